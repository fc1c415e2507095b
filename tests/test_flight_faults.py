"""Flights across processes, and what happens when one of them, or the server, is struck.

``SINGLEFLIGHT_TEST_RUNS`` says how often each fault is made to happen; once by default.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import redis

from singleflight_django.stores.redis.scripts import JOIN, PUBLISH
from tests.fliers import Flier, executions, fliers, now
from tests.proxy import Proxy
from tests.servers import Valkey, until

RUNS = int(os.environ.get("SINGLEFLIGHT_TEST_RUNS", "1"))
# How long after the end of a dead leader's lease its successor may begin, in seconds. The promise
# is 0.12 on an idle machine; one that runs other tests at once needs more.
SOON = float(os.environ.get("SINGLEFLIGHT_TEST_SOON", "3.0"))
# Of leaders that are to live on: a process that stands still for up to a second renews in time.
TTL = 1.5
# Of a server that does not answer.
SOCKET_TIMEOUT = 1.5

repeated = pytest.mark.parametrize("turn", range(RUNS))
as_both = pytest.mark.parametrize("how", ["thread", "task"])


def waiting(client: redis.Redis, number: int) -> None:
    """Return when so many connections wait for a landing."""
    until(lambda: len(blocked(client)) == number, f"{number} blocked connections")


def blocked(client: redis.Redis) -> list[dict[str, Any]]:
    return [one for one in client.client_list() if "b" in one["flags"] and one["cmd"] == "xread"]


def requests(client: redis.Redis) -> int:
    """How many requests there have been, scripts counted as one each."""
    stats = client.info("commandstats")
    names = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_xread")
    return sum(stats[name]["calls"] for name in names if name in stats)


def warm(crew: list[Flier], how: str = "thread") -> None:
    """Let each process connect, and the server learn the scripts."""
    for flier in crew:
        flier.call("instant", key=f"warm {id(flier)}", how=how)
        flier.answers()
        flier.events.clear()


def follow(crew: list[Flier], client: redis.Redis, **call: Any) -> Flier:
    """Let the first lead, at the gate, and the others follow it."""
    crew[0].call(**call)
    crew[0].wait_for("executing")
    for flier in crew[1:]:
        flier.call(**call)
    waiting(client, len(crew) - 1)
    return crew[0]


def all_board(flier: Flier, passengers: int) -> None:
    """Return when the process knows its flight, and so many callers besides its agent wait."""
    wanted = {"flights": 1, "known": 1, "passengers": passengers}
    until(lambda: flier.state() == wanted, f"{passengers} to board")


# Without faults


@pytest.mark.parametrize("store", [None, "cache"])
@repeated
def test_threads_and_tasks_of_four_processes_get_the_answer_of_one_run(
    turn: int, store: str | None, redis_url: str
) -> None:
    with fliers(4, redis_url, store) as crew:
        crew[0].call(count=10)
        crew[0].wait_for("executing")
        for flier in crew:
            flier.call(count=10)
            flier.call(count=10, how="task")
        boarded = dict.fromkeys(crew, 19) | {crew[0]: 29}
        for flier, passengers in boarded.items():
            all_board(flier, passengers)
        crew[0].open_gate()
        answers = [a for flier in crew for a in flier.answers(30 if flier is crew[0] else 20)]
        (run,) = executions(crew)
        assert answers == [run.value] * 90
        assert [flier.state()["flights"] for flier in crew] == [0] * 4


@as_both
@repeated
def test_callers_that_arrive_all_at_once_share_a_run(turn: int, how: str, redis_url: str) -> None:
    with fliers(3, redis_url) as crew:
        warm(crew, how)
        for number in range(5):
            for flier in crew:
                flier.events.clear()
            for flier in crew:
                flier.call("200", key=f"k{number}", count=15, how=how)
            answers = [answer for flier in crew for answer in flier.answers(15)]
            assert len(executions(crew)) == 1
            assert len(set(answers)) == 1


def test_leading_costs_two_requests_and_a_kept_result_one(redis_server: Valkey) -> None:
    with redis_server.client() as client, fliers(1, redis_server.url(), result_ttl=60) as (flier,):
        warm([flier])
        before = requests(client)
        flier.call("instant")
        flier.answers()
        assert requests(client) - before == 2
        flier.call("instant")
        flier.answers(2)
        assert requests(client) - before == 3
        assert flier.count("executing") == 1


@as_both
@pytest.mark.parametrize("processes", [2, 4])
def test_callers_cost_two_requests_a_process_whatever_their_number(
    how: str, processes: int, redis_server: Valkey
) -> None:
    """Each second of a flight, a process asks again; and where a machine is busy, what time it is.

    So one of several flights, which is over soon, tells what callers cost.
    """
    wanted, costs = 2 + 2 * (processes - 1), []
    with redis_server.client() as client, fliers(processes, redis_server.url(), ttl=60) as crew:
        warm(crew, how)
        for turn in range(10):
            before = requests(client)
            leader = follow(crew, client, key=f"k{turn}", how=how)
            for flier in crew:
                flier.call(key=f"k{turn}", count=24, how=how)
            for flier in crew:
                all_board(flier, 24)
            waiting(client, processes - 1)
            leader.open_gate()
            answers = [answer for flier in crew for answer in flier.answers(25)]
            assert len(set(answers)) == len(executions(crew)) == 1
            costs.append(requests(client) - before)
            if costs[-1] == wanted:
                return
            leader.close_gate()
            for flier in crew:
                flier.events.clear()
    assert wanted in costs


# Order


@pytest.mark.parametrize("then", ["under way", "over"])
@repeated
def test_a_follower_held_up_before_its_wait_gets_the_answer_of_its_own_flight(
    turn: int, then: str, redis_server: Valkey, proxy: Proxy
) -> None:
    """D36 and D50: its flight ends, and the next one begins, before it can begin to wait."""
    with fliers(1, redis_server.url()) as (leader,), fliers(1, proxy.url()) as (follower,):
        leader.call()
        leader.wait_for("executing")
        trap = proxy.trap(b"XREAD", at="request", then="hold")
        follower.call()
        trap.wait()
        follower.signal(signal.SIGSTOP)
        leader.open_gate()
        (first,) = leader.answers()
        leader.close_gate()
        leader.call()
        leader.wait_for("executing", 2)
        if then == "over":
            leader.open_gate()
            leader.answers(2)
        follower.signal(signal.SIGCONT)
        trap.release()
        assert follower.answers() == [first]
        leader.open_gate()
        assert leader.answers(2)[1] != first


@pytest.mark.parametrize("agent", ["stays", "leaves"])
@repeated
def test_who_comes_after_the_leaders_return_does_not_get_its_answer(
    turn: int, agent: str, redis_server: Valkey, proxy: Proxy
) -> None:
    """It boards a flight whose agent in this process hasn't heard of the end yet."""
    with fliers(1, redis_server.url()) as (leader,), fliers(1, proxy.url()) as (other,):
        leader.call()
        leader.wait_for("executing")
        trap = proxy.trap(b"XREAD", then="hold")
        other.call(how="task")
        until(lambda: proxy.count(b"XREAD"), "the agent to wait")
        leader.open_gate()
        (old,) = leader.answers()
        other.call("instant")
        until(lambda: other.state()["passengers"] == 1, "the newcomer to board")
        if agent == "leaves":
            other.cancel()
        else:
            trap.release()
        answers = set(other.answers(2))
        new = other.of("executing")[0].value
        assert answers == {"CancelledError" if agent == "leaves" else old, new}
        assert other.count("executing") == 1


