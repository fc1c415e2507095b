"""What the driver's exceptions mean."""

from __future__ import annotations

from typing import Any

from singleflight_django.stores.redis.clients import Server


class Failures:
    """What the driver's exceptions mean for a connection, and for sending a command again."""

    def __init__(self, server: Server) -> None:
        errors = server.errors
        self._half = server.timeout / 2
        self.clean: Any = errors.ResponseError
        self.forgotten: Any = errors.NoScriptError
        self.broken: Any = errors.ConnectionError
        self._demoted = (errors.ReadOnlyError, errors.MasterDownError)
        self._hopeless = (
            errors.AuthenticationError,
            errors.AuthorizationError,
            errors.BusyLoadingError,
        )

    def demoted(self, replies: list[Any]) -> bool:
        """Whether the server is a replica: the primary is elsewhere now."""
        for reply in replies:
            # Older drivers have no class for MASTERDOWN.
            if isinstance(reply, Exception) and (
                isinstance(reply, self._demoted) or str(reply).startswith("MASTERDOWN")
            ):
                return True
        return False

    def final(self, error: Exception, seconds: float, within: float | None) -> bool:
        """Whether to leave it at ``error``, which came after so many seconds."""
        return isinstance(error, self._hopeless) or (within is None and seconds > self._half)
