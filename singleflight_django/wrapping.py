"""A guarded view: of the view's own colour, with its attributes, in the transactions it asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType
from typing import Any, Protocol, TypeVar, cast

from asgiref.sync import iscoroutinefunction

from singleflight_django.conf import conf
from singleflight_django.lease import Lease
from singleflight_django.placement import dispatches_async, expose, split
from singleflight_django.transactions import opt_out, with_transactions

_View = TypeVar("_View", bound=Callable[..., Any])
_Call = Callable[[], Any]


class ViewGuard(Protocol):
    """A guard as far as wrapping needs it."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The HTTP methods that are guarded."""

    def unprotected(self) -> Lease:
        """Return a lease for a view that runs without one."""


def wrap_view(
    view: _View,
    guard: ViewGuard,
    enter: Callable[[_Call, Any, tuple[Any, ...], Any], Any],
    aenter: Callable[[_Call, Any, tuple[Any, ...], Any], Any],
) -> _View:
    """Return ``view``, called by ``enter`` or, if it is async, by ``aenter``.

    They get the call of the view, its request, and its other arguments.
    """

    is_function, methods = isinstance(view, FunctionType), guard.methods

    def passes(request: Any) -> bool:
        if conf.SINGLEFLIGHT_ENABLED is False:
            expose(request, guard.unprotected())
            return True
        return request.method not in methods

    async def ainner(*args: Any, **kwargs: Any) -> Any:
        request, rest = split(args)
        if passes(request):
            return await view(*args, **kwargs)
        return await aenter(partial(view, *args, **kwargs), request, rest, kwargs)

    def inner(*args: Any, **kwargs: Any) -> Any:
        request, rest = split(args)
        call = with_transactions(partial(view, *args, **kwargs), request)
        if passes(request):
            return call()
        # A plain function is a view, or a method: then the view's object comes first.
        is_sync = is_function and request is args[0]
        through = aenter if not is_sync and dispatches_async(view, args) else enter
        return through(call, request, rest, kwargs)

    if iscoroutinefunction(view):
        return cast(_View, marked(wraps(view)(ainner), guard, view))
    opt_out(wraps(view)(inner))
    return cast(_View, marked(inner, guard, view))


def marked(guarded: Any, guard: ViewGuard, view: Any) -> Any:
    """Note on a guarded view which guards it has, the outermost first: for ``manage.py check``."""
    guarded.singleflight_guards = (guard, *getattr(view, "singleflight_guards", ()))
    return guarded
