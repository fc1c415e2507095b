"""The URLconf, route by route. A part that can't be loaded is left to Django's own checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from django.conf import settings
from django.urls import URLResolver, get_resolver


class Route(NamedTuple):
    """One way to a view: its path as it is written, and the names of what the view is called with.

    ``kwargs`` is None where they can't be known.
    """

    view: Any
    path: str
    kwargs: frozenset[str] | None


def routes() -> Iterator[Route]:
    """Yield every route of ROOT_URLCONF."""
    if getattr(settings, "ROOT_URLCONF", None):
        yield from _below(get_resolver(), "", frozenset(), ())


def _below(
    resolver: Any, path: str, kwargs: frozenset[str] | None, above: tuple[int, ...]
) -> Iterator[Route]:
    try:
        patterns = list(resolver.url_patterns)
        # A URLconf that includes itself has no end.
        here = id(resolver.url_patterns)
    except Exception:
        return
    if here in above:
        return
    for each in patterns:
        own = getattr(each, "pattern", None)
        if own is None:
            # No route, whatever it is: Django's own check of URLs tells.
            continue
        longer, more = path + str(own), _kwargs(each, kwargs)
        if isinstance(each, URLResolver):
            yield from _below(each, longer, more, (*above, here))
        else:
            yield Route(getattr(each, "callback", None), longer, more)


def _kwargs(each: Any, above: frozenset[str] | None) -> frozenset[str] | None:
    """Return the names that a pattern or a resolver adds to those from above it."""
    try:
        own = {*each.pattern.converters, *each.pattern.regex.groupindex}
        extra = each.default_kwargs if isinstance(each, URLResolver) else each.default_args
    except Exception:
        return None
    return None if above is None else above | own | {*extra}
