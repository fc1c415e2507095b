"""The laws of ``stores.base.Store``, once for every store, yours too. Needs pytest.

A store's test class inherits them and has a fixture ``store``, on an empty server::

    class TestMyStore(StoreContract, FlightContract):
        finest, brief = 1.0, 1.0

        @pytest.fixture
        def store(self): ...

Each law holds for the plain methods and for their a-twins; what needs several callers at once has
real threads, or tasks of one event loop.
"""

from singleflight_django.testing.contract.fingerprints import FingerprintLaws
from singleflight_django.testing.contract.flights import LandingLaws
from singleflight_django.testing.contract.holders import HolderLaws
from singleflight_django.testing.contract.leases import LeaseLaws
from singleflight_django.testing.contract.listing import FlightListingLaws, ListingLaws
from singleflight_django.testing.contract.takeovers import TakeoverLaws
from singleflight_django.testing.contract.waiting import WaitingLaws

__all__ = ["FlightContract", "StoreContract"]


class StoreContract(LeaseLaws, HolderLaws, WaitingLaws, ListingLaws):
    """The laws of leases.

    ``finest``: the smallest step of a ttl, in seconds: up to this a store may round up.
    ``brief``: a ttl, in seconds, that a law waits for.
    """


class FlightContract(LandingLaws, TakeoverLaws, FingerprintLaws, FlightListingLaws):
    """The laws of flights. ``brief``: a ttl, or a time to keep an outcome, that a law waits for."""
