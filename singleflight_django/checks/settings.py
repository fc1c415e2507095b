"""00x: do the settings mean what was meant?"""

from __future__ import annotations

from difflib import get_close_matches

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from singleflight_django.checks.base import message, setting
from singleflight_django.conf import SETTING_NAMES, conf


def check_setting_names() -> list[CheckMessage]:
    """Is there a setting that only looks like one of ours?"""
    return [
        message(
            Warning,
            "W001",
            f"{name} is not a setting of singleflight_django and has no effect.",
            f"Did you mean {nearest}?"
            if nearest
            else f"Remove it. The settings are {', '.join(SETTING_NAMES)}.",
        )
        for name in dir(settings)
        if name.isupper() and name not in SETTING_NAMES
        if (nearest := _nearest(name)) is not None
    ]


def _nearest(name: str) -> str | None:
    """Return the setting that ``name`` resembles, "" if none does, None if it isn't our affair."""
    ours = name.startswith("SINGLEFLIGHT_")
    # Outside our block it has to be very near: it may be another app's.
    found = get_close_matches(name, SETTING_NAMES, 1, 0.6 if ours else 0.9)
    return found[0] if found else "" if ours else None


def check_setting_values() -> list[CheckMessage]:
    """Does each setting have a value that can be used?"""
    messages = []
    for name in SETTING_NAMES:
        try:
            getattr(conf, name)
        except ImproperlyConfigured as error:
            hint = "Correct it, or remove it to get the default."
            messages.append(message(Error, "E002", str(error), hint))
    return messages


def check_store_path() -> list[CheckMessage]:
    """Can a store that is named by a dotted path be imported?"""
    path = setting("SINGLEFLIGHT_STORE")
    if path is None or "." not in path:
        return []
    try:
        import_string(path)
    except ImportError as error:
        text = f"SINGLEFLIGHT_STORE can't be imported: {error}"
        hint = 'Correct the path to the store\'s class, or use "redis", "cache" or "database".'
        return [message(Error, "E003", text, hint)]
    return []
