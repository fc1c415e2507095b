"""What a stage puts in place of the real thing: a store, and the function that does the work."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import getattr_static
from typing import Any
from unittest import mock


class WatchedStore:
    """A store whose callers go through a stage."""

    def __init__(self, store: Any, stage: Any) -> None:
        self._store, self._stage = store, stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def acquire(self, key: str, token: str, ttl: float, limit: int, wait: float) -> Any:
        self._stage.meet(token, self._store, key, limit)
        return self._stage.note(token, self._store.acquire(key, token, ttl, limit, wait))

    async def aacquire(self, key: str, token: str, ttl: float, limit: int, wait: float) -> Any:
        self._stage.meet(token, self._store, key, limit)
        return self._stage.note(token, await self._store.aacquire(key, token, ttl, limit, wait))

    def join(self, key: str, joining: Any) -> Any:
        self._stage.meet(joining.token, self._store, key, 1, True)
        return self._stage.note(joining.token, self._store.join(key, joining))

    async def ajoin(self, key: str, joining: Any) -> Any:
        self._stage.meet(joining.token, self._store, key, 1, True)
        return self._stage.note(joining.token, await self._store.ajoin(key, joining))

    # Noted before the store is told: by then the next one may be in.
    def release(self, key: str, token: str) -> Any:
        self._stage.leave(token)
        return self._store.release(key, token)

    async def arelease(self, key: str, token: str) -> Any:
        self._stage.leave(token)
        return await self._store.arelease(key, token)

    def publish(self, key: str, publishing: Any) -> Any:
        self._stage.leave(publishing.token)
        return self._store.publish(key, publishing)

    async def apublish(self, key: str, publishing: Any) -> Any:
        self._stage.leave(publishing.token)
        return await self._store.apublish(key, publishing)


def replaced(path: str, wrap: Callable[[Any], Any]) -> Any:
    """Replace what stands at a dotted path, function or method, by what ``wrap`` makes of it.

    A method that is inherited is replaced for this class alone. Raises ValueError where there is
    nothing.
    """
    *owners, name = path.split(".")
    place = _place(owners, path)
    try:
        found = getattr_static(place, name) if isinstance(place, type) else getattr(place, name)
    except AttributeError:
        raise _nothing_at(path, f"{'.'.join(owners)} has no {name!r}") from None
    if isinstance(found, staticmethod | classmethod):
        return mock.patch.object(place, name, type(found)(wrap(found.__func__)))
    return mock.patch.object(place, name, wrap(found))


def _place(owners: list[str], path: str) -> Any:
    """Return the module, the class or the object in it."""
    for length in range(len(owners), 0, -1):
        module = ".".join(owners[:length])
        if _is_module(module):
            place: Any = import_module(module)
            for owner in owners[length:]:
                if not hasattr(place, owner):
                    raise _nothing_at(path, f"{module} has no {owner!r}")
                place = getattr(place, owner)
            return place
    raise _nothing_at(path, f"there is no module {owners[0] if owners else path!r}")


def _is_module(module: str) -> bool:
    """Whether ``module`` can be imported; a class in its place can't."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _nothing_at(path: str, why: str) -> ValueError:
    return ValueError(
        f"work={path!r}: {why}. Give the dotted path of the function that does the work, as its "
        'caller finds it: "lessons.views.create_lesson".'
    )