# The leader dies


@as_both
@repeated
def test_a_leader_that_is_killed_at_work_is_taken_over_once(
    turn: int, how: str, redis_server: Valkey
) -> None:
    with redis_server.client() as client, fliers(4, redis_server.url(), ttl=TTL) as crew:
        leader = follow(crew, client, how=how)
        for flier in crew[1:]:
            flier.call("20", count=5, how=how)
            flier.open_gate()
        leader.kill()
        killed = now()
        answers = [answer for flier in crew[1:] for answer in flier.answers(6)]
        runs = executions(crew)
        assert len(runs) == 2
        assert runs[1].at - killed < TTL + SOON
        assert answers == [runs[1].value] * 18
        assert [flier.state()["flights"] for flier in crew[1:]] == [0] * 3


@pytest.mark.parametrize(
    ("script", "at", "runs"),
    [(JOIN, "reply", 1), (PUBLISH, "request", 2), (PUBLISH, "reply", 1)],
    ids=["before the work", "between work and publish", "after the publish"],
)
@repeated
def test_a_leader_that_is_killed_around_its_work(
    turn: int, script: Any, at: Any, runs: int, redis_server: Valkey, proxy: Proxy
) -> None:
    """Exactly one successor does the work, or gets its outcome if it was published."""
    with (
        redis_server.client() as client,
        fliers(1, proxy.url(), ttl=TTL) as (leader,),
        fliers(3, redis_server.url(), ttl=TTL) as crew,
    ):
        warm([leader, *crew])
        trap = proxy.trap(script.sha, at=at, then="hold")
        leader.call()
        if script is JOIN:
            trap.wait()
        else:
            leader.wait_for("executing")
        for flier in crew:
            flier.call("instant")
        waiting(client, 3)
        leader.open_gate()
        trap.wait()
        leader.kill()
        answers = [answer for flier in crew for answer in flier.answers()]
        every = executions([leader, *crew])
        assert len(every) == runs
        assert answers == [every[-1].value] * 3


