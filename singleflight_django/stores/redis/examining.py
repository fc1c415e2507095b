"""The examination of a Redis or Valkey server: what it is, and what of it puts leases at risk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from singleflight_django.stores.findings import Finding, Level
from singleflight_django.stores.redis.clients import DEFAULT_SOCKET_TIMEOUT, Server
from singleflight_django.stores.redis.facts import Facts
from singleflight_django.stores.redis.listing import primaries
from singleflight_django.stores.redis.rights import examine_rights
from singleflight_django.stores.redis.transports import Transport

ROUNDS = 20
# The first one with streams, and with scripts that may read the clock before they write.
OLDEST = (5,)


def examine(server: Server, transport: Transport, prefix: str, ttl: float) -> Iterator[Finding]:
    """Yield what is found. ``ttl``: of a usual lease, in seconds, to measure clocks and roads by."""
    try:
        yield _round_trip(server, transport, ttl)
        nodes = [Facts(server, node) for node in primaries(server, transport)]
        for facts in nodes:
            yield from _of_node(facts, server, ttl)
        if all(_is_usable(facts) for facts in nodes):
            yield from examine_rights(server, transport, prefix)
        yield from _timeouts(server)
    except server.failures as error:
        yield _away(server, error)


def _away(server: Server, error: Exception) -> Finding:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, server.errors.AuthenticationError | server.errors.AuthorizationError):
        cure = "Correct the user and the password in LOCATION, or in OPTIONS."
        return Finding("login", Level.ERROR, f"The server doesn't let us in. {text}", cure)
    cure = "Is it running, and is LOCATION right? Is a firewall, or TLS, in between?"
    return Finding("reach", Level.ERROR, f"The server doesn't answer. {text}", cure)


def _round_trip(server: Server, transport: Transport, ttl: float) -> Finding:
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        try:
            transport.ask("PING")
        except server.errors.ResponseError as error:
            # Not allowed, or the server is in a state that the rest will tell.
            return Finding("round-trip", Level.UNKNOWN, f"PING is refused: {error}")
        times.append(time.perf_counter() - begin)
    # The first one opened the connection.
    middle, longest = median(times[1:]), max(times[1:])
    text = f"{middle * 1000:.2f} ms (median of {ROUNDS}; the longest {longest * 1000:.2f} ms)."
    if middle > ttl / 100:
        cure = "A guarded call makes two: use a server nearby, or a longer ttl."
        return Finding("round-trip", Level.WARNING, f"A slow road: {text}", cure)
    return Finding("round-trip", Level.OK, text)


def _of_node(facts: Facts, server: Server, ttl: float) -> Iterator[Finding]:
    yield _kind(facts)
    yield _role(facts, server)
    yield from _cluster(facts, server)
    yield _eviction(facts)
    yield from _memory(facts)
    yield _persistence(facts)
    yield from _replicas(facts)
    yield _clock(facts, ttl)


def _kind(facts: Facts) -> Finding:
    product = facts.product
    if product is None:
        return Finding("server", Level.UNKNOWN, "It doesn't tell what it is (INFO).")
    version = (facts.said("server", "redis_version") or "7").split(".")
    if tuple(int(part) for part in version[:1] if part.isdigit()) < OLDEST:
        cure = "Update it: streams, and scripts that read the clock, came with Redis 5."
        return Finding("server", Level.ERROR, f"{product} is too old.", cure)
    mode = facts.said("server", "redis_mode") or facts.said("server", "server_mode")
    return Finding("server", Level.OK, f"{product}, {mode or 'mode unknown'}.")


def _role(facts: Facts, server: Server) -> Finding:
    role = facts.said("replication", "role")
    if role is None:
        return Finding("role", Level.UNKNOWN, "It doesn't tell whether it is a primary (INFO).")
    if role != "master":
        cure = "Point LOCATION at the primary, or let Sentinel say where it is."
        text = "It is a replica: it takes no writes, and what it shows is late."
        return Finding("role", Level.ERROR, text, cure)
    how = ", as Sentinel says" if server.sentinel else ""
    return Finding("role", Level.OK, f"A primary{how}.")


def _is_usable(facts: Facts) -> bool:
    """Whether there is a point in trying to write."""
    if facts.said("cluster", "cluster_enabled") == "1" and not _covers(facts.cluster()):
        return False
    return facts.said("replication", "role") in ("master", None)


def _covers(cluster: dict[str, str]) -> bool:
    return cluster.get("cluster_state", "ok") == "ok" and _slots(cluster) == "16384"


def _slots(cluster: dict[str, str]) -> str:
    return cluster.get("cluster_slots_ok", "16384")


def _cluster(facts: Facts, server: Server) -> Iterator[Finding]:
    if facts.said("cluster", "cluster_enabled") != "1":
        return
    cluster = facts.cluster()
    if not hasattr(server.client, "get_primaries"):
        cure = "Give the alias a client for clusters (docs/operations.md), or use a single server."
        text = "It is a node of a cluster, and the cache's client knows of this node only."
        yield Finding("cluster", Level.ERROR, text, cure)
    if not _covers(cluster):
        state = cluster.get("cluster_state", "?")
        text = f"{_slots(cluster)} of 16384 slots are served (cluster_state: {state})."
        cure = "Bring the missing node back, or `redis-cli --cluster fix`: calls for its keys fail."
        yield Finding("cluster", Level.ERROR, text, cure)
    else:
        yield Finding("cluster", Level.OK, "All 16384 slots are served.")


def _eviction(facts: Facts) -> Finding:
    policy = facts.said("memory", "maxmemory_policy") or facts.config("maxmemory-policy")
    if policy is None:
        cure = "Ask your provider for maxmemory-policy noeviction."
        text = "It doesn't tell what it throws away when its memory is full."
        return Finding("eviction", Level.UNKNOWN, text, cure)
    if policy == "noeviction":
        return Finding("eviction", Level.OK, "noeviction: a lease is never thrown away.")
    limit = facts.said("memory", "maxmemory") or facts.config("maxmemory")
    cure = "maxmemory-policy noeviction; if it also is a cache, an instance for leases alone."
    if limit == "0":
        text = f"maxmemory-policy is {policy}, which does nothing while there is no maxmemory."
        return Finding("eviction", Level.INFO, text, cure)
    evicted = facts.said("stats", "evicted_keys") or "?"
    text = (
        f"maxmemory-policy is {policy}: when its memory is full, leases that are held may be thrown "
        f"away, and a second caller gets in. Evicted so far: {evicted} keys."
    )
    return Finding("eviction", Level.WARNING, text, cure)


def _memory(facts: Facts) -> Iterator[Finding]:
    used = int(facts.said("memory", "used_memory") or 0)
    limit = int(facts.said("memory", "maxmemory") or 0)
    if limit and used > limit * 0.9:
        text = (
            f"{used * 100 // limit} % of maxmemory are used: soon no lease fits, or some are lost."
        )
        yield Finding("memory", Level.WARNING, text, "Raise maxmemory.")


def _persistence(facts: Facts) -> Finding:
    if facts.said("persistence", "aof_enabled") == "1":
        fsync = facts.config("appendfsync")
        how = f", appendfsync {fsync}" if fsync else ""
        return Finding("persistence", Level.OK, f"An append-only file{how}.")
    save = facts.config("save")
    if save is None:
        text = "It doesn't tell whether leases outlive a restart (CONFIG)."
        return Finding("persistence", Level.UNKNOWN, text)
    cure = "appendonly yes. The unique constraint holds meanwhile: is there one?"
    if save:
        text = "Snapshots only: a crash forgets the leases since the last one, and others get in."
        return Finding("persistence", Level.INFO, text, cure)
    text = "Nothing is kept on disk: a restart forgets all leases, and others get in."
    return Finding("persistence", Level.WARNING, text, cure)


def _replicas(facts: Facts) -> Iterator[Finding]:
    number = int(facts.said("replication", "connected_slaves") or 0)
    if not number:
        return
    least = facts.config("min-replicas-to-write")
    text = (
        f"{number} replica{'' if number == 1 else 's'}, written to after the reply: a failover may "
        "forget the leases of the last moment. Fence and constraint still hold."
    )
    if least not in (None, "0"):
        text += f" It takes no writes with less than {least} of them (min-replicas-to-write)."
    yield Finding("replicas", Level.INFO, text)


def _clock(facts: Facts, ttl: float) -> Finding:
    begin = time.time()
    theirs = facts.clock()
    end = time.time()
    if theirs is None:
        return Finding("clock", Level.UNKNOWN, "It doesn't tell its time.")
    # Somewhere between the question and the answer.
    ahead = theirs - end if theirs > end else min(0.0, theirs - begin)
    text = f"The server's clock is {ahead:+.3f} s from this machine's."
    if abs(ahead) > ttl / 10:
        cure = (
            "Run NTP on both. Leases go by the server's clock alone; a failover to a server with "
            "another time ends them early, or late, and fences step back."
        )
        return Finding("clock", Level.WARNING, text, cure)
    return Finding("clock", Level.OK, text)


def _timeouts(server: Server) -> Iterator[Finding]:
    given = server.configured_timeout
    cure = "Set the client's socket_timeout to a few seconds."
    if not server.connects and not given:
        text = "No socket_timeout: a server that hangs holds a guarded request for ever."
        yield Finding("timeouts", Level.WARNING, text, cure)
    elif not given:
        text = (
            f"No socket_timeout. Leases give up after {DEFAULT_SOCKET_TIMEOUT:g} s all the same; the "
            "site's own use of this cache may not."
        )
        yield Finding("timeouts", Level.INFO, text, cure)
    else:
        text = f"A server that doesn't answer is given up after {server.timeout:g} s."
        yield Finding("timeouts", Level.OK, text)
