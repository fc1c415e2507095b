"""One caller: a lock taken and given back, a conflict, what a guard adds to a view. A program."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import django
import redis

HELD = "bench:held"
# Seconds: for longer than all turns take.
LONG = 600


def main() -> None:
    """Print the figures as JSON. ``sys.argv``: how many turns each peer takes, and their names."""
    django.setup()
    from testproject.benching import peers
    from testproject.benching.timing import measure

    turns, url = int(sys.argv[1]), os.environ["REDIS_URL"]
    server, here = redis.Redis.from_url(url), peers.installed(url, sys.argv[2:])
    locks = [peer for peer in here if peer.locks]
    told = {}

    samples = measure({peer.name: _cycle(peer) for peer in locks}, server, turns)
    told["cycle"] = _figures(samples, peers.Floor.name)

    with ExitStack() as held:
        for peer in locks:
            held.enter_context(peer.lock(f"{HELD}:{peer.name}", LONG))
        calls = {peer.name: partial(_conflict, peer) for peer in locks}
        told["conflict"] = _figures(measure(calls, server, turns), peers.Floor.name)

    guarded = {peer.name: peer.guard(peers.plain) for peer in here if peer.locks or not peer.shares}
    guarded.pop(peers.Store.name, None)
    views = {"no guard": peers.plain, **guarded}
    calls = {name: partial(_request, view) for name, view in views.items()}
    told["view"] = _figures(measure(calls, server, turns), "no guard")
    print(json.dumps(told))


def _cycle(peer: Any) -> Callable[[str], Any]:
    def cycle(key: str) -> None:
        with peer.lock(key):
            pass

    return getattr(peer, "cycle", cycle)


def _conflict(peer: Any, key: str) -> None:
    if peer.attempt(f"{HELD}:{peer.name}"):
        raise RuntimeError(f"{peer.name} got a lock that is held.")


def _request(view: Callable[..., Any], key: str) -> None:
    from django.test import RequestFactory

    request = RequestFactory().post("/bench/", headers={"Idempotency-Key": key})
    if view(request).status_code != 200:
        raise RuntimeError(f"{view} refused a request that was alone.")


def _figures(samples: dict[str, Any], floor: str) -> dict[str, dict[str, float]]:
    return {name: sample.as_numbers(samples[floor]) for name, sample in samples.items()}


if __name__ == "__main__":
    main()
