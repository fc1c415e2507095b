"""``SemaphoreLockMixin``: the lock for class views, taken after their own checks have passed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.views import View

from singleflight_django.entering import lock_view
from singleflight_django.exceptions import LeaseConflictError
from singleflight_django.keys import KeySpec
from singleflight_django.locks import UNSAFE_METHODS, Lock, LockOptions
from singleflight_django.transactions import opt_out, with_transactions

if TYPE_CHECKING:
    _Base = View
else:
    _Base = object

# Stands for the name of every handler.
_ANY = ""


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
    lock_renew: bool = True
    lock_max_hold: Any = None
    lock_observe: bool = False
    lock_cache: str | None = None
    lock_on_store_error: str = "reject"
    lock_unique: Any = None
    lock_on_duplicate: Any = None

    _locks: ClassVar[dict[str, Lock]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_misuse(cls)
        cls._locks = _locks(cls, {})

    @classmethod
    def as_view(cls, *args: Any, **initkwargs: Any) -> Any:
        """Return the view; raise where its lock could never be taken as it was meant."""
        locks = _locks(cls, initkwargs)
        if not locks:
            raise ImproperlyConfigured(f"{cls.__qualname__} needs a lock_key, or get_lock_key().")
        for name in locks:
            if name != _ANY and not callable(getattr(cls, name, None)):
                raise ImproperlyConfigured(
                    f"{cls.__qualname__}.lock_key names {name!r}, but there is no such handler or "
                    "action."
                )
        view = super().as_view(*args, **initkwargs)
        if not iscoroutinefunction(view):
            opt_out(view)
        return view

    def get_lock_key(self, request: HttpRequest) -> Any:
        """Return the key: a str or a tuple, or a list of those for several keys."""
        raise NotImplementedError("lock_key says what the key is: there is no other to return.")

    def lock_conflict(self, request: HttpRequest, conflict: LeaseConflictError) -> Any:
        """Return the response to a conflict, by default as ``lock_on_conflict`` says."""
        return next(iter(self._own_locks().values())).refusal(request, conflict)

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Arm the handler, which the view's own dispatch() calls once all checks have passed."""
        name = (request.method or "").lower()
        handler = getattr(self, name, None) if name in self.http_method_names else None
        if handler is not None:
            lock = self._lock_of(handler)
            armed = lock_view(handler, lock) if lock else _in_transactions(handler)
            setattr(self, name, armed)
        return super().dispatch(request, *args, **kwargs)

    def _lock_of(self, handler: Any) -> Lock | None:
        locks, name = self._own_locks(), getattr(handler, "__name__", _ANY)
        lock = locks.get(name) or locks.get(_ANY)
        if lock is None:
            return None
        view = f"{type(self).__module__}.{type(self).__qualname__}.{name}"
        spec = KeySpec(self._computed_key) if _overrides(self, "get_lock_key") else lock.spec
        answer = self.lock_conflict if _overrides(self, "lock_conflict") else None
        return Lock(spec, lock.options, view, answer)

    def _own_locks(self) -> dict[str, Lock]:
        """Return the class's locks, unless as_view() was told otherwise."""
        own = {name: value for name, value in vars(self).items() if name.startswith("lock_")}
        return _locks(type(self), own) if own else self._locks

    def _computed_key(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return self.get_lock_key(request)


def _in_transactions(handler: Any) -> Any:
    """Return a handler that is not locked, in the transactions that dispatch() has opted out of."""

    @wraps(handler)
    def inner(request: Any, *args: Any, **kwargs: Any) -> Any:
        return with_transactions(partial(handler, request, *args, **kwargs), request)()

    return inner


def _locks(cls: type[SemaphoreLockMixin], own: Mapping[str, Any]) -> dict[str, Lock]:
    """Return the locks by the name of the handler; ``own`` goes before what the class says."""

    def said(name: str) -> Any:
        return own.get(f"lock_{name}", getattr(cls, f"lock_{name}"))

    options = LockOptions(**{field.name: said(field.name) for field in fields(LockOptions)})
    if options.on_conflict == "yield":
        raise ValueError('lock_on_conflict="yield" is for `with`: a view uses "reject" or "skip".')
    key = cls.get_lock_key if _overrides(cls, "get_lock_key") else said("key")
    if key is None:
        return {}
    by_name = key if isinstance(key, Mapping) else {_ANY: key}
    return {name: Lock(KeySpec(value), options) for name, value in by_name.items()}


def _overrides(view: Any, name: str) -> bool:
    cls = view if isinstance(view, type) else type(view)
    return getattr(cls, name) is not getattr(SemaphoreLockMixin, name)


def _refuse_misuse(cls: type[SemaphoreLockMixin]) -> None:
    mro = cls.__mro__
    if View in mro and mro.index(View) < mro.index(SemaphoreLockMixin):
        raise TypeError(
            f"{cls.__qualname__} lists SemaphoreLockMixin after View, where it is never asked: "
            f"write class {cls.__name__}(SemaphoreLockMixin, ...)."
        )
    known = [name for name in dir(SemaphoreLockMixin) if name.startswith("lock_")]
    for name in vars(cls).keys() - known:
        if name.startswith("lock_") and (near := get_close_matches(name, known, 1, 0.85)):
            raise TypeError(f"{cls.__qualname__}.{name} has no effect. Did you mean {near[0]}?")
