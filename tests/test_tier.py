"""The local tier by itself: who speaks for whom, and who is told what."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from singleflight_django import tier
from singleflight_django.exceptions import TooManyFollowersError
from singleflight_django.seats import Seat
from singleflight_django.stores.base import Kept, Landing, Status
from singleflight_django.tier import AGENT, ANEW, LocalFlight, Passenger, board
from singleflight_django.waiting import clock
from tests.servers import until

PATIENCE = 20.0
LANDED = Landing(Status.DONE, b"one")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert tier._flights == {}


def aboard(place: object = "k", passengers: int = 1) -> tuple[LocalFlight, list[Passenger]]:
    """A flight with an agent and so many passengers."""
    local, none = board(place)
    assert none is None
    boarded = [board(place) for _ in range(passengers)]
    assert all(flight is local for flight, _ in boarded)
    return local, [passenger for _, passenger in boarded if passenger is not None]


def test_the_first_is_the_agent_and_the_next_are_passengers() -> None:
    local, passengers = aboard(passengers=3)
    assert len(passengers) == 3
    assert local.has_passengers
    local.land(LANDED)
    assert not local.has_passengers


def test_other_places_are_other_flights() -> None:
    one, _ = aboard("one")
    two, _ = aboard("two")
    assert one is not two
    one.land(LANDED)
    two.land(LANDED)


def test_everyone_is_told_what_became_of_it() -> None:
    local, passengers = aboard(passengers=3)
    assert local.land(LANDED) is LANDED
    assert all(passenger.news is LANDED for passenger in passengers)
    assert passengers[0].wait_news(0.0)


def test_who_comes_after_a_flight_is_closed_boards_another() -> None:
    local, (passenger,) = aboard()
    local.close()
    other, none = board("k")
    assert none is None
    assert other is not local
    local.land(LANDED)
    assert passenger.news is LANDED
    other.land(LANDED)


def test_a_thread_is_woken_by_the_news() -> None:
    local, (passenger,) = aboard()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(passenger.wait_news, PATIENCE)
        until(lambda: passenger._lock is not None, "the thread to wait")
        local.land(LANDED)
        assert waiting.result(PATIENCE)


async def test_a_task_is_woken_by_the_news() -> None:
    local, (passenger,) = aboard()
    waiting = asyncio.ensure_future(passenger.await_news(PATIENCE))
    await asyncio.sleep(0)
    await asyncio.to_thread(local.land, LANDED)
    assert await waiting


def test_a_thread_waits_no_longer_than_it_said() -> None:
    local, (passenger,) = aboard()
    begin = clock()
    assert not passenger.wait_news(0.05)
    assert 0.04 < clock() - begin < 5
    assert local.leave(passenger)
    local.land(LANDED)


async def test_a_task_waits_no_longer_than_it_said() -> None:
    local, (passenger,) = aboard()
    begin = clock()
    assert not await passenger.await_news(0.05)
    assert 0.04 < clock() - begin < 5
    assert local.leave(passenger)
    local.land(LANDED)


async def test_news_that_were_there_before_are_not_waited_for() -> None:
    local, (passenger,) = aboard()
    local.land(LANDED)
    assert passenger.wait_news(PATIENCE)
    assert await passenger.await_news(PATIENCE)


def test_an_agent_that_leaves_makes_the_first_passenger_the_agent() -> None:
    local, (first, second) = aboard(passengers=2)
    local.hand_over()
    assert first.news is AGENT
    assert second.news is None
    assert board("k")[0] is local
    local.hand_over()
    assert second.news is AGENT
    local.land(LANDED)


def test_an_agent_that_leaves_alone_takes_the_flight_with_it() -> None:
    local, _ = aboard(passengers=0)
    local.hand_over()
    assert board("k")[0] is not local
    tier._flights.clear()


def test_a_flight_that_was_closed_in_vain_is_open_again() -> None:
    local, (passenger,) = aboard()
    local.close()
    local.hand_over()
    assert passenger.news is AGENT
    assert board("k")[0] is local
    local.land(LANDED)


def test_a_flight_that_was_closed_in_vain_leaves_the_next_one_alone() -> None:
    local, (passenger,) = aboard()
    local.close()
    other, _ = board("k")
    local.hand_over()
    assert passenger.news is AGENT
    assert board("k")[0] is other
    local.land(LANDED)
    assert board("k")[0] is other
    other.land(LANDED)


def test_who_leaves_after_the_news_came_still_has_them() -> None:
    local, (passenger,) = aboard()
    local.land(LANDED)
    assert not local.leave(passenger)
    assert passenger.news is LANDED


def test_who_came_after_the_end_gets_no_part_of_it() -> None:
    """The agent learns of a landing later than it happened: some have boarded since."""
    local, (early,) = aboard()
    asked = clock()
    local.follow(7, asked, now=1000.0)
    until(lambda: clock() > asked + 0.01, "10 ms")
    late = board("k")[1]
    assert late is not None
    landed = Landing(Status.DONE, b"one", at=1000.005, seen="1")
    assert local.land(landed) is landed
    assert early.news is landed
    assert late.news is ANEW


def test_an_heir_that_came_after_the_end_gets_no_part_of_it_either() -> None:
    local, _ = aboard(passengers=0)
    asked = clock()
    local.follow(7, asked, now=1000.0)
    until(lambda: clock() > asked + 0.01, "10 ms")
    board("k")
    local.hand_over()
    assert local.land(Landing(Status.DONE, b"one", at=1000.005, seen="1")) is ANEW


def test_an_heir_that_the_store_told_itself_is_told_the_outcome() -> None:
    local, _ = aboard(passengers=0)
    local.follow(7, clock(), now=1000.0)
    board("k")
    local.hand_over()
    local.follow(7, clock(), now=1000.1)
    landed = Landing(Status.DONE, b"one", at=1000.1, seen="1")
    assert local.land(landed) is landed


def test_what_is_kept_and_errors_are_for_everyone() -> None:
    for news in (Kept(b"one", 5.0), OSError()):
        local, (passenger,) = aboard()
        local.follow(7, clock(), now=1000.0)
        local.land(news)
        assert passenger.news is news


def test_to_follow_another_flight_forgets_what_was_seen_of_the_last() -> None:
    local, _ = aboard(passengers=0)
    local.follow(7, 1.0, 1.0)
    local.seen = "5"
    local.follow(7, 1.0, 1.0)
    assert local.seen == "5"
    local.follow(8, 1.0, 1.0)
    assert local.seen == "0"
    local.hand_over()


# Loops


def test_threads_and_tasks_of_several_loops_are_all_woken() -> None:
    local, passengers = aboard(passengers=9)

    async def tasks(mine: list[Passenger]) -> list[bool]:
        return await asyncio.gather(*(one.await_news(PATIENCE) for one in mine))

    with ThreadPoolExecutor(5) as pool:
        loops = [pool.submit(asyncio.run, tasks(passengers[n : n + 3])) for n in (0, 3)]
        threads = [pool.submit(one.wait_news, PATIENCE) for one in passengers[6:]]
        until(
            lambda: all(one._lock or one._future for one in passengers),
            "all of them to wait",
        )
        local.land(LANDED)
        assert [loop.result(PATIENCE) for loop in loops] == [[True] * 3] * 2
        assert all(thread.result(PATIENCE) for thread in threads)


def abandoned(passenger: Passenger) -> None:
    """Leave ``passenger`` to a loop that is closed while its task is pending."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(passenger.await_news(PATIENCE))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    # asyncio would report it as destroyed.
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_closed_loop_keeps_nobody_else_from_being_told() -> None:
    local, (lost, other) = aboard(passengers=2)
    abandoned(lost)
    local.land(LANDED)
    assert other.news is LANDED


