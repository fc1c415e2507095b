from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    operations = [  # noqa: RUF012
        migrations.CreateModel(
            name="Lease",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("digest", models.CharField(max_length=32)),
                ("slot", models.PositiveIntegerField(default=0)),
                ("key", models.CharField(help_text="For people to read.", max_length=255)),
                ("token", models.CharField(default="", max_length=96)),
                ("ends", models.BigIntegerField(default=0)),
                ("fence", models.BigIntegerField(default=0)),
                ("flight", models.BigIntegerField(default=0)),
                ("fingerprint", models.CharField(default="", max_length=255)),
                ("open", models.BooleanField(default=False)),
                ("known", models.BigIntegerField(default=0)),
                ("followed", models.BigIntegerField(default=0)),
                ("takeovers", models.PositiveIntegerField(default=0)),
                ("failures", models.PositiveIntegerField(default=0)),
                ("again", models.BooleanField(default=False)),
                ("apart", models.BigIntegerField(default=0)),
                ("until", models.BigIntegerField(db_index=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("digest", "slot"), name="singleflight_one_lease"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="LiveLease",
            fields=[],
            options={
                "verbose_name": "live lease or flight",
                "verbose_name_plural": "live leases and flights",
                "permissions": (("release_livelease", "Can release live leases and flights"),),
                "proxy": True,
                "default_permissions": ("view",),
                "indexes": [],
                "constraints": [],
            },
            bases=("singleflight_django.lease",),
        ),
        migrations.CreateModel(
            name="Outcome",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("digest", models.CharField(max_length=32)),
                ("flight", models.BigIntegerField()),
                ("status", models.CharField(max_length=16)),
                ("payload", models.BinaryField(default=b"")),
                ("at", models.BigIntegerField()),
                ("until", models.BigIntegerField(db_index=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("digest", "flight"), name="singleflight_one_outcome"
                    )
                ],
            },
        ),
    ]
