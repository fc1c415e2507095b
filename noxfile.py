"""The matrix of CI. ``nox -l`` lists the sessions; ``.ci/run`` starts the services and runs them."""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = True
nox.needs_version = ">=2025.5"

# Django 6.0 and later need Python 3.12.
PAIRS = [
    ("3.11", "5.2"),
    ("3.12", "5.2"),
    ("3.13", "5.2"),
    ("3.12", "6.0"),
    ("3.13", "6.0"),
    ("3.12", "6.1"),
    ("3.13", "6.1"),
]
# This pair runs on Debian's Redis instead of the wheel's Valkey: its servers, and its clusters too.
ON_REDIS = ("3.12", "6.0")
REDIS_PY = ["5", "6", "7", "8"]
NEWEST = PAIRS[-1]
SUITE_SECONDS, SOAK_SECONDS = 240, 900


def pytest(session: nox.Session, seconds: int, *args: str, **env: str) -> None:
    """Run the tests, measured, and end them for good when their time is up."""
    home = Path(__file__).parent
    session.run(
        *("timeout", "--verbose", "--signal=INT", "--kill-after=20", str(seconds)),
        *("python", "-m", "coverage", "run", "-m", "pytest", *args),
        env={"COVERAGE_FILE": str(home / f".coverage.{session.name.replace(' ', '')}"), **env},
        external=True,
    )


def install(session: nox.Session, *pinned: str) -> None:
    session.install("-e", ".[test]", *pinned)
    session.run("python", "-m", "pip" if False else "django", "--version")


@nox.session
@nox.parametrize(
    "python,django",
    [nox.param(*pair, id=f"py{pair[0]}-django{pair[1]}") for pair in PAIRS],
)
def tests(session: nox.Session, django: str) -> None:
    """Run the whole suite on a pair of Python and Django."""
    install(session, f"django=={django}.*")
    env = {}
    if (session.python, django) == ON_REDIS and (binary := os.environ.get("REDIS_SERVER")):
        env["SINGLEFLIGHT_TEST_REDIS_SERVER"] = binary
    pytest(session, SUITE_SECONDS, "-n", "2", *session.posargs, **env)
