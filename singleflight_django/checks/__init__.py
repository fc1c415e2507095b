"""What ``manage.py check`` asks. No check opens a network connection.

The ids come in blocks (00x settings, 01x cache, 02x database) and are never used again for
something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from django.core.checks import CheckMessage

from singleflight_django.checks import cache, database, settings
from singleflight_django.checks.base import setting

TAG = "singleflight"

Question = Callable[[], list[CheckMessage]]

QUESTIONS: Sequence[Question] = (
    settings.check_setting_names,
    settings.check_setting_values,
    settings.check_store_path,
    cache.check_alias,
    cache.check_backend,
    cache.check_exclusion,
    cache.check_shared,
    cache.check_outages_show,
    cache.check_ttl_is_kept,
    cache.check_one_server_decides,
    database.check_constraints_exist,
)
DEPLOY_QUESTIONS: Sequence[Question] = (cache.check_shared_when_deployed,)


def check(**kwargs: object) -> list[CheckMessage]:
    """Ask what is asked at every ``manage.py check``."""
    return _answers(QUESTIONS)


def check_deployment(**kwargs: object) -> list[CheckMessage]:
    """Ask what is asked only at ``manage.py check --deploy``."""
    return _answers(DEPLOY_QUESTIONS)


def _answers(questions: Sequence[Question]) -> list[CheckMessage]:
    # Who has turned the library off needs none of its warnings.
    if setting("SINGLEFLIGHT_ENABLED") is False:
        return []
    return [answer for question in questions for answer in question()]
