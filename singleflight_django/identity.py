"""Which requests are one flight.

Two requests that differ in a line of this list are separate flights:

- namespace and key (the caller of this module adds them);
- method;
- scheme and host;
- path, script name included;
- query: the names in any order, the values of one name in theirs;
- principal (see ``principals``);
- Accept, Accept-Language and the others in NEGOTIATED, which choose another answer to one question;
- the language and the time zone that the site has activated;
- the headers that the option ``vary`` names.

Accept-Encoding is not in it: responses are compressed later. See ``sharing`` for one that a view
compresses itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import parse_qsl

from django.utils.timezone import get_current_timezone_name
from django.utils.translation import get_language

from singleflight_django.bodies import unwrap
from singleflight_django.digests import digest
from singleflight_django.principals import CREDENTIALS, Scope, aprincipal, principal

# A 304, a 412, a part of a file or of a page is no answer to who asked for the whole.
NEGOTIATED: Final = (
    "Accept",
    "Accept-Language",
    "If-Match",
    "If-None-Match",
    "If-Modified-Since",
    "If-Unmodified-Since",
    "If-Range",
    "Range",
    "Prefer",
    "X-HTTP-Method-Override",
    "X-Requested-With",
    "HX-Request",
    "HX-Target",
    "HX-Boosted",
    "Turbo-Frame",
)


def identity(request: Any, scope: Scope = "user", vary: Iterable[str] = ()) -> str:
    """Return the digest of all of the list above but namespace and key.

    ``request`` is Django's or REST framework's. Raises DisallowedHost as Django does.
    """
    return _digest(request, principal(request, scope), vary)


async def aidentity(request: Any, scope: Scope = "user", vary: Iterable[str] = ()) -> str:
    """See identity()."""
    return _digest(request, await aprincipal(request, scope), vary)


def checked_vary(vary: object) -> tuple[str, ...]:
    """Return ``vary`` as a tuple of lower-case header names, each once; raise if it isn't one."""
    if isinstance(vary, str) or not isinstance(vary, Iterable):
        raise TypeError(f'vary must be a tuple like ("X-Tenant",), not {vary!r}.')
    names = tuple(vary)
    for name in names:
        if not isinstance(name, str) or not name or not name.replace("-", "").isalnum():
            raise ValueError(f'vary has names of headers like "X-Tenant"; {name!r} is not one.')
    return tuple(sorted({name.lower() for name in names}))


def headers_inside(scope: Scope, vary: Iterable[str] = ()) -> frozenset[str]:
    """Return the headers, in lower case, that a response may vary on within its identity."""
    caller = ("Cookie", *CREDENTIALS) if scope == "user" else ()
    return frozenset(name.lower() for name in (*NEGOTIATED, *caller, *vary))


def sorted_pairs(text: str) -> list[tuple[str, str]]:
    """Return the fields of a query string or of a urlencoded form, sorted by their names."""
    # latin-1 loses nothing: what isn't valid UTF-8 would all become one replacement character.
    pairs = parse_qsl(text, keep_blank_values=True, encoding="latin-1")
    return sorted(pairs, key=lambda pair: pair[0])


def _digest(request: Any, who: object, vary: Iterable[str]) -> str:
    inner = unwrap(request)
    parts = [
        inner.method,
        [inner.scheme, inner.get_host().lower()],
        inner.path,
        sorted_pairs(inner.META.get("QUERY_STRING", "")),
        who,
        [inner.headers.get(name) for name in NEGOTIATED],
        [get_language(), get_current_timezone_name()],
        [[name, inner.headers.get(name)] for name in sorted({name.lower() for name in vary})],
    ]
    return digest("identity", parts)
