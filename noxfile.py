"""The matrix of CI. ``nox -l`` lists the sessions; ``.ci/run`` starts the services and runs all."""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "tests"]

HOME = Path(__file__).parent
# Django 6.0 and later need Python 3.12. In .ci/run the README's own command runs the first pair, and
# the session "covered" the last.
PAIRS = [
    ("3.11", "5.2"),
    ("3.12", "5.2"),
    ("3.13", "5.2"),
    ("3.12", "6.0"),
    ("3.13", "6.0"),
    ("3.12", "6.1"),
    ("3.13", "6.1"),
]
NEWEST_PYTHON, NEWEST_DJANGO = PAIRS[-1]
# Here all servers, Sentinel and the cluster too, are Debian's Redis instead of the wheel's Valkey.
PAIR_ON_REDIS = ("3.12", "6.0")
# The suite has 240 on an idle machine of two cores; one that is busy gets two minutes more.
SUITE_SECONDS, SOAK_SECONDS = 360, 900
# Exit codes of pytest.
FAILED_TESTS, NO_TESTS = 1, 5
# Needs what only CI has: the session "services" runs it once.
SERVICES = "mariadb or memcached"


def run_pytest(session: nox.Session, seconds: int, *args: str, **env: str) -> None:
    """Run the tests, and end them for good when their time is up.

    What fails is run once more, alone: what fails again is broken. What does not is told above all
    the same, and has a fault to be found: it can't bear its neighbours.
    """
    session.run(
        *("timeout", "--verbose", "--signal=INT", "--kill-after=20", str(seconds)),
        *("python", "-m", *args, *session.posargs),
        env=env,
        external=True,
        success_codes=[0, FAILED_TESTS],
    )
    again = ("--last-failed", "--last-failed-no-failures", "none", "-n", "0", "-m", "")
    session.run("python", "-m", "pytest", *again, env=env, success_codes=[0, NO_TESTS])


def run_covered(session: nox.Session, seconds: int, *args: str, **env: str) -> None:
    """See run_pytest(); what is executed is counted."""
    covered = ("coverage", "run", "-m", "pytest", *args)
    run_pytest(session, seconds, *covered, COVERAGE_FILE=str(HOME / ".coverage"), **env)


@nox.session
@nox.parametrize(
    "python,django", [nox.param(*pair, id=f"{pair[0]}-django{pair[1]}") for pair in PAIRS]
)
def tests(session: nox.Session, django: str) -> None:
    """Run the suite on one pair of Python and Django."""
    session.install("-e", ".[test]", f"django=={django}.*")
    env = {}
    if (session.python, django) == PAIR_ON_REDIS and "CI_REDIS_SERVER" in os.environ:
        env["SINGLEFLIGHT_TEST_REDIS_SERVER"] = os.environ["CI_REDIS_SERVER"]
    run_pytest(session, SUITE_SECONDS, "pytest", "-k", f"not ({SERVICES})", **env)


@nox.session(python=NEWEST_PYTHON)
def services(session: nox.Session) -> None:
    """Run the tests of the services that only CI has."""
    session.install("-e", ".[test]", f"django=={NEWEST_DJANGO}.*")
    # One memcached for all: its tests empty it.
    run_covered(session, 2 * SUITE_SECONDS, "-n", "0", "-k", SERVICES)


@nox.session(python=NEWEST_PYTHON)
def covered(session: nox.Session) -> None:
    """Run the suite once more, slower, and count what it executes."""
    session.install("-e", ".[test]", f"django=={NEWEST_DJANGO}.*")
    run_covered(session, 3 * SUITE_SECONDS, "-k", f"not ({SERVICES})")


@nox.session(python=NEWEST_PYTHON)
@nox.parametrize("version", [nox.param(major, id=major) for major in "5678"])
def redis_py(session: nox.Session, version: str) -> None:
    """Run the store contract on one major version of redis-py."""
    session.install("-e", ".[test]", f"django=={NEWEST_DJANGO}.*", f"redis=={version}.*")
    stores = ("tests/test_stores_redis.py", "tests/test_stores_flights.py", "tests/test_wires.py")
    # Without the classes of stores on a cache's add, which leave the driver to the cache.
    run_pytest(session, SUITE_SECONDS, "pytest", *stores, "-k", "not TestOn")


@nox.session(python=NEWEST_PYTHON)
def soak(session: nox.Session) -> None:
    """Run what takes long: fault runs, soaks and kills."""
    session.install("-e", ".[test]", f"django=={NEWEST_DJANGO}.*")
    run_pytest(session, SOAK_SECONDS, "pytest", "-m", "soak", "-n", "0", "--durations=10")


@nox.session(python=NEWEST_PYTHON)
def coverage(session: nox.Session) -> None:
    """Put together what all runs have covered, and require ``fail_under`` of pyproject.toml."""
    session.install("coverage>=7.10")
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


@nox.session(python=NEWEST_PYTHON)
def lint(session: nox.Session) -> None:
    """Check style, types, and that imports run downwards only."""
    session.install("-e", ".[test,lint]", f"django=={NEWEST_DJANGO}.*")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")
