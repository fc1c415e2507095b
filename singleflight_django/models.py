"""The tables of the database store. Without it they stay empty.

All times are whole microseconds since 1970 on the clock of the database: what is compared in a
conditional UPDATE must not pass through anybody's time zone, nor lose digits.
"""

from __future__ import annotations

from django.db import models


class Lease(models.Model):
    """One place to hold a key: the first one also tells what is known of the key's flight.

    ``digest`` stands for the key in every comparison: a database may take "a" for "A", or for "a ".
    """

    digest = models.CharField(max_length=32)
    # 0; the holders of a semaphore with a limit above 1 have a number each.
    slot = models.PositiveIntegerField(default=0)
    key = models.CharField(max_length=255, help_text="For people to read.")
    token = models.CharField(max_length=96, default="")
    ends = models.BigIntegerField(default=0)
    fence = models.BigIntegerField(default=0)

    # The flight under way (``open``), or the last one while its outcome is kept, until ``known``.
    flight = models.BigIntegerField(default=0)
    fingerprint = models.CharField(max_length=255, default="")
    open = models.BooleanField(default=False)
    known = models.BigIntegerField(default=0)
    # Followers may be waiting until then.
    followed = models.BigIntegerField(default=0)
    takeovers = models.PositiveIntegerField(default=0)
    failures = models.PositiveIntegerField(default=0)
    # The next leader is not to be counted as one that took over.
    again = models.BooleanField(default=False)
    # Until then the identity is not coalesced.
    apart = models.BigIntegerField(default=0)

    # From then on the row says nothing that matters, and may be purged.
    until = models.BigIntegerField(db_index=True)

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=["digest", "slot"], name="singleflight_one_lease"),
        )

    def __str__(self) -> str:
        return self.key


class LiveLease(Lease):
    """What the admin's page of live leases hangs on, with its permissions. It reads no table.

    A proxy: an unmanaged model's table would be missed by ``dumpdata``.
    """

    class Meta:
        proxy = True
        verbose_name = "live lease or flight"
        verbose_name_plural = "live leases and flights"
        default_permissions = ("view",)
        permissions = (("release_livelease", "Can release live leases and flights"),)


class Outcome(models.Model):
    """What became of a flight: for its followers, and while it is kept for later callers."""

    digest = models.CharField(max_length=32)
    flight = models.BigIntegerField()
    status = models.CharField(max_length=16)
    payload = models.BinaryField(default=b"")
    at = models.BigIntegerField()
    until = models.BigIntegerField(db_index=True)

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=["digest", "flight"], name="singleflight_one_outcome"),
        )

    def __str__(self) -> str:
        return f"{self.status} {self.flight}"
