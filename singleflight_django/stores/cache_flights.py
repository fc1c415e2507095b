"""Flights on a cache that only has ``add``: a lease tells who leads, other entries the outcome.

Joining takes several steps here. The one that matters comes last: a caller that has won the lease
looks once more whether the flight that it followed has landed meanwhile, and gives it back then.

``<key>``            the lease, whose text also names the flight and its fingerprint
``<key>#<flight>``   what became of a flight
``<key>#state``      takeovers and failures of the flight under way
``<key>#kept``       the outcome for callers that come later
``<key>#apart``      exists while the identity is not coalesced
"""

from __future__ import annotations

import math
import time
from base64 import b64decode, b64encode
from typing import Any, NamedTuple

from singleflight_django.exceptions import StoreUnavailableError
from singleflight_django.stores.base import (
    Apart,
    Busy,
    Joined,
    Joining,
    Kept,
    Landing,
    Led,
    Mismatch,
    Publishing,
    Status,
    Store,
)


class _State(NamedTuple):
    flight: int = 0
    takeovers: int = 0
    failures: int = 0
    again: int = 0

    def text(self) -> str:
        return " ".join(map(str, self))


class CacheFlights(Store):
    """Flights for ``CacheStore``, which has the entries."""

    def call(self, method: str, entry: str, *args: Any) -> Any:
        """Call a method of the cache."""
        raise NotImplementedError

    def take(self, entry: str, token: str, ttl: float, more: str) -> tuple[str, float] | None:
        """Take a lease: None if it is ours now, else the rest of the present text, and its end."""
        raise NotImplementedError

    def join(self, key: str, joining: Joining) -> Joined:
        """See Store.join()."""
        if joining.flight and (landed := self._landing(key, joining)):
            return landed
        if self.call("get", f"{key}#apart"):
            return Apart()
        if (kept := self._kept(key, joining.fingerprint)) is not None:
            return kept
        now = time.time()
        flight = joining.flight or int(now * 1e6)
        more = f"{flight} {joining.fingerprint}"
        present = self.take(key, joining.token, joining.ttl, more)
        if present is not None:
            return _busy(*present, joining.fingerprint)
        if joining.flight and (landed := self._landing(key, joining)):
            self.release(key, joining.token)
            return landed
        # A newcomer may have seen no outcome just before it was kept.
        if (kept := self._kept(key, joining.fingerprint)) is not None:
            self.release(key, joining.token)
            return kept
        return self._lead(key, flight, joining)

    def publish(self, key: str, publishing: Publishing) -> Status | None:
        """See Store.publish()."""
        owner, _, more = parse_lease(self.call("get", key))
        if owner != publishing.token:
            return None
        status = self._land(key, self._settle(key, publishing), publishing)
        if status == Status.DONE and publishing.keep > 0:
            ends = time.time() + publishing.keep
            text = f"{ends} {_text(publishing.payload)} {more.partition(' ')[2]}"
            self.call("set", f"{key}#kept", text, math.ceil(publishing.keep))
        if publishing.apart > 0:
            self.call("set", f"{key}#apart", 1, math.ceil(publishing.apart))
        return status if self.release(key, publishing.token) else None

    def forget(self, key: str) -> None:
        """See Store.forget()."""
        self.call("delete", f"{key}#kept")

    def now(self, key: str) -> float:
        """See Store.now(). The clocks of machines that share a cache are taken for one."""
        return time.time()

    async def anow(self, key: str) -> float:
        """See now()."""
        return self.now(key)

    def _lead(self, key: str, flight: int, joining: Joining) -> Led | Landing:
        state = self._state(key)
        if state.flight != flight:
            state = _State(flight)
        elif not state.again:
            state = state._replace(takeovers=state.takeovers + 1)
        state = state._replace(again=0)
        if state.takeovers > joining.takeovers:
            failed = Publishing(joining.token, flight, Status.FAILED, linger=joining.wait)
            self.publish(key, failed)
            return Landing(Status.FAILED)
        self.call("set", f"{key}#state", state.text(), math.ceil(joining.life))
        return Led(flight, None, state.takeovers, time.time())

    def _land(self, key: str, status: Status, publishing: Publishing) -> Status:
        """Put the outcome where followers read it; where the cache refuses it, say that."""
        entry, seconds = f"{key}#{publishing.flight}", math.ceil(publishing.linger + 1)
        # What tells one landing of a flight from the next: clocks of two machines may not.
        head = f"{time.time()} {publishing.token[:8]}"
        if status == Status.DONE:
            try:
                self.call("set", entry, f"{status} {head} {_text(publishing.payload)}", seconds)
                if self.call("has_key", entry):
                    return status
            except StoreUnavailableError:
                # Perhaps only too large: memcached raises, or is silent, depending on its client.
                pass
            status = Status.UNSHAREABLE
        self.call("set", entry, f"{status} {head} ", seconds)
        return status

    def _settle(self, key: str, publishing: Publishing) -> Status:
        """Note a failure that is tried again; return the status that the followers see."""
        status, state = publishing.status, self._state(key)
        if status == Status.FAILED and state.failures < publishing.retry:
            status = Status.AGAIN
            state = state._replace(failures=state.failures + 1)
        if status == Status.AGAIN:
            text, seconds = state._replace(again=1).text(), math.ceil(publishing.linger)
            self.call("set", f"{key}#state", text, seconds)
        elif status != Status.VACANT:
            self.call("delete", f"{key}#state")
        return status

    def _state(self, key: str) -> _State:
        text = self.call("get", f"{key}#state")
        return _State(*map(int, text.split())) if isinstance(text, str) else _State()

    def _landing(self, key: str, joining: Joining) -> Landing | None:
        text = self.call("get", f"{key}#{joining.flight}")
        if not isinstance(text, str):
            return None
        status, at, seen, payload = text.split(" ")
        if seen == joining.seen:
            return None
        return Landing(Status(status), b64decode(payload), float(at), seen)

    def _kept(self, key: str, fingerprint: str) -> Kept | Mismatch | None:
        text = self.call("get", f"{key}#kept")
        if not isinstance(text, str):
            return None
        ends, payload, print_ = text.split(" ")
        left = float(ends) - time.time()
        if left <= 0:
            return None
        return Kept(b64decode(payload), left) if print_ == fingerprint else Mismatch()


def parse_lease(text: Any) -> tuple[str, float, str]:
    """Return the owner token, the end and the rest of a lease's text; "" for anything else."""
    owner, _, rest = text.partition(" ") if isinstance(text, str) else ("", "", "")
    ends, _, more = rest.partition(" ")
    try:
        return owner, float(ends), more
    except ValueError:
        return "", 0.0, ""


def _busy(more: str, ends: float, fingerprint: str) -> Busy | Mismatch:
    flight, _, other = more.partition(" ")
    if other != fingerprint:
        return Mismatch()
    now = time.time()
    return Busy(int(flight or 0), max(0.0, ends - now), now)


def _text(payload: bytes) -> str:
    return b64encode(payload).decode()
