"""The admin's page of live leases and flights. It reads the store, and of the database nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import admin, messages
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db.transaction import non_atomic_requests
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse

from singleflight_django.conf import conf
from singleflight_django.live import Live, Row, listable_caches, told
from singleflight_django.models import LiveLease
from singleflight_django.stores.listing import evicted, whose
from singleflight_django.stores.registry import backed_by_database, get_store

# So many rows are read and shown at most: a million leases are never in memory.
MOST = 500


if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[LiveLease]
else:
    _ModelAdmin = admin.ModelAdmin


@admin.register(LiveLease)
class LiveLeaseAdmin(_ModelAdmin):
    """Lists what is held, to staff with ``view_livelease``; ends it, with ``release_livelease``, too."""

    def get_urls(self) -> list[URLPattern]:
        """Return a list and a page that asks: there is nothing to add, to change or to delete."""
        return [
            path("", self._wrapped(self.changelist_view), name=self._name("changelist")),
            path("release/", self._wrapped(self.release_view), name=self._name("release")),
        ]

    def _wrapped(self, view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
        # The database store is not to be asked in the middle of a transaction.
        return non_atomic_requests(self.admin_site.admin_view(view))

    def _name(self, page: str) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{page}"

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Leases are not made by hand."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nor changed."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nor deleted: see has_release_permission()."""
        return False

    def has_release_permission(self, request: HttpRequest) -> bool:
        """Whether the user may end somebody's lease."""
        may: bool = request.user.has_perm(f"{self.opts.app_label}.release_livelease")
        return may and self.has_view_permission(request)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """List what is held."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        asked = _Asked(request)
        problems: list[str] = []
        rows, more = self._read(request, asked, problems)
        return self._page(
            request,
            "list",
            title="Live leases and flights",
            asked=asked,
            rows=rows,
            more=more,
            problems=problems,
            most=MOST,
            may_release=self.has_release_permission(request),
            caches=listable_caches(),
            **(extra_context or {}),
        )

    def _read(
        self, request: HttpRequest, asked: _Asked, problems: list[str]
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return what is shown, the oldest first, and whether there are more."""
        by_mark: dict[str, Row] = {}
        more = False
        with told(problems.append):
            for row in asked.live().rows(asked.text):
                more = len(by_mark) == MOST and row.mark not in by_mark
                if more:
                    break
                by_mark[row.mark] = row
        rows = sorted(by_mark.values(), key=lambda row: (-(row.holding.age or 0.0), row.shown))
        # Where all are 0, a bar still has to have a length.
        longest = max((row.holding.age or 0.0 for row in rows), default=0.0) or 1.0
        followers = max((row.holding.followers or 0 for row in rows), default=0) or 1
        may = self.has_release_permission(request)
        return [
            {
                **row.cells(),
                "age_of": f"{longest:.3f}",
                "followers_of": str(followers),
                "release": f"{self._url('release')}?{asked.query(row)}" if may else "",
            }
            for row in rows
        ], more

    def release_view(self, request: HttpRequest) -> HttpResponse:
        """Ask whether it is meant; then end the lease, unless it has changed hands meanwhile."""
        if not self.has_release_permission(request):
            raise PermissionDenied
        asked = _Asked(request)
        if not asked.key:
            return HttpResponseRedirect(self._back(asked))
        with told(partial(messages.error, request)):
            live = asked.live()
            row = live.find(asked.key, asked.mark)
            if row is None:
                self._refuse(request, asked, live)
            elif request.method == "POST":
                self._release(request, asked, row)
            else:
                return self._page(
                    request,
                    "release",
                    title=f"Release this {row.holding.kind}?",
                    asked=asked,
                    row=row.cells(),
                    whose=whose(row.holding),
                    back=self._back(asked),
                )
        return HttpResponseRedirect(self._back(asked))

    def _refuse(self, request: HttpRequest, asked: _Asked, live: Live) -> None:
        now = sorted({whose(r.holding) for r in live.rows(asked.key) if r.shown == asked.key})
        then = f"It is held by {', '.join(now)} now." if now else "Nobody holds it now."
        text = f"{asked.key}: what you chose has ended meanwhile. {then} Nothing was released."
        messages.warning(request, text)

    def _release(self, request: HttpRequest, asked: _Asked, row: Row) -> None:
        # By the owner token: nobody is hit who has come since we looked.
        done = asked.store().evict(row.holding)
        said = evicted(row.holding, done)
        messages.add_message(
            request, messages.SUCCESS if done else messages.WARNING, f"{row.shown}: {said}"
        )
        if done:
            self.log_change(request, LiveLease(key=row.shown), said)

    def _page(self, request: HttpRequest, name: str, **context: Any) -> HttpResponse:
        request.current_app = self.admin_site.name
        return TemplateResponse(
            request,
            f"admin/singleflight_django/livelease/{name}.html",
            {**self.admin_site.each_context(request), "opts": self.opts, **context},
        )

    def _url(self, page: str) -> str:
        return reverse(f"admin:{self._name(page)}", current_app=self.admin_site.name)

    def _back(self, asked: _Asked) -> str:
        return f"{self._url('changelist')}?{asked.query()}"


class _Asked:
    """What the query string says: which store, and what of it."""

    def __init__(self, request: HttpRequest) -> None:
        said = request.GET
        self.cache = said.get("cache") or conf.SINGLEFLIGHT_CACHE
        self.database = bool(said.get("database"))
        self.text = said.get("q", "").strip()
        self.key, self.mark = said.get("key", ""), said.get("id", "")

    def store(self) -> Any:
        if self.cache not in settings.CACHES:
            raise ImproperlyConfigured(f"CACHES has no {self.cache!r}.")
        store = get_store(self.cache)
        return backed_by_database(store) if self.database else store

    def live(self) -> Live:
        return Live(self.store())

    def query(self, row: Row | None = None) -> str:
        """Return the query string that says the same; ``row``: and names an acquisition."""
        said = {"cache": self.cache, "database": "1" if self.database else "", "q": self.text}
        if row is not None:
            said |= {"key": row.shown, "id": row.mark}
        return urlencode({name: value for name, value in said.items() if value})
