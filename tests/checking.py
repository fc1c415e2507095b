"""What the system checks say, by the end of the id, and views for them to look at."""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage
from django.http import HttpRequest, HttpResponse
from django.views import View

from singleflight_django import SemaphoreLockMixin, semaphore_lock, single_flight
from singleflight_django.checks import check, check_databases, check_deployment
from tests.meeting import urls

PK = "<str:pk>/"


def _by_number(found: list[CheckMessage]) -> dict[str, CheckMessage]:
    return {str(message.id).removeprefix("singleflight_django."): message for message in found}


def messages() -> dict[str, CheckMessage]:
    return _by_number(check())


def deployment_messages() -> dict[str, CheckMessage]:
    return _by_number(check_deployment())


def database_messages(*aliases: str) -> dict[str, CheckMessage]:
    return _by_number(check_databases(databases=list(aliases)))


def of_view(settings: Any, view: Any, route: str = "<str:pk>/") -> dict[str, CheckMessage]:
    """What they say of a site that has this one view."""
    settings.ROOT_URLCONF = urls(view, route)
    return messages()


def plain(request: HttpRequest, **kwargs: Any) -> HttpResponse:
    return HttpResponse("done")


def lock(key: Any, **options: Any) -> Any:
    return semaphore_lock(key, **options)(plain)


def flight(key: Any, **options: Any) -> Any:
    return single_flight(key, **options)(plain)


def mixin(key: Any, *handlers: str, base: type = SemaphoreLockMixin, **attributes: Any) -> Any:
    prefix = "lock" if base is SemaphoreLockMixin else "flight"
    own = {f"{prefix}_key": key, **attributes}
    methods = {name: lambda self, request, **kwargs: HttpResponse("done") for name in handlers}
    for name, method in methods.items():
        method.__name__ = name
    return type("Page", (base, View), {**methods, **own})
