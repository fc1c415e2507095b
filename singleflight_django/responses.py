"""What we answer ourselves: the one place that knows which error is which HTTP status."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from asgiref.sync import sync_to_async
from django.db.transaction import TransactionManagementError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.cache import patch_vary_headers

from singleflight_django.exceptions import (
    ContentionError,
    DuplicateError,
    DuplicateMismatchError,
    FingerprintMismatchError,
    FlightTimeoutError,
    KeyFieldError,
    LeaderFailedError,
    LeaseConflictError,
    SingleFlightError,
    StoreUnavailableError,
    TooManyFollowersError,
    UnshareableResultError,
)

HTML = "text/html"
JSON = "application/problem+json"
TEMPLATE = "singleflight_django/problem.html"

_Response = TypeVar("_Response", bound=HttpResponseBase)


class Problem(NamedTuple):
    """An answer as RFC 9457 describes it. ``slug`` ends the URI of its type and never changes."""

    status: int
    slug: str
    title: str
    detail: str
    retry: bool = False


# Every error that a view's client is told of. The others are faults of the code and propagate.
PROBLEMS: dict[type[SingleFlightError], Problem] = {
    LeaseConflictError: Problem(
        429,
        "conflict",
        "Already in progress",
        "The same request is being carried out right now. Try again in a moment.",
        retry=True,
    ),
    FingerprintMismatchError: Problem(
        409,
        "fingerprint-mismatch",
        "Different content",
        "Another request with the same identity and different content is in progress.",
    ),
    DuplicateMismatchError: Problem(
        409,
        "duplicate-mismatch",
        "Already exists",
        "This already exists, with different content.",
    ),
    DuplicateError: Problem(409, "duplicate", "Already exists", "This already exists."),
    UnshareableResultError: Problem(
        409,
        "in-flight",
        "Already in progress",
        "The same request was being carried out, and its answer was not for sharing. "
        "Look at the outcome before you try again.",
        retry=True,
    ),
    FlightTimeoutError: Problem(
        504,
        "timeout",
        "Still in progress",
        "The same request is still being carried out. Try again in a moment.",
        retry=True,
    ),
    LeaderFailedError: Problem(
        503,
        "leader-failed",
        "Failed",
        "The same request was being carried out, and failed. Try again in a moment.",
        retry=True,
    ),
    TooManyFollowersError: Problem(
        503,
        "too-many-followers",
        "Already in progress",
        "The same request is being carried out, and too many wait for it. Try again in a moment.",
        retry=True,
    ),
    StoreUnavailableError: Problem(
        503,
        "store-unavailable",
        "Temporarily unavailable",
        "This cannot be answered safely right now. Try again in a moment.",
        retry=True,
    ),
    ContentionError: Problem(
        503,
        "contention",
        "Temporarily unavailable",
        "This and another request were in each other's way. Try again in a moment.",
        retry=True,
    ),
    KeyFieldError: Problem(
        400,
        "key-field",
        "Bad field",
        "The field '{field}' is missing, ambiguous or malformed.",
    ),
}
_TOO_LARGE = Problem(
    413,
    "body-too-large",
    "Body too large",
    "The body is too large for the field '{field}' to be read.",
)

# For ``except ANSWERED as error: return problem(request, error)``.
ANSWERED = tuple(PROBLEMS)
STATUS = {error: answer.status for error, answer in PROBLEMS.items()}


def problem(request: HttpRequest, error: SingleFlightError) -> HttpResponse:
    """Return the response that tells the client of ``request`` about ``error``.

    An error that is not in ANSWERED is raised again. Beneath ``async def`` use aproblem().
    """
    if not isinstance(error, ANSWERED):
        raise error
    request = _django_request(request)
    members = _members(error)
    page = _page(request, members) if prefers_html(request) else None
    return _response(request, error, members, page)


async def aproblem(request: HttpRequest, error: SingleFlightError) -> HttpResponse:
    """See problem()."""
    if prefers_html(request):
        # The site's own template, and its context processors, may query the database.
        return await sync_to_async(problem)(request, error)
    return problem(request, error)


def skip() -> HttpResponse:
    """Return 204: no body, and so no Content-Type."""
    response = HttpResponse(status=204)
    del response.headers["Content-Type"]
    response.headers["Cache-Control"] = "no-store"
    return refusal(response)


def refusal(response: _Response) -> _Response:
    """Mark ``response`` as our own no: never shared, and no warning in Django's log."""
    vars(response).update(singleflight_refusal=True, _has_been_logged=True)
    return response


def is_refusal(response: object) -> bool:
    """Whether refusal() has marked ``response``."""
    return getattr(response, "singleflight_refusal", False) is True


def prefers_html(request: HttpRequest) -> bool:
    """Whether the client, a browser most likely, would rather have a page than JSON."""
    try:
        return request.get_preferred_type([JSON, "application/json", HTML]) == HTML
    except ValueError:  # an Accept header that Django refuses to parse
        return False


def _django_request(request: HttpRequest) -> HttpRequest:
    wrapped = getattr(request, "_request", request)  # of Django REST framework's Request
    return wrapped if isinstance(wrapped, HttpRequest) else request


def _problem_of(error: SingleFlightError) -> Problem:
    if isinstance(error, KeyFieldError) and error.too_large:
        return _TOO_LARGE
    return next(answer for kind, answer in PROBLEMS.items() if isinstance(error, kind))


# Neither the error's key nor its message goes out: they may hold what only the server should know.
def _members(error: SingleFlightError) -> dict[str, Any]:
    answer = _problem_of(error)
    members: dict[str, Any] = {
        "type": f"urn:singleflight-django:{answer.slug}",
        "title": answer.title,
        "status": answer.status,
        "detail": answer.detail,
    }
    if isinstance(error, KeyFieldError):
        members["detail"] = answer.detail.format(field=error.field)
        members["field"] = error.field
    return members


def _page(request: HttpRequest, members: dict[str, Any]) -> str | None:
    try:
        return render_to_string(TEMPLATE, members, request)
    except TemplateDoesNotExist:  # the app isn't installed, or the site has no templates at all
        return None
    except TransactionManagementError:
        # It asks the database, which allows no query until the transaction's end, after a deadlock.
        return None


def _response(
    request: HttpRequest, error: SingleFlightError, members: dict[str, Any], page: str | None
) -> HttpResponse:
    status = members["status"]
    if page is None:
        response: HttpResponse = JsonResponse(members, status=status, content_type=JSON)
    else:
        response = HttpResponse(page, status=status)
    response.headers["Cache-Control"] = "no-store"
    if _problem_of(error).retry:
        response.headers["Retry-After"] = "1"
    patch_vary_headers(response, ["Accept"])
    if request.method == "HEAD":
        response.content = b""
    return refusal(response)
