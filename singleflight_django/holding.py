"""How long a view holds its lease: until what Django does after the view has returned is done, too."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from weakref import WeakSet, finalize

from django.core.signals import request_finished
from django.dispatch import receiver
from django.http import HttpRequest

from singleflight_django.drivers import arun, run
from singleflight_django.lease import Lease, held_here
from singleflight_django.locking import lapse, release

# Leases of views that have returned: their responses are still being rendered or streamed.
_outliving: WeakSet[Lease] = WeakSet()
_background: set[asyncio.Task[None]] = set()


def give_back(lease: Lease) -> None:
    """Release ``lease`` from wherever we are: on an event loop in the background, else at once."""
    _outliving.discard(lease)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        run(release(lease))
        return
    task = loop.create_task(arun(release(lease)))
    _background.add(task)
    task.add_done_callback(_background.discard)


def outlives(response: Any, lease: Lease, request: HttpRequest) -> bool:
    """Whether ``response`` needs the lease for longer; if so, it is released at the end of that.

    An unrendered response releases it once rendered, a streaming one when it is closed. Where
    neither comes about (rendering fails, a middleware puts another response in its place), the end
    of the request does.
    """
    if getattr(response, "is_rendered", True) is False:
        response.add_post_render_callback(lambda _: give_back(lease))
    elif getattr(response, "streaming", False):
        _close_then_give_back(response, lease)
    else:
        return False
    _outliving.add(lease)
    finalize(request, give_back, lease).atexit = False
    return True


def interrupted(error: BaseException, lease: Lease) -> bool:
    """Whether ``lease`` has to lapse by itself, since the work may go on after ``error``.

    A cancelled task leaves at once; the thread that its ORM call runs in doesn't. A CancelledError
    that the work raised without being cancelled says that it has ended.
    """
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        return False
    lapse(lease)
    return True


def _close_then_give_back(response: Any, lease: Lease) -> None:
    close = response.close

    def close_then_give_back() -> None:
        try:
            close()
        finally:
            give_back(lease)

    response.close = close_then_give_back


@receiver(request_finished, dispatch_uid="singleflight_django.holding")
def _end_of_request(**kwargs: Any) -> None:
    for lease in held_here():
        if lease in _outliving:
            with suppress(Exception):
                give_back(lease)
