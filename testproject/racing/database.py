"""The database of a race, and what is counted in it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote
from uuid import UUID

from django.apps import apps
from django.core.management import call_command
from django.db import connection

from testproject.lessons.factories import UserFactory


def migrate_database(directory: Path) -> str:
    """
    Migrate DATABASE_URL's database, or else a SQLite file in ``directory``; return its URL.

    The command's own connection has been configured before anyone knew the directory, so it is
    pointed to the new file as Django's test runner does.
    """
    url = os.environ.get("DATABASE_URL", "")
    if not url:
        path = directory / "race.sqlite3"
        url = f"sqlite:///{quote(str(path))}"
        connection.close()
        connection.settings_dict["NAME"] = str(path)
    call_command("migrate", verbosity=0, interactive=False)
    return url


@contextmanager
def student() -> Iterator[int]:
    """Give the primary key of a user; in the end the user goes, with every lesson made for it."""
    user = UserFactory.create()
    try:
        yield user.pk
    finally:
        user.delete()


def count_lessons(model: str, uuids: Sequence[UUID]) -> list[int]:
    """Return how many rows of ``model`` (a label) there are for each of ``uuids``."""
    rows = apps.get_model(model)._default_manager.filter(uuid__in=uuids)
    counts = Counter(rows.values_list("uuid", flat=True))
    return [counts[uuid] for uuid in uuids]
