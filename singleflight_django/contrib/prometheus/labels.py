"""The values of labels: few, whatever happens. A key is never one of them."""

from __future__ import annotations

from typing import Final

from singleflight_django.sharing import REASONS
from singleflight_django.signals import OBSERVED, STORE_AWAY
from singleflight_django.stores.base import Status

OTHER: Final = "other"
MOST_NAMESPACES: Final = 500

# Every reason that is always the same text.
KNOWN: Final = frozenset(
    {
        "",
        STORE_AWAY,
        OBSERVED,
        *REASONS,
        *(str(status) for status in Status),
        "headers beside a value",
        "it had ended before it was released",
        "it had ended before the outcome was published",
        "it was held for longer than max_hold",
        "it was not ours any more when renewed",
        "not ours any more when extended",
        "the store did not renew it within its ttl",
        "lost",
        "not published",
        "cancelled: it lapses",
        "abandoned",
        "kept",
        "the leader failed",
    }
)


def reason_label(event: str, reason: str) -> str:
    """Return the reason of an event as a label's value: one of a few, or "other"."""
    if reason in KNOWN:
        return reason
    if event == "duplicate_caught":
        # The name of one of the constraints that the code declares.
        return reason
    if reason.startswith(f"{OBSERVED}: "):
        return OBSERVED
    return "too large" if "over max_bytes" in reason else OTHER


class Namespaces:
    """The namespaces seen so far. Usually each is in the code; one may be made of a tenant's id."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def label(self, namespace: str) -> str:
        """Return ``namespace``, or "other" if there are too many already."""
        if namespace not in self._seen:
            if len(self._seen) >= MOST_NAMESPACES:
                return OTHER
            self._seen.add(namespace)
        return namespace
