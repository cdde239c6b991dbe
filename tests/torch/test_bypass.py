"""Operations that bypass the mode while memory suffices, and the return of the mode when it does not."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import small_programs
from adversary import Adversary, resident_bytes
from bypassed import MIB, bypass_of, mode_of, open_bypass, small_loop
from torch.utils._python_dispatch import TorchDispatchMode

import mempool.torch
from mempool.torch.eager.mode import OffloadMode
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
    """Counts operations, except the detach of saved tensors, which PyTorch passes to modes directly."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


# --- the same results


def same(program: Any, seed: int, share: float) -> None:
    """Assert equal results while the bypass opens, closes and stands by, and storages move, at random."""
    choose = random.Random(seed)

    def nothing() -> None:
        pass

    plain = small_programs.run_program(program, 4, nothing, nothing)
    with (
        mempool.torch.install(device="cpu", mode="record") as pool,
        Adversary(seed, share=share, client=pool.client) as mode,
    ):
        assert mode.bypass is not None

        def disturb() -> None:
            assert mode.bypass is not None
            if mode.bypass.is_open and choose.random() < 0.2:
                mode.operations.close_bypass()
            elif not mode.bypass.is_open and choose.random() < 0.5:
                mode.bypass.open()
            if mode.bypass.is_open and choose.random() < 0.3:
                mode.bypass.stand_by()
            mode.disturb()

        offloaded = small_programs.run_program(program, 4, disturb, mode.step)
    assert offloaded == plain


@example([(which, 1, 3) for which in range(len(small_programs.INSTRUCTIONS))], 0, 0.9)
@example([(which, 0, 2) for which in range(len(small_programs.INSTRUCTIONS))], 1, 0.3)
@given(
    st.lists(instructions, min_size=1, max_size=12),
    st.integers(0, 2**16),
    st.sampled_from([0.1, 0.5, 0.9]),
)
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_random_programs_are_identical_with_and_without_bypass(program: Any, seed: int, share: float) -> None:
    same(program, seed, share)


@pytest.mark.full
@given(
    st.lists(instructions, min_size=1, max_size=40),
    st.integers(0, 2**16),
    st.sampled_from([0.1, 0.5, 0.9]),
)
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
def test_long_random_programs_are_identical_with_bypass(program: Any, seed: int, share: float) -> None:
    same(program, seed, share)


def test_training_is_identical_and_nearly_all_operations_are_bypassed() -> None:
    plain = small_loop()
    expected = [plain.step() for _ in range(60)]
    with Seen() as seen:
        plain.step()
    loop = small_loop()
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        losses = [loop.step() for _ in range(50)]
        before = pool.report().values["swapping"]["bypassed"]
        losses += [loop.step() for _ in range(10)]
        passed = pool.report().values["swapping"]["bypassed"] - before
    assert losses == expected
    assert passed >= 10 * seen.count


# --- closing the bypass


def known(pool: Any) -> dict[int, Any]:
    """Close the bypass; return the records, and assert that they include all live storages."""
    mode = mode_of(pool)
    mode.operations.close_bypass()
    mode.operations.remove_dead()
    found = dict(mode.storages.records)
    rooms = sum(record.rounded_bytes for record in found.values())
    assert rooms - mode.storages.foreign_bytes == pool.client.stats()["live"]["current"]
    return found


def test_closing_the_bypass_registers_all_living_storages() -> None:
    kept: list[Any] = []
    loop = small_loop()
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        open_bypass(pool, loop)
        mode = mode_of(pool)
        for i in range(8):
            loop.step()
            kept.append(torch.full((1024,), float(i)))
        assert mode.storages.find(kept[-1].untyped_storage()) is None
        hidden = loop.net(torch.ones(256, 64)).square().mean()  # only its graph holds the saved tensors
        found = known(pool)
        last = [found[id(tensor.untyped_storage())].last for tensor in kept]
        assert last == sorted(last)  # in the order of their last use
        assert max(last) < found[id(hidden.untyped_storage())].last
        kept.clear()
        del hidden, found


