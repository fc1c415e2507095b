"""Spans for OpenTelemetry, of what the signals tell: ``docs/metrics.md`` lists them.

Add ``"singleflight_django.contrib.opentelemetry"`` to INSTALLED_APPS, or call connect().
"""

from singleflight_django.contrib.opentelemetry.spans import connect, disconnect

__all__ = ["connect", "disconnect"]
