"""Where a guard stands: what it was put on, and where the request is among the arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.views import View

from singleflight_django.bodies import is_drf, unwrap
from singleflight_django.lease import Lease

_View = TypeVar("_View", bound=Callable[..., Any])


def split(args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the request, Django's or DRF's, and the positional arguments after it.

    It is the first argument of a view and the second of a method.
    """
    for place, arg in enumerate(args[:2]):
        if isinstance(arg, HttpRequest) or is_drf(arg):
            return arg, args[place + 1 :]
    raise TypeError(
        "The guard got no HttpRequest. It decorates views and their methods; elsewhere use "
        '`with semaphore_lock("import:7") as lease:`.'
    )


def expose(request: Any, lease: Lease) -> None:
    """Let the view find its lease as ``request.lease``, whichever request it is given."""
    inner: Any = unwrap(request)
    inner.lease = lease


def dispatches_async(view: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether ``view``, a plain function by its looks, returns something to be awaited.

    It is the dispatch() of an async class view, or an object whose call is a coroutine.
    """
    view = _innermost(view)
    owner = getattr(view, "__self__", args[0])
    if isinstance(owner, View):
        return owner.view_is_async
    return iscoroutinefunction(getattr(type(view), "__call__", None))  # noqa: B004


def view_name(view: Callable[..., Any]) -> str:
    """Return the dotted name of ``view`` for signals and logs."""
    view = _innermost(view)
    cls = getattr(view, "view_class", None) or getattr(view, "cls", None) or view
    name = getattr(cls, "__qualname__", type(cls).__qualname__)
    return f"{getattr(cls, '__module__', '')}.{name}"


def _innermost(view: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(view, partial):
        view = view.func
    return view


def refuse_misplaced(view: Callable[..., Any]) -> None:
    """Raise TypeError if ``view`` can't be guarded, or not from here."""
    if isinstance(view, type):
        raise TypeError(
            "A guard can't decorate a class: use "
            '@method_decorator(semaphore_lock(...), name="post") or SemaphoreLockMixin.'
        )
    if not callable(view):
        raise TypeError(f"A guard decorates a view, not {view!r}.")
    _refuse_above_a_framework(view)
    if isinstance(view, FunctionType):
        _refuse_what_is_no_view(view)


def _refuse_above_a_framework(view: Callable[..., Any]) -> None:
    # The class that @api_view makes goes by the function's name, but for this.
    if getattr(getattr(view, "cls", None), "__qualname__", "") == "WrappedAPIView":
        raise TypeError(
            "The guard stands above @api_view, where nobody has been authenticated yet: put it "
            "beneath, between @api_view and the function."
        )
    # Ninja's route decorators register the function that they get, and return that one unchanged.
    if hasattr(view, "_ninja_operation"):
        raise TypeError(
            "The guard stands above a route decorator of Ninja, which never calls it: put it "
            "beneath, between @router.post(...) and the function."
        )


def _refuse_what_is_no_view(view: FunctionType) -> None:
    code = view.__code__
    if not code.co_argcount and not code.co_flags & inspect.CO_VARARGS:
        raise TypeError(
            f"{view.__qualname__}() takes no request, so it is no view: in its body use "
            '`with semaphore_lock("import:7") as lease:`.'
        )
    if inspect.isgeneratorfunction(view) or inspect.isasyncgenfunction(view):
        raise TypeError(
            f"{view.__qualname__}() is a generator: its body would run after the guard had ended. "
            "Return StreamingHttpResponse(...) from a plain function."
        )


def with_resolved_signature(guarded: _View, view: _View) -> _View:
    """Give ``guarded`` the signature of ``view`` with types where there are only their names.

    Ninja looks the names up in the module of the function that it gets: ours, beneath a guard.
    """
    if isinstance(view, FunctionType):
        names = [name for name in view.__annotations__.values() if isinstance(name, str)]
        # Not for those that only type checkers know, or that are defined further down.
        with suppress(Exception):
            if names:
                vars(guarded)["__signature__"] = inspect.signature(view, eval_str=True)
    return guarded
