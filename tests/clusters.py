"""A connection factory for django-redis on a cluster, as sites write one."""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import urlsplit

import redis
from django_redis.pool import ConnectionFactory


class ClusterFactory(ConnectionFactory):
    """One client of the cluster for each URL: it keeps the connections to all nodes itself."""

    clients: ClassVar[dict[str, redis.RedisCluster]] = {}

    def connect(self, url: str) -> Any:
        if url not in self.clients:
            parts = urlsplit(url)
            timeout = self.options.get("SOCKET_TIMEOUT")
            self.clients[url] = redis.RedisCluster(
                host=parts.hostname, port=parts.port, socket_timeout=timeout
            )
        return self.clients[url]

    def disconnect(self, connection: Any) -> None:
        connection.disconnect_connection_pools()
