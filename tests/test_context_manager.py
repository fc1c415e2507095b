"""``with semaphore_lock(...)`` and ``async with``: tasks, commands, webhooks, service functions."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from singleflight_django import LeaseConflictError, semaphore_lock
from singleflight_django.exceptions import (
    LeaseLostError,
    NestedFlightError,
    StoreUnavailableError,
)
from tests.meeting import PATIENCE, Room, held, listening, meet, someone_waits, together
from tests.proxy import Proxy
from tests.servers import until


class TestRaisingForm:
    def test_it_holds_the_key_for_the_block_only(self) -> None:
        with semaphore_lock("import:7", ttl=30) as lease:
            assert held("import:7")
            assert lease.acquired
            assert lease.status == "locked"
            assert bool(lease)
        assert not held("import:7")

    async def test_it_holds_the_key_for_the_async_block_only(self) -> None:
        async with semaphore_lock("import:7", ttl=30) as lease:
            assert await asyncio.to_thread(held, "import:7")
            assert lease.acquired
        assert not await asyncio.to_thread(held, "import:7")

    def test_a_second_caller_gets_an_error_that_tells_how_long(self) -> None:
        room = Room()

        def first() -> None:
            with semaphore_lock("import:7", ttl=30):
                room.stay()

        def second() -> LeaseConflictError:
            with pytest.raises(LeaseConflictError) as raised, semaphore_lock("import:7"):
                room.stay()
            return raised.value

        _, conflict = meet(room, first, second)
        assert room.visits == 1
        assert conflict.key == "semaphore_lock:import:7"
        assert 25 < conflict.retry_after <= 30

    async def test_a_second_async_caller_gets_an_error(self) -> None:
        inside, leave = asyncio.Event(), asyncio.Event()

        async def first() -> None:
            async with semaphore_lock("import:7"):
                inside.set()
                await leave.wait()

        running = asyncio.create_task(first())
        await asyncio.wait_for(inside.wait(), PATIENCE)
        with pytest.raises(LeaseConflictError):
            async with semaphore_lock("import:7"):
                pytest.fail("two inside")
        leave.set()
        await running

    def test_wait_used_up_is_a_conflict_too(self) -> None:
        room = Room()

        def first() -> None:
            with semaphore_lock("import:7"):
                room.stay()

        def second() -> None:
            with pytest.raises(LeaseConflictError), semaphore_lock("import:7", wait=0.05):
                room.stay()

        meet(room, first, second)
        assert room.visits == 1

    async def test_wait_wakes_up_at_the_release(self) -> None:
        order: list[str] = []
        inside, leave = asyncio.Event(), asyncio.Event()

        async def first() -> None:
            async with semaphore_lock("import:7"):
                inside.set()
                await leave.wait()
                order.append("first")

        async def second() -> None:
            await inside.wait()
            async with semaphore_lock("import:7", wait=PATIENCE):
                order.append("second")

        running = [asyncio.create_task(first()), asyncio.create_task(second())]
        await asyncio.to_thread(someone_waits)
        leave.set()
        await asyncio.wait_for(asyncio.gather(*running), PATIENCE)
        assert order == ["first", "second"]

    def test_limit_counts_holders(self) -> None:
        rooms = [Room(), Room()]
        lock = semaphore_lock("import:7", limit=2)

        def hold(room: Room) -> None:
            with lock:
                room.stay()

        def third() -> None:
            with pytest.raises(LeaseConflictError), lock:
                pytest.fail("three inside")

        second = lambda: meet(rooms[1], lambda: hold(rooms[1]), third)  # noqa: E731
        meet(rooms[0], lambda: hold(rooms[0]), second)
        with lock:
            pass

    def test_several_keys_are_taken_sorted_and_once(self) -> None:
        with semaphore_lock(["b", "a", "b"]) as lease:
            assert lease.keys == ("semaphore_lock:a", "semaphore_lock:b")
            assert list(lease.fences) == ["semaphore_lock:a", "semaphore_lock:b"]
            assert held("a")
            assert held("b")
        assert not held("a")
        assert not held("b")

    def test_of_several_keys_none_stays_behind_when_one_is_held(self) -> None:
        with semaphore_lock("b"):
            (free,) = together(_a_and_b_conflict)
        assert free

    def test_a_namespace_keeps_keys_apart(self) -> None:
        with semaphore_lock("7", namespace="import"), semaphore_lock("7", namespace="export"):
            assert held("7", "import")
            assert held("7", "export")
            assert not held("7")

    def test_on_a_cache_of_one_process(self) -> None:
        with semaphore_lock("import:7", cache="locmem") as lease:
            assert lease.fence is None
            assert held("import:7", cache="locmem")
        assert not held("import:7", cache="locmem")


def _a_and_b_conflict() -> bool:
    with pytest.raises(LeaseConflictError) as raised, semaphore_lock(["a", "b"]):
        pass
    assert raised.value.key == "semaphore_lock:b"
    return not held("a")


class TestStatusForm:
    def test_whoever_comes_second_is_told(self) -> None:
        with semaphore_lock("import:7", on_conflict="yield") as lease:
            assert lease.status == "locked"
            ((skipped, left),) = together(self._second)
        assert (skipped.acquired, bool(skipped), skipped.status) == (False, False, "skipped")
        assert left
        assert not held("import:7")

    @staticmethod
    def _second() -> tuple[Any, bool]:
        with semaphore_lock("import:7", on_conflict="yield") as lease:
            with pytest.raises(LeaseConflictError):
                _ = lease.fence
            with pytest.raises(LeaseConflictError):
                lease.check()
            with pytest.raises(LeaseConflictError):
                lease.extend(60)
        return lease, held("import:7")

    async def test_whoever_comes_second_is_told_in_async_code(self) -> None:
        async def second() -> Any:
            async with semaphore_lock("import:7", on_conflict="yield") as lease:
                with pytest.raises(LeaseConflictError):
                    await lease.aextend(60)
                return lease

        async with semaphore_lock("import:7", on_conflict="yield") as lease:
            assert lease.acquired
            skipped = await asyncio.create_task(second(), context=contextvars.Context())
            assert await asyncio.to_thread(held, "import:7")
        assert not skipped.acquired
        assert not await asyncio.to_thread(held, "import:7")

    def test_a_store_that_is_away_is_no_conflict(self) -> None:
        lock = semaphore_lock("import:7", on_conflict="yield", cache="dead_ignoring")
        with pytest.raises(StoreUnavailableError), lock:
            pytest.fail("inside without a lease")


class TestMisuse:
    @pytest.mark.parametrize("on_conflict", ["skip", lambda request, conflict: None])
    def test_answers_belong_to_views(self, on_conflict: Any) -> None:
        lock = semaphore_lock("import:7", on_conflict=on_conflict)
        with pytest.raises(ValueError, match="no response to answer with"), lock:
            pytest.fail("inside")

    @pytest.mark.parametrize("on_conflict", ["skip", lambda request, conflict: None])
    async def test_answers_belong_to_views_in_async_code_too(self, on_conflict: Any) -> None:
        with pytest.raises(ValueError, match="no response to answer with"):
            async with semaphore_lock("import:7", on_conflict=on_conflict):
                pytest.fail("inside")

    @pytest.mark.parametrize("key", ["import:<pk>", lambda request: "import", ["a", "b:<pk>"]])
    def test_a_key_that_needs_a_request(self, key: Any) -> None:
        with pytest.raises(ValueError, match="needs a request"), semaphore_lock(key):
            pytest.fail("inside")

    @pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
    def test_an_extension_by_nothing(self, seconds: float) -> None:
        with semaphore_lock("import:7") as lease, pytest.raises(ValueError, match="positive"):
            lease.extend(seconds)


class TestTheLease:
    def test_one_key_has_one_fence_and_several_have_one_each(self) -> None:
        with semaphore_lock("a") as lease:
            assert isinstance(lease.fence, int)
        with semaphore_lock(["a", "b"]) as lease:
            with pytest.raises(ValueError, match=r"lease\.fences"):
                _ = lease.fence
            assert all(isinstance(fence, int) for fence in lease.fences.values())

    def test_extend_moves_the_end(self, redis_client: Any) -> None:
        with semaphore_lock("import:7", ttl=5) as lease:
            lease.extend(60)
            assert redis_client.pttl("singleflight:{semaphore_lock:import:7}:lease") > 30_000
            lease.check()

    async def test_aextend_moves_the_end(self, redis_client: Any) -> None:
        async with semaphore_lock("import:7", ttl=5) as lease:
            await lease.aextend(60)
            assert redis_client.pttl("singleflight:{semaphore_lock:import:7}:lease") > 30_000

    def test_a_lost_lease_shows_when_it_is_extended(self, redis_client: Any) -> None:
        with listening("lease_lost") as told, semaphore_lock("import:7") as lease:
            redis_client.flushdb()
            with pytest.raises(LeaseLostError):
                lease.extend(60)
            assert lease.lost
            with pytest.raises(LeaseLostError):
                lease.check()
        assert len(told) == 1

    async def test_a_lost_lease_shows_when_it_is_extended_in_async_code(
        self, redis_client: Any
    ) -> None:
        async with semaphore_lock("import:7") as lease:
            redis_client.flushdb()
            with pytest.raises(LeaseLostError):
                await lease.aextend(60)

    def test_an_ended_lease_is_known_without_asking(self) -> None:
        with semaphore_lock("import:7", ttl=0.01, renew=False) as lease:
            until(lambda: lease.lost, "the lease has ended", PATIENCE)
            with pytest.raises(LeaseLostError):
                lease.check()

    def test_after_the_block_it_is_held_no_more(self) -> None:
        with semaphore_lock("import:7") as lease:
            pass
        assert not lease.held
        with pytest.raises(LeaseLostError):
            lease.check()


class TestNesting:
    @pytest.mark.parametrize("wait", [0, PATIENCE])
    def test_the_same_key_inside_is_an_error_at_once(self, wait: float) -> None:
        with semaphore_lock("import:7"):
            with pytest.raises(NestedFlightError), semaphore_lock(["a", "import:7"], wait=wait):
                pytest.fail("inside twice")
            assert held("import:7")
            assert not held("a")

    async def test_the_same_key_inside_async_code(self) -> None:
        async with semaphore_lock("import:7"):
            with pytest.raises(NestedFlightError):
                async with semaphore_lock("import:7", wait=PATIENCE):
                    pytest.fail("inside twice")

    def test_the_status_form_does_not_hide_it(self) -> None:
        with (
            semaphore_lock("import:7"),
            pytest.raises(NestedFlightError),
            semaphore_lock("import:7", on_conflict="yield"),
        ):
            pytest.fail("inside twice")

    async def test_a_task_started_inside_is_nested(self) -> None:
        async def child() -> None:
            async with semaphore_lock("import:7"):
                pytest.fail("inside twice")

        async with semaphore_lock("import:7"):
            with pytest.raises(NestedFlightError):
                await asyncio.create_task(child())

    async def test_a_thread_of_sync_to_async_inside_is_nested(self) -> None:
        def child() -> None:
            with semaphore_lock("import:7"):
                pytest.fail("inside twice")

        async with semaphore_lock("import:7"):
            with pytest.raises(NestedFlightError):
                await sync_to_async(child)()

    async def test_a_task_started_before_is_not_nested(self) -> None:
        begin = asyncio.Event()

        async def background() -> None:
            await begin.wait()
            async with semaphore_lock("import:7"):
                pytest.fail("two inside")

        task = asyncio.create_task(background())
        async with semaphore_lock("import:7"):
            begin.set()
            with pytest.raises(LeaseConflictError):
                await task

    async def test_a_task_started_inside_is_free_once_the_lease_is(self) -> None:
        begin = asyncio.Event()

        async def background() -> str:
            await begin.wait()
            async with semaphore_lock("import:7"):
                return "inside"

        async with semaphore_lock("import:7"):
            task = asyncio.create_task(background())
        begin.set()
        assert await task == "inside"

    def test_a_plain_thread_inside_is_a_conflict(self) -> None:
        with semaphore_lock("import:7"), ThreadPoolExecutor(1) as pool:

            def other() -> None:
                with semaphore_lock("import:7"):
                    pytest.fail("two inside")

            with pytest.raises(LeaseConflictError):
                pool.submit(other).result(PATIENCE)

    def test_one_after_the_other_is_fine(self) -> None:
        for _ in range(3):
            with semaphore_lock("import:7"):
                pass


class TestOneObjectForMany:
    """Each `with` has its own state, whoever else uses the same object."""

    def test_threads(self) -> None:
        lock = semaphore_lock("import:7", wait=PATIENCE)
        inside, most = [], []

        def work() -> None:
            for _ in range(20):
                with lock as lease:
                    inside.append(lease)
                    most.append(len(inside))
                    lease.check()
                    inside.remove(lease)

        together(*[work] * 6)
        assert max(most) == 1
        assert len(most) == 120
        assert lock._entered == []
        assert not held("import:7")

    async def test_tasks(self) -> None:
        lock = semaphore_lock("import:7", wait=PATIENCE)
        inside, most = [], []

        async def work() -> None:
            for _ in range(20):
                async with lock as lease:
                    inside.append(lease)
                    most.append(len(inside))
                    await asyncio.sleep(0)
                    lease.check()
                    inside.remove(lease)

        await asyncio.wait_for(asyncio.gather(*[work() for _ in range(6)]), PATIENCE * 3)
        assert max(most) == 1
        assert len(most) == 120
        assert lock._entered == []

    def test_threads_of_which_some_are_skipped(self) -> None:
        lock = semaphore_lock("import:7", on_conflict="yield")
        inside, most = [], []

        def work() -> int:
            skipped = 0
            for _ in range(50):
                with lock as lease:
                    if lease.acquired:
                        inside.append(lease)
                        most.append(len(inside))
                        inside.remove(lease)
                    else:
                        skipped += 1
            return skipped

        together(*[work] * 4)
        assert max(most) == 1
        assert not held("import:7")

    def test_holders_leave_in_any_order(self) -> None:
        lock = semaphore_lock("import:7", limit=3)
        first, second = self._holding(lock), self._holding(lock)
        one, two = contextvars.copy_context(), contextvars.copy_context()
        lease_1, lease_2 = one.run(next, first), two.run(next, second)
        one.run(first.close)
        assert not lease_1.held
        assert lease_2.held
        two.run(second.close)
        assert not lease_2.held

    def test_a_generator_that_is_closed_in_another_context_gives_back_its_own(self) -> None:
        lock = semaphore_lock("import:7", limit=3)
        generators = [self._holding(lock) for _ in range(3)]
        leases = [contextvars.copy_context().run(next, generator) for generator in generators]
        generators[1].close()
        assert [lease.held for lease in leases] == [True, False, True]
        generators[2].close()
        generators[0].close()
        assert [lease.held for lease in leases] == [False, False, False]

    def test_a_generator_that_nobody_closes_gives_back_its_own(self) -> None:
        lock = semaphore_lock("import:7", limit=2)
        kept, dropped = self._holding(lock), self._holding(lock)
        lease_1 = contextvars.copy_context().run(next, kept)
        lease_2 = contextvars.copy_context().run(next, dropped)
        del dropped
        gc.collect()
        assert lease_1.held
        assert not lease_2.held
        kept.close()

    @staticmethod
    def _holding(lock: semaphore_lock) -> Iterator[Any]:
        with lock as lease:
            yield lease

    async def test_async_generators_that_are_closed_by_another_task(self) -> None:
        lock = semaphore_lock("import:7", limit=3)

        async def holding() -> AsyncIterator[Any]:
            async with lock as lease:
                yield lease

        generators: list[Any] = [holding() for _ in range(3)]
        leases = [
            await asyncio.create_task(anext(generator), context=contextvars.Context())
            for generator in generators
        ]
        await generators[1].aclose()
        await asyncio.to_thread(until, lambda: not leases[1].held, "given back", PATIENCE)
        assert [lease.held for lease in leases] == [True, False, True]
        await generators[0].aclose()
        await generators[2].aclose()
        await asyncio.to_thread(until, lambda: not held("import:7"), "free", PATIENCE)

    def test_an_exit_stack(self) -> None:
        lock = semaphore_lock("import:7", limit=2)

        def work() -> Any:
            with ExitStack() as stack:
                lease = stack.enter_context(lock)
                lease.check()
                meeting.wait()
                stack.close()
                assert not lease.held
                meeting.wait()
                return lease

        meeting = threading.Barrier(2, timeout=PATIENCE)
        together(work, work)
        assert lock._entered == []

    async def test_an_async_exit_stack(self) -> None:
        lock = semaphore_lock("import:7")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(lock)
            assert await asyncio.to_thread(held, "import:7")
        assert not await asyncio.to_thread(held, "import:7")


class TestExits:
    @pytest.mark.parametrize(
        "kind",
        [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError],
    )
    def test_every_exception_frees_the_key_and_goes_on(self, kind: type[BaseException]) -> None:
        error = kind("as it was")
        with pytest.raises(kind) as raised, semaphore_lock("import:7"):
            raise error
        assert raised.value is error
        assert not held("import:7")

    @pytest.mark.parametrize(
        "kind",
        [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError],
    )
    def test_every_exception_frees_the_key_in_async_code(self, kind: type[BaseException]) -> None:
        error = kind("as it was")

        async def work() -> None:
            async with semaphore_lock("import:7"):
                raise error

        with pytest.raises(kind):
            asyncio.run(work())
        until(lambda: not held("import:7"), "free", PATIENCE)

    def test_return_and_break(self) -> None:
        def early() -> str:
            with semaphore_lock("import:7"):
                return "early"

        assert early() == "early"
        for _ in range(1):
            with semaphore_lock("import:7"):
                break
        assert not held("import:7")

    def test_a_lost_lease_hides_no_exception(self, redis_client: Any) -> None:
        error = ValueError("mine")
        with pytest.raises(ValueError, match="mine") as raised, semaphore_lock("import:7"):
            _raise_after(redis_client.flushdb, error)
        assert raised.value is error
        assert raised.value.__context__ is None

    def test_a_store_that_goes_away_inside_hides_nothing(self, proxy: Proxy, cache_at: Any) -> None:
        error = ValueError("mine")
        with (
            pytest.raises(ValueError, match="mine") as raised,
            semaphore_lock("import:7", cache=cache_at(proxy.url()), ttl=5),
        ):
            _raise_after(proxy.refuse, error)
        assert raised.value is error


def _raise_after(action: Callable[[], Any], error: Exception) -> None:
    action()
    raise error


class TestCancellation:
    async def test_a_cancelled_holder_does_not_free_the_key_while_its_thread_runs(self) -> None:
        """The task leaves at once, its ORM call doesn't: the lease lapses after ttl."""
        room, done = Room(), threading.Event()

        def write() -> None:
            room.stay()
            done.set()

        async def work() -> None:
            async with semaphore_lock("import:7", ttl=1.5):
                await sync_to_async(write, thread_sensitive=False)()

        task = asyncio.create_task(work())
        await room.await_()
        with listening("lease_released") as told:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(held, "import:7")
            assert not done.is_set()
        assert [facts.reason for _, facts in told] == ["cancelled: it lapses"]
        room.door.set()
        await asyncio.to_thread(until, lambda: not held("import:7"), "lapsed", PATIENCE)

    async def test_a_cancelled_acquire_leaves_no_orphan(self, proxy: Proxy, cache_at: Any) -> None:
        """The client goes while its SET is under way, which the server carries out (D29)."""
        alias = cache_at(proxy.url())
        async with semaphore_lock("warm", cache=alias):
            pass
        trap = proxy.trap(b"EVALSHA", then="hold")

        async def work() -> None:
            async with semaphore_lock("import:7", cache=alias, ttl=60):
                pytest.fail("inside after all")

        task = asyncio.create_task(work())
        await asyncio.to_thread(trap.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        trap.release()
        free = lambda: not held("import:7", cache=alias)  # noqa: E731
        await asyncio.to_thread(until, free, "free", PATIENCE)

    @pytest.mark.parametrize("times", [1, 2])
    async def test_a_cancelled_release_is_carried_through(
        self, proxy: Proxy, cache_at: Any, times: int
    ) -> None:
        """(D30)"""
        alias, inside, leave = cache_at(proxy.url()), asyncio.Event(), asyncio.Event()

        async def work() -> None:
            async with semaphore_lock("import:7", cache=alias, ttl=60):
                inside.set()
                await leave.wait()

        task = asyncio.create_task(work())
        await asyncio.wait_for(inside.wait(), PATIENCE)
        trap = proxy.trap(b"EVALSHA", at="request", then="hold")
        leave.set()
        await asyncio.to_thread(trap.wait)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        trap.release()
        free = lambda: not held("import:7", cache=alias)  # noqa: E731
        await asyncio.to_thread(until, free, "free", PATIENCE)

    async def test_a_cancelled_waiter_tells_of_no_loss(self) -> None:
        async def waiter() -> None:
            async with semaphore_lock("import:7", wait=PATIENCE):
                pytest.fail("two inside")

        with listening("lease_lost", "lease_acquired", "lease_released") as told:
            async with semaphore_lock("import:7"):
                task = asyncio.create_task(waiter(), context=contextvars.Context())
                await asyncio.to_thread(someone_waits)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert await asyncio.to_thread(held, "import:7")
        assert [name for name, _ in told] == ["lease_acquired", "lease_released"]

    async def test_a_timeout_around_it_lets_it_lapse(self) -> None:
        room = Room()

        async def work() -> None:
            async with asyncio.timeout(None) as limit, semaphore_lock("import:7", ttl=1.5):
                limit.reschedule(asyncio.get_running_loop().time())
                await room.astay()

        with pytest.raises(TimeoutError):
            await work()
        assert await asyncio.to_thread(held, "import:7")
        room.door.set()
        await asyncio.to_thread(until, lambda: not held("import:7"), "lapsed", PATIENCE)


class TestStoreAway:
    @pytest.mark.parametrize("cache", ["dead", "dead_core", "dead_ignoring"])
    def test_reject_raises(self, cache: str) -> None:
        with pytest.raises(StoreUnavailableError), semaphore_lock("import:7", cache=cache):
            pytest.fail("inside without a lease")

    @pytest.mark.parametrize("cache", ["dead", "dead_core", "dead_ignoring"])
    async def test_reject_raises_in_async_code(self, cache: str) -> None:
        with pytest.raises(StoreUnavailableError):
            async with semaphore_lock("import:7", cache=cache):
                pytest.fail("inside without a lease")

    @pytest.mark.parametrize("cache", ["dead", "dead_core", "dead_ignoring"])
    def test_proceed_enters_and_tells(self, cache: str) -> None:
        lock = semaphore_lock(["a", "b"], cache=cache, on_store_error="proceed")
        with listening("unprotected_run") as told, lock as lease:
            lease.check()
            assert lease.fences == {"semaphore_lock:a": None, "semaphore_lock:b": None}
        assert len(told) == 1

    @pytest.mark.parametrize("cache", ["dead", "dead_core", "dead_ignoring"])
    async def test_proceed_enters_and_tells_in_async_code(self, cache: str) -> None:
        lock = semaphore_lock("a", cache=cache, on_store_error="proceed")
        with listening("unprotected_run") as told:
            async with lock as lease:
                lease.check()
        assert len(told) == 1


class TestSwitchedOff:
    def test_it_enters_without_asking(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_ENABLED = False
        with semaphore_lock(["a", "b"], cache="dead") as lease:
            lease.check()
            assert set(lease.fences) == {"semaphore_lock:a", "semaphore_lock:b"}

    async def test_it_enters_without_asking_in_async_code(self, settings: Any) -> None:
        settings.SINGLEFLIGHT_ENABLED = False
        async with semaphore_lock("a", cache="dead") as lease:
            await lease.aextend(5)

    @pytest.mark.parametrize("how", ["option", "setting"])
    def test_observing_it_enters_beside_the_holder(self, how: str, settings: Any) -> None:
        settings.SINGLEFLIGHT_ENABLED = "observe" if how == "setting" else True

        def second() -> bool:
            with semaphore_lock("a", observe=how == "option") as lease:
                return lease.acquired

        with semaphore_lock("a"), listening("lease_rejected") as told:
            assert together(second) == [True]
        assert [facts.reason for _, facts in told] == ["observe"]
