"""How long a view holds its lease: until what Django does after it has returned is done, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, finalize

from django.core.signals import request_finished
from django.dispatch import receiver

from singleflight_django.bodies import unwrap
from singleflight_django.drivers import arun, in_background, run
from singleflight_django.lease import Lease, held_here
from singleflight_django.steps import Steps

End = Callable[[], Steps]

# Leases of views that have returned, and how they end: their responses are still being rendered or
# streamed.
_outliving: WeakKeyDictionary[Lease, End] = WeakKeyDictionary()


def outlives(response: Any, request: Any, lease: Lease, end: End) -> bool:
    """Whether ``response`` needs the lease for longer; if so, ``end`` is carried out after that.

    An unrendered response is done once rendered, a streaming one when it is closed. Where neither
    comes about (rendering fails, a middleware puts another response in its place), the end of the
    request does it.
    """
    if getattr(response, "is_rendered", True) is False:
        response.add_post_render_callback(lambda _: _end(lease))
    elif getattr(response, "streaming", False):
        _end_on_close(response, lease)
    else:
        return False
    _outliving[lease] = end
    finalize(unwrap(request), _end, lease).atexit = False
    return True


def was_cancelled(error: BaseException) -> bool:
    """Whether ``error`` is the end of a cancelled task, whose work may go on in a thread.

    A CancelledError that the work raised without being cancelled says that it has ended.
    """
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _end(lease: Lease) -> None:
    end = _outliving.pop(lease, None)
    if end is None:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        run(end())
    else:
        in_background(arun(end()))


def _end_on_close(response: Any, lease: Lease) -> None:
    close = response.close

    def close_then_end() -> None:
        try:
            close()
        finally:
            _end(lease)

    response.close = close_then_end


@receiver(request_finished, dispatch_uid="singleflight_django.holding")
def _end_of_request(**kwargs: Any) -> None:
    for lease in held_here():
        with suppress(Exception):
            _end(lease)