@repeated
def test_two_leaders_are_killed_in_a_row_and_a_third_one_succeeds(
    turn: int, redis_server: Valkey
) -> None:
    with redis_server.client() as client, fliers(4, redis_server.url(), ttl=TTL) as crew:
        follow(crew, client)
        left = list(crew)
        for _ in range(2):
            (leader,) = (flier for flier in left if flier.count("executing"))
            leader.kill()
            left.remove(leader)
            until(lambda: sum(map(len, [f.of("executing") for f in left])), "the next leader")
        for flier in left:
            flier.open_gate()
        answers = [answer for flier in left for answer in flier.answers()]
        runs = executions(crew)
        assert len(runs) == 3
        assert answers == [runs[-1].value] * 2
        assert sum("flight_taken_over" in [e.value for e in f.of("event")] for f in crew) == 2


@repeated
def test_work_that_kills_every_leader_is_given_up(turn: int, redis_server: Valkey) -> None:
    """D37: two takeovers, then a definite error; nobody waits for longer than its bound."""
    ttl = 0.3
    with redis_server.client() as client, fliers(6, redis_server.url(), ttl=ttl) as crew:
        leader = follow(crew, client)
        for flier in crew[1:]:
            flier.call("die", count=3)
        # Those that follow already would wait at the gate.
        for flier in crew[1:]:
            all_board(flier, 3)
        begin = now()
        leader.kill()
        seen = set[int]()
        while len(seen) < 2:
            runs = [run.pid for run in executions(crew[1:]) if run.pid not in seen]
            for flier in crew[1:]:
                if flier.process.pid in runs:
                    flier.kill()
                    seen.add(flier.process.pid or 0)
        survivors = [flier for flier in crew[1:] if flier.process.is_alive()]
        assert len(survivors) == 3
        answers = [answer for flier in survivors for answer in flier.answers(4)]
        assert answers == ["LeaderFailedError"] * 12
        assert len(executions(crew)) == 3
        assert now() - begin < 4 * ttl + SOON


