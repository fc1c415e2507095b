"""What tests of guarded code need. Nothing here needs pytest, save ``plugin`` and ``contract``.

``disabled``, ``isolated_keys`` and ``IsolatedKeysMixin`` switch the library off, or keep the keys
of tests apart; ``held`` and ``crash_leader`` play the other caller; ``race`` calls something at
once; ``assert_mutual_exclusion`` and ``assert_single_flight`` try out a guard in three scenarios.
"""

from singleflight_django.testing.processes import crash_leader
from singleflight_django.testing.racing import Raced, race
from singleflight_django.testing.scenarios import assert_mutual_exclusion, assert_single_flight
from singleflight_django.testing.switches import (
    IsolatedKeysMixin,
    disabled,
    held,
    isolated_keys,
)

__all__ = [
    "IsolatedKeysMixin",
    "Raced",
    "assert_mutual_exclusion",
    "assert_single_flight",
    "crash_leader",
    "disabled",
    "held",
    "isolated_keys",
    "race",
]
