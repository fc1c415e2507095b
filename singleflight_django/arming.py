"""How a mixin guards: it arms the instance's handler, which fires after the view's own checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.views import View

from singleflight_django.guards import Guard, Options
from singleflight_django.keys import KeySpec
from singleflight_django.transactions import opt_out, with_transactions

# Stands for the name of every handler.
_ANY = ""


@dataclass(frozen=True)
class Armoury:
    """What one mixin has of its own: the prefix of its attributes, its options, guard and wrapper.

    ``make(spec, options, name, view)`` returns the guard, ``view`` being None where there is no
    instance yet. ``wrap(handler, guard)`` returns the guarded handler.
    """

    prefix: str
    options: type[Options]
    make: Callable[[Any, Any, str, Any], Guard]
    wrap: Callable[[Any, Any], Any]
    _guards: WeakKeyDictionary[type, dict[str, Guard]]

    def check(self, cls: type, mixin: type) -> None:
        """Raise where the subclass ``cls`` of ``mixin`` can't work; remember its guards."""
        mro = cls.__mro__
        if View in mro and mro.index(View) < mro.index(mixin):
            raise TypeError(
                f"{cls.__qualname__} lists {mixin.__name__} after View, where it is never asked: "
                f"write class {cls.__name__}({mixin.__name__}, ...)."
            )
        known = [name for name in dir(mixin) if name.startswith(f"{self.prefix}_")]
        for name in vars(cls).keys() - known:
            near = get_close_matches(name, known, 1, 0.85)
            if name.startswith(f"{self.prefix}_") and near:
                raise TypeError(f"{cls.__qualname__}.{name} has no effect. Did you mean {near[0]}?")
        self._guards[cls] = self._made(cls, {})

    def view(self, cls: type, view: Any, initkwargs: Mapping[str, Any]) -> Any:
        """Return what as_view() returns; raise where its guard could never be used as meant."""
        guards, prefix = self._made(cls, initkwargs), self.prefix
        if not guards:
            raise ImproperlyConfigured(
                f"{cls.__qualname__} needs a {prefix}_key, or get_{prefix}_key()."
            )
        for name in guards:
            if name != _ANY and not callable(getattr(cls, name, None)):
                raise ImproperlyConfigured(
                    f"{cls.__qualname__}.{prefix}_key names {name!r}, but there is no such "
                    "handler or action."
                )
        if not iscoroutinefunction(view):
            opt_out(view)
        # For ``manage.py check``. What another mixin's as_view() has armed is armed around it.
        view.singleflight_armed = (*getattr(view, "singleflight_armed", ()), guards)
        return view

    def arm(self, view: Any) -> None:
        """Put the guarded handler of the request's method into the place of the plain one."""
        name = (view.request.method or "").lower()
        handler = getattr(view, name, None) if name in view.http_method_names else None
        if handler is not None:
            guard = self.guard_of(view, getattr(handler, "__name__", _ANY))
            armed = self.wrap(handler, guard) if guard else _in_transactions(handler)
            setattr(view, name, armed)

    def guards_of(self, view: Any) -> dict[str, Guard]:
        """Return the guards of a view's class, unless as_view() was told otherwise."""
        start = f"{self.prefix}_"
        own = {name: value for name, value in vars(view).items() if name.startswith(start)}
        return self._made(type(view), own) if own else self._guards[type(view)]

    def guard_of(self, view: Any, handler: str) -> Guard | None:
        """Return what guards a handler of an instance."""
        guards = self.guards_of(view)
        guard: Any = guards.get(handler) or guards.get(_ANY)
        if guard is None:
            return None
        name = f"{type(view).__module__}.{type(view).__qualname__}.{handler}"
        get_key = getattr(view, f"get_{self.prefix}_key")
        computed = KeySpec(lambda request, *args, **kwargs: get_key(request))
        spec = computed if self._computes_key(type(view)) else guard.spec
        return self.make(spec, guard.options, name, view)

    def _made(self, cls: type, own: Mapping[str, Any]) -> dict[str, Guard]:
        """Return the guards by handler; ``own`` goes before what the class says."""

        def said(name: str) -> Any:
            name = f"{self.prefix}_{name}"
            return own.get(name, getattr(cls, name))

        options = self.options(**{one.name: said(one.name) for one in fields(self.options)})
        key = said("key")
        if self._computes_key(cls):
            key = getattr(cls, f"get_{self.prefix}_key")
        if key is None:
            return {}
        by_name = key if isinstance(key, Mapping) else {_ANY: key}
        return {name: self.make(value, options, "", None) for name, value in by_name.items()}

    def _computes_key(self, cls: type) -> bool:
        return not hasattr(getattr(cls, f"get_{self.prefix}_key"), "is_default")


def armoury(
    prefix: str,
    options: type[Options],
    make: Callable[[Any, Any, str, Any], Guard],
    wrap: Callable[[Any, Any], Any],
) -> Armoury:
    """Return what a mixin has of its own; see Armoury."""
    return Armoury(prefix, options, make, wrap, WeakKeyDictionary())


def default(method: Any) -> Any:
    """Mark a mixin's method as the one that is there to be overridden."""
    method.is_default = True
    return method


def _in_transactions(handler: Any) -> Any:
    """Return a handler without guard, in the transactions that as_view() has opted out of."""

    @wraps(handler)
    def inner(request: Any, *args: Any, **kwargs: Any) -> Any:
        return with_transactions(partial(handler, request, *args, **kwargs), request)()

    return inner
