"""Operations that pass by while nothing has to move: the same results, all known once it has to."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import small_programs
from adversary import HERE_BYTES, Adversary
from bypassed import MIB, bypass_of, opened, small, swapper_of
from torch.utils._python_dispatch import TorchDispatchMode

import mempool.torch
from mempool.torch.eager.mode import Swapper
from mempool.torch.offload.host_engine import HostEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chain import Loop

pytestmark = pytest.mark.usefixtures("nothing_is_held")
CPU = torch.device("cpu")

instructions = st.tuples(
    st.integers(0, len(small_programs.INSTRUCTIONS) - 1), st.integers(0, 4), st.integers(0, 19)
)


class Seen(TorchDispatchMode):
    """Counts operations, but not what PyTorch gives to modes past the dispatcher: what backwards saved."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


# --- the same results


def same(program: Any, seed: int, share: float) -> None:
    """Opened and closed at any instruction; whatever is known while it is closed moves at random."""
    choose = random.Random(seed)

    def nothing() -> None:
        pass

    plain = small_programs.seen_of(program, 4, nothing, nothing)
    with (
        mempool.torch.install(device="cpu", mode="record") as pool,
        Adversary(seed, share=share, client=pool.client) as swapper,
    ):
        assert swapper.bypass is not None

        def disturb() -> None:
            assert swapper.bypass is not None
            if swapper.bypass.is_open and choose.random() < 0.2:
                swapper.see_all()
            elif not swapper.bypass.is_open and choose.random() < 0.5:
                swapper.bypass.open()
            swapper.disturb()

        swapped = small_programs.seen_of(program, 4, disturb, swapper.step)
    assert swapped == plain


