"""What all the checks share."""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured

from singleflight_django.conf import conf


def message(kind: type[Error] | type[Warning], number: str, text: str, hint: str) -> CheckMessage:
    """Return a message whose id ends in ``number``. The hint is the cure."""
    return kind(text, hint=hint, id=f"singleflight_django.{number}")


def setting(name: str) -> Any:
    """Return the setting, or None where it is impossible: E002 tells that."""
    try:
        return getattr(conf, name)
    except ImproperlyConfigured:
        return None
