"""What a guarded view did, as one record: it returned a response or a value, or it raised."""

from __future__ import annotations

from typing import Any

from django.http.response import HttpResponseBase

from singleflight_django.raised import rebuild
from singleflight_django.records import RAISED, RESPONSE, UNREADABLE, VALUE, unseal
from singleflight_django.snapshots import freeze, respond
from singleflight_django.values import freeze_value, restore


def freeze_result(
    result: Any, *, method: str | None = "GET", max_bytes: int | None = None
) -> bytes:
    """Return the record of what a view returned to a request of ``method``.

    Raises UnshareableResultError. For what it raised see raised.freeze_raised().
    """
    if isinstance(result, HttpResponseBase):
        return freeze(result, method=method, max_bytes=max_bytes)
    return freeze_value(result, max_bytes=max_bytes)


def replay(data: object) -> Any:
    """Return what the view returned, or raise like what it raised.

    UNREADABLE, and a log line, if ``data`` can't be read.
    """
    record = unseal(data, RESPONSE + VALUE + RAISED)
    if record is None:
        return UNREADABLE
    if record.kind == VALUE:
        return restore(record)
    if record.kind == RESPONSE:
        response = respond(record)
        return UNREADABLE if response is None else response
    error = rebuild(record)
    if error is None:
        return UNREADABLE
    raise error
