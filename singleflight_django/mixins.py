"""``SemaphoreLockMixin``: the lock for class views, taken after their own checks have passed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.views import View

from singleflight_django.decorators import lock_view
from singleflight_django.exceptions import LeaseConflictError
from singleflight_django.guards import UNSAFE_METHODS, Lock, LockOptions
from singleflight_django.responses import problem, skip

if TYPE_CHECKING:
    _Base = View
else:
    _Base = object


class SemaphoreLockMixin(_Base):
    """``semaphore_lock`` for ``View``, ``APIView`` and ``ViewSet``, sync or async.

    Put it before the view's base class. ``lock_key`` is a key as the decorator takes it, or a dict
    of them by handler or action name (``{"create": "lesson:<uuid>", "destroy": "lesson:<url.pk>"}``):
    what it does not name isn't guarded. ``lock_<option>`` is each option of ``semaphore_lock``.

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

    _locks: ClassVar[dict[str, Lock]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        mro = cls.__mro__
        if View in mro and mro.index(View) < mro.index(SemaphoreLockMixin):
            raise TypeError(
                f"{cls.__qualname__} lists SemaphoreLockMixin after View, where it is never asked: "
                f"write class {cls.__name__}(SemaphoreLockMixin, ...)."
            )
        cls._locks = {}
        _options(cls)
        for key in _keys(cls.lock_key):
            Lock(key, LockOptions())

    def get_lock_key(self, request: HttpRequest) -> Any:
        """Return the key: a str or a tuple, or a list of those for several keys."""
        raise NotImplementedError

    def lock_conflict(self, request: HttpRequest, conflict: LeaseConflictError) -> Any:
        """Return the response to a conflict: 204 under ``lock_on_conflict = "skip"``, else 429."""
        if callable(self.lock_on_conflict):
            return self.lock_on_conflict(request, conflict)
        if self.lock_on_conflict == "skip":
            return skip()
        return problem(request, conflict)

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Arm the handler, which the view's own dispatch() calls once all its checks have passed."""
        name = (request.method or "").lower()
        handler = getattr(self, name, None) if name in self.http_method_names else None
        lock = self._lock_for(handler) if handler else None
        if handler and lock:
            setattr(self, name, lock_view(handler, lock))
        return super().dispatch(request, *args, **kwargs)

    def _lock_for(self, handler: Any) -> Lock | None:
        key = self.lock_key
        if type(self).get_lock_key is not SemaphoreLockMixin.get_lock_key:
            key = self._computed_key
        elif isinstance(key, Mapping):
            key = key.get(handler.__name__)
            if key is None:
                return None
        elif key is None:
            raise ImproperlyConfigured(
                f"{type(self).__qualname__} has neither lock_key nor get_lock_key()."
            )
        options = _options(self)
        view = f"{type(self).__module__}.{type(self).__qualname__}.{handler.__name__}"
        return Lock(key, options, view)

    def _computed_key(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return self.get_lock_key(request)


def _options(view: Any) -> LockOptions:
    options = {field.name: getattr(view, f"lock_{field.name}") for field in fields(LockOptions)}
    if options["on_conflict"] == "yield":
        raise ValueError('lock_on_conflict="yield" is for `with`: a view uses "reject" or "skip".')
    if not isinstance(view, type):
        options["on_conflict"] = view.lock_conflict
    return LockOptions(**options)


def _keys(key: Any) -> list[Any]:
    if isinstance(key, Mapping):
        return list(key.values())
    return [] if key is None else [key]