@pytest.mark.parametrize("on_lost", ["raise", "return"])
@repeated
def test_a_leader_that_is_stopped_past_its_lease_can_neither_publish_nor_release(
    turn: int, on_lost: str, redis_server: Valkey
) -> None:
    options = {"ttl": TTL, "on_lost": on_lost}
    with redis_server.client() as client, fliers(3, redis_server.url(), **options) as crew:
        zombie = follow(crew, client)
        zombie.signal(signal.SIGSTOP)
        until(lambda: sum(flier.count("executing") for flier in crew[1:]), "a takeover")
        (successor,) = (flier for flier in crew[1:] if flier.count("executing"))
        (follower,) = (flier for flier in crew[1:] if not flier.count("executing"))
        zombie.open_gate()
        zombie.signal(signal.SIGCONT)
        (mine,) = (run.value for run in zombie.of("executing"))
        assert zombie.answers() == ["LeaseLostError" if on_lost == "raise" else mine]
        assert follower.count("answer") == 0
        late = crew[0]
        late.call()
        waiting(client, 2)
        successor.open_gate()
        answers = [*successor.answers(), *follower.answers(), late.answers(2)[1]]
        assert answers == [successor.of("executing")[0].value] * 3
        assert len(executions(crew)) == 2


@pytest.mark.parametrize("kind", ["exit", "interrupt"])
@repeated
def test_when_a_leaders_worker_ends_another_process_takes_over_at_once(
    turn: int, kind: str, redis_server: Valkey, proxy: Proxy
) -> None:
    with (
        redis_server.client() as client,
        fliers(1, proxy.url(), ttl=30) as (leader,),
        fliers(2, redis_server.url(), ttl=30) as crew,
    ):
        trap = proxy.trap(PUBLISH.sha, at="request", then="hold")
        leader.call(kind)
        trap.wait()
        for flier in crew:
            flier.call("instant")
        waiting(client, 2)
        trap.release()
        answers = [answer for flier in crew for answer in flier.answers()]
        assert leader.answers() == [{"exit": "SystemExit", "interrupt": "KeyboardInterrupt"}[kind]]
        assert len(executions([leader, *crew])) == 2
        assert len(set(answers)) == 1


@repeated
def test_the_followers_of_a_leader_that_raised_learn_it_in_every_process(
    turn: int, redis_server: Valkey, proxy: Proxy
) -> None:
    with (
        redis_server.client() as client,
        fliers(1, proxy.url(), ttl=30) as (leader,),
        fliers(2, redis_server.url(), ttl=30) as crew,
    ):
        trap = proxy.trap(PUBLISH.sha, at="request", then="hold")
        leader.call("raise")
        trap.wait()
        for flier in crew:
            flier.call("instant", count=3)
        waiting(client, 2)
        trap.release()
        answers = [answer for flier in crew for answer in flier.answers(3)]
        assert answers == ["LeaderFailedError"] * 6
        assert leader.answers() == ["RuntimeError"]


@pytest.mark.parametrize("store", [None, "cache"])
@pytest.mark.parametrize("retry", [0, 2])
@repeated
def test_when_every_run_fails_the_executions_are_bounded_in_all_processes(
    turn: int, retry: int, store: str | None, redis_url: str
) -> None:
    with fliers(3, redis_url, store, retry=retry) as crew:
        # The first run waits until all the others have joined.
        crew[0].call("gate then raise")
        crew[0].wait_for("executing")
        for flier in crew:
            flier.call("raise", count=8)
        for flier, count in zip(crew, [8, 7, 7], strict=True):
            all_board(flier, count)
        crew[0].open_gate()
        answers = [*crew[0].answers(9), *crew[1].answers(8), *crew[2].answers(8)]
        assert answers.count("RuntimeError") == len(executions(crew)) == retry + 1
        assert answers.count("LeaderFailedError") == 24 - retry


# The wait


@as_both
@repeated
def test_wait_used_up_is_told_in_every_process(turn: int, how: str, redis_server: Valkey) -> None:
    with (
        redis_server.client() as client,
        fliers(1, redis_server.url()) as (leader,),
        fliers(2, redis_server.url(), wait=0.5) as crew,
    ):
        leader.call()
        leader.wait_for("executing")
        begin = now()
        for flier in crew:
            flier.call(count=3, how=how)
        told = [event for flier in crew for event in flier.wait_for("answer", 3)]
        assert {event.value for event in told} == {"FlightTimeoutError"}
        assert all(0.45 < event.at - begin < 0.5 + 2 * SOON for event in told)
        assert blocked(client) == []
        leader.open_gate()
        leader.answers()


