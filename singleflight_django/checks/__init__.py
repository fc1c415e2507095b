"""What ``manage.py check`` asks. No check opens a connection, but for ``check --database``.

The ids come in blocks (00x settings, 01x cache, 02x database, 03x views, 04x leases that go through
the cache) and are never used again for something else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from django.core.checks import CheckMessage

from singleflight_django.checks import (
    adding,
    cache,
    database,
    logins,
    servers,
    settings,
    transactions,
    views,
)
from singleflight_django.checks.base import setting
from singleflight_django.checks.caches import Cache, aliases_in_use, described
from singleflight_django.checks.guarded import Guarded, find_guarded, guards_in_use

logger = logging.getLogger("singleflight_django")

TAG = "singleflight"

Question = Callable[[], list[CheckMessage]]
AliasQuestion = Callable[[str], list[CheckMessage]]
CacheQuestion = Callable[[Cache], list[CheckMessage]]
ViewQuestion = Callable[[Guarded], Iterable[CheckMessage]]

QUESTIONS: Sequence[Question] = (
    settings.check_setting_names,
    settings.check_setting_values,
    settings.check_store_path,
    database.check_constraints_exist,
    database.check_constraints_are_made,
    database.check_nulls_collide,
)
ALIAS_QUESTIONS: Sequence[AliasQuestion] = (cache.check_alias, cache.check_backend)
CACHE_QUESTIONS: Sequence[CacheQuestion] = (
    cache.check_exclusion,
    cache.check_shared,
    cache.check_outages_show,
    cache.check_ttl_is_kept,
    cache.check_one_server_decides,
    adding.check_whole_seconds,
    adding.check_reads_see_writes,
    adding.check_a_hang_ends,
)
VIEW_QUESTIONS: Sequence[ViewQuestion] = (
    views.check_url_fields,
    views.check_body_fields,
    views.check_coarse_keys,
    views.check_fine_keys,
    logins.check_shared_with_strangers,
    transactions.check_waits_outside,
)
DEPLOY_CACHE_QUESTIONS: Sequence[CacheQuestion] = (
    cache.check_shared_when_deployed,
    adding.check_nothing_is_culled,
    adding.check_no_pickles,
)
DEPLOY_VIEW_QUESTIONS: Sequence[ViewQuestion] = (servers.check_server_waits,)


def check(**kwargs: object) -> list[CheckMessage]:
    """Ask what is asked at every ``manage.py check``."""
    if _off():
        return []
    found = [answer for ask in QUESTIONS for answer in ask()]
    seen = find_guarded()
    for alias in _aliases(seen):
        found += [answer for ask in ALIAS_QUESTIONS for answer in ask(alias)]
    return [*found, *_of_caches(CACHE_QUESTIONS, seen), *_of_views(VIEW_QUESTIONS, seen)]


def check_deployment(**kwargs: object) -> list[CheckMessage]:
    """Ask what is asked only at ``manage.py check --deploy``."""
    if _off():
        return []
    seen = find_guarded()
    return [*_of_caches(DEPLOY_CACHE_QUESTIONS, seen), *_of_views(DEPLOY_VIEW_QUESTIONS, seen)]


def check_databases(
    *, databases: Iterable[str] | None = None, **kwargs: object
) -> list[CheckMessage]:
    """Ask what is asked only at ``manage.py check --database``, of the databases it names."""
    return [] if _off() else database.check_tables(list(databases or ()))


def _off() -> bool:
    # Who has turned the library off needs none of its warnings.
    return setting("SINGLEFLIGHT_ENABLED") is False


def _aliases(seen: Iterable[Guarded]) -> list[str]:
    return aliases_in_use(guard.options.cache for guard in guards_in_use(seen))


def _of_caches(
    questions: Sequence[CacheQuestion], seen: Iterable[Guarded]
) -> Iterator[CheckMessage]:
    for alias in _aliases(seen):
        if (known := described(alias)) is not None:
            for ask in questions:
                yield from ask(known)


def _of_views(questions: Sequence[ViewQuestion], seen: Iterable[Guarded]) -> list[CheckMessage]:
    answers = [answer for each in seen for ask in questions for answer in _asked(ask, each)]
    # One view may have several routes.
    return [*{(answer.id, answer.msg): answer for answer in answers}.values()]


def _asked(ask: ViewQuestion, each: Guarded) -> list[CheckMessage]:
    try:
        return list(ask(each))
    except Exception:
        # A strange view must not keep anybody from running a command.
        logger.debug("The checks don't understand %s.", each.name, exc_info=True)
        return []
