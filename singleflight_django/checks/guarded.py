"""The guards of the URLconf's views: on functions, classes and their handlers, and on operations."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from singleflight_django import functions
from singleflight_django.checks.routes import Route, routes
from singleflight_django.guards import Guard
from singleflight_django.placement import view_name

logger = logging.getLogger("singleflight_django")


@dataclass(frozen=True, eq=False, kw_only=True)
class Guarded:
    """A guard, and how it is come to.

    ``function``: what it is on, or is armed for. ``answers``: the HTTP methods that this is called
    for; None where the function itself decides. ``inside``: whether another guard, or a mixin, is
    around it. ``cls``: the class of a class view. ``operation``: Ninja's.
    """

    guard: Any
    name: str
    route: Route
    function: Any
    answers: frozenset[str] | None = None
    inside: bool = False
    cls: type | None = None
    operation: Any = None

    @cached_property
    def methods(self) -> frozenset[str] | None:
        """The HTTP methods that are guarded here; None where that can't be known."""
        if self.answers is not None:
            return self.answers & {*self.guard.methods}
        # Those that were written down are meant; the default ones are only possible.
        default = type(self.guard.options).__dataclass_fields__["methods"].default
        return None if self.guard.methods == default else frozenset(self.guard.methods)


def find_guarded() -> list[Guarded]:
    """Return every guard on every view of the URLconf. A view that is not understood has none."""
    found: list[Guarded] = []
    for route in routes():
        try:
            found += [each for each in _on(route) if each.methods is None or each.methods]
        except Exception:
            logger.debug("The checks don't understand %r.", route.path, exc_info=True)
    return found


def guards_in_use(seen: Iterable[Guarded]) -> list[Guard]:
    """Return those that were found, and that of each SingleFlight. A ``with`` can't be found."""
    return [*(each.guard for each in seen), *sorted(functions.made, key=_namespace)]


def _namespace(guard: Guard) -> str:
    return guard.namespace


def _on(route: Route) -> Iterator[Guarded]:
    view = route.view
    while isinstance(view, partial):
        view = view.func
    cls = getattr(view, "view_class", None) or getattr(view, "cls", None)
    if operations := _operations(view):
        yield from _on_operations(operations, route)
    elif cls is None:
        name = view_name(view)
        yield from _stack(_guards(view), name=name, route=route, function=view)
    elif cls.__qualname__ == "WrappedAPIView":
        yield from _on_api_view(cls, view, route)
    else:
        yield from _on_class(cls, view, route)


def _stack(guards: Iterable[Guard | None], **facts: Any) -> Iterator[Guarded]:
    """Yield guards that are around one another, the outermost first; None is a mixin without one."""
    for number, guard in enumerate(guards):
        if guard is not None:
            yield Guarded(guard=guard, **{"inside": number > 0, **facts})


def _on_class(cls: type, view: Any, route: Route) -> Iterator[Guarded]:
    handlers, name = _handlers(cls, view), view_name(view)
    outer, armed = _guards(view), getattr(view, "singleflight_armed", ())
    facts = {"route": route, "cls": cls}
    yield from _stack(outer, name=name, function=view, answers=frozenset(handlers), **facts)
    for handler in dict.fromkeys(handlers.values()):
        own = handler.__name__
        arms = [guards.get(own) or guards.get("") for guards in armed]
        inner = {"inside": True} if outer else {}
        yield from _stack(
            [*arms, *_guards(handler)],
            name=f"{name}.{own}",
            function=handler,
            answers=_methods(handlers, handler),
            **facts,
            **inner,
        )


def _on_api_view(cls: type, view: Any, route: Route) -> Iterator[Guarded]:
    handlers = _handlers(cls, view)
    # Only the handler, which is the same for all methods, knows the function.
    handler = next(iter(handlers[name] for name in handlers if name != "OPTIONS"))
    function = _enclosed(handler, "func")
    yield from _stack(
        _guards(function),
        name=view_name(function),
        function=function,
        answers=_methods(handlers, handler),
        route=route,
        cls=cls,
    )


def _on_operations(operations: Iterable[Any], route: Route) -> Iterator[Guarded]:
    for each in operations:
        yield from _stack(
            [*_guards(each.run), *_guards(each.view_func)],
            name=view_name(each.view_func),
            function=each.view_func,
            answers=frozenset(each.methods),
            route=route,
            operation=each,
        )


def _operations(view: Any) -> list[Any]:
    """Return Ninja's operations behind a view that it made, else []."""
    if not str(getattr(view, "__module__", "")).startswith("ninja."):
        return []
    owner = getattr(view, "__self__", None) or _enclosed(view, "self")
    return list(getattr(owner, "operations", ()))


def _handlers(cls: type, view: Any) -> dict[str, Any]:
    """Return what a class view calls for each HTTP method."""
    told = getattr(view, "initkwargs", None) or getattr(view, "view_initkwargs", {})
    actions = getattr(view, "actions", None)
    if actions is None:
        names = told.get("http_method_names", getattr(cls, "http_method_names", ()))
        actions = {name: name for name in names}
    found = {
        method.upper(): getattr(cls, name)
        for method, name in actions.items()
        if callable(getattr(cls, name, None))
    }
    if "GET" in found:
        found.setdefault("HEAD", found["GET"])
    return found


def _methods(handlers: Mapping[str, Any], handler: Any) -> frozenset[str]:
    return frozenset(name for name, each in handlers.items() if each is handler)


def _guards(view: Any) -> tuple[Guard, ...]:
    found: tuple[Guard, ...] = getattr(view, "singleflight_guards", ())
    return found


def _enclosed(function: Any, name: str) -> Any:
    """Return the variable ``name`` that a function takes from where it was defined, or None."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents
