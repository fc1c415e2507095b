"""Where a guard stands: what it was put on, and where the request is among the arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.http import HttpRequest
from django.views import View

from singleflight_django.lease import Lease


def split(args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the request, Django's or DRF's, and the positional arguments after it.

    It is the first argument of a view and the second of a method.
    """
    for place, arg in enumerate(args[:2]):
        if isinstance(django_request(arg), HttpRequest):
            return arg, args[place + 1 :]
    raise TypeError(
        "The guard got no HttpRequest. It decorates views and their methods; elsewhere use "
        '`with semaphore_lock("import:7") as lease:`.'
    )


def django_request(request: Any) -> Any:
    """Return the HttpRequest that ``request`` is, or that a DRF request wraps."""
    return getattr(request, "_request", request)


def expose(request: Any, lease: Lease) -> None:
    """Let the view find its lease as ``request.lease``, whichever request it is given."""
    django_request(request).lease = lease


def dispatches_async(view: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether ``view`` is the dispatch() of an async class view: a plain function, but awaited."""
    while isinstance(view, partial):
        view = view.func
    owner = getattr(view, "__self__", args[0])
    return isinstance(owner, View) and owner.view_is_async


def view_name(view: Callable[..., Any]) -> str:
    """Return the dotted name of ``view`` for signals and logs."""
    while isinstance(view, partial):
        view = view.func
    cls = getattr(view, "view_class", None) or getattr(view, "cls", None) or view
    name = getattr(cls, "__qualname__", type(cls).__qualname__)
    return f"{getattr(cls, '__module__', '')}.{name}"


def refuse_misplaced(view: Callable[..., Any]) -> None:
    """Raise TypeError if ``view`` can't be guarded, or not from here."""
    if isinstance(view, type):
        raise TypeError(
            "A guard can't decorate a class: use "
            '@method_decorator(semaphore_lock(...), name="post") or SemaphoreLockMixin.'
        )
    if not callable(view):
        raise TypeError(f"A guard decorates a view, not {view!r}.")
    if getattr(getattr(view, "cls", None), "__name__", "") == "WrappedAPIView":
        raise TypeError(
            "The guard stands above @api_view, where nobody has been authenticated yet: put it "
            "beneath, between @api_view and the function."
        )
