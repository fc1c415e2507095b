"""The smoke test of flights between real servers, and what happens when a leader is struck there.

gunicorn and uvicorn, two processes each, serve one site. 1. One request succeeds. 2. Several at
once with one key, at all four processes: exactly one does the work and all get its answer. 3.
Several at once with different keys: all do the work, at the same time.
"""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Iterator

import pytest

from tests.fliers import now
from tests.flight_servers import PATIENCE, Answer, Line, Server, Site
from tests.flight_site import TTL

LED, FOLLOWED = "singleflight; fwd=miss; stored", "singleflight; fwd=miss; collapsed"
# How long after the end of a dead leader's lease its successor may begin, in seconds. The promise
# is 0.12 on an idle machine; one that runs other tests at once needs more.
SOON = float(os.environ.get("SINGLEFLIGHT_TEST_SOON", "1.0"))

soak = (pytest.mark.soak, pytest.mark.timeout(600))
rounds = pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=soak)])
strikes = pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=soak)])
as_each = pytest.mark.parametrize("colour", ["sync", "async", "mixed"])
led_by_each = pytest.mark.parametrize("leading", ["gunicorn", "uvicorn"])


@pytest.fixture(scope="module")
def started() -> Iterator[Site]:
    pytest.importorskip("gunicorn")
    pytest.importorskip("uvicorn")
    site = Site()
    try:
        site.start()
        yield site
    finally:
        site.end()


@pytest.fixture
def site(started: Site) -> Site:
    started.connect()
    return started


def check(answers: list[Answer], leader: int) -> None:
    """One process led; everyone got what it made."""
    assert {answer.shared for answer in answers} == {answers[0].shared}
    assert answers[0].status == 201
    assert answers[0].body.endswith(b"by %d" % leader)
    assert None not in answers[0].headers
    (led,) = (answer for answer in answers if answer.how == LED)
    assert led.pid == leader
    assert [answer.how for answer in answers].count(FOLLOWED) == len(answers) - 1
    # Not among the headers that are carried.
    assert [answer for answer in answers if answer.run] == [led]


@as_each
@rounds
def test_one_request_alone_succeeds(colour: str, rounds: int, site: Site) -> None:
    for turn in range(rounds):
        for line in site.lines():
            key = f"alone-{turn}-{id(line)}"
            site.open(key)
            check([site.go(line, colour, key).result(PATIENCE)], line.pid)
            assert [run.pid for run in site.executions(key)] == [line.pid]


@as_each
@rounds
def test_of_several_with_one_key_exactly_one_works(colour: str, rounds: int, site: Site) -> None:
    """Each of the processes leads in turn."""
    for turn in range(rounds):
        key = f"same-{turn}"
        first, *others = site.lines(turn)
        leader = site.go(first, colour, key)
        site.inside(key)
        followers = [site.go(line, colour, key) for line in others]
        site.followed(len(others))
        site.open(key)
        answers = [one.result(PATIENCE) for one in (leader, *followers)]
        assert [run.pid for run in site.executions(key)] == [first.pid]
        assert {answer.pid for answer in answers} == set(site.pids)
        check(answers, first.pid)


@as_each
@rounds
def test_all_at_once_nobody_first(colour: str, rounds: int, site: Site) -> None:
    for turn in range(rounds):
        key = f"burst-{turn}"
        running = [site.go(line, colour, key) for line in site.lines(turn)]
        site.inside(key)
        site.followed(len(running) - 1)
        site.open(key)
        answers = [one.result(PATIENCE) for one in running]
        (run,) = site.executions(key)
        assert {answer.pid for answer in answers} == set(site.pids)
        check(answers, run.pid)


@as_each
@rounds
def test_different_keys_do_not_contend(colour: str, rounds: int, site: Site) -> None:
    """All are in the view at the same time, those of one process too."""
    for turn in range(rounds):
        lines = {f"key-{turn}-{number}": line for number, line in enumerate(site.lines())}
        running = {key: site.go(line, colour, key) for key, line in lines.items()}
        for key in lines:
            site.inside(key)
        for key, line in lines.items():
            site.open(key)
            check([running[key].result(PATIENCE)], line.pid)
            assert [run.pid for run in site.executions(key)] == [line.pid]


# The leader is struck


def cast(site: Site, leading: str, turn: int) -> tuple[Line, list[Line], list[Line]]:
    """A line to the leader, those to the other server, and two to the leader's own server."""
    site.connect()
    own: Server = getattr(site, leading)
    (other,) = (server for server in site.servers if server is not own)
    (first, spare, _), (sibling, *_) = sorted(
        own.lines.values(), key=lambda lines: lines[0].pid, reverse=bool(turn % 2)
    )
    return first, [line for lines in other.lines.values() for line in lines], [spare, sibling]


@led_by_each
@strikes
def test_a_leader_that_is_killed_in_its_view_is_taken_over_by_the_other_server(
    leading: str, rounds: int, site: Site
) -> None:
    for turn in range(rounds):
        key = f"killed-{turn}"
        first, others, (_, sibling) = cast(site, leading, turn)
        leader = site.go(first, "brief", key)
        site.inside(key)
        followers = [site.go(line, "brief", key) for line in others]
        site.followed(len(others))
        site.strike(first.pid, signal.SIGKILL)
        killed = now()
        successor = site.inside(key, 2)
        assert successor.at - killed < TTL + SOON
        followers.append(site.go(sibling, "brief", key))
        site.followed(len(others))
        site.open(key)
        answers = [one.result(PATIENCE) for one in followers]
        assert [run.pid for run in site.executions(key)] == [first.pid, successor.pid]
        assert successor.pid in {line.pid for line in others}
        check(answers, successor.pid)
        # Its own client's connection went with it.
        with pytest.raises((OSError, http.client.HTTPException)):
            leader.result(PATIENCE)
        site.hang_up(first.pid)


@led_by_each
@strikes
def test_a_leader_that_is_stopped_past_its_lease_can_neither_publish_nor_release(
    leading: str, rounds: int, site: Site
) -> None:
    for turn in range(rounds):
        key = f"stopped-{turn}"
        first, others, late = cast(site, leading, turn)
        zombie = site.go(first, "brief", key)
        site.inside(key)
        followers = [site.go(line, "brief", key) for line in others]
        site.followed(len(others))
        site.strike(first.pid, signal.SIGSTOP)
        successor = site.inside(key, 2)
        assert successor.pid in {line.pid for line in others}
        site.open(key, first.pid)
        site.strike(first.pid, signal.SIGCONT)
        # It is told: LeaseLostError is a fault of the code, or of its ttl.
        assert zombie.result(PATIENCE).status == 500
        # It has told nobody else, and the key isn't free: not even its own process leads anew.
        followers += [site.go(line, "brief", key) for line in late]
        site.followed(len(followers) - 1)
        assert not any(follower.done() for follower in followers)
        site.open(key, successor.pid)
        answers = [one.result(PATIENCE) for one in followers]
        assert [run.pid for run in site.executions(key)] == [first.pid, successor.pid]
        check(answers, successor.pid)
