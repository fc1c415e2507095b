"""How a cache alias reaches its primary server: the client and connection settings it already has."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

from django.core.cache import caches

# A server that does not answer must not hold a request for ever, whatever the site has configured.
DEFAULT_SOCKET_TIMEOUT = 5.0

# Settings of a connection that mean the same to every connection class of redis-py and valkey-py.
PORTABLE = frozenset(
    [
        "host",
        "port",
        "path",
        "db",
        "username",
        "password",
        "credential_provider",
        "client_name",
        "protocol",
        "socket_timeout",
        "socket_connect_timeout",
        "socket_keepalive",
        "socket_keepalive_options",
        "socket_type",
        "lib_name",
        "lib_version",
        "driver_info",
        "ssl_keyfile",
        "ssl_certfile",
        "ssl_cert_reqs",
        "ssl_ca_certs",
        "ssl_ca_data",
        "ssl_ca_path",
        "ssl_check_hostname",
        "ssl_min_version",
        "ssl_ciphers",
        "ssl_password",
    ]
)
# What redis-py 8 adds for maintenance notifications: they belong to the pool that the site has.
POOL_ONLY = ("maint_", "orig_", "oss_", "maintenance_", "himport_", "event_dispatcher", "retry")


def primary_client(alias: str) -> Any:
    """Return the client of ``alias`` that writes: decisions are never read from a replica."""
    cache: Any = caches[alias]
    client = getattr(cache, "client", None)
    if client is not None and hasattr(client, "get_client"):
        return client.get_client(write=True)
    return cache._cache.get_client(None, write=True)


class Server:
    """The server behind a client: its driver's modules, and the settings of its connections."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.pool: Any = getattr(client, "connection_pool", None)
        self.driver = _driver(client)
        self.errors: Any = import_module(f"{self.driver.__name__}.exceptions")
        # What all failures of the driver derive from; a cluster's client has one apart.
        names = ("RedisError", "RedisClusterException", "ValkeyError", "ValkeyClusterException")
        driver = (getattr(self.errors, name) for name in names if hasattr(self.errors, name))
        self.failures: tuple[type[Exception], ...] = (*driver, OSError)
        # A cluster's client keeps its settings with its nodes.
        source = self.pool or getattr(client, "nodes_manager", None)
        self._configured: dict[str, Any] = dict(getattr(source, "connection_kwargs", {}))
        self.timeout = float(self._configured.get("socket_timeout") or DEFAULT_SOCKET_TIMEOUT)

    @property
    def configured_timeout(self) -> float | None:
        """The socket timeout in seconds that the site, or its driver, has set."""
        return self._configured.get("socket_timeout")

    @property
    def connects(self) -> bool:
        """Whether connections like the pool's own can be made; not so for a cluster's client."""
        return self.pool is not None and hasattr(self.pool, "connection_class")

    @property
    def sentinel(self) -> Any:
        """The Sentinel manager that knows where the primary is, or None."""
        return getattr(self.pool, "sentinel_manager", None)

    @property
    def primary(self) -> Any:
        """The address that Sentinel last named to the pool, or None."""
        return getattr(self.pool, "master_address", None)

    def connection(self) -> Any:
        """Return a new blocking connection: not the pool's, so that it uses up nothing of the site's."""
        settings = {
            name: value
            for name, value in self._configured.items()
            if not name.startswith(POOL_ONLY)
        }
        kind = self.pool.connection_class
        return kind(**settings | understood(kind, self._bounds(self.driver)))

    def async_settings(self) -> dict[str, Any]:
        """The settings of an asyncio connection to the same server."""
        settings = {n: v for n, v in self._configured.items() if n in PORTABLE}
        return settings | self._bounds(import_module(f"{self.driver.__name__}.asyncio"))

    def _bounds(self, flavour: ModuleType) -> dict[str, Any]:
        retry = import_module(f"{flavour.__name__}.retry").Retry
        backoff = import_module(f"{self.driver.__name__}.backoff").NoBackoff
        connect = self._configured.get("socket_connect_timeout") or self.timeout
        bounds = {
            "socket_timeout": self.timeout,
            "socket_connect_timeout": min(float(connect), self.timeout),
            "decode_responses": False,
            "health_check_interval": 0,
            "retry": retry(backoff(), 0),
        }
        with suppress(ImportError):
            notifications = import_module(f"{self.driver.__name__}.maint_notifications")
            off = notifications.MaintNotificationsConfig(enabled=False)
            bounds["maint_notifications_config"] = off
        return bounds


def _driver(client: Any) -> ModuleType:
    """redis or valkey: the package that ``client``'s class, or one that it derives from, is of."""
    for cls in type(client).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in ("redis", "valkey"):
            return import_module(root)
    raise TypeError(f"{type(client)!r} is neither a redis-py nor a valkey-py client.")


def understood(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Those of ``settings`` that ``kind``, or a class that it hands them on to, has parameters for."""
    inits = [vars(cls)["__init__"] for cls in kind.__mro__ if "__init__" in vars(cls)]
    known = {name for init in inits[:-1] for name in signature(init).parameters}
    return {name: value for name, value in settings.items() if name in known}
