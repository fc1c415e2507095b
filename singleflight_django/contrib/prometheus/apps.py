from __future__ import annotations

from django.apps import AppConfig

from singleflight_django.contrib.prometheus.metrics import connect


class PrometheusConfig(AppConfig):
    name = "singleflight_django.contrib.prometheus"
    label = "singleflight_prometheus"
    verbose_name = "Single flight: metrics for Prometheus"

    def ready(self) -> None:
        connect()
