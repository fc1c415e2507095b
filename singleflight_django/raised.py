"""What a view raised, where the framework makes an answer of it: a 404, a serializer's errors.

Inside REST framework and Ninja the guard asks the framework for that answer, once, and returns it
in the exception's place: leader and followers get one response, and its handler has one error to
report. See ``answer()``.

Plain Django makes the answer outside of all decorators, after the middlewares' process_exception()
and with the site's own handler404, which may render a page for the one who asks. There the leader's
exception goes on, and each follower raises one like it: see ``freeze_raised()``. Which classes can
be rebuilt is a fixed list; of an exception only its texts are stored. What ``create_or_existing()``
raises is among them: the guard answers it, for leader and followers alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404
from django.http.multipartparser import MultiPartParserError
from django.http.response import HttpResponseBase
from django.utils.functional import Promise

from singleflight_django.bodies import is_drf
from singleflight_django.exceptions import DuplicateError, DuplicateMismatchError
from singleflight_django.records import RAISED, Record, ignore, seal, unseal

_LONGEST_TEXT: Final = 1000


class SuspicionRepeated(BadRequest, SuspiciousOperation):
    """What the followers of a leader with a SuspiciousOperation raise.

    Django answers it alike, but leaves the report of a security incident to the leader.
    """


# The first that fits. These are the statuses that Django, or ``responses``, gives them.
_KINDS: Final[dict[str, tuple[type[Exception], type[Exception], int]]] = {
    "not found": (Http404, Http404, 404),
    "denied": (PermissionDenied, PermissionDenied, 403),
    "bad": (BadRequest, BadRequest, 400),
    "multipart": (MultiPartParserError, MultiPartParserError, 400),
    "suspicious": (SuspiciousOperation, SuspicionRepeated, 400),
    "mismatch": (DuplicateMismatchError, DuplicateMismatchError, 409),
    "duplicate": (DuplicateError, DuplicateError, 409),
}


def answer(request: Any, error: Exception) -> HttpResponseBase:
    """Return the response that the framework around the guard makes of ``error``, for all to have.

    Raise ``error`` where there is none: then ``freeze_raised(error)`` tells whether Django has one,
    or the guard itself.
    """
    if isinstance(error, DuplicateError):
        raise error
    if is_drf(request):
        return _drf_answer(request, error)
    api = _ninja_api(request)
    if api is None:
        raise error
    response: HttpResponseBase = api.on_exception(request, error)
    vars(response)["exception"] = True
    return response


def is_from_exception(response: object) -> bool:
    """Whether the framework made ``response`` of an exception. REST framework marks them itself."""
    return getattr(response, "exception", False) is True


def status_of_raised(error: BaseException) -> int:
    """Return the status of Django's answer to ``error``: 500 where it is a failure."""
    return next((status for _, status in _kind(error)), 500)


def freeze_raised(error: BaseException) -> bytes | None:
    """Return the record from which followers raise one like ``error``; None if it is a failure."""
    for name, _ in _kind(error):
        texts = [str(arg)[:_LONGEST_TEXT] for arg in error.args if isinstance(arg, str | Promise)]
        return seal(RAISED, {"kind": name, "texts": texts}, b"")
    return None


def thaw_raised(data: object) -> Exception | None:
    """Return the exception to raise; None, and a log line, if ``data`` can't be read."""
    record = unseal(data, RAISED)
    return None if record is None else rebuild(record)


def rebuild(record: Record) -> Exception | None:
    """Return the exception that an opened record holds; None, and a log line, if it doesn't."""
    kind = record.head.get("kind")
    if kind not in _KINDS:
        ignore(f"it holds an exception of the unknown kind {kind!r}")
        return None
    return _KINDS[kind][1](*record.head["texts"])


def _kind(error: BaseException) -> Iterator[tuple[str, int]]:
    for name, (raised, _, status) in _KINDS.items():
        if isinstance(error, raised):
            yield name, status


def _drf_answer(request: Any, error: Exception) -> HttpResponseBase:
    view = (request.parser_context or {}).get("view")
    if view is None:  # a request that was made by hand
        raise error
    handle = view.handle_exception
    try:
        response: HttpResponseBase = handle(error)
    except Exception:
        # The view's dispatch() is going to ask again, and a handler that reports would do it twice.
        view.handle_exception = lambda again: _reraise(again, error, handle)
        raise
    return response


def _reraise(again: Exception, error: Exception, handle: Any) -> Any:
    if again is error:
        raise again
    return handle(again)


def _ninja_api(request: Any) -> Any:
    """Return the API whose operation runs for ``request``, or None outside of Ninja."""
    view: Any = getattr(getattr(request, "resolver_match", None), "func", None)
    while hasattr(view, "__wrapped__"):
        view = view.__wrapped__
    if getattr(view, "__module__", "") != "ninja.operation":
        return None
    # Ninja says it nowhere; the URL's callback is a closure over the path's operations.
    paths = [cell.cell_contents for cell in view.__closure__]
    operations = [op for path in paths for op in path.operations if request.method in op.methods]
    return operations[0].api if operations else None
