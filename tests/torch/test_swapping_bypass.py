"""Operations that are not seen while nothing has to move: the same results, all known once it has to."""

from __future__ import annotations

import gc
import logging
import os
import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import small_programs
from adversary import HERE_BYTES, Adversary
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import mempool.torch
from mempool import _core
from mempool.torch.swapping.host_engine import HostEngine
from mempool.torch.swapping.swapper import Swapper

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
CPU = torch.device("cpu")

instructions = st.tuples(
    st.integers(0, len(small_programs.INSTRUCTIONS) - 1), st.integers(0, 4), st.integers(0, 19)
)


@pytest.fixture(autouse=True)
def nothing_is_held(one_thread: None) -> Iterator[None]:
    yield
    gc.collect()
    assert _core.torch_cpu_hook().held() == 0


class Loop:
    """Training that is told how large each batch is."""

    def __init__(self, layers: int = 6) -> None:
        torch.manual_seed(0)
        linear = [torch.nn.Linear(64, 64) for _ in range(layers)]
        self.net = torch.nn.Sequential(*(one for layer in linear for one in (layer, torch.nn.Tanh())))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 1e-2, momentum=0.9)
        self.random = torch.Generator().manual_seed(1)

    def step(self, size: int = 256) -> float:
        batch = torch.randn(size, 64, generator=self.random)
        loss = self.net(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


class Seen(TorchDispatchMode):
    """Counts operations, but not what PyTorch gives to modes past the dispatcher: what backwards saved."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


def swapper_of(pool: Any) -> Swapper:
    found: Swapper = pool._swapping.swapper
    return found


def bypass_of(pool: Any) -> Any:
    return swapper_of(pool).bypass


def opened(pool: Any, loop: Loop) -> None:
    """Train until operations pass by."""
    for _ in range(40):
        loop.step()
        if bypass_of(pool).is_open:
            return
    raise AssertionError("operations are all seen")


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
    plain = Loop()
    expected = [plain.step() for _ in range(60)]
    with Seen() as seen:
        plain.step()
    loop = Loop()
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
    loop = Loop()
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
        opened(pool, Loop())
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
    loop = Loop()
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
    loop = Loop()
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
        opened(pool, Loop())
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
    plain = Loop()
    expected = [plain.step(size) for size in sizes]
    loop = Loop()
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
    loop = Loop()
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
    loop = Loop()
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        for _ in range(10):
            loop.step()
        most = pool.report().values["swapping"]["peak_bytes"]
    loop = Loop()
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
        loop = Loop()
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
        loop = Loop()
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
        loop = Loop()
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
                opened(pool, Loop())
            source = torch.arange(MIB // 4)
            outs = [torch.empty(0, dtype=torch.long) for _ in range(64)]
            pool.client.pool.set_max_reserved(pool.client.pool.stats()["reserved"]["current"])
            with pytest.raises(torch.OutOfMemoryError):
                summed(source, outs)
            pool.client.pool.set_max_reserved(1 << 62)
            del source, outs


# --- what is always seen


def passes(pool: Any, act: Any) -> int:
    """How many of the last one's operations were not seen, after they could have been learned."""
    for _ in range(2):
        act()
    before = bypass_of(pool).passed
    act()
    return int(bypass_of(pool).passed - before)


@pytest.fixture
def open_pool() -> Iterator[Any]:
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        opened(pool, Loop())
        yield pool


class Other(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Doubled(torch.Tensor):
    """Made of another tensor, of which it says that it is twice as much."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [2 * one.inner if isinstance(one, Doubled) else one for one in args]
        return func(*plain, **(kwargs or {}))


class TestAlwaysSeen:
    def test_by_a_class_of_tensors(self, open_pool: Any) -> None:
        x = torch.ones(100)
        assert passes(open_pool, lambda: x + 1) == 1
        y = Doubled(x)
        assert all(torch.equal(y + 1, torch.full((100,), 3.0)) for _ in range(3))

    def test_by_a_mode_that_was_entered_later(self, open_pool: Any) -> None:
        x = torch.ones(100)
        assert passes(open_pool, lambda: x + 1) == 1
        with Other() as other:
            assert passes(open_pool, lambda: x + 1) == 0
        assert other.seen == [torch.ops.aten.add.Tensor] * 3

    def test_by_a_mode_that_takes_its_place(self, open_pool: Any) -> None:
        x = torch.ones(100)
        assert passes(open_pool, lambda: x + 1) == 1
        with _disable_current_modes(), Other() as other:
            assert passes(open_pool, lambda: x + 1) == 0
        assert other.seen == [torch.ops.aten.add.Tensor] * 3

    def test_by_fake_tensors(self, open_pool: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        assert passes(open_pool, lambda: torch.ones(100)) == 1
        with FakeTensorMode():
            assert all(isinstance(torch.ones(100), FakeTensor) for _ in range(3))

    def test_whose_size_goes_by_data(self, open_pool: Any) -> None:
        x = torch.ones(1000)
        assert passes(open_pool, lambda: x.nonzero()) == 0
        assert passes(open_pool, lambda: x[x > 0]) == 1  # the comparison

    def test_whose_size_goes_by_a_fraction(self, open_pool: Any) -> None:
        ends = iter((10.0, 20.0, 1e5))
        assert passes(open_pool, lambda: torch.arange(0.0, next(ends))) == 0
        assert passes(open_pool, lambda: torch.full((10,), random.random())) == 1

    def test_what_goes_by_how_much_memory_there_is_already(self, open_pool: Any) -> None:
        source, out = torch.ones(100), torch.empty(100)
        assert passes(open_pool, lambda: torch.add(source, source, out=out)) == 0
        assert passes(open_pool, lambda: torch.arange(0.0, 100.0, out=out)) == 0
        assert passes(open_pool, lambda: out.resize_(50)) == 0

    def test_what_is_made_of_data_alone(self, open_pool: Any) -> None:
        x = torch.eye(10)
        assert passes(open_pool, x.to_sparse) == 0
        assert passes(open_pool, lambda: torch._lazy_clone(x)) == 0  # which both go on using

    def test_the_first_of_each_shape_strides_and_type(self, open_pool: Any) -> None:
        base = torch.ones(20, 1536)
        thin = base[:, 0]  # with strides that are as large as the other's side
        assert passes(open_pool, lambda: thin + 1) == 1
        for other in (
            base,
            thin[:10],
            torch.ones(20, 7)[:, 0],
            thin.clone(),
            thin.double(),
            torch.ones(20, 1),
        ):
            seen = bypass_of(open_pool).passed
            _ = other + 1
            assert bypass_of(open_pool).passed == seen
        numbers = torch.ones(100, dtype=torch.int32)
        assert passes(open_pool, lambda: numbers / 2) == 1
        torch.set_default_dtype(torch.float64)
        try:
            seen = bypass_of(open_pool).passed
            _ = numbers / 2
            assert bypass_of(open_pool).passed == seen
        finally:
            torch.set_default_dtype(torch.float32)

    def test_numbers_of_a_library(self, open_pool: Any) -> None:
        with torch.library._scoped_library("mempool_bypass_test", "FRAGMENT") as library:
            library.define("number(int x) -> int")
            library.impl("number", lambda x: x, "CompositeExplicitAutograd")
            assert passes(open_pool, lambda: torch.ops.mempool_bypass_test.number(1)) == 0

    def test_an_operator_where_another_was(self, open_pool: Any) -> None:
        """Its schema may lie where that of the other lay."""
        name, operators = "mempool_bypass_test", torch.ops.mempool_bypass_test
        for schema, value in (("(int x) -> int", 1), ("(Tensor x) -> Tensor", torch.ones(1000))) * 6:
            before = bypass_of(open_pool).passed
            with torch.library._scoped_library(name, "FRAGMENT") as library:
                for i in range(20):
                    library.define(f"one{i}{schema}")
                    library.impl(f"one{i}", lambda x: x, "CompositeExplicitAutograd")
                    getattr(operators, f"one{i}")(value)
                    delattr(operators, f"one{i}")
            gc.collect()
            assert bypass_of(open_pool).passed == before

    def test_memory_that_is_not_the_pools(self) -> None:
        with mempool.torch.install(device="cpu", limit="64MiB", background=False) as pool:
            opened(pool, Loop())
            x = torch.ones(MIB)
            kept, others = [x + 1], []
            for _ in range(8):
                others.append(torch.from_numpy(np.ones(MIB, np.float32)))
                others[-1].add_(1)
                kept.append(x + 1)
            kept += [x + 1 for _ in range(8)]
            stats = pool.client.pool.stats()
            assert stats["reserved"]["peak"] + 32 * MIB <= 64 * MIB * 1.02
            assert all(one.sum().item() == 2 * MIB for one in (*kept, *others))
            del x, kept, others

    def test_what_a_library_has_in_python(self, open_pool: Any) -> None:
        with torch.library._scoped_library("mempool_bypass_test", "FRAGMENT") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x + x, "CPU")
            x = torch.ones(10)
            assert passes(open_pool, lambda: torch.ops.mempool_bypass_test.twice(x)) == 0

    def test_what_hooks_of_saved_tensors_do(self, open_pool: Any) -> None:
        packed: list[Any] = []

        def pack(x: Any) -> Any:
            packed.append(x + 0)
            return packed[-1]

        x = torch.ones(2048, requires_grad=True)
        for _ in range(3):
            x.exp()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            x.exp()
        assert swapper_of(open_pool).storages.find(packed[0].untyped_storage()) is not None

    def test_functions_of_vmap_and_grad(self, open_pool: Any) -> None:
        x = torch.arange(12.0).view(3, 4)
        for _ in range(3):
            got = torch.vmap(torch.func.grad(lambda row: row.square().sum()))(x)
            assert torch.equal(got, 2 * x)

    def test_operations_of_higher_order(self, open_pool: Any) -> None:
        from torch._higher_order_ops.cond import cond_op

        x = torch.arange(4.0)
        for _ in range(3):
            assert torch.equal(cond_op(True, torch.sin, torch.cos, (x,)), x.sin())


def test_what_is_not_written_yet_is_nobodys_to_move(open_pool: Any) -> None:
    """Functions of C++ write into it next, past the dispatcher."""
    for _ in range(3):
        blank, written = torch.empty(2048), torch.ones(2048)
    swapper = swapper_of(open_pool)
    swapper.see_all()
    assert swapper.storages.find(written.untyped_storage()) is not None
    assert swapper.storages.find(blank.untyped_storage()) is None


def test_nor_once_there_are_views_of_it(open_pool: Any) -> None:
    swapper = swapper_of(open_pool)
    for _ in range(3):
        blank = torch.empty(2048)
        view = blank.view(2, 1024)
    swapper.see_all()
    assert swapper.storages.find(blank.untyped_storage()) is None
    del blank, view


def test_what_has_been_written_may_move(open_pool: Any) -> None:
    swapper = swapper_of(open_pool)
    learned = torch.ones(4000)
    for _ in range(3):
        learned.add_(1)
    tensors = [torch.empty(2048 + i).fill_(4) for i in range(8)]  # no two alike: each is seen
    assert swapper._blank == {}
    seen = torch.empty(4000)
    assert len(swapper._blank) == 1
    before = bypass_of(open_pool).passed
    seen.add_(1)  # passes by
    assert bypass_of(open_pool).passed == before + 1
    swapper.see_all()
    assert swapper._blank == {}
    swapper._governor.clear(set(), 0)
    assert [HERE_BYTES(one.untyped_storage()) for one in (*tensors, seen)] == [0] * 9
    assert all(one.mean().item() == 4 for one in tensors)


def test_an_optimizer_that_steps_in_the_backward() -> None:
    """Where it opens PyTorch's engine takes back what a thread was given meanwhile."""
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizers = {one: torch.optim.SGD([one], 0.01) for one in net.parameters()}

    def steps(one: Any) -> None:
        optimizers[one].step()
        optimizers[one].zero_grad()

    def train() -> None:
        net(torch.ones(8, 64)).square().mean().backward()

    hooks = [one.register_post_accumulate_grad_hook(steps) for one in optimizers]
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        for _ in range(40):
            train()
        assert bypass_of(pool).is_open
        assert passes(pool, train) > 20
    for hook in hooks:
        hook.remove()


def test_ctrl_c_while_it_opens_leaves_all_where_it_is(
    open_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapper, bypass, x = swapper_of(open_pool), bypass_of(open_pool), torch.ones(MIB)
    swapper.see_all()
    for _ in range(3):
        x + 1
    library = bypass._library
    monkeypatch.setattr(library, "mempool_bypass_open", broken_after(library.mempool_bypass_open))
    with pytest.raises(KeyboardInterrupt):
        bypass.open()
    swapper._governor.clear(set(), 0)
    assert HERE_BYTES(x.untyped_storage()) == 4 * MIB
    assert (x + 1).mean().item() == 2


def broken_after(act: Any) -> Any:
    def broken(*args: Any) -> None:
        act(*args)
        raise KeyboardInterrupt

    return broken


def test_while_operations_pass_by_nothing_leaves(open_pool: Any) -> None:
    swapper = swapper_of(open_pool)
    x = torch.ones(MIB)
    swapper._know(x, x.untyped_storage())
    held = swapper.storages.find(x.untyped_storage())
    assert held is not None
    swapper._governor.clear(set(), 0)
    assert HERE_BYTES(x.untyped_storage()) == 4 * MIB
    swapper.see_all()
    swapper._governor.clear(set(), 0)
    assert HERE_BYTES(x.untyped_storage()) == 0
    assert x.sum().item() == MIB
    del held


def test_what_was_written_unseen_is_what_comes_back(open_pool: Any) -> None:
    swapper, x = swapper_of(open_pool), torch.ones(MIB)
    swapper.see_all()
    x.add_(1)
    swapper._governor.clear(set(), 0)  # there is a copy now
    x.sum()
    bypass_of(open_pool).open()
    for _ in range(3):
        x.add_(1)
    swapper.see_all()
    swapper._governor.clear(set(), 0)
    assert HERE_BYTES(x.untyped_storage()) == 0
    assert x[0].item() == 5


def test_what_passed_by_and_is_gone_takes_no_memory(open_pool: Any) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    x = torch.ones(8)
    for _ in range(20_000):
        x = x + 1
    before = resident()
    for _ in range(200_000):
        x = x + 1
    assert resident() - before < 8 * MIB


def test_only_one_swapper_of_a_process_does_it(open_pool: Any) -> None:
    with Swapper(HostEngine(1 << 20), CPU, 1 << 40, client=open_pool.client) as other:
        assert other.bypass is not None
        other.bypass.open()
        assert not other.bypass.is_open
    assert bypass_of(open_pool).is_open


def test_other_threads_are_seen_as_before(open_pool: Any) -> None:
    x, found = torch.ones(100), []
    assert passes(open_pool, lambda: x + 1) == 1
    before = bypass_of(open_pool).passed

    def work() -> None:
        found.append(x + 1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert bypass_of(open_pool).passed == before
    assert torch.equal(found.pop(), x + 1)


def test_a_forked_child_goes_on(open_pool: Any) -> None:
    x = torch.ones(1000)
    for _ in range(3):
        x = x + 1
    pid = os.fork()
    if pid == 0:
        good = False
        try:
            for _ in range(3):
                x = x + 1
            good = bool(x.sum().item() == 7000) and not bypass_of(open_pool).is_open
        finally:
            os._exit(not good)
    assert os.waitpid(pid, 0)[1] == 0
    assert bypass_of(open_pool).is_open


def test_afterwards_pytorch_is_as_it_was() -> None:
    before = str(torch._C._dispatch_tls_local_include_set())
    assert "DeferredInit" not in before
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        opened(pool, Loop())
        assert "DeferredInit" in str(torch._C._dispatch_tls_local_include_set())
    assert str(torch._C._dispatch_tls_local_include_set()) == before


def test_without_a_compiler_all_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from mempool.torch.swapping import bypass

    bypass._library.cache_clear()
    loop = Loop()
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        monkeypatch.setenv("MEMPOOL_CACHE", str(tmp_path))
        monkeypatch.setenv("CXX", "false")
        with caplog.at_level(logging.INFO):
            for _ in range(40):
                loop.step()
        assert pool.report().values["swapping"]["bypassed"] == 0
    assert caplog.text.count("each operation is seen within the limit") == 1
    bypass._library.cache_clear()


def test_a_loop_of_inferences_that_marks_nothing_passes_by_too() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    batch = torch.ones(16, 64)
    with torch.no_grad():
        expected = net(batch)
        with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
            for _ in range(200):
                got = net(batch)
            assert pool.report().values["swapping"]["bypassed"] > 0
            assert torch.equal(got, expected)
            del got


SCRIPT = """
    import torch, mempool.torch
    pool = mempool.torch.install(device="cpu", limit="1GiB")
    lin = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(lin.parameters(), 0.01)
    for _ in range(40):
        lin(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    assert pool.report().values["swapping"]["bypassed"] > 0
    print("well")
"""


def test_a_program_may_end_while_operations_pass_by() -> None:
    folder = str(Path(mempool.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")