@example([(which, 1, 3) for which in range(len(small_programs.INSTRUCTIONS))], 0, 0.9)
@example([(which, 0, 2) for which in range(len(small_programs.INSTRUCTIONS))], 1, 0.3)
@given(
    st.lists(instructions, min_size=1, max_size=12),
    st.integers(0, 2**16),
    st.sampled_from([0.1, 0.5, 0.9]),
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_program_sees_the_same_whenever_its_operations_pass_by(
    program: Any, seed: int, share: float
) -> None:
    same(program, seed, share)


@pytest.mark.full
@given(
    st.lists(instructions, min_size=1, max_size=40),
    st.integers(0, 2**16),
    st.sampled_from([0.1, 0.5, 0.9]),
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_long_programs_see_the_same_too(program: Any, seed: int, share: float) -> None:
    same(program, seed, share)


def test_training_is_the_same_and_hardly_an_operation_is_seen() -> None:
    plain = small()
    expected = [plain.step() for _ in range(60)]
    with Seen() as seen:
        plain.step()
    loop = small()
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        losses = [loop.step() for _ in range(50)]
        before = pool.report().values["swapping"]["bypassed"]
        losses += [loop.step() for _ in range(10)]
        passed = pool.report().values["swapping"]["bypassed"] - before
    assert losses == expected
    assert passed >= 10 * seen.count


# --- once something has to move


def summed(source: Any, outs: list[Any]) -> None:
    for out in outs:
        torch.add(source, source, out=out)


def known(pool: Any) -> dict[int, Any]:
    """What is known once operations are seen again: all that lives."""
    swapper = swapper_of(pool)
    swapper.see_all()
    swapper._bury()
    found = dict(swapper.storages.known)
    rooms = sum(held.room for held in found.values())
    assert rooms - swapper.storages.outside_bytes == pool.client.stats()["live"]["current"]
    return found


def test_all_that_lives_is_known_when_operations_are_seen_again() -> None:
    kept: list[Any] = []
    loop = small()
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        opened(pool, loop)
        swapper = swapper_of(pool)
        for i in range(8):
            loop.step()
            kept.append(torch.full((1024,), float(i)))
        assert swapper.storages.find(kept[-1].untyped_storage()) is None
        hidden = (
            loop.net(torch.ones(256, 64)).square().mean()
        )  # whose graph alone has what its backward needs
        found = known(pool)
        last = [found[id(tensor.untyped_storage())].last for tensor in kept]
        assert last == sorted(last)  # in the order of their last use
        assert max(last) < found[id(hidden.untyped_storage())].last
        kept.clear()
        del hidden, found


def test_what_was_known_before_has_its_last_use_and_size_too() -> None:
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        first, second = torch.ones(1000), torch.ones(1000)
        opened(pool, small())
        for _ in range(3):
            second.add_(1)
            first.add_(1)
        first.resize_(2000)
        found = known(pool)
        known_first, known_second = (found[id(one.untyped_storage())] for one in (first, second))
        assert known_second.last < known_first.last == max(held.last for held in found.values())
        assert known_first.size == 8000
        del first, second, found, known_first, known_second


def test_an_iteration_that_was_half_seen_is_none() -> None:
    loop = small()
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        opened(pool, loop)
        swapper = swapper_of(pool)
        before = pool.report().values["swapping"]

        def order() -> int:
            return len(swapper.iterations._patterns._order)

        seen = order()
        half = loop.net(torch.ones(256, 64))
        swapper.see_all()
        half.square().mean().backward()
        loop.optimizer.step()
        after = pool.report().values["swapping"]
        assert order() == seen
        assert bypass_of(pool)._calm == 0
        assert after["iterations"] == before["iterations"] + 1
        assert (after["diverged"], after["plans"]) == (before["diverged"], before["plans"])
        loop.step()
        assert order() == seen + 1
        bypass_of(pool).open()
        swapper.see_all()
        with pool.iteration():  # which is seen from its beginning on
            loop.step()
        assert order() == seen + 2
        del half


def hits(pool: Any, loop: Loop, steps: int) -> float:
    """The part of allocations in batches of many sizes that had their planned place."""
    choose = random.Random(steps)
    before = pool.client.stats()["outcomes"]
    for step in range(steps):
        loop.step(choose.randrange(400, 512))
        if step % 10 == 9:
            pool.plan_now()
    after = pool.client.stats()["outcomes"]
    new = {name: after[name] - before[name] for name in after}
    return float(new["hit"] / sum(new.values()))


def test_the_pool_plans_meanwhile_as_without_a_limit() -> None:
    loop = small()
    with mempool.torch.install(device="cpu", limit="32MiB", background=False) as pool:
        pool.watch(loop.optimizer)
        hits(pool, loop, 60)
        assert hits(pool, loop, 30) > 0.9
        assert bypass_of(pool).is_open
        swapper_of(pool).see_all()
        assert swapper_of(pool)._room.holds_arena
        assert pool.client.pool.stats()["arena_bytes"] > 0


def test_what_autocast_keeps_is_known_too() -> None:
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        opened(pool, small())
        x, weight = torch.ones(4, 32, 32), torch.ones(4, 32, 32, requires_grad=True)
        for enabled in (False, True):  # what passes by without it may not with it
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                for _ in range(4):
                    torch.bmm(x, weight)
                if enabled:
                    known(pool)
        del x, weight


def test_a_batch_that_is_much_larger_is_kept_within_the_limit() -> None:
    sizes = [256] * 30 + [4096] + [256] * 10 + [4096] * 2
    plain = small()
    expected = [plain.step(size) for size in sizes]
    loop = small()
    with mempool.torch.install(device="cpu", limit="8MiB", background=False) as pool:
        losses = [loop.step(size) for size in sizes[:30]]
        assert bypass_of(pool).is_open
        losses.append(loop.step(sizes[30]))
        values = pool.report().values["swapping"]
        assert not bypass_of(pool).is_open
        assert values["evicted"] > 0
        losses += [loop.step(size) for size in sizes[31:]]
        reserved = pool.client.pool.stats()["reserved"]["peak"]
    assert losses == expected
    assert reserved <= 8 * MIB * 1.02


def test_it_opens_again_after_ever_more_iterations() -> None:
    loop = small()
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        opened(pool, loop)
        waits = []
        for _ in range(5):
            swapper_of(pool).see_all()
            loop.step()
            waits.append(0)
            while not bypass_of(pool).is_open:
                loop.step()
                waits[-1] += 1
    assert waits == sorted(waits)
    assert waits[-1] >= 2 * waits[0] > 0


def test_where_little_room_is_left_all_are_seen() -> None:
    loop = small()
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        for _ in range(10):
            loop.step()
        most = pool.report().values["swapping"]["peak_bytes"]
    loop = small()
    with mempool.torch.install(device="cpu", limit=int(1.1 * most), background=False) as pool:
        for _ in range(40):
            loop.step()
        assert pool.report().values["swapping"]["bypassed"] == 0


class TestWhen:
    """Iterations of which it is told how much they needed."""

    @pytest.fixture
    def swapper(self) -> Iterator[Swapper]:
        with (
            mempool.torch.install(device="cpu", mode="record") as pool,
            Swapper(HostEngine(1 << 28), CPU, 8 * MIB, client=pool.client) as swapper,
        ):
            yield swapper

    def opens(self, swapper: Swapper, most: int) -> bool:
        assert swapper.bypass is not None
        for _ in range(4):
            swapper.bypass.look(most)
        return swapper.bypass.is_open

    def test_where_enough_is_left(self, swapper: Swapper) -> None:
        assert not self.opens(swapper, 7 * MIB + 1)
        assert self.opens(swapper, 7 * MIB)

    def test_not_where_something_moved(self, swapper: Swapper) -> None:
        swapper.counts.iteration_out_bytes = 1
        assert not self.opens(swapper, MIB)
        swapper.counts.iteration_out_bytes, swapper.counts.iteration_in_bytes = 0, 1
        assert not self.opens(swapper, MIB)
        swapper.counts.iteration_in_bytes = 0
        assert self.opens(swapper, MIB)

    def test_not_where_what_is_away_would_not_fit(self, swapper: Swapper) -> None:
        x = torch.ones(MIB // 2)
        swapper._governor.clear(set(), 0)
        assert HERE_BYTES(x.untyped_storage()) == 0
        assert not self.opens(swapper, 6 * MIB)
        assert self.opens(swapper, 5 * MIB)
        assert HERE_BYTES(x.untyped_storage()) == 2 * MIB

    def test_not_by_another_thread(self, swapper: Swapper) -> None:
        said: list[bool] = []
        thread = threading.Thread(target=lambda: said.append(self.opens(swapper, MIB)))
        thread.start()
        thread.join()
        assert said == [False]

    def test_not_if_the_next_operation_like_it_has_no_room(self, swapper: Swapper) -> None:
        x = torch.ones(MIB // 4)
        kept = [x + 1]
        assert self.opens(swapper, 2 * MIB)
        while swapper.bypass is not None and swapper.bypass.is_open:
            kept.append(x + 1)
        assert len(kept) == 8 - 1  # and x
        kept += [x + 1 for _ in range(6)]
        assert swapper.storages.here_bytes <= 8 * MIB
        assert all(one.sum().item() == MIB // 2 for one in kept)


class TestOutOfMemory:
    def test_an_operation_that_finds_none_runs_once_everything_has_left(self) -> None:
        loop = small()
        with mempool.torch.install(device="cpu", limit="64MiB", background=False) as pool:
            kept = [torch.full((MIB // 4,), float(i)) for i in range(8)]
            opened(pool, loop)
            source = torch.arange(MIB // 4).float()
            for _ in range(2):
                twice = source + source
            assert bypass_of(pool).is_open
            del twice
            reserved = pool.client.pool.stats()["reserved"]["current"]
            pool.client.pool.set_max_reserved(reserved)
            more = [source + source for _ in range(6)]
            assert not bypass_of(pool).is_open
            pool.client.pool.set_max_reserved(1 << 62)
            assert all(torch.equal(one, 2 * torch.arange(MIB // 4)) for one in more)
            assert [one.mean().item() for one in kept] == [float(i) for i in range(8)]
            del kept, more, source

    def test_one_that_draws_random_numbers_raises(self) -> None:
        loop = small()
        with mempool.torch.install(device="cpu", limit="64MiB", background=False) as pool:
            opened(pool, loop)
            source = torch.ones(MIB // 4)
            for _ in range(2):
                torch.rand_like(source)
            pool.client.pool.set_max_reserved(pool.client.pool.stats()["reserved"]["current"])
            drawn: list[Any] = []
            with pytest.raises(torch.OutOfMemoryError):
                drawn.extend(torch.rand_like(source) for _ in range(64))
            pool.client.pool.set_max_reserved(1 << 62)
            del source, drawn

    def test_one_that_writes_raises(self) -> None:
        loop = small()
        with mempool.torch.install(device="cpu", limit="64MiB", background=False) as pool:
            opened(pool, loop)
            source = torch.arange(MIB // 4)
            outs = [torch.empty(0, dtype=torch.long) for _ in range(64)]
            for out in outs[:2]:
                torch.add(source, source, out=out)
            assert bypass_of(pool).is_open
            pool.client.pool.set_max_reserved(pool.client.pool.stats()["reserved"]["current"])
            with pytest.raises(torch.OutOfMemoryError):
                summed(source, outs[2:])
            pool.client.pool.set_max_reserved(1 << 62)
            del source, outs, out

    @pytest.mark.parametrize("seen", [False, True])
    def test_one_that_writes_where_nothing_is_yet_is_not_run_again(self, seen: bool) -> None:
        """The first time has given it a shape, and no memory."""
        with mempool.torch.install(device="cpu", limit="64MiB", background=False) as pool:
            if seen:
                swapper_of(pool).bypass = None
            else:
                opened(pool, small())
            source = torch.arange(MIB // 4)
            outs = [torch.empty(0, dtype=torch.long) for _ in range(64)]
            pool.client.pool.set_max_reserved(pool.client.pool.stats()["reserved"]["current"])
            with pytest.raises(torch.OutOfMemoryError):
                summed(source, outs)
            pool.client.pool.set_max_reserved(1 << 62)
            del source, outs
