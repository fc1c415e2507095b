"""The laws of leases are in the test kit, for stores of others as well."""

from singleflight_django.testing.contract import StoreContract
from singleflight_django.testing.contract.calling import (
    LONG,
    PATIENCE,
    AsyncCalls,
    Calls,
    at_once,
    closing,
    grants,
)

__all__ = [
    "LONG",
    "PATIENCE",
    "AsyncCalls",
    "Calls",
    "StoreContract",
    "at_once",
    "closing",
    "grants",
]
