"""Answer two identical requests at once with one execution: reject, skip or coalesce the second."""

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
