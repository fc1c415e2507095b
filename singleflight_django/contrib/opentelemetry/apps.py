from __future__ import annotations

from django.apps import AppConfig

from singleflight_django.contrib.opentelemetry.spans import connect


class OpenTelemetryConfig(AppConfig):
    name = "singleflight_django.contrib.opentelemetry"
    label = "singleflight_opentelemetry"
    verbose_name = "Single flight: spans for OpenTelemetry"

    # Whether spans tell the key, as the log shows it. A subclass may say so.
    show_keys = False

    def ready(self) -> None:
        connect(show_keys=self.show_keys)
