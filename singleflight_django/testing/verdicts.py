"""What a scenario showed, and what that means for the guard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from singleflight_django.conf import conf
from singleflight_django.signals import Facts
from singleflight_django.testing.racing import Outcome, hint_of_transaction
from singleflight_django.testing.stage import Caller, Stage

TITLES = {1: "one alone", 2: "{n} at once with the same key", 3: "two at once with different keys"}


def answered(result: Any) -> bool:
    """Whether a call's result is a success: a response below 400, or any other value."""
    return bool(getattr(result, "status_code", 200) < 400)


@dataclass
class Verdict:
    """What came of one scenario. Each check raises AssertionError, or returns what it found out."""

    number: int
    stage: Stage
    outcomes: list[Outcome]
    succeeded: Callable[[Any], bool]
    work: str | None
    flies: bool
    # Whether every lease had been given back in time.
    emptied: bool

    def check_alone(self) -> int:
        """Scenario 1. Returns how many may be in at once."""
        self._check_guarded()
        caller = self._callers[0]
        if not caller.got:
            self._fail(
                f"{caller.key!r} is held already, by the test itself or by what ran before it. Let "
                "it be released first, or isolate keys (isolated_keys, singleflight_isolated)."
            )
        if self._told("share_refused"):
            self._fail(f"Nothing is shared: {self._told('share_refused')[0].reason}.")
        self._check_success(1)
        self._check_covered()
        return caller.limit

    def check_same_key(self, limit: int) -> None:
        """Scenario 2."""
        self._check_guarded()
        keys = self.stage.together
        if len(keys) > limit:
            self._fail_of_two(keys)
        if any(facts.reason == "observe" for facts in self._told("lease_rejected")):
            self._fail("Nothing is refused: the guard only observes.")
        if any(caller.mismatched for caller in self._callers):
            self._fail("Same identity, other content: calls of `same` must have equal bodies.")
        self._check_met()
        if self.stage.most_working > limit:
            self._fail(
                f"{self.stage.most_working} were in {self.work} at once. Released early, or taken "
                "late: the lease has to be held from before the work until after its commit."
            )
        self._check_success(1)
        if self.flies:
            self._check_shared()

    def check_different_keys(self) -> None:
        """Scenario 3."""
        self._check_guarded()
        keys = [caller.key for caller in self._callers]
        if any(caller.refused for caller in self._callers) or len(set(keys)) < len(keys):
            self._fail(
                f"They met at {keys[0]!r}. Too coarse: the key lacks what tells the two apart, and "
                "calls that have nothing to do with each other exclude each other."
            )
        self._check_met()
        self._check_success(2)

    def _check_guarded(self) -> None:
        if self._told("unprotected_run"):
            self._fail("It ran unprotected: the store is away, and on_store_error lets it proceed.")
        if conf.SINGLEFLIGHT_ENABLED is not True:
            self._fail(f"The library is off: SINGLEFLIGHT_ENABLED is {conf.SINGLEFLIGHT_ENABLED}.")
        if not self._callers:
            self._fail(
                "No key was asked for. Is the guard on this view, and for this HTTP method? Did "
                f"something answer before it? {self._report()}"
            )
        if self._callers[0].flies is not self.flies:
            right = "assert_single_flight" if self._callers[0].flies else "assert_mutual_exclusion"
            self._fail(f"This is another kind of guard: use {right}().")

    def _check_success(self, least: int) -> None:
        if sum(self._is_success(outcome) for outcome in self.outcomes) < least:
            self._fail(self._report())

    def _check_covered(self) -> None:
        if self.work and not self.stage.runs:
            self._fail(
                f"{self.work} was never called. Name it where the view looks it up: if it says "
                "`from services import work`, that is `views.work`."
            )
        if self.stage.bare:
            self._fail(
                f"{self.work} began, or ended, while no lease was held. Released early, or taken "
                "late: the lease has to be held around all of it."
            )
        if not self.emptied:
            self._fail(
                "The lease is still held although the call has returned: the next one has to wait "
                "for its ttl. Is a generator or a response not closed?"
            )

    def _check_met(self) -> None:
        if self.stage.stuck:
            self._fail(
                "The others neither asked the store nor ended while one of them was in: something "
                f"else makes them wait, a row, a connection or a worker. {self._report()}"
            )
        if len(self._callers) < len(self.outcomes):
            self._fail(f"Not all of them asked for a key. {self._report()}")

    def _check_shared(self) -> None:
        led = sum(caller.got for caller in self._callers)
        if led > 1:
            self._fail(
                f"{led} led, one after the other. The first one failed, or what it answered is "
                f"never shared (401, 403, 408, 425, 429). {self._report()}"
            )
        if self.work and self.stage.runs > 1:
            self._fail(f"{self.work} ran {self.stage.runs} times: it is called outside the flight.")
        first, *others = [_comparable(outcome) for outcome in self.outcomes]
        if any(other != first for other in others):
            self._fail(f"The results differ. {self._report()}")

    def _fail_of_two(self, keys: list[str]) -> NoReturn:
        if len(set(keys)) == 1:
            self._fail(
                f"{len(keys)} got {keys[0]!r}. Not atomic: this store lets several callers in who "
                "ask at the same moment."
            )
        self._fail(
            f"{len(keys)} got in, with keys of their own: {', '.join(sorted(set(keys)))}. Too "
            "fine: something in the key, or in the identity, differs from call to call."
        )

    @property
    def _callers(self) -> list[Caller]:
        return list(self.stage.callers.values())

    def _told(self, name: str) -> list[Facts]:
        return self.stage.told[name]

    def _is_success(self, outcome: Outcome) -> bool:
        return outcome.error is None and self.succeeded(outcome.value)

    def _report(self) -> str:
        said = [
            f"raised {outcome.error!r}" if outcome.error else f"returned {outcome.value!r}"
            for outcome in self.outcomes
        ]
        errors = [outcome.error for outcome in self.outcomes if outcome.error]
        hint = hint_of_transaction() if errors else ""
        if any("is locked" in str(error) for error in errors):
            hint += IN_MEMORY
        return f"Of the calls, {'; '.join(f'one {words}' for words in said)}.{hint}"

    def _fail(self, what: str) -> NoReturn:
        title = TITLES[self.number].format(n={2: "two"}.get(len(self.outcomes), "several"))
        errors = (outcome.error for outcome in self.outcomes if outcome.error is not None)
        raise AssertionError(f"Scenario {self.number}, {title}: {what}") from next(errors, None)


IN_MEMORY = (
    " SQLite's database in memory, the default of tests, has one lock for all threads: give it a "
    'file, DATABASES["default"]["TEST"] = {"NAME": BASE_DIR / "test.sqlite3"}, and in OPTIONS '
    '{"transaction_mode": "IMMEDIATE"}.'
)


def _comparable(outcome: Outcome) -> Any:
    value = outcome.value
    if hasattr(value, "status_code"):
        return value.status_code, getattr(value, "content", b"")
    return repr(outcome.error) if outcome.error else value
