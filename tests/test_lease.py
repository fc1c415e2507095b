"""The lease object: what its holder can ask it, and what it says once it has ended."""

from __future__ import annotations

import os

import pytest

from singleflight_django.context import held_here
from singleflight_django.exceptions import (
    LeaseConflictError,
    LeaseLostError,
    NestedFlightError,
    StoreUnavailableError,
)
from singleflight_django.lease import Lease
from singleflight_django.stores.base import Store
from singleflight_django.stores.registry import get_store
from tests.engine import Ear, agive_back, give_back, lease_on, take
from tests.engine import fresh_context as fresh_context


@pytest.fixture
def store() -> Store:
    return get_store("default")


def test_a_lease_that_was_got_says_so(store: Store) -> None:
    lease = take(lease_on(store, "k"))
    assert lease
    assert (lease.acquired, lease.held, lease.lost, lease.status) == (True, True, False, "locked")
    assert lease.key == "k"
    assert lease.fence == lease.fences["k"]
    lease.check()
    assert repr(lease) == "<Lease k locked>"
    give_back(lease)
    assert (lease.acquired, lease.held, lease.lost) == (True, False, False)


def test_a_lease_that_was_not_got_is_skipped_and_refuses_to_be_used(store: Store) -> None:
    holder, late = take(lease_on(store, "k")), lease_on(store, "k")
    # Another context: this one holds the key.
    with pytest.raises(NestedFlightError):
        take(late)
    assert not late
    assert (late.acquired, late.held, late.lost, late.status) == (False, False, False, "skipped")
    for use in (lambda: late.fence, late.check, lambda: late.extend(5)):
        with pytest.raises(LeaseConflictError, match=r"lease\.acquired"):
            use()
    give_back(holder)


def test_a_lease_of_several_keys_has_a_fence_for_each(store: Store) -> None:
    lease = take(lease_on(store, "a", "b"))
    assert lease.key == "a,b"
    assert set(lease.fences) == {"a", "b"}
    with pytest.raises(ValueError, match=r"lease\.fences"):
        _ = lease.fence
    give_back(lease)


def test_a_lease_that_lived_out_its_ttl_is_lost_without_asking_anyone(store: Store) -> None:
    lease = take(lease_on(store, "k", ttl=0.001, max_hold=0))
    while not lease.lost:
        pass
    with pytest.raises(LeaseLostError) as caught:
        lease.check()
    assert caught.value.key == "k"
    assert repr(lease) == "<Lease k locked lost>"
    give_back(lease)


def test_check_after_the_release_is_a_loss_too(store: Store) -> None:
    lease = take(lease_on(store, "k"))
    give_back(lease)
    with pytest.raises(LeaseLostError):
        lease.check()


def test_extend_lets_it_live_for_longer(store: Store) -> None:
    lease = take(lease_on(store, "k", ttl=2.0))
    before = lease.expires
    lease.extend(50)
    assert lease.expires - before > 40
    answer = store.acquire("k", "other", 1.0, 1, 0.0)
    assert answer.remaining > 40  # type: ignore[union-attr]
    give_back(lease)


async def test_aextend_lets_it_live_for_longer(store: Store) -> None:
    lease = take(lease_on(store, "k", ttl=2.0))
    await lease.aextend(50)
    answer = store.acquire("k", "other", 1.0, 1, 0.0)
    assert answer.remaining > 40  # type: ignore[union-attr]
    give_back(lease)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_extend_takes_a_positive_time(store: Store, seconds: float) -> None:
    lease = take(lease_on(store, "k"))
    with pytest.raises(ValueError, match="positive"):
        lease.extend(seconds)
    give_back(lease)


def test_extending_what_someone_else_has_taken_is_a_loss_told_once(store: Store) -> None:
    ear = Ear()
    lease = take(lease_on(store, "k", max_hold=0, emit=ear))
    store.release("k", lease.token)
    store.acquire("k", "successor", 30.0, 1, 0.0)
    for _ in range(2):
        with pytest.raises(LeaseLostError):
            lease.extend(5)
    give_back(lease)
    assert ear.names.count("lease_lost") == 1
    assert store.release("k", "successor") is True


def test_extending_while_the_store_is_away_says_that(store: Store) -> None:
    lease = take(lease_on(store, "k"))
    lease.store = get_store("dead")
    with pytest.raises(StoreUnavailableError):
        lease.extend(5)
    assert not lease.lost
    lease.store = store
    give_back(lease)


async def test_an_unprotected_lease_is_never_lost_and_nobody_knows_of_it() -> None:
    for give in ("sync", "async"):
        ear = Ear()
        lease = Lease.unprotected(("k",), ear)
        assert (lease.acquired, lease.lost, lease.fence) == (True, False, None)
        lease.extend(5)
        await lease.aextend(5)
        if give == "sync":
            give_back(lease)
        else:
            await agive_back(lease)
        assert ear.names == ["lease_released"]


def test_what_is_held_here_is_known_until_it_is_given_back(store: Store) -> None:
    first, second = take(lease_on(store, "a")), take(lease_on(store, "b"))
    assert held_here() == (first, second)
    give_back(first)
    assert held_here() == (second,)
    third = take(lease_on(store, "c"))
    assert held_here() == (second, third)
    for lease in (second, third):
        give_back(lease)
    assert held_here() == ()


def test_owner_tokens_are_secrets_of_their_own(store: Store) -> None:
    tokens = {lease_on(store).token for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(bytes.fromhex(token.partition("@")[0])) == 16 for token in tokens)
    lease = lease_on(store)
    assert lease.token not in repr(lease)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_hold_its_parents_lease(store: Store) -> None:
    lease = take(lease_on(store, "k"))
    child = os.fork()
    if child == 0:
        give_back(lease)
        os._exit(lease.held or held_here() != () or lease.end())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lease.held
    assert store.release("k", lease.token) is True
    lease.end()