# The server


@as_both
@repeated
def test_blocked_connections_that_are_killed_cost_no_answer(
    turn: int, how: str, redis_server: Valkey
) -> None:
    with redis_server.client() as client, fliers(3, redis_server.url()) as crew:
        leader = follow(crew, client, how=how)
        for _ in range(3):
            old = {one["id"] for one in blocked(client)}
            for number in old:
                client.client_kill_filter(_id=number)
            until(
                lambda old=old: len({one["id"] for one in blocked(client)} - old) == 2,
                "both to wait again",
            )
        leader.open_gate()
        assert len({answer for flier in crew for answer in flier.answers()}) == 1
        assert len(executions(crew)) == 1


@repeated
def test_forgotten_scripts_cost_no_answer(turn: int, redis_server: Valkey) -> None:
    with redis_server.client() as client, fliers(3, redis_server.url()) as crew:
        leader = follow(crew, client)
        client.script_flush()
        leader.open_gate()
        assert len({answer for flier in crew for answer in flier.answers()}) == 1
        assert len(executions(crew)) == 1


@repeated
def test_after_a_flush_the_work_is_done_once_more(turn: int, redis_server: Valkey) -> None:
    with redis_server.client() as client, fliers(3, redis_server.url(), ttl=TTL) as crew:
        leader = follow(crew, client)
        client.flushall()
        until(lambda: sum(flier.count("executing") for flier in crew[1:]), "another run")
        # Whoever followed before has to follow once more: it is woken by the end of its own wait.
        until(lambda: client.hget("singleflight:{fliers:k}:flight", "till"), "a follower")
        for flier in crew:
            flier.open_gate()
        answers = [answer for flier in crew[1:] for answer in flier.answers()]
        assert leader.answers() == ["LeaseLostError"]
        runs = executions(crew)
        assert len(runs) == 2
        assert answers == [runs[1].value] * 2


@repeated
def test_a_pause_of_the_server_costs_time_and_no_more(turn: int, redis_server: Valkey) -> None:
    with redis_server.client() as client, fliers(3, redis_server.url()) as crew:
        leader = follow(crew, client)
        client.client_pause(400)
        leader.open_gate()
        assert len({answer for flier in crew for answer in flier.answers()}) == 1
        assert len(executions(crew)) == 1


@pytest.mark.parametrize("policy", ["proceed", "reject"])
@pytest.mark.parametrize("fault", ["hang", "kill"])
@repeated
def test_a_server_that_goes_away_holds_nobody_up(
    turn: int, fault: str, policy: str, redis_server: Valkey
) -> None:
    """Guarantee 24: each caller has an answer within a few of the socket's timeouts."""
    options: dict[str, Any] = {"on_store_error": policy, "socket_timeout": SOCKET_TIMEOUT}
    with redis_server.client() as client, fliers(3, redis_server.url(), **options) as crew:
        leader = follow(crew, client)
        if fault == "hang":
            redis_server.signal(signal.SIGSTOP)
        else:
            redis_server.kill()
        for flier in crew:
            flier.open_gate()
        for flier in crew[1:]:
            flier.call("instant", count=2)
        answers = [
            answer for flier in crew[1:] for answer in flier.answers(3, within=8 * SOCKET_TIMEOUT)
        ]
        run = leader.of("executing")[0].value
        assert leader.answers() in ([run], ["LeaseLostError"])
        if policy == "reject":
            assert set(answers) <= {"StoreUnavailableError", run}
        else:
            assert all(answer == run or "-" in answer for answer in answers)
        if fault == "hang":
            redis_server.signal(signal.SIGCONT)