def test_closing_the_bypass_updates_last_use_and_size() -> None:
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        first, second = torch.ones(1000), torch.ones(1000)
        open_bypass(pool, small_loop())
        for _ in range(3):
            second.add_(1)
            first.add_(1)
        first.resize_(2000)
        found = known(pool)
        known_first, known_second = (found[id(one.untyped_storage())] for one in (first, second))
        assert known_second.last < known_first.last == max(record.last for record in found.values())
        assert known_first.size == 8000
        del first, second, found, known_first, known_second


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traced_numbers_are_compared_while_the_bypass_is_open() -> None:
    """Optimizing a trace compares its numbers, which reach a dispatch mode as Python numbers."""
    traced = torch.jit.trace(lambda x: torch.stack([(x + 1.0).sum(), (x + 2.0).sum()]), torch.ones(8))
    graph = traced.graph.copy()
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        open_bypass(pool, small_loop())
        torch._C._jit_pass_constant_pooling(graph)
        assert bypass_of(pool).is_open


def test_partly_bypassed_iteration_is_not_recorded() -> None:
    loop = small_loop()
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        open_bypass(pool, loop)
        mode = mode_of(pool)
        before = pool.report().values["swapping"]

        def order() -> int:
            return len(mode.iterations.patterns.order)

        seen = order()
        half = loop.net(torch.ones(256, 64))
        mode.operations.close_bypass()
        half.square().mean().backward()
        loop.optimizer.step()
        after = pool.report().values["swapping"]
        assert order() == seen
        assert bypass_of(pool).calm_iterations == 0
        assert after["iterations"] == before["iterations"] + 1
        assert (after["diverged"], after["plans"]) == (before["diverged"], before["plans"])
        loop.step()
        assert order() == seen + 1
        bypass_of(pool).open()
        mode.operations.close_bypass()
        with pool.iteration():  # recorded from its first operation on
            loop.step()
        assert order() == seen + 2
        del half


def hits(pool: Any, loop: Loop, steps: int) -> float:
    """Train on batches of many sizes; return the hit rate."""
    choose = random.Random(steps)
    before = pool.client.stats()["outcomes"]
    for step in range(steps):
        loop.step(choose.randrange(400, 512))
        if step % 10 == 9:
            pool.plan_now()
    after = pool.client.stats()["outcomes"]
    new = {name: after[name] - before[name] for name in after}
    return float(new["hit"] / sum(new.values()))


def test_pool_plans_while_operations_are_bypassed() -> None:
    loop = small_loop()
    with mempool.torch.install(device="cpu", limit="32MiB", background=False) as pool:
        pool.watch(loop.optimizer)
        hits(pool, loop, 60)
        assert hits(pool, loop, 30) > 0.9
        assert bypass_of(pool).is_open
        mode_of(pool).operations.close_bypass()
        assert mode_of(pool).headroom.holds_arena
        assert pool.client.pool.stats()["arena_bytes"] > 0


def test_autocast_copies_are_registered_when_the_bypass_closes() -> None:
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        open_bypass(pool, small_loop())
        x, weight = torch.ones(4, 32, 32), torch.ones(4, 32, 32, requires_grad=True)
        for enabled in (False, True):  # an operation bypassed without autocast must not be bypassed with it
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                for _ in range(4):
                    torch.bmm(x, weight)
                    copy = torch.inference_mode()(torch.ones)(999).double()
                if enabled:
                    known(pool)
        del x, weight, copy


def test_larger_batch_closes_the_bypass_and_keeps_the_limit() -> None:
    sizes = [256] * 30 + [4096] + [256] * 10 + [4096] * 2
    plain = small_loop()
    expected = [plain.step(size) for size in sizes]
    loop = small_loop()
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


