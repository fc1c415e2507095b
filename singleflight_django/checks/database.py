"""02x: does the database stand behind what guards rely on?"""

from __future__ import annotations

from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured

from singleflight_django.checks.base import message
from singleflight_django.uniques import declared


def check_constraints_exist() -> list[CheckMessage]:
    """Does each ``unique=`` of the guards that are loaded name a constraint of a model?"""
    messages = []
    for unique in sorted(declared, key=lambda each: str(each.spec)):
        try:
            _ = unique.constraints
        except ImproperlyConfigured as error:
            hint = "Without the constraint nothing keeps duplicates out when a lease is lost."
            messages.append(message(Error, "E020", str(error), hint))
    return messages
