"""Answer two identical requests at once with one execution: reject, skip or coalesce the second."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from singleflight_django.creating import acreate_or_existing, create_or_existing
    from singleflight_django.decorators import semaphore_lock, single_flight
    from singleflight_django.exceptions import LeaseConflictError
    from singleflight_django.functions import SingleFlight
    from singleflight_django.mixins import SemaphoreLockMixin, SingleFlightMixin

__all__ = [
    "LeaseConflictError",
    "SemaphoreLockMixin",
    "SingleFlight",
    "SingleFlightMixin",
    "acreate_or_existing",
    "create_or_existing",
    "semaphore_lock",
    "single_flight",
]

# Where each name is. Loaded when it is asked for: Django imports every app as it starts, before the
# settings and models that most of this needs are there.
_HOMES = {
    "LeaseConflictError": "exceptions",
    "SemaphoreLockMixin": "mixins",
    "SingleFlight": "functions",
    "SingleFlightMixin": "mixins",
    "acreate_or_existing": "creating",
    "create_or_existing": "creating",
    "semaphore_lock": "decorators",
    "single_flight": "decorators",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    # The next look finds it without asking.
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
