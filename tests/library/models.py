# ruff: noqa: RUF012
"""Every kind of unique constraint, and of what else can refuse a row."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models.functions import Lower


class Owner(models.Model):
    name = models.CharField(max_length=50)

    def __str__(self) -> str:
        return self.name


class Visible(models.Manager["Book"]):
    def get_queryset(self) -> models.QuerySet[Book]:
        return super().get_queryset().filter(deleted=False)


class Book(models.Model):
    uuid = models.UUIDField(unique=True)
    isbn = models.CharField(max_length=50, unique=True, null=True)  # noqa: DJ001 - many have none
    owner = models.ForeignKey(Owner, on_delete=models.CASCADE, related_name="books", null=True)
    title = models.CharField(max_length=50, default="")
    pages = models.IntegerField(default=1)
    deleted = models.BooleanField(default=False)

    objects = models.Manager()
    visible = Visible()

    class Meta:
        constraints = [
            models.CheckConstraint(condition=models.Q(pages__gt=0), name="library_has_pages")
        ]

    def __str__(self) -> str:
        return self.title


class Magazine(models.Model):
    """Its columns are called as Book's are: on MariaDB their keys, too."""

    uuid = models.UUIDField(unique=True)

    def __str__(self) -> str:
        return str(self.uuid)


class Loan(models.Model):
    """One a day for each owner."""

    owner = models.ForeignKey(Owner, on_delete=models.CASCADE)
    day = models.DateField()
    shelf = models.IntegerField(default=0)
    place = models.IntegerField(default=0)
    book = models.CharField(max_length=50, default="")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["owner", "day"], name="library_one_a_day")]
        unique_together = [("day", "shelf", "place")]

    def __str__(self) -> str:
        return self.book


class Card(models.Model):
    """The client makes its primary key, and it has no default."""

    id = models.UUIDField(primary_key=True)
    title = models.CharField(max_length=50, default="")

    def __str__(self) -> str:
        return self.title


class Ticket(models.Model):
    """Its primary key has a default."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    title = models.CharField(max_length=50, default="")

    def __str__(self) -> str:
        return self.title


class Label(models.Model):
    code = models.CharField(max_length=50, primary_key=True)
    title = models.CharField(max_length=50, default="")

    def __str__(self) -> str:
        return self.title


class GoldCard(Card):
    number = models.IntegerField(unique=True)
    limit = models.IntegerField(default=0)


class Seat(models.Model):
    pk = models.CompositePrimaryKey("row", "place")
    row = models.IntegerField()
    place = models.IntegerField()
    title = models.CharField(max_length=50, default="")

    def __str__(self) -> str:
        return self.title


class Queued(models.Model):
    """Its constraint is checked at COMMIT, where the database can do that: on PostgreSQL."""

    number = models.IntegerField()
    title = models.CharField(max_length=50, default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["number"], name="library_queued_once", deferrable=models.Deferrable.DEFERRED
            )
        ]

    def __str__(self) -> str:
        return self.title


class Member(models.Model):
    """Its constraint is an expression, where the database can index that: not on MariaDB."""

    email = models.CharField(max_length=50)

    class Meta:
        constraints = [models.UniqueConstraint(Lower("email"), name="library_email_once")]

    def __str__(self) -> str:
        return self.email
