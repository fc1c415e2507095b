"""One of the processes of a burst: reads what to do, a JSON line each, and writes what happened.

A program. ``sys.argv``: the name of the peer. Times are of CLOCK_MONOTONIC, which all processes of
a machine share.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from typing import Any

import django

PATIENCE = 60.0


def main() -> None:
    """Run one burst for each line."""
    django.setup()
    from testproject.benching import peers

    [kind] = [peer for peer in peers.PEERS if peer.name == sys.argv[1]]
    try:
        peer = kind(os.environ["REDIS_URL"])
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    threading.stack_size(256 * 1024)
    for line in sys.stdin:
        print(json.dumps(_burst(peer, **json.loads(line))), flush=True)


def _burst(peer: Any, key: str, callers: int, work: float, begin: float) -> dict[str, Any]:
    """Let ``callers`` threads ask for ``key`` at ``begin``; the work takes ``work`` seconds."""
    executions: list[tuple[float, float]] = []
    returns: list[tuple[float, float]] = []
    errors: list[str] = []

    def execute() -> str:
        since = time.monotonic()
        time.sleep(work)
        executions.append((since, time.monotonic()))
        return f"{key}|" + "x" * 1000

    def call() -> None:
        time.sleep(max(0.0, begin - time.monotonic()))
        since = time.monotonic()
        try:
            value = peer.share(key, execute)
            returns.append((since, time.monotonic()))
            if not value.startswith(f"{key}|"):
                errors.append("the answer to another key")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=call, daemon=True) for _ in range(callers)]
    gc.collect()
    gc.disable()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, begin + PATIENCE - time.monotonic()))
    gc.enable()
    return {"executions": executions, "returns": returns, "errors": errors}


if __name__ == "__main__":
    main()
