"""03x: does the server let a request wait for as long as its guard does?"""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator

from django.core.checks import CheckMessage, Warning

from singleflight_django.checks.base import message, setting
from singleflight_django.checks.guarded import Guarded
from singleflight_django.flights import FlightGuard
from singleflight_django.guards import as_float


def check_server_waits(each: Guarded) -> Iterator[CheckMessage]:
    """Does the wait end before the server ends the request?"""
    wait = _wait(each)
    for source, timeout in _timeouts():
        if 0 < timeout <= wait:
            text = (
                f"{each.name}: a caller may wait for {wait:g} seconds, and by {source} the server "
                f"ends a request after {timeout:g}: it never gets the 504."
            )
            hint = (
                "Make wait= (or SINGLEFLIGHT_WAIT) shorter by as much as the view itself takes, or "
                "the server's timeout longer."
            )
            yield message(Warning, "W036", text, hint)


def _wait(each: Guarded) -> float:
    wait = each.guard.options.wait
    if wait is None and isinstance(each.guard, FlightGuard):
        wait = setting("SINGLEFLIGHT_WAIT")
    return as_float(wait or 0)


def _timeouts() -> Iterator[tuple[str, float]]:
    """Yield what the environment tells of the server: where it says so, and the seconds."""
    if (gunicorn := _of_gunicorn(os.environ.get("GUNICORN_CMD_ARGS", ""))) is not None:
        yield "GUNICORN_CMD_ARGS", gunicorn
    if (uwsgi := _number(os.environ.get("UWSGI_HARAKIRI"))) is not None:
        yield "UWSGI_HARAKIRI", uwsgi


def _of_gunicorn(arguments: str) -> float | None:
    """Return the timeout that sync workers are given; the others' isn't one of a request."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-t", "--timeout")
    parser.add_argument("-k", "--worker-class", default="sync")
    parser.add_argument("--threads", default="1")
    try:
        known, _ = parser.parse_known_args(shlex.split(arguments))
    except (Exception, SystemExit):
        return None
    if known.worker_class != "sync" or known.threads != "1":
        return None
    return _number(known.timeout)


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