@repeated
def test_a_restart_of_the_server_in_mid_flight_hangs_nobody(
    turn: int, redis_server: Valkey
) -> None:
    with redis_server.client() as client, fliers(3, redis_server.url(), ttl=TTL) as crew:
        leader = follow(crew, client)
        redis_server.restart()
        for flier in crew:
            flier.open_gate()
        answers = [answer for flier in crew[1:] for answer in flier.answers()]
        leader.answers()
        runs = executions(crew)
        assert 1 <= len(runs) <= 3
        assert set(answers) <= {run.value for run in runs}
        for flier in crew:
            flier.call("instant", key="after")
        after = [flier.answers(2)[1] for flier in crew]
        assert all("-" in answer for answer in after)


# Lost replies


@pytest.mark.parametrize("script", [JOIN, PUBLISH], ids=["join", "publish"])
@as_both
@repeated
def test_a_reply_that_is_lost_costs_neither_a_run_nor_an_answer(
    turn: int, how: str, script: Any, redis_server: Valkey, proxy: Proxy
) -> None:
    with (
        redis_server.client() as client,
        fliers(1, proxy.url()) as (leader,),
        fliers(2, redis_server.url()) as crew,
    ):
        warm([leader, *crew])
        trap = proxy.trap(script.sha)
        follow([leader, *crew], client, how=how)
        leader.open_gate()
        answers = [answer for flier in [leader, *crew] for answer in flier.answers()]
        assert trap.sprung
        (run,) = executions([leader, *crew])
        assert answers == [run.value] * 3


@as_both
@repeated
def test_a_join_whose_reply_never_comes_leaves_no_orphan(
    turn: int, how: str, redis_server: Valkey, proxy: Proxy
) -> None:
    """D35: the leader-to-be gives up, and nobody is refused for the whole of its ttl."""
    hasty = {"socket_timeout": SOCKET_TIMEOUT, "on_store_error": "reject"}
    with (
        fliers(1, proxy.url(), ttl=60, **hasty) as (lost,),
        fliers(1, redis_server.url(), wait=10, ttl=60) as (other,),
    ):
        warm([lost, other])
        trap = proxy.trap(JOIN.sha, then="hold")
        lost.call(how=how)
        assert lost.answers() == ["StoreUnavailableError"]
        trap.release()
        other.call("instant")
        assert other.answers() == [other.of("executing")[0].value]


# Cancelled tasks


@repeated
def test_an_agent_that_is_cancelled_costs_the_others_nothing(
    turn: int, redis_server: Valkey
) -> None:
    with redis_server.client() as client, fliers(2, redis_server.url()) as crew:
        leader, other = crew
        leader.call()
        leader.wait_for("executing")
        other.call(how="task", count=3)
        until(lambda: other.state()["passengers"] == 2, "passengers")
        other.call(count=3)
        until(lambda: other.state()["passengers"] == 5, "passengers")
        other.cancel()
        assert other.answers(3) == ["CancelledError"] * 3
        waiting(client, 1)
        leader.open_gate()
        assert other.answers(6)[3:] == leader.answers() * 3
        assert len(executions(crew)) == 1


@repeated
def test_a_leader_that_is_cancelled_goes_on_for_its_followers(
    turn: int, redis_server: Valkey
) -> None:
    with redis_server.client() as client, fliers(2, redis_server.url()) as crew:
        leader = follow(crew, client, how="task")
        leader.cancel()
        assert leader.answers() == ["CancelledError"]
        leader.open_gate()
        (run,) = executions(crew)
        assert crew[1].answers() == [run.value]
        assert len(executions(crew)) == 1


@repeated
def test_a_leader_that_is_cancelled_alone_is_followed_after_its_lease(
    turn: int, redis_server: Valkey
) -> None:
    """Its thread may still be at work: the key isn't free at once."""
    with fliers(2, redis_server.url(), ttl=0.5) as (leader, other):
        leader.call(how="task")
        leader.wait_for("executing")
        leader.cancel()
        leader.answers()
        cancelled = now()
        other.call("instant")
        (run,) = (event.value for event in other.wait_for("executing"))
        assert other.of("executing")[0].at - cancelled < 0.5 + SOON
        assert other.answers() == [run]
        leader.open_gate()
