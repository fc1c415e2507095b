"""A TLS end before a server: the wheel's Valkey can't do it itself."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Self

import pytest


class TlsEnd:
    """Listens with a certificate for 127.0.0.1 and passes on to ``target``."""

    def __init__(self, target: int, directory: Path) -> None:
        self.target, self.certificate = target, directory / "certificate.pem"
        self._key = directory / "key.pem"
        self._open: list[socket.socket] = []

    def _make_certificate(self) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl to make a certificate")
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
        subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        # Python 3.13 wants it to say what the key is for.
        use = ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]
        files = ["-keyout", str(self._key), "-out", str(self.certificate)]
        subprocess.run([*command.split(), *subject, *use, *files], check=True, capture_output=True)

    def __enter__(self) -> Self:
        self._make_certificate()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self._key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, args=(context,), daemon=True)
        self._thread.start()
        return self

    def _accept(self, context: ssl.SSLContext) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                self._open.append(plain)
                # A client that doesn't trust us breaks the handshake off.
                with contextlib.suppress(OSError):
                    self._connect(context.wrap_socket(plain, server_side=True))

    def _connect(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self.target))
        self._open += [client, server]
        for pair in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        for one in self._open:
            one.close()
