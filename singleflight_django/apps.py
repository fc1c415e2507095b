from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import Tags, register

from singleflight_django import checks


class SingleFlightConfig(AppConfig):
    name = "singleflight_django"
    label = "singleflight_django"
    verbose_name = "Single flight"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        register(checks.check, checks.TAG)
        register(checks.check_deployment, checks.TAG, deploy=True)
        # Not by our own tag: whoever asks for that does not expect a connection.
        register(checks.check_databases, Tags.database)
