"""A view under its lease: in, through, and out again on every path. Sync and async."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import isawaitable
from typing import Any, Protocol, TypeVar

from django.http.response import HttpResponseBase

from singleflight_django.drivers import arun, run
from singleflight_django.holding import leave, outlives
from singleflight_django.lease import Lease
from singleflight_django.locking import acquire, release
from singleflight_django.locks import Lock
from singleflight_django.placement import expose
from singleflight_django.responses import ANSWERED
from singleflight_django.transactions import (
    arefuse_to_wait,
    give_back,
    give_back_ended,
    refuse_to_wait,
)
from singleflight_django.wrapping import wrap_view

_View = TypeVar("_View", bound=Callable[..., Any])


class Catching(Protocol):
    """A guard as far as calling its view needs it: errors of ours that are answers become those."""

    def catching(self, call: Callable[[], Any], request: Any, lease: Lease) -> Any: ...

    async def acatching(self, call: Callable[[], Any], request: Any, lease: Lease) -> Any: ...


def lock_view(view: _View, lock: Lock) -> _View:
    """Return ``view`` guarded by ``lock``: of the same colour, with the same attributes."""
    return wrap_view(view, lock, partial(_guarded, lock), partial(_aguarded, lock))


def take(lease: Lease, lock: Lock) -> None:
    """Acquire ``lease``, if it may have to be waited for outside of transactions only."""
    give_back_ended()
    terms = lock.options.terms()
    if terms.wait:
        refuse_to_wait(lease.key)
    run(acquire(lease, terms))


async def atake(lease: Lease, lock: Lock) -> None:
    """See take()."""
    terms = lock.options.terms()
    if terms.wait:
        await arefuse_to_wait(lease.key)
    await arun(acquire(lease, terms))


def _guarded(
    lock: Lock, call: Callable[[], Any], request: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Call a view under its lease, or return what refuses the request."""
    keys: tuple[str, ...] = ("?",)
    try:
        keys = lock.spec.keys(request, args, kwargs)
        lease = lock.lease(keys)
        take(lease, lock)
    except Exception as error:
        if not lock.goes_on_without(error):
            if isinstance(error, ANSWERED):
                return lock.refusal(request, error)
            raise
        lease = lock.unprotected(keys)
    return hold(call, lock, lease, request)


def hold(call: Callable[[], Any], guard: Catching, lease: Lease, request: Any) -> Any:
    """Call a view that has its lease, and give that back when the view is done."""
    expose(request, lease)
    try:
        response = guard.catching(call, request, lease)
    except BaseException:
        give_back(lease)
        raise
    if not isinstance(response, HttpResponseBase) and isawaitable(response):
        return ahold(lambda: response, guard, lease, request)
    if not outlives(response, request, lease, partial(release, lease)):
        give_back(lease)
    return response


async def _aguarded(
    lock: Lock, call: Callable[[], Any], request: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """See _guarded()."""
    keys: tuple[str, ...] = ("?",)
    try:
        keys = await lock.spec.akeys(request, args, kwargs)
        lease = lock.lease(keys)
        await atake(lease, lock)
    except Exception as error:
        if not lock.goes_on_without(error):
            if isinstance(error, ANSWERED):
                return await lock.arefusal(request, error)
            raise
        lease = lock.unprotected(keys)
    return await ahold(call, lock, lease, request)


async def ahold(call: Callable[[], Any], guard: Catching, lease: Lease, request: Any) -> Any:
    """See hold()."""
    expose(request, lease)
    try:
        response = await guard.acatching(call, request, lease)
    except BaseException as error:
        await leave(lease, error)
        raise
    if not outlives(response, request, lease, partial(release, lease)):
        await leave(lease)
    return response
