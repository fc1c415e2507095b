"""03x: can a guard wait where it stands?"""

from __future__ import annotations

from collections.abc import Iterator

from asgiref.sync import iscoroutinefunction
from django.core.checks import CheckMessage, Error
from django.db import connections

from singleflight_django.checks.base import message
from singleflight_django.checks.guarded import Guarded
from singleflight_django.flights import FlightGuard
from singleflight_django.transactions import OptOut


def check_waits_outside(each: Guarded) -> Iterator[CheckMessage]:
    """Is a transaction open already, where the guard may have to wait?"""
    # To async views Django itself says that they can't have ATOMIC_REQUESTS.
    if not _may_wait(each) or iscoroutinefunction(each.route.view):
        return
    if not (aliases := [alias for alias in connections.settings if _is_open(each, alias)]):
        return
    text = (
        f"{each.name}: the guard may have to wait, and ATOMIC_REQUESTS has opened a transaction on "
        f"{', '.join(map(repr, aliases))} before it is asked: every guarded request raises "
        "WaitInTransactionError."
    )
    hint = (
        "Put @transaction.non_atomic_requests on the URL's callback, and transaction.atomic() into "
        "the view where it is needed; or use the mixin of a class view, alone."
    )
    yield message(Error, "E035", text, hint)


def _may_wait(each: Guarded) -> bool:
    if each.guard.observing:
        return False
    return isinstance(each.guard, FlightGuard) or bool(each.guard.options.wait)


def _is_open(each: Guarded, alias: str) -> bool:
    if not connections.settings[alias]["ATOMIC_REQUESTS"]:
        return False
    marker = getattr(each.route.view, "_non_atomic_requests", ())
    if isinstance(marker, OptOut):
        # The outermost guard opens it, inside of its own lease.
        return each.inside and not set.__contains__(marker, alias)
    return alias not in marker
