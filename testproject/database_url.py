"""DATABASE_URL as an entry of Django's DATABASES."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

ENGINES = {
    "postgres": "django.db.backends.postgresql",
    "postgresql": "django.db.backends.postgresql",
    "mysql": "django.db.backends.mysql",
    "sqlite": "django.db.backends.sqlite3",
}

# WAL lets readers go on beside the writer. IMMEDIATE takes the write lock at BEGIN, where SQLite
# waits for it up to the timeout; a transaction that first reads and then writes fails at once.
SQLITE_OPTIONS = {
    "timeout": 20,
    "transaction_mode": "IMMEDIATE",
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}


def parse(url: str) -> dict[str, Any]:
    """
    Return the DATABASES entry for ``url``.

    ``postgresql://user:password@host:5432/name`` (also ``postgres://``; a unix socket is
    ``postgresql://user@/name?host=/directory``), ``mysql://user:password@host:3306/name``,
    ``sqlite:///relative/path`` or ``sqlite:////absolute/path``. Parts are percent-decoded; what
    the query says beside ``host`` and ``port`` goes to OPTIONS. Raise ValueError for the rest.
    """
    parts = urlsplit(url)
    if parts.scheme not in ENGINES:
        known = ", ".join(f"{scheme}://" for scheme in ENGINES)
        raise ValueError(f"DATABASE_URL starts with {parts.scheme!r}; known are {known}")
    name = unquote(parts.path.removeprefix("/"))
    if not name:
        raise ValueError(f"DATABASE_URL names no database: {parts.scheme}://…/NAME")
    if parts.scheme == "sqlite":
        return {"ENGINE": ENGINES["sqlite"], "NAME": name, "OPTIONS": dict(SQLITE_OPTIONS)}
    options = dict(parse_qsl(parts.query))
    return {
        "ENGINE": ENGINES[parts.scheme],
        "NAME": name,
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": options.pop("host", parts.hostname or ""),
        "PORT": options.pop("port", str(parts.port or "")),
        "OPTIONS": options,
    }
