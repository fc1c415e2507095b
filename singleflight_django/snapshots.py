"""Snapshots: a frozen HttpResponse, and the one that is made of it for each follower.

A snapshot has the status, the reason phrase, the body's bytes and those headers that describe the
answer (CARRIED). It leaves behind what belongs to one request or one client: Set-Cookie, Date,
Server, Content-Length, hop-by-hop headers, request ids, rate limits, and whatever isn't listed.
"""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpResponse

from singleflight_django.records import RESPONSE, Record, ignore, seal, unseal

# In lower case. 401, 403 and 429 are never shared, so that WWW-Authenticate has no place here.
CARRIED: Final = frozenset(
    """
    content-type content-encoding content-language content-disposition content-location
    content-range accept-ranges
    location etag last-modified cache-control expires vary link retry-after
    allow accept-patch accept-post accept-query deprecation sunset preference-applied
    content-security-policy content-security-policy-report-only cross-origin-embedder-policy
    cross-origin-opener-policy cross-origin-resource-policy permissions-policy referrer-policy
    x-content-type-options x-frame-options x-robots-tag
    access-control-allow-credentials access-control-allow-headers access-control-allow-methods
    access-control-allow-origin access-control-expose-headers
    hx-location hx-push-url hx-redirect hx-refresh hx-replace-url hx-reselect hx-reswap hx-retarget
    hx-trigger hx-trigger-after-settle hx-trigger-after-swap
    x-accel-buffering x-accel-charset x-accel-expires x-accel-limit-rate x-accel-redirect x-sendfile
    x-total-count
    """.split()  # noqa: SIM905
)

# What Django's own decorators leave on a response for a middleware to find.
_FLAGS: Final = ("xframe_options_exempt",)
_BODILESS: Final = (204, 304)


class _Redirect(HttpResponse):
    @property
    def url(self) -> str:
        """Where to; as HttpResponseRedirect has it, for Django's test client."""
        return self.headers["Location"]


def freeze(response: Any, *, method: str | None = "GET", max_bytes: int | None = None) -> bytes:
    """Return the record of a rendered ``response`` to a request of ``method``.

    Raises UnshareableResultError if it is longer than ``max_bytes``. Whether it may be shared at
    all is another question: see ``sharing``.
    """
    body = b"" if response.status_code in _BODILESS else response.content
    headers = [pair for pair in response.headers.items() if pair[0].lower() in CARRIED]
    if method == "HEAD" and body:
        # The leader's server leaves the body out as well, but tells its length.
        headers.append(("Content-Length", str(len(body))))
        body = b""
    head = {
        "status": response.status_code,
        "reason": response.reason_phrase,
        "headers": headers,
        "flags": [flag for flag in _FLAGS if getattr(response, flag, False) is True],
    }
    return seal(RESPONSE, head, body, max_bytes)


def thaw(data: object) -> HttpResponse | None:
    """Return a new response like the frozen one; None, and a log line, without a readable one."""
    record = unseal(data, RESPONSE)
    return None if record is None else respond(record)


def respond(record: Record) -> HttpResponse | None:
    """Return the response that an opened record holds; None, and a log line, if it doesn't."""
    try:
        return _response(**record.head, body=record.body)
    except (TypeError, ValueError) as error:
        ignore(f"it holds no response ({error})")
        return None


def _response(
    status: int, reason: str, headers: list[tuple[str, str]], flags: list[str], body: bytes
) -> HttpResponse:
    redirects = 300 <= status < 400 and any(name.lower() == "location" for name, _ in headers)
    make = _Redirect if redirects else HttpResponse
    response = make(body, status=status, reason=reason)
    # Not every response has one, as Django assumes.
    del response.headers["Content-Type"]
    for name, value in headers:
        response.headers[name] = value
    vars(response).update(dict.fromkeys(flags, True))
    return response
