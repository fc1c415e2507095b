"""The benchmark itself: a server up, each measurement in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.core.management import CommandError
from redis import Redis

from testproject.benching import bursts
from testproject.benching.peers import PEERS
from testproject.racing.redis import redis


@dataclass
class Bench:
    """
    ``turns`` of 50 calls for each peer of ``names``, and ``turns`` / 5 bursts of each number of
    ``callers``.

    ``say`` is called with each line of progress.
    """

    names: tuple[str, ...]
    turns: int
    callers: tuple[int, ...]
    say: Callable[[str], None]
    # The bursts of the largest number that a picture can show.
    shown: dict[str, list[bursts.Burst]] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Return what was measured."""
        with (
            tempfile.TemporaryDirectory(prefix="bench-") as directory,
            redis(Path(directory)) as server,
        ):
            self.say("One caller: cycles, conflicts, views ...")
            told = self._cycles(server.url)
            told["bursts"] = self._bursts(server.url)
        return told

    def _cycles(self, url: str) -> dict[str, Any]:
        command = [
            sys.executable,
            "-m",
            "testproject.benching.cycles",
            str(self.turns),
            *self.names,
        ]
        done = subprocess.run(
            command, env={**os.environ, "REDIS_URL": url}, stdout=subprocess.PIPE, check=False
        )
        if done.returncode:
            raise CommandError("The measurement of one caller has failed; see above.")
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def _bursts(self, url: str) -> dict[int, Any]:
        names = [peer.name for peer in PEERS if peer.shares and peer.name in self.names]
        told = {}
        with bursts.all_callers(names, url) as present:
            for callers in self.callers:
                self.say(f"Bursts of {callers} callers in {bursts.PROCESSES} processes ...")
                turns = max(1, self.turns // 5)
                done = bursts.take_turns(present, callers, turns, Redis.from_url(url))
                told[callers] = {
                    name: bursts.as_numbers(some, callers) for name, some in done.items()
                }
                self.shown = self.shown or done
        return told