class TestStandby:
    """Tests of iterations that follow the pool's plan without the mode."""

    @pytest.fixture(autouse=True)
    def nothing_is_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Forget what other tests have compiled."""
        monkeypatch.setattr(torch._dynamo.eval_frame, "cached_backends", {})

    @pytest.fixture
    def pool(self) -> Iterator[Any]:
        with mempool.torch.install(device="cpu", limit="16MiB", background=False) as pool:
            yield pool

    def stands_by(self, pool: Any, loop: Loop) -> list[float]:
        """Train until the mode stands by, and return the losses."""
        losses = []
        while not bypass_of(pool).is_standing_by:
            losses.append(loop.step())
            pool.plan_now()
            assert len(losses) < 40
        return losses

    def test_no_operation_is_compared_in_planned_iterations(self) -> None:
        plain = small_loop()
        expected = [plain.step() for _ in range(60)]
        with mempool.torch.install(device="cpu", limit="16MiB", background=False) as pool:
            loop = small_loop()
            losses = self.stands_by(pool, loop)
            assert torch._C._len_torch_dispatch_stack() == 0
            before = bypass_of(pool).skipped_operations
            losses += [loop.step() for _ in range(60 - len(losses))]
            assert bypass_of(pool).skipped_operations == before
            assert bypass_of(pool).is_standing_by
        assert losses == expected

    def test_operation_with_a_planned_place_needs_no_other_room(self) -> None:
        def step() -> None:
            base = torch.ones(3 * MIB // 2)
            results = [base + 1, base + 2]  # 18 MiB in all
            assert sum(int(one[0]) for one in results) == 5

        with mempool.torch.install(device="cpu", limit="19.5MiB", background=False) as pool:
            for _ in range(4):  # small iterations, so that the bypass opens
                torch.ones(8)
                pool.step()
            for _ in range(20):
                step()
                pool.step()
                pool.plan_now()
            assert bypass_of(pool).is_open
            assert pool.client.pool.stats()["reserved"]["peak"] <= 19.5 * MIB * 1.02

    def test_mode_is_back_before_kept_tensors_exceed_the_limit(self, pool: Any) -> None:
        loop = small_loop()
        self.stands_by(pool, loop)
        kept = []
        for value in range(24):
            kept.append(torch.full((MIB // 4,), float(value)))
            loop.step()
        assert pool.client.pool.stats()["reserved"]["peak"] <= 16 * MIB * 1.02
        assert [one.mean().item() for one in kept] == list(range(24))
        assert torch._C._len_torch_dispatch_stack() == 1
        del kept

    @pytest.mark.parametrize("closes", [False, True])
    def test_mode_is_on_the_stack_once_after_a_program_disabled_modes(
        self, pool: Any, *, closes: bool
    ) -> None:
        loop = small_loop()
        self.stands_by(pool, loop)
        kept = []
        while torch._C._len_torch_dispatch_stack() == 0:
            kept.append(torch.ones(MIB // 4))
        with torch.utils._python_dispatch._disable_current_modes():
            kept.append(torch.ones(MIB // 4))
        kept.clear()
        if closes:
            pool.close()
        else:
            loop.step()
        assert torch._C._len_torch_dispatch_stack() == (0 if closes else 1)

    @pytest.mark.parametrize("transforms", [torch.func.vmap, torch.func.grad])
    def test_mode_is_back_within_function_transforms(self, pool: Any, transforms: Any) -> None:
        def total(x: torch.Tensor) -> torch.Tensor:
            kept = [x + value for value in range(24)]
            return torch.stack([one.sum() for one in kept]).sum()

        x = torch.arange(4 * MIB / 16).reshape(4, -1)
        expected = transforms(total)(x)
        self.stands_by(pool, small_loop())
        assert torch.equal(transforms(total)(x), expected)
        assert not bypass_of(pool).is_open
        assert pool.client.pool.stats()["reserved"]["peak"] <= 16 * MIB * 1.02

    def test_mode_stays_back_after_a_departure_in_a_backward_pass(self, pool: Any) -> None:
        loop = small_loop()
        self.stands_by(pool, loop)
        kept: list[Any] = []
        parameter = next(loop.net.parameters())
        parameter.register_hook(lambda _: kept.append(torch.ones(4 * MIB)))
        loop.step()
        assert len(kept) == 1
        assert torch._C._len_torch_dispatch_stack() == 1
        kept.clear()

    def test_iteration_without_a_place_in_the_plan_brings_the_mode_back(self, pool: Any) -> None:
        loop = small_loop()
        self.stands_by(pool, loop)
        loop.step()  # without the mode, PyTorch may allocate differently, and the pool learns
        loop.step(300)
        assert not bypass_of(pool).is_standing_by
        assert torch._C._len_torch_dispatch_stack() == 1

    def test_standby_outlasts_the_inference_mode_of_its_beginning(self, pool: Any) -> None:
        weight, few = torch.ones(256, 256), torch.ones(3)
        with torch.inference_mode():
            for _ in range(30):
                weight @ weight
                pool.step()
                pool.plan_now()
            assert bypass_of(pool).is_standing_by
        assert torch.isfinite(few + 1).tolist() == [True] * 3
        assert bypass_of(pool).is_standing_by

    def test_mode_that_is_back_outlasts_the_inference_mode_of_its_return(self, pool: Any) -> None:
        self.stands_by(pool, small_loop())
        with torch.inference_mode():
            kept = [torch.ones(size) for size in (3 * MIB, MIB // 2, MIB // 4)]
        assert torch._C._len_torch_dispatch_stack() == 1
        before, few = bypass_of(pool).skipped_operations, torch.ones(3)
        for _ in range(4):
            few + 1
        assert bypass_of(pool).skipped_operations > before
        del kept

    @pytest.mark.parametrize("closes", [True, False])
    def test_mode_that_is_back_outlasts_the_backward_pass_of_its_return(
        self, pool: Any, *, closes: bool
    ) -> None:
        """PyTorch restores the modes of the pass's beginning before each node, and after the pass."""
        self.stands_by(pool, small_loop())
        kept: list[torch.Tensor] = []
        modes: list[int] = []
        few, leaf = torch.ones(3), torch.ones(3, requires_grad=True)
        parameters: list[torch.nn.Parameter] = []
        doubled = leaf * 2
        squared = doubled * doubled

        def keep(_: torch.Tensor) -> None:
            kept.extend(torch.ones(size) for size in (3 * MIB, MIB // 2, MIB // 4))
            if closes:
                bypass_of(pool).close()

        squared.register_hook(keep)
        doubled.register_hook(lambda _: parameters.append(torch.nn.Parameter(few)))  # without modes
        doubled.register_hook(lambda _: few.add_(1))
        doubled.register_hook(lambda _: modes.append(torch._C._len_torch_dispatch_stack()))
        squared.sum().backward()
        parameters.append(torch.nn.Parameter(few))
        few.add_(1)
        assert bypass_of(pool).is_open != closes
        assert [*modes, torch._C._len_torch_dispatch_stack()] == [1, 1]

    @pytest.mark.parametrize("compiles", [True, False])
    def test_mode_sees_programs_that_compile_or_keep_addresses(
        self, pool: Any, monkeypatch: pytest.MonkeyPatch, *, compiles: bool
    ) -> None:
        if compiles:
            monkeypatch.setitem(torch._dynamo.eval_frame.cached_backends, 0, id)
        else:
            zeros = torch.zeros(8, dtype=torch.int32)
            torch.fake_quantize_per_channel_affine(torch.ones(8, 8), torch.ones(8), zeros, 0, 0, 255)
        loop = small_loop()
        for _ in range(20):
            loop.step()
            pool.plan_now()
        assert bypass_of(pool).is_open
        assert not bypass_of(pool).is_standing_by

    def test_parameters_are_made_after_the_return_of_the_mode(self, pool: Any) -> None:
        self.stands_by(pool, small_loop())
        kept = [torch.ones(size) for size in (3 * MIB, MIB // 2, MIB // 4)]
        assert torch._C._len_torch_dispatch_stack() == 1
        assert type(copy.deepcopy(torch.nn.Parameter(kept[1]))) is torch.nn.Parameter

    def test_removed_mode_is_not_put_back(self) -> None:
        with mempool.torch.install(device="cpu", limit="16MiB", background=False) as pool:
            self.stands_by(pool, small_loop())
        assert torch._C._len_torch_dispatch_stack() == 0
        with Seen() as seen:
            torch.ones(MIB)
        assert seen.count == 1


class TestBypassOpening:
    """Tests of opening, with given peaks of iterations."""

    @pytest.fixture
    def mode(self) -> Iterator[OffloadMode]:
        with (
            mempool.torch.install(device="cpu", mode="record") as pool,
            OffloadMode(HostEngine(1 << 28), CPU, 8 * MIB, client=pool.client) as mode,
        ):
            yield mode

    def opens(self, mode: OffloadMode, most: int) -> bool:
        assert mode.bypass is not None
        for _ in range(4):
            mode.bypass.record_peak(most)
        return mode.bypass.is_open

    def test_bypass_stays_closed_if_offloaded_storages_would_not_fit(self, mode: OffloadMode) -> None:
        x = torch.ones(MIB // 2)
        mode.eviction.clear(set(), 0)
        assert resident_bytes(mode, x) == 0
        assert not self.opens(mode, 6 * MIB)
        assert self.opens(mode, 5 * MIB)
        assert resident_bytes(mode, x) == 2 * MIB

    def test_bypass_closes_when_an_operation_lacks_headroom(self, mode: OffloadMode) -> None:
        x = torch.ones(MIB // 4)
        kept = [x + 1]
        assert self.opens(mode, 2 * MIB)
        while mode.bypass is not None and mode.bypass.is_open:
            kept.append(x + 1)
        assert len(kept) == 8 - 1  # and x
        kept += [x + 1 for _ in range(6)]
        assert mode.storages.resident_bytes <= 8 * MIB
        assert all(one.sum().item() == MIB // 2 for one in kept)


class TestOutOfMemory:
    def test_operation_is_retried_after_all_else_is_evicted(self) -> None:
        loop = small_loop()
        with mempool.torch.install(device="cpu", limit="64MiB", background=False) as pool:
            kept = [torch.full((MIB // 4,), float(i)) for i in range(8)]
            open_bypass(pool, loop)
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

    @pytest.mark.parametrize(
        ("operation", "learned", "seen"),
        [("draw", True, False), ("write", True, False), ("write", False, False), ("write", False, True)],
    )
    def test_drawing_or_writing_operation_is_not_retried(
        self, operation: str, learned: bool, seen: bool
    ) -> None:
        """The first call with an unallocated output has given the output its shape."""
        with mempool.torch.install(device="cpu", limit="64MiB", background=False) as pool:
            if seen:
                mode_of(pool).bypass = None
            else:
                open_bypass(pool, small_loop())
            source = torch.ones(MIB // 4)
            outs = [torch.empty(0) for _ in range(64)]

            def act(out: Any, source: Any = source) -> Any:
                return torch.rand_like(source) if operation == "draw" else torch.add(source, source, out=out)

            kept = [act(out) for out in outs[: 2 * learned]]
            pool.client.pool.set_max_reserved(pool.client.pool.stats()["reserved"]["current"])
            with pytest.raises(torch.OutOfMemoryError):
                kept.extend(act(out) for out in outs[2:])
            pool.client.pool.set_max_reserved(1 << 62)
            del source, outs, kept, act


def test_bypassed_iterations_end_for_the_host_memory_too(
    open_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = list[int]()
    monkeypatch.setattr(mode_of(open_pool).engine, "end_iteration", lambda: ends.append(1))
    loop = small_loop()
    for _ in range(3):
        loop.step()
    assert len(ends) == 3
