"""A flight: one execution for a key, from joining to publishing.

Go's singleflight (golang.org/x/sync) across processes: who leads does the work and publishes what
became of it (see ``landing``), who follows gets that. The lease tells a dead leader from a slow
one.
"""

from __future__ import annotations

from singleflight_django import tier
from singleflight_django.callers import OPEN, Alone, Flight, Leading, Outcome, Shared
from singleflight_django.context import enter, refuse_nested
from singleflight_django.exceptions import (
    FingerprintMismatchError,
    FlightTimeoutError,
    LeaderFailedError,
    StoreUnavailableError,
)
from singleflight_django.lease import Lease
from singleflight_django.renewal import keeper
from singleflight_django.steps import Steps
from singleflight_django.stores.base import (
    Apart,
    Busy,
    Joined,
    Joining,
    Kept,
    Landing,
    Led,
    Mismatch,
    Status,
)
from singleflight_django.waiting import Deadline, clock, pauses

MOST_TAKEOVERS = 2
# How often the store is asked for its time, at the end of a flight that somebody boarded late.
MOST_COMPARISONS = 5
# A wait that is longer, in seconds, lets go of what the caller doesn't need for it.
SHORT = 0.5
# The store counts on a follower for so much longer than it waits, in seconds: when one that speaks
# for others leaves, the next takes a moment to say so.
GRACE = 1.0


def join(flight: Flight) -> Steps:
    """Lead, or wait for the outcome of whoever does. Returns an Outcome.

    Raises FlightTimeoutError when ``wait`` is used up, LeaderFailedError, FingerprintMismatchError,
    TooManyFollowersError, NestedFlightError, StoreUnavailableError.
    """
    refuse_nested(flight.lease.keys)
    arrived, flight.deadline = clock(), Deadline(flight.wait)
    with flight.seat:
        while True:
            local, passenger = tier.board((flight.lease.store, flight.key, flight.fingerprint))
            if passenger is None:
                news = yield from _as_agent(flight, local)
            else:
                news = yield from _as_passenger(flight, local, passenger)
            if not (isinstance(news, Landing) and news.status in OPEN):
                return _outcome(flight, news, clock() - arrived)


def _as_passenger(flight: Flight, local: tier.LocalFlight, passenger: tier.Passenger) -> Steps:
    try:
        flight.seat.take()
        seconds = flight.deadline.left()
        if seconds > SHORT:
            if not (yield passenger, "wait_news", (SHORT,)):
                yield from _let_go(flight)
                yield passenger, "wait_news", (seconds - SHORT,)
        else:
            yield passenger, "wait_news", (seconds,)
    except BaseException:
        if not local.leave(passenger) and passenger.news is tier.AGENT:
            local.hand_over()
        raise
    if local.leave(passenger):
        raise _timed_out(flight)
    if passenger.news is tier.AGENT:
        return (yield from _as_agent(flight, local))
    if isinstance(passenger.news, Exception):
        raise StoreUnavailableError(str(passenger.news), key=flight.key) from passenger.news
    return passenger.news


def _as_agent(flight: Flight, local: tier.LocalFlight) -> Steps:
    try:
        news = yield from _ask_the_store(flight, local)
    except StoreUnavailableError as error:
        local.land(error)
        raise
    except BaseException:
        local.hand_over()
        raise
    return news if isinstance(news, Leading) else local.land(news)


def _ask_the_store(flight: Flight, local: tier.LocalFlight) -> Steps:
    store, pause = flight.lease.store, pauses(flight.longest_pause)
    while True:
        asked = clock()
        try:
            answer = yield store, "join", (flight.key, _joining(flight, local))
        except BaseException as error:
            yield from _undo(flight.lease, error)
            raise
        if isinstance(answer, Led):
            return _lead(flight, local, answer, asked)
        if isinstance(answer, Busy):
            local.follow(answer.flight, asked, answer.now)
            answer = yield from _wait(flight, local, answer, next(pause))
        if isinstance(answer, Landing):
            local.seen = answer.seen
            if answer.status in OPEN:
                continue
        if answer is not None:
            yield from _compare_clocks(flight, local, answer)
            return answer


