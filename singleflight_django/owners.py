"""Owner tokens: a secret of one acquisition, which also tells people where its owner runs."""

from __future__ import annotations

import os
import re
import socket

# Longest name of a host that is told; of a longer one, its two ends.
MOST = 40


def new_token() -> str:
    """Return a token that nobody else has: 128 random bits, and this process as ``host:pid``."""
    return f"{os.urandom(16).hex()}@{_here}"


def holder_of(token: str) -> str:
    """Return ``host:pid`` of the process that made ``token``, or "" if it doesn't say."""
    return token.partition("@")[2]


def _name_of(host: str) -> str:
    name = re.sub(r"[^A-Za-z0-9.-]", "-", host)
    half = MOST // 2 - 1
    return name if len(name) <= MOST else f"{name[:half]}..{name[-half:]}"


def _note_process() -> None:
    global _here
    _here = f"{_name_of(socket.gethostname())}:{os.getpid()}"


_here = ""
_note_process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_process)
