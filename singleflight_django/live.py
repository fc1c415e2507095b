"""The live leases as people may see them: keys without secrets, and names that are no tokens."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from django.conf import settings
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured

from singleflight_django.checks.guarded import find_guarded
from singleflight_django.conf import conf
from singleflight_django.digests import digest
from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.parts import escape
from singleflight_django.redaction import Redaction
from singleflight_django.stores.base import Store
from singleflight_django.stores.listing import FLIGHT, Holding, seconds_text
from singleflight_django.stores.registry import speaks_redis
from singleflight_django.templates import Template

logger = logging.getLogger("singleflight_django")

# What stands in a shown key for a part that is hidden.
_HIDDEN = re.compile(r"<[0-9a-f]{8}>")


class Row(NamedTuple):
    """A live lease. ``shown``: its key; ``mark``: a name of this one acquisition."""

    holding: Holding
    shown: str
    mark: str

    def cells(self) -> dict[str, Any]:
        """Return what a template shows of it: text, which no locale is to change."""
        holding = self.holding
        age, followers, fence = holding.age, holding.followers, holding.fence
        return {
            "key": self.shown,
            "kind": holding.kind,
            "is_flight": holding.kind == FLIGHT,
            "holder": holding.holder or "?",
            "age": seconds_text(age),
            "age_value": "" if age is None else f"{age:.3f}",
            "left": seconds_text(holding.remaining),
            # A lease has none; of a flight, the store may not know how many.
            "followers": "?" if followers is None else str(followers),
            "fence": "?" if fence is None else str(fence),
        }


class Live:
    """The live leases of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shown = ShownKeys()

    def rows(self, text: str = "") -> Iterator[Row]:
        """Yield those whose shown key contains ``text``, in any order; see Store.holdings()."""
        hidden = _HIDDEN.search(text)
        # The store knows the keys as they are. What is hidden can't be found by guessing at it.
        for row in self._read(text[: hidden.start()] if hidden else text):
            if text in row.shown:
                yield row

    def rows_of(self, key: str) -> Iterator[Row]:
        """Yield those of a key as it is, for whoever knows it."""
        return (row for row in self._read(key) if row.holding.key == key)

    def _read(self, text: str) -> Iterator[Row]:
        for holding in self._store.holdings(text):
            shown = self._shown(holding.key)
            yield Row(holding, shown, digest("live", [holding.key, holding.token]))

    def find(self, shown: str, mark: str) -> Row | None:
        """Return the acquisition ``mark`` of a key, or None if it has ended."""
        return next((row for row in self.rows(shown) if row.mark == mark), None)


class ShownKeys:
    """How keys are shown, as far as the guards of the URLconf's views tell what is in them."""

    def __init__(self) -> None:
        templates: defaultdict[str, list[Template]] = defaultdict(list)
        for each in find_guarded():
            spec = each.guard.spec
            templates[each.guard.namespace] += spec.templates if spec else ()
        self._by_namespace = {
            escape(namespace): (namespace, redaction, _heads(found))
            for namespace, found in templates.items()
            if (redaction := Redaction.of(found))
        }

    def __call__(self, key: str) -> str:
        """Return what may be shown of ``key``."""
        name, _, body = key.partition(":")
        if name in self._by_namespace:
            namespace, redaction, heads = self._by_namespace[name]
            # Others have nothing to do with a template that has a secret, and stay readable.
            if body.startswith(heads):
                return redaction.shown(namespace, key)
        return key


def _heads(templates: list[Template]) -> tuple[str, ...]:
    return tuple(each.head for each in templates if Redaction.of([each]))


def listable_caches() -> list[str]:
    """Return SINGLEFLIGHT_CACHE, and the other aliases that may have leases to list."""
    default, kind = conf.SINGLEFLIGHT_CACHE, conf.SINGLEFLIGHT_STORE
    others = (alias for alias in settings.CACHES if alias != default)
    # Of the database there is one store for all aliases, and other caches can't list.
    return [default, *(alias for alias in others if kind in (None, "redis") and _is_redis(alias))]


def _is_redis(alias: str) -> bool:
    try:
        return speaks_redis(caches[alias])
    except Exception:
        return False


@contextmanager
def told(tell: Callable[[str], object]) -> Iterator[None]:
    """A store that is away, or that can't list, is something to tell."""
    doctor = "Ask manage.py singleflight doctor."
    try:
        yield
    except StoreUnavailableError as error:
        tell(f"{error} {doctor}")
    except (NotImplementedError, ImproperlyConfigured) as error:
        tell(str(error))
    except Exception as error:
        logger.exception("The live leases can't be read.")
        tell(f"The store failed: {type(error).__name__}. {doctor}")
