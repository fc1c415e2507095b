"""The mixins: class views that are guarded after their own checks have passed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.http import HttpRequest
from django.views import View

from singleflight_django.arming import armoury, default
from singleflight_django.coalescing import ALL_METHODS, Coalescer, ViewOptions
from singleflight_django.entering import lock_view
from singleflight_django.exceptions import LeaseConflictError
from singleflight_django.flight_views import flight_view
from singleflight_django.locks import UNSAFE_METHODS, Lock, LockOptions
from singleflight_django.principals import Scope

if TYPE_CHECKING:
    _Base = View
else:
    _Base = object


class SemaphoreLockMixin(_Base):
    """``semaphore_lock`` for ``View``, ``APIView`` and ``ViewSet``, sync or async.

    Put it before the view's base class. ``lock_key`` is a key as the decorator takes it, or a dict
    of them by the name of the handler or action; one that it does not name isn't guarded::

        lock_key = {"create": "lesson:<uuid>", "destroy": "lesson:<url.pk>"}

    ``lock_<option>`` is each option of ``semaphore_lock``.

    The lease is taken when the handler is called: after login, permission and throttle checks, and
    in DRF after ``initial()``.
    """

    lock_key: Any = None
    lock_ttl: Any = None
    lock_namespace: str = "semaphore_lock"
    lock_on_conflict: Any = "reject"
    lock_wait: Any = 0
    lock_limit: int = 1
    lock_methods: tuple[str, ...] = UNSAFE_METHODS
    lock_unique: Any = None
    lock_on_duplicate: Any = None
    lock_renew: bool = True
    lock_max_hold: Any = None
    lock_observe: bool = False
    lock_cache: str | None = None
    lock_on_store_error: str = "reject"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _LOCKS.check(cls, SemaphoreLockMixin)

    @classmethod
    def as_view(cls, *args: Any, **initkwargs: Any) -> Any:
        """Return the view; raise where its lock could never be taken as it was meant."""
        return _LOCKS.view(cls, super().as_view(*args, **initkwargs), initkwargs)

    @default
    def get_lock_key(self, request: HttpRequest) -> Any:
        """Return the key: a str or a tuple, or a list of those for several keys."""
        raise NotImplementedError("lock_key says what the key is: there is no other to return.")

    @default
    def lock_conflict(self, request: HttpRequest, conflict: LeaseConflictError) -> Any:
        """Return the response to a conflict, by default as ``lock_on_conflict`` says."""
        lock: Any = next(iter(_LOCKS.guards_of(self).values()))
        return lock.refusal(request, conflict)

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Arm the handler, which the view's own dispatch() calls once all checks have passed."""
        _LOCKS.arm(self)
        return super().dispatch(request, *args, **kwargs)


class SingleFlightMixin(_Base):
    """``single_flight`` for ``View``, ``APIView`` and ``ViewSet``, sync or async.

    Put it before the view's base class. ``flight_key`` is a key as the decorator takes it, or a
    dict of them by the name of the handler or action. ``flight_<option>`` is each option of
    ``single_flight``. Leaders and followers alike have passed the view's own checks.
    """

    flight_key: Any = None
    flight_ttl: Any = None
    flight_wait: Any = None
    flight_result_ttl: Any = None
    flight_namespace: str | None = None
    flight_scope: Scope = "user"
    flight_vary: tuple[str, ...] = ()
    flight_methods: tuple[str, ...] = ALL_METHODS
    flight_retry: int = 0
    flight_takeover: bool = True
    flight_authorize: Any = None
    flight_on_timeout: Any = None
    flight_on_unshareable: Any = None
    flight_on_lost: str = "raise"
    flight_max_bytes: int | None = None
    flight_max_followers: int | None = None
    flight_max_run: Any = None
    flight_renew: bool = True
    flight_max_hold: Any = None
    flight_observe: bool = False
    flight_cache: str | None = None
    flight_on_store_error: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _FLIGHTS.check(cls, SingleFlightMixin)

    @classmethod
    def as_view(cls, *args: Any, **initkwargs: Any) -> Any:
        """Return the view; raise where it could never be coalesced as it was meant."""
        return _FLIGHTS.view(cls, super().as_view(*args, **initkwargs), initkwargs)

    @default
    def get_flight_key(self, request: HttpRequest) -> Any:
        """Return the key: a str or a tuple."""
        raise NotImplementedError("flight_key says what the key is: there is no other to return.")

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Arm the handler, which the view's own dispatch() calls once all checks have passed."""
        _FLIGHTS.arm(self)
        return super().dispatch(request, *args, **kwargs)


def _lock(spec: Any, options: Any, name: str, view: Any) -> Lock:
    if options.on_conflict == "yield":
        raise ValueError('lock_on_conflict="yield" is for `with`: a view uses "reject" or "skip".')
    overridden = view is not None and not hasattr(view.lock_conflict, "is_default")
    return Lock(spec, options, name, view.lock_conflict if overridden else None)


def _coalescer(spec: Any, options: Any, name: str, view: Any) -> Coalescer:
    return Coalescer(spec, options, name)


_LOCKS = armoury("lock", LockOptions, _lock, lock_view)
_FLIGHTS = armoury("flight", ViewOptions, _coalescer, flight_view)
# By the variant of the guards that they make.
ARMOURIES = {"lock": _LOCKS, "flight": _FLIGHTS}
