"""A view under its lease: in, through, and out again on every path. Sync and async."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import isawaitable
from typing import Any, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest

from singleflight_django.conf import conf
from singleflight_django.drivers import arun, run
from singleflight_django.holding import leave, outlives
from singleflight_django.lease import Lease
from singleflight_django.locking import acquire, release
from singleflight_django.locks import Lock
from singleflight_django.placement import dispatches_async, expose, split
from singleflight_django.responses import ANSWERED
from singleflight_django.transactions import (
    give_back,
    give_back_ended,
    opt_out,
    refuse_to_wait,
    with_transactions,
)

_View = TypeVar("_View", bound=Callable[..., Any])


def lock_view(view: _View, lock: Lock) -> _View:
    """Return ``view`` guarded by ``lock``: of the same colour, with the same attributes."""

    def unguarded(request: HttpRequest) -> bool:
        if conf.SINGLEFLIGHT_ENABLED is False:
            expose(request, lock.unprotected())
            return True
        return request.method not in lock.options.methods

    async def ainner(*args: Any, **kwargs: Any) -> Any:
        request, rest = split(args)
        if unguarded(request):
            return await view(*args, **kwargs)
        return await _aguarded(partial(view, *args, **kwargs), lock, request, rest, kwargs)

    def inner(*args: Any, **kwargs: Any) -> Any:
        request, rest = split(args)
        call = with_transactions(partial(view, *args, **kwargs), request)
        if unguarded(request):
            return call()
        enter = _aguarded if dispatches_async(view, args) else _guarded
        return enter(call, lock, request, rest, kwargs)

    if iscoroutinefunction(view):
        return cast(_View, wraps(view)(ainner))
    opt_out(wraps(view)(inner))
    return cast(_View, inner)


def take(lease: Lease, lock: Lock) -> None:
    """Acquire ``lease``, if it may have to be waited for outside of transactions only."""
    give_back_ended()
    terms = lock.options.terms()
    if terms.wait:
        refuse_to_wait(lease.key)
    run(acquire(lease, terms))


async def atake(lease: Lease, lock: Lock) -> None:
    """See take(). No transaction is open in async code."""
    await arun(acquire(lease, lock.options.terms()))


def _guarded(
    call: Callable[[], Any], lock: Lock, request: Any, args: tuple[Any, ...], kwargs: Any
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
    expose(request, lease)
    try:
        response = lock.catching(call, request, lease)
    except BaseException:
        give_back(lease)
        raise
    if isawaitable(response):
        return _finished(lambda: response, lock, lease, request)
    if not outlives(response, request, lease, partial(release, lease)):
        give_back(lease)
    return response


async def _aguarded(
    call: Callable[[], Any], lock: Lock, request: Any, args: tuple[Any, ...], kwargs: Any
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
    expose(request, lease)
    return await _finished(call, lock, lease, request)


async def _finished(call: Callable[[], Any], lock: Lock, lease: Lease, request: Any) -> Any:
    try:
        response = await lock.acatching(call, request, lease)
    except BaseException as error:
        await leave(lease, error)
        raise
    if not outlives(response, request, lease, partial(release, lease)):
        await leave(lease)
    return response