def test_who_can_not_be_reached_is_no_heir() -> None:
    local, (lost, other) = aboard(passengers=2)
    abandoned(lost)
    local.hand_over()
    assert lost.news is None
    assert other.news is AGENT
    local.hand_over()
    assert tier._flights == {}


# Seats


def test_there_are_so_many_seats_for_threads_and_for_tasks() -> None:
    with Seat(True, 1, "k") as seat, Seat(True, 1, "k") as other, Seat(False, 1, "k") as task:
        seat.take()
        seat.take()
        with pytest.raises(TooManyFollowersError) as caught:
            other.take()
        assert caught.value.key == "k"
        task.take()
    with Seat(True, 1, "k") as seat:
        seat.take()


def test_nobody_waits_where_there_is_no_seat_at_all() -> None:
    with Seat(True, 0, "k") as seat, pytest.raises(TooManyFollowersError):
        seat.take()


def test_a_seat_is_free_again_after_an_error() -> None:
    with Seat(True, 1, "k") as seat:
        seat.take()
        with pytest.raises(TooManyFollowersError), Seat(True, 1, "k") as other:
            other.take()
    with Seat(True, 1, "k") as seat:
        seat.take()


def test_any_number_may_wait_where_no_limit_is_given() -> None:
    seats = [Seat(True, None, "k") for _ in range(100)]
    for seat in seats:
        seat.__enter__().take()
    for seat in seats:
        seat.__exit__()


# Processes and collisions


def test_a_forked_child_starts_without_flights_and_seats() -> None:
    local, _ = aboard()
    with Seat(True, 1, "k") as seat, tier._mutex:
        seat.take()
        with warnings.catch_warnings():
            # Other tests have left threads behind, of which the child has none.
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            fine = tier._flights == {} and board("k")[1] is None
            with Seat(True, 1, "k") as mine:
                mine.take()
            os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    local.land(LANDED)


def test_boarding_leaving_and_landing_at_once_lose_nobody() -> None:
    """Every passenger is told the news, or has left, or became the agent."""
    for _ in range(50):
        local, passengers = aboard(passengers=8)
        start = threading.Barrier(10, timeout=PATIENCE)

        def leave(passenger: Passenger, local: LocalFlight = local, start: Any = start) -> bool:
            start.wait()
            return local.leave(passenger)

        def act(action: Any, *args: Any, start: Any = start) -> bool:
            start.wait()
            action(*args)
            return True

        with ThreadPoolExecutor(10) as pool:
            leaving = [pool.submit(leave, passenger) for passenger in passengers]
            pool.submit(act, local.hand_over)
            pool.submit(act, local.land, LANDED)
            left = [future.result(PATIENCE) for future in leaving]
        for passenger, gone in zip(passengers, left, strict=True):
            assert (passenger.news is None) == gone
        assert sum(passenger.news is AGENT for passenger in passengers) <= 1
        local.land(LANDED)
