"""How long a view holds its lease: until what Django does after it has returned is done, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, finalize

from singleflight_django.bodies import unwrap
from singleflight_django.drivers import arun, in_background, run
from singleflight_django.lease import Lease
from singleflight_django.locking import hand_over, lapse, release
from singleflight_django.renewal import keeper
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
    request = unwrap(request)
    # Django closes the request together with whichever response it sends.
    _end_on_close(request, lease)
    # Whatever the garbage collector has interrupted: this must wait for nothing there.
    finalize(request, keeper.later, partial(_end, lease)).atexit = False
    return True


async def leave(lease: Lease, error: BaseException | None = None) -> None:
    """Give ``lease`` back when its work has ended, by ``error`` or well."""
    if isinstance(error, GeneratorExit):
        # Whoever is being closed may not await any more.
        hand_over(lease)
    elif error is not None and was_cancelled(error):
        lapse(lease)
    else:
        await arun(release(lease))


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


def _end_on_close(closed: Any, lease: Lease) -> None:
    close = closed.close

    def close_then_end() -> None:
        # Puts the former close back, and so breaks the reference cycle.
        closed.close = close
        try:
            close()
        finally:
            _end(lease)

    closed.close = close_then_end
