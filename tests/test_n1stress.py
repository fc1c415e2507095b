import pytest
from tests.test_testing_plugin import *
from tests.test_testing_plugin import CLASSES, TESTS, site
for name in [n for n in globals() if n.startswith("test_")]: del globals()[name]
@pytest.mark.parametrize("n", range(24))
def test_stress(site, n):
    classes = CLASSES.replace("BASES", "IsolatedKeysMixin,")
    said = site("test", "--parallel=2", runner="django", test_all=TESTS + classes)
