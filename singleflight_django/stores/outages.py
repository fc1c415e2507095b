"""What a store with another one behind it remembers: an outage, and where each lease was taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.base import Claim, RenewalInDoubtError, Store
from singleflight_django.waiting import clock

logger = logging.getLogger("singleflight_django")

# What to ask of which store. A method and its a-twin carry out the same steps.
Steps = Generator[tuple[Store, str, tuple[Any, ...]], Any, Any]

# For how many seconds a store that did not answer is left alone. Then one caller tries it again.
REST = 5.0
_GONE = "The store is away, leases go to the database"
_BACK = "The store answers again, leases no longer go to the database."
# How many leases are remembered before those that nobody gave back are sorted out.
MANY = 1000


class Breaker:
    """Whether a store is worth asking: not every caller is to wait for its timeout.

    ``gone``, ``back``: what the log is told. ``rest``: as REST.
    """

    def __init__(
        self, gone: str = _GONE, back: str = _BACK, rest: Callable[[], float] = lambda: REST
    ) -> None:
        self._gone, self._back, self._rest = gone, back, rest
        self._again_at = 0.0
        # Has one element while the store is away, which did not answer the last time that it was asked.
        # No lock: a fork may come at any time.
        self.away: dict[str, object] = {}

    def lets_through(self) -> bool:
        """Whether this caller is to ask it."""
        if not self.away:
            return True
        now = clock()
        if now < self._again_at:
            return False
        # What this one finds out the others need not wait for.
        self._again_at = now + self._rest()
        return True

    def trip(self, error: StoreUnavailableError) -> None:
        """Note that it did not answer."""
        self._again_at, mine = clock() + self._rest(), object()
        # One of those that find out together tells.
        if self.away.setdefault("away", mine) is mine:
            # A cache that complains of a key quotes it, and that may hold a secret of a header.
            why = str(error).replace(error.key, "(key)") if error.key else str(error)
            logger.warning("%s: %s", self._gone, why)

    def mend(self) -> None:
        """Note that it answered."""
        if self.away.pop("away", None):
            logger.warning("%s", self._back)


class Places:
    """The leases of this process that are in a certain store, by key and token."""

    def __init__(self) -> None:
        # When they end at the latest, unless they are renewed.
        self._ends: dict[tuple[str, str], float] = {}

    def add(self, key: str, token: str, ttl: float) -> None:
        """Note that ``token`` may be there."""
        if len(self._ends) >= MANY:
            now = clock()
            for place in [place for place, end in list(self._ends.items()) if end < now]:
                self._ends.pop(place, None)
        # Twice its life: the store's clock began later than ours.
        self._ends[key, token] = clock() + 2 * ttl

    def remove(self, key: str, token: str) -> None:
        """Note that it is not there, or not any more."""
        self._ends.pop((key, token), None)

    def note_renewal(self, claims: Iterable[Claim]) -> None:
        """Note that those which are there live on."""
        for key, token, ttl in claims:
            if (key, token) in self._ends:
                self._ends[key, token] = clock() + 2 * ttl

    def has(self, key: str, token: str) -> bool:
        """Whether ``token`` may be there."""
        return (key, token) in self._ends

    def has_key(self, key: str) -> bool:
        """Whether any lease of ``key`` is there."""
        return any(place[0] == key for place in list(self._ends))


def renewal(first: Store, second: Store, moved: Places, claims: Sequence[Claim]) -> Steps:
    """Renew each claim in its store. One that does not answer says nothing about the other's."""
    answers: list[bool | None] = [None] * len(claims)
    failure: StoreUnavailableError | None = None
    for store in (first, second):
        mine = [
            number
            for number, (key, token, _) in enumerate(claims)
            if moved.has(key, token) == (store is second)
        ]
        try:
            told = (yield store, "renew", ([claims[number] for number in mine],)) if mine else []
        except StoreUnavailableError as error:
            failure, told = error, getattr(error, "answers", [None] * len(mine))
        for number, answer in zip(mine, told, strict=True):
            answers[number] = answer
    moved.note_renewal(claims)
    if failure:
        raise RenewalInDoubtError(str(failure), answers) from failure
    return answers


def ask(steps: Steps) -> Any:
    """Carry out steps that say which store is to do what. Return or raise what they do."""
    try:
        store, verb, args = next(steps)
        while True:
            try:
                answer = getattr(store, verb)(*args)
            except BaseException as error:
                store, verb, args = steps.throw(error)
            else:
                store, verb, args = steps.send(answer)
    except StopIteration as stop:
        return stop.value


async def ask_async(steps: Steps) -> Any:
    """See ask()."""
    try:
        store, verb, args = next(steps)
        while True:
            try:
                answer = await getattr(store, "a" + verb)(*args)
            except BaseException as error:
                store, verb, args = steps.throw(error)
            else:
                store, verb, args = steps.send(answer)
    except StopIteration as stop:
        return stop.value
