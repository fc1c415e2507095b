# ruff: noqa: N802
"""The settings, each read at the moment of use: ``override_settings`` works.

An attribute bears the full name of its setting, so that one search finds the two together.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any, Generic, Literal, TypeVar

from django.conf import Settings as DjangoSettings
from django.conf import UserSettingsHolder, global_settings, settings
from django.core.exceptions import ImproperlyConfigured

# Beyond this the clocks of threads and of Redis overflow. It is over thirty years.
LONGEST = 10**9

# A prefix stands before the hash tag of Redis Cluster, and memcached takes neither spaces nor more
# than 250 bytes for the whole key.
_PREFIX = re.compile(r"[!-z|~]{1,40}")
_STORES = ("redis", "cache", "database")
_DOTTED_PATH = re.compile(r"\w+(\.\w+)+")

_T = TypeVar("_T")
_ABSENT = object()
# Where Django's lazy settings keep themselves: looked up by hand, for it costs a fifth.
_lazy: dict[str, Any] = vars(settings)


class checked(Generic[_T]):  # noqa: N801 - reads like property
    """A property that checks the setting of its name again only when that has changed.

    A lock reads several settings, and Django's own look-up of one that is absent is slow.
    """

    def __init__(self, read: Callable[[Any], _T]) -> None:
        self._read = read
        self._name = read.__name__
        self.__doc__ = read.__doc__
        # What the value was made of: the settings in force, what they hold themselves (not those that
        # they override), and what that says.
        self._seen: tuple[Any, dict[str, Any], Any, Any] = (_ABSENT, {}, None, None)

    def __get__(self, instance: Any, owner: Any = None) -> _T:
        source, own, given, value = self._seen
        name = self._name
        if (
            _lazy.get("_wrapped") is source
            and own.get(name, _ABSENT) is given
            and name not in own.get("_deleted", ())
        ):
            return value  # type: ignore[no-any-return]
        return self._look(instance)

    def _look(self, instance: Any) -> _T:
        source = _lazy.get("_wrapped")
        own = getattr(source, "__dict__", {})
        given = own.get(self._name, _ABSENT)
        value = self._read(instance)
        # Looked at before and after: what another thread sets meanwhile must not be covered up.
        stays = _lazy.get("_wrapped") is source and own.get(self._name, _ABSENT) is given
        if stays and _tells_all(source):
            self._seen = source, own, given, value
        return value


def _tells_all(source: Any) -> bool:
    """Whether these settings keep what they say where we look; those of other packages needn't."""
    while type(source) is UserSettingsHolder:
        source = source.default_settings
    return type(source) is DjangoSettings or source is global_settings


def seconds(value: object, name: str, *, zero: bool = False) -> float:
    """Return ``value``, a number of seconds or a timedelta, as a float.

    ``name`` is what the value is called where it was written; ``zero`` tells whether 0 will do.
    Raises ValueError for None, NaN, infinity and what is not positive, TypeError for other types.
    """
    if isinstance(value, timedelta):
        number = value.total_seconds()
    elif isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        number = _finite(value)
    else:
        refusal = ValueError if value is None else TypeError
        raise refusal(f"{name} must be a number of seconds or a timedelta, not {value!r}.")
    if (zero and number == 0) or 0 < number <= LONGEST:
        return number
    least = "0 or more" if zero else "more than 0"
    raise ValueError(f"{name} must be {least} and at most {LONGEST} seconds, not {value!r}.")


def _finite(value: float | Decimal) -> float:
    try:
        return float(value)
    except (OverflowError, ValueError):
        return math.inf


