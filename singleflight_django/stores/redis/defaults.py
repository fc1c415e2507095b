"""What a driver does where the site says nothing."""

from __future__ import annotations

from importlib import import_module
from inspect import signature


def gives_up(driver: str) -> bool:
    """Whether connections of ``driver`` ("redis" or "valkey") have a timeout when none is given.

    redis-py waits for ever before version 8.
    """
    connection = import_module(f"{driver}.connection").AbstractConnection
    return signature(connection).parameters["socket_timeout"].default is not None
