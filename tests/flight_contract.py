"""The laws of flights are in the test kit, for stores of others as well."""

from singleflight_django.testing.contract import FlightContract
from singleflight_django.testing.contract.flying import AGAIN, DONE, FAILED, VACANT, Flights

__all__ = ["AGAIN", "DONE", "FAILED", "VACANT", "FlightContract", "Flights"]
