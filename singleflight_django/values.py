"""What a Django Ninja handler returns instead of a response: a value, with or without a status."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from django.http.response import HttpResponseBase

from singleflight_django.records import UNREADABLE, VALUE, Record, ignore, seal, unseal
from singleflight_django.serializers import to_json

_BARE: Final = "bare"
_PAIR: Final = "pair"
_STATUS: Final = "status"


def freeze_value(value: Any, *, max_bytes: int | None = None) -> bytes:
    """Return the record of ``value``, ``(status, value)`` or Ninja's ``Status(status, value)``.

    Raises UnshareableResultError if JSON doesn't give an equal value back.
    """
    form, status, content = _parts(value)
    return seal(VALUE, {"form": form, "status": status}, to_json(content), max_bytes)


def thaw_value(data: object) -> Any:
    """Return the value in the form that it had; UNREADABLE, and a log line, if it can't be read."""
    record = unseal(data, VALUE)
    return UNREADABLE if record is None else restore(record)


def restore(record: Record) -> Any:
    """Return the value that an opened record holds, or UNREADABLE."""
    form, status, value = record.head["form"], record.head["status"], json.loads(record.body)
    if form == _BARE:
        return value
    if form == _PAIR:
        return status, value
    make = _status_class()
    if make is None:
        ignore("this process knows no Status of Django Ninja")
        return UNREADABLE
    return make(status, value)


def status_of(result: Any) -> int:
    """Return the status of what a view returned; 200 for a bare value, which is a success."""
    if isinstance(result, HttpResponseBase):
        return result.status_code
    return _parts(result)[1]


def touched(kwargs: Mapping[str, Any]) -> bool:
    """Whether a Ninja handler has put headers or cookies on the response that it was given.

    A value doesn't tell of them.
    """
    given = [value for value in kwargs.values() if isinstance(value, HttpResponseBase)]
    return any(
        response.cookies or set(map(str.lower, response.headers)) - {"content-type"}
        for response in given
    )


def _parts(value: Any) -> tuple[str, int, Any]:
    status_class = _status_class()
    if status_class is not None and isinstance(value, status_class):
        return _STATUS, value.status_code, value.value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], int):
        return _PAIR, int(value[0]), value[1]
    return _BARE, 200, value


def _status_class() -> Any:
    return getattr(sys.modules.get("ninja.responses"), "Status", None)