class Settings:
    """Each raises ImproperlyConfigured, with the cure, for a value that can't be used."""

    @checked
    def CACHES(self) -> Any:
        """Django's own."""
        return settings.CACHES

    @checked
    def SINGLEFLIGHT_CACHE(self) -> str:
        """The alias in CACHES whose server keeps leases and outcomes."""
        value = _given("SINGLEFLIGHT_CACHE", "default")
        if isinstance(value, str) and value:
            return value
        raise _impossible("SINGLEFLIGHT_CACHE", value, "the name of an alias in CACHES")

    @checked
    def SINGLEFLIGHT_STORE(self) -> str | None:
        """The kind of store; None: by the cache's backend."""
        value = _given("SINGLEFLIGHT_STORE", None)
        if value is None:
            return None
        if isinstance(value, str) and (value in _STORES or _DOTTED_PATH.fullmatch(value)):
            return value
        raise _impossible(
            "SINGLEFLIGHT_STORE", value, 'None, "redis", "cache", "database" or a dotted path'
        )

    @checked
    def SINGLEFLIGHT_PREFIX(self) -> str:
        """What every entry in the store begins with, whatever the cache's own KEY_PREFIX."""
        value = _given("SINGLEFLIGHT_PREFIX", "singleflight")
        if isinstance(value, str) and _PREFIX.fullmatch(value):
            return value
        raise _impossible(
            "SINGLEFLIGHT_PREFIX",
            value,
            "1 to 40 printable ASCII characters without spaces and braces",
        )

    @checked
    def SINGLEFLIGHT_TTL(self) -> float:
        """Life of a lease without renewal, in seconds."""
        return _seconds("SINGLEFLIGHT_TTL", 10)

    @property
    def SINGLEFLIGHT_WAIT(self) -> float:
        """Longest time that a follower waits, in seconds."""
        if hasattr(settings, "SINGLEFLIGHT_WAIT"):
            return _seconds("SINGLEFLIGHT_WAIT", 60, zero=True)
        text = os.environ.get("POLL_MAX_WAIT_SEC", "").strip() or "60"
        try:
            return seconds(float(text), "POLL_MAX_WAIT_SEC", zero=True)
        except ValueError:
            raise _impossible(
                "The environment variable POLL_MAX_WAIT_SEC", text, "a number of seconds"
            ) from None

    @checked
    def SINGLEFLIGHT_POLL_INTERVAL(self) -> float:
        """Longest pause in seconds between two looks at a store that can't wake us."""
        return _seconds("SINGLEFLIGHT_POLL_INTERVAL", 0.5)

    @checked
    def SINGLEFLIGHT_RESULT_TTL(self) -> float:
        """How long an outcome answers callers that come after its flight, in seconds."""
        return _seconds("SINGLEFLIGHT_RESULT_TTL", 0, zero=True)

    @checked
    def SINGLEFLIGHT_MAX_HOLD(self) -> float:
        """Longest time that a lease is renewed for, in seconds."""
        return _seconds("SINGLEFLIGHT_MAX_HOLD", 600)

    @checked
    def SINGLEFLIGHT_MAX_BYTES(self) -> int:
        """Largest outcome that is shared, in bytes."""
        value = _given("SINGLEFLIGHT_MAX_BYTES", 1_000_000)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise _impossible("SINGLEFLIGHT_MAX_BYTES", value, "a whole number of bytes above 0")

    @checked
    def SINGLEFLIGHT_ENABLED(self) -> bool | Literal["observe"]:
        """False: nothing is guarded. "observe": nothing is refused or shared, only counted."""
        value = _given("SINGLEFLIGHT_ENABLED", True)
        # Not ``in``: 1 == True, and a "False" from the environment must not mean "on".
        if value is True or value is False:
            return value
        if value == "observe":
            return "observe"
        raise _impossible("SINGLEFLIGHT_ENABLED", value, 'True, False or "observe"')


def _given(name: str, default: object) -> Any:
    return getattr(settings, name, default)


def _seconds(name: str, default: float, *, zero: bool = False) -> float:
    try:
        return seconds(_given(name, default), name, zero=zero)
    except (TypeError, ValueError) as error:
        raise ImproperlyConfigured(str(error)) from None


def _impossible(name: str, value: object, right: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(f"{name} must be {right}, not {value!r}.")


SETTING_NAMES = tuple(name for name in vars(Settings) if name.startswith("SINGLEFLIGHT_"))

conf = Settings()