def _compare_clocks(flight: Flight, local: tier.LocalFlight, news: Joined) -> Steps:
    """Until nobody's arrival is in doubt: on a busy machine some of the answers come late."""
    for _ in range(MOST_COMPARISONS):
        if not local.doubts(news):
            return
        asked = clock()
        try:
            now = yield flight.lease.store, "now", (flight.key,)
        except StoreUnavailableError:
            return
        if now is None:
            return
        local.compare(asked, now)


def _joining(flight: Flight, local: tier.LocalFlight) -> Joining:
    lease = flight.lease
    return Joining(
        lease.token,
        lease.ttl,
        flight.deadline.left() + GRACE,
        flight.fingerprint,
        local.flight,
        local.seen,
        max(lease.max_hold, lease.ttl) + lease.ttl + flight.wait + GRACE,
        MOST_TAKEOVERS if flight.takeover else 0,
    )


def _wait(flight: Flight, local: tier.LocalFlight, busy: Busy, pause: float) -> Steps:
    """Wait for a landing, for no longer than the lease lives: what then, a join tells."""
    left, store = flight.deadline.left(), flight.lease.store
    if left <= 0:
        raise _timed_out(flight)
    flight.seat.take()
    block = store.longest_block
    seconds = min(left, block, busy.remaining + 0.001) if block else min(left, pause)
    try:
        landing = yield store, "wait_landing", (flight.key, local.flight, local.seen, seconds)
    except StoreUnavailableError:
        # Cut off, or forbidden to block: whether the store is away, the next join tells.
        landing, seconds = None, min(left, pause)
        yield store, "rest", (seconds,)
    if landing is None:
        flight.deadline.spend(seconds)
        if flight.wait - flight.deadline.left() >= SHORT:
            yield from _let_go(flight)
    return landing


def _let_go(flight: Flight) -> Steps:
    """Let go of what others may need meanwhile, once."""
    ballast, flight.ballast = flight.ballast, None
    if ballast is not None:
        yield ballast, "let_go", ()


def _lead(flight: Flight, local: tier.LocalFlight, led: Led, asked: float) -> Leading:
    lease = flight.lease
    lease.grant(flight.key, led.fence, asked)
    flight.local, flight.led = local, led
    local.follow(led.flight, asked, led.now)
    enter(lease)
    keeper.watch(lease)
    waited = flight.wait - flight.deadline.left()
    flight.tell("flight_taken_over" if led.takeovers else "flight_led", wait=waited)
    return Leading()


def _undo(lease: Lease, error: BaseException) -> Steps:
    """Give back what an interrupted join may have taken."""
    lease.grant(lease.keys[0], None, clock())
    lease.end()
    # Who is being closed may not ask any more.
    if isinstance(error, StoreUnavailableError | GeneratorExit):
        keeper.give_back_later(lease)
        return
    try:
        yield lease.store, "release", (lease.keys[0], lease.token)
    except StoreUnavailableError:
        keeper.give_back_later(lease)


def _outcome(flight: Flight, news: object, waited: float) -> Outcome:
    if isinstance(news, Mismatch):
        raise FingerprintMismatchError(
            f"{flight.key!r} is under way with another content.", key=flight.key
        )
    if isinstance(news, Apart):
        return Alone("apart")
    if isinstance(news, Leading):
        return news
    if isinstance(news, Kept):
        flight.tell("flight_joined", wait=waited, reason="kept")
        return news
    landing: Landing = news  # type: ignore[assignment]
    if landing.status == Status.FAILED:
        flight.tell("flight_failed", wait=waited, reason="the leader failed")
        raise LeaderFailedError(f"The leader of {flight.key!r} failed.", key=flight.key)
    if landing.status == Status.UNSHAREABLE:
        return Alone("unshareable")
    flight.tell("flight_joined", wait=waited)
    return Shared(landing.payload)


def _timed_out(flight: Flight) -> FlightTimeoutError:
    flight.tell("flight_timed_out", wait=flight.wait)
    return FlightTimeoutError(
        f"{flight.key!r} was still under way after {flight.wait:g} s.", key=flight.key
    )
