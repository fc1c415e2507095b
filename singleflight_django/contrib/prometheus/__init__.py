"""Metrics for Prometheus, of what the signals tell: ``docs/metrics.md`` lists them.

Add ``"singleflight_django.contrib.prometheus"`` to INSTALLED_APPS, or call connect().
"""

from singleflight_django.contrib.prometheus.metrics import connect, disconnect

__all__ = ["connect", "disconnect"]
