from __future__ import annotations
import uuid
from singleflight_django.creating import create_or_existing
from tests.library.models import Book
from tests.library.threads import race

def test_concurrent_creates_make_one_row(using: str) -> None:
    u = uuid.uuid4()
    results = race(*[lambda: create_or_existing(Book.objects, uuid=u, defaults={"title": "x"})] * 8)
    assert sorted(created for _, created in results) == [False] * 7 + [True]
    assert len({book.pk for book, _ in results}) == 1
    assert create_or_existing(Book.objects, uuid=str(u).upper())[1] is False
