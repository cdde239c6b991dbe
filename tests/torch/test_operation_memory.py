"""Memory of an operation: its prediction, and the evictions that make room."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from models import MODELS
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from mempool.recording.torch.ledger import storages_in
from mempool.recording.torch.operations import learn
from mempool.torch.eager.eviction_policy import victims
from mempool.torch.eager.mode import OffloadMode
from mempool.torch.eager.op_footprints import OpFootprints, PoolCounters
from mempool.torch.eager.operator_traits import NATIVE
from mempool.torch.eager.recorded_iteration import NextUse, RecordedIteration
from mempool.torch.eager.storages import OFFLOADED
from mempool.torch.offload.host_engine import HostEngine
from mempool.torch.offload.options import OPTIONS
from solvers.swap import Step

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture
def engine() -> Iterator[HostEngine]:
    engine = HostEngine(1 << 30)
    yield engine
    engine.close()


def block(value: float) -> Any:
    """Return a tensor of 1 MiB."""
    return torch.full((MIB // 4,), float(value))


def offloaded(tensors: list[Any]) -> list[int]:
    mode = _get_current_dispatch_mode()
    return [i for i, tensor in enumerate(tensors) if mode.storages.of(tensor).state == OFFLOADED]


class Sized(NamedTuple):
    rounded_bytes: int


class TestEviction:
    @given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 200))
    def test_victims_free_enough_and_none_is_superfluous(self, rooms: list[int], missing: int) -> None:
        order = [Sized(room) for room in rooms]
        chosen: Any = victims(order, missing)  # type: ignore[arg-type]
        at = [i for record in chosen for i, other in enumerate(order) if other is record]
        assert at == sorted(set(at))
        total = sum(record.rounded_bytes for record in chosen)
        if total < missing:
            assert len(chosen) == len(order)
        else:
            assert all(total - record.rounded_bytes < missing for record in chosen)

    @given(st.data())
    @settings(max_examples=50)
    def test_next_use_is_the_first_later_access(self, data: st.DataObject) -> None:
        k = data.draw(st.integers(1, 12))
        rows = data.draw(
            st.lists(st.tuples(st.integers(0, k - 1), st.integers(1, k), st.booleans()), max_size=5)
        )
        start = [0 if stays else begin for begin, _, stays in rows]
        end = [k if stays else min(begin + length, k) for begin, length, stays in rows]
        used = [sorted(data.draw(st.sets(st.integers(a, b - 1)))) for a, b in zip(start, end, strict=True)]
        step = Step(
            seconds=np.ones(k),
            operation=np.full(k, -1, np.int32),
            start=np.array(start, np.int64),
            end=np.array(end, np.int64),
            size=np.ones(len(rows), np.int64),
            persistent=np.array([stays for _, _, stays in rows], np.bool_),
            ids=np.arange(len(rows)),
            access_buffer=np.array([row for row, ops in enumerate(used) for _ in ops], np.int64),
            access_op=np.array([op for ops in used for op in ops], np.int64),
            access_writes=np.zeros(sum(map(len, used)), np.bool_),
            circular=True,
        )
        uses = NextUse(step)
        for at_row, (_, _, stays) in enumerate(rows):
            for at in range(k):
                later = [op for op in used[at_row] if op >= at] + [op + k for op in used[at_row] if stays]
                if later:
                    assert uses.next_use(at_row, at) == min(later) - at
                elif not stays:
                    assert uses.next_use(at_row, at) == 2 * max(end[at_row] - at, 0)
                else:
                    assert uses.next_use(at_row, at) >= k - at

    def test_least_recently_used_storage_is_evicted_without_a_schedule(self, engine: HostEngine) -> None:
        with OffloadMode(engine, CPU, 4 * MIB):
            kept = [block(i) for i in range(4)]
            for i in (0, 2, 3, 1):
                kept[i].add_(1)
            kept.append(block(4))
            assert offloaded(kept) == [0]

    def test_storage_written_during_its_offload_is_evicted(self, engine: HostEngine) -> None:
        with OffloadMode(engine, CPU, 4 * MIB) as mode:
            kept = [block(1)]
            mode.transfers.offload(mode.storages.of(kept[0]))
            kept[0].add_(1)
            mode.eviction.clear((), 0)
            assert offloaded(kept) == [0]
            assert kept[0].mean().item() == 2

    def test_room_is_made_for_a_larger_view_than_in_the_last_iteration(self, engine: HostEngine) -> None:
        with OffloadMode(engine, CPU, 4 * MIB) as mode:
            kept = [block(i) for i in range(3)]
            for elements in (1, 1, MIB // 4):
                mode.step()
                kept.append(kept[0][:elements].clone())
            assert mode.storages.resident_bytes <= 4 * MIB

    def test_last_used_storage_is_evicted_by_the_schedule(self, engine: HostEngine) -> None:
        """The order of uses in the last iteration is a better prediction than the times of earlier uses."""
        with OffloadMode(engine, CPU, 64 * MIB) as mode:
            kept = [block(i) for i in range(4)]

            def iteration(extra: bool) -> list[int]:
                for i in (1, 2, 3, 0):
                    kept[i].add_(1)
                more = torch.full((MIB // 4 if extra else 16,), 0.0)
                offloaded_range = offloaded(kept)
                for i in (0, 1, 3, 2):
                    kept[i].add_(1)
                del more
                mode.step()
                return offloaded_range

            for _ in range(3):
                iteration(False)
            assert mode.iterations.schedule is not None
            mode.eviction.limit_bytes = 4 * MIB
            assert iteration(True) == [2]


class PredictionObserver(TorchDispatchMode):
    """Predicted and actual results of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.predictions: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = learn(func)
        if operation.asks or operation.views:
            return func(*args, **kwargs)
        footprint = OpFootprints().footprint(func, args, kwargs, 0)
        given = {id(storage) for _, storage in storages_in((args, kwargs))}
        result = func(*args, **kwargs)
        made = {id(s): s.nbytes() for _, s in storages_in(result) if id(s) not in given}
        self.predictions.append((operation.name, footprint.result_bytes, sum(made.values())))
        return result


class TestOpFootprints:
    @pytest.mark.parametrize("name", ["resnet", "gpt"])
    def test_result_bytes_of_a_step_are_predicted(self, name: str) -> None:
        model = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        with PredictionObserver() as asked:
            model.loss(*model.batch(0, 2)).backward()
            optimizer.step()
        assert [told for told in asked.predictions if told[1] != told[2]] == []

    @pytest.mark.filterwarnings("ignore:Sparse CSR")
    def test_data_dependent_footprint_is_an_upper_bound(self) -> None:
        x = torch.randint(0, 5, (40, 3))
        with PredictionObserver() as asked:
            x.nonzero()
            x[x > 2]
            x.masked_select(x > 1)
            x.unique()
            x.unique(return_inverse=True, return_counts=True)
            x.unique(dim=0, return_inverse=True)
            x.flatten().unique_consecutive()
            x.to_sparse(), torch.ones(40, 3).to_sparse_csr(), torch.ones(2, 3, 40).to_sparse_csc()
        assert {"aten::nonzero", "aten::index.Tensor", "aten::_unique2", "aten::unique_dim"} <= {
            name for name, _, _ in asked.predictions
        }
        assert [told for told in asked.predictions if told[1] < told[2]] == []

    def test_unpredictable_footprint_is_that_of_the_arguments_or_the_largest_seen(self) -> None:
        footprints, func = OpFootprints(), torch.ops.aten.repeat_interleave.Tensor
        for counts, expected in (([1, 2], 16), ([3, 5], 24), ([1], 64)):
            args = (torch.tensor(counts),)
            footprint = footprints.footprint(func, args, {}, 8 * len(counts))
            assert footprint.result_bytes == expected
            footprints.end(func, footprint, 8 * len(counts), func(*args).untyped_storage().nbytes())

    @pytest.mark.parametrize("sizes", [(64, 16, 128, 256), (10, 4, 64, 128), (7, 3, 20, 24)])
    def test_saved_values_of_an_rnn_are_bounded_before_the_first_run(self, sizes: tuple[int, ...]) -> None:
        """PyTorch's computation of shapes leaves them empty."""
        steps, batch, features, hidden = sizes
        rnn = torch.nn.LSTM(features, hidden)
        footprints: list[Any] = []

        class Observer(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                if "rnn_layer.default" in str(func):
                    made = sum(one.untyped_storage().nbytes() for one in result)
                    footprints.append((OpFootprints().footprint(func, args, {}, 1), made))
                return result

        with Observer():
            rnn(torch.randn(steps, batch, features))
        ((footprint, made),) = footprints
        assert made <= footprint.result_bytes <= 1.1 * made + (64 << 10)

    def test_footprint_cache_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mempool.torch.eager.op_footprints.OPTIONS", replace(OPTIONS, max_footprints=8))
        footprints, func = OpFootprints(), torch.ops.aten.add.Tensor
        for at in range(50):
            x = torch.ones(at + 1)
            assert footprints.footprint(func, (x, x), {}, 4 * (at + 1)).result_bytes == 4 * (at + 1)
        assert len(footprints.cache) <= 8

    def test_arguments_are_not_counted_as_results(self) -> None:
        x = torch.ones(4, 4)
        assert OpFootprints().footprint(torch.ops.aten.add_.Tensor, (x, x), {}, 64).result_bytes == 0
        assert OpFootprints().footprint(torch.ops.aten.add.out, (x, x), {"out": x}, 64).result_bytes == 0

    def test_offloaded_tensor_keeps_its_shape(self) -> None:
        x = torch.ones(4, 4)
        x.untyped_storage().resize_(0)
        assert OpFootprints().footprint(torch.ops.aten.add.Tensor, (x, x), {}, 64).result_bytes == 64

    def test_ample_headroom_skips_the_prediction(self) -> None:
        footprints = OpFootprints(spare_bytes=lambda: 1 << 20)
        x, add = torch.ones(4), torch.ops.aten.add.Tensor
        first = footprints.footprint(add, (x, x), {}, 16)
        assert first.result_bytes == 16
        footprints.end(add, first, 16, 16)
        y = torch.ones(5)
        footprint = footprints.footprint(add, (y, y), {}, 20)
        assert footprint.result_bytes == 0
        footprints.end(add, footprint, 20, 20)
        assert footprint.result_bytes == 20
        column, row = torch.ones(64, 1), torch.ones(1, 64)  # broadcast: the result is large
        assert footprints.footprint(add, (column, row), {}, 512).result_bytes == 64 * 64 * 4

    def test_default_generator_draws_nothing_for_a_prediction(self) -> None:
        """C++ code and `torch.ops` leave the device out."""
        before = torch.get_rng_state()
        footprint = OpFootprints().footprint(torch.ops.aten.rand.default, ([250],), {}, 0)
        assert footprint.result_bytes == 1000
        assert torch.equal(torch.get_rng_state(), before)

    def test_first_run_of_a_foreign_operation_corrects_the_guess(self) -> None:
        footprints, x = OpFootprints(), torch.ones(1000)
        with torch.library._scoped_library("mempool_footprints", "FRAGMENT") as library:
            library.define("half(Tensor x) -> Tensor")
            func = torch.ops.mempool_footprints.half.default
            footprint = footprints.footprint(func, (x,), {}, 4000)
            assert footprint.result_bytes == 4000
            footprints.end(func, footprint, 4000, 2000)
            assert footprint.result_bytes == 2000
            y = torch.ones(500)
            assert footprints.footprint(func, (y,), {}, 2000).result_bytes == 1000

    def test_growing_operation_is_always_predicted(self) -> None:
        footprints = OpFootprints(spare_bytes=lambda: 1 << 20)
        x, repeat = torch.ones(4), torch.ops.aten.repeat.default
        for many in (100, 200):
            footprint = footprints.footprint(repeat, (x, [many]), {}, 16)
            assert footprint.result_bytes == many * 16
            footprints.end(repeat, footprint, 16, many * 16)

    @given(st.lists(st.integers(-40, 40), min_size=1, max_size=30), st.integers(0, 15))
    def test_pool_counters_bound_the_workspace(self, changes: list[int], before: int) -> None:
        before = min(before, len(changes))

        def live(until: int) -> dict[str, int]:
            sizes = [
                *itertools.accumulate(changes[:until], lambda live, more: max(live + more, 0), initial=0)
            ]
            grown = sum(max(after - size, 0) for size, after in itertools.pairwise(sizes))
            return {"current": sizes[-1], "peak": max(sizes), "total": grown}

        client = SimpleNamespace(stats=lambda: {"live": live(before)})
        counters = PoolCounters(client)  # type: ignore[arg-type]
        counters.begin()
        begun, most = live(before), max(live(at)["current"] for at in range(before, len(changes) + 1))
        client.stats = lambda: {"live": live(len(changes))}
        assert (
            most - begun["current"] <= counters.taken_bytes() <= live(len(changes))["total"] - begun["total"]
        )


class FailingMode(TorchDispatchMode):
    """A mode below swapping that raises an out-of-memory error a given number of times."""

    missing = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.missing and learn(func).name.startswith(("aten::add", "aten::bernoulli")):
            self.missing -= 1
            raise torch.OutOfMemoryError("there is none")
        return func(*args, **(kwargs or {}))


class FakePool:
    """A fake pool whose statistics a test sets."""

    def __init__(self) -> None:
        self.total = self.kept = 0

    def stats(self) -> Any:
        return {"live": {"current": self.kept, "peak": 1 << 40, "total": self.total}}


class TestWorkspace:
    conv = torch.ops.aten.convolution.default
    add = torch.ops.aten.add.Tensor

    def footprint(self, footprints: OpFootprints, func: Any, side: int) -> Any:
        x = torch.ones(1, 1, side, side)
        args = (x, x) if func is self.add else (x, x, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        return footprints.footprint(func, args, {}, 8 * side * side)

    def test_workspace_counts_within_the_limit(self, engine: HostEngine) -> None:
        with OffloadMode(engine, CPU, 3 * MIB + 4096) as mode:
            pool: Any = FakePool()
            mode.operations.footprints = OpFootprints(PoolCounters(pool))
            kept = [block(i) for i in range(2)]
            kept[1].sum()
            assert offloaded(kept) == []
            for footprint in mode.operations.footprints.cache.values():
                footprint.workspace_bytes, footprint.samples = 2 * MIB, 9
            mode.iterations.footprints.clear()
            kept[1].sum()
            assert offloaded(kept) == [0]
            assert mode.iterations.current.workspaces[len(mode.iterations.current) - 1] == 2 * MIB

    def test_workspace_that_a_library_keeps_is_foreseen_in_the_next_thread(self) -> None:
        """CuBLAS keeps one workspace for all products of a thread."""
        pool: Any = FakePool()
        footprints, x = OpFootprints(PoolCounters(pool)), torch.ones(4, 4)
        mm, addmm = torch.ops.aten.mm.default, torch.ops.aten.addmm.default

        def run(func: Any, args: Any, kept: int) -> int:
            foreseen = footprints.footprint(func, args, {}, 128)
            workspace: int = foreseen.workspace_bytes
            footprints.begin()
            pool.total += 64 + kept
            pool.kept += 64 + kept
            footprints.end(func, foreseen, 128, 64)
            return workspace

        assert [run(addmm, (x, x, x), kept) for kept in (MIB, 0, 0)] == [0, MIB, 0]
        with ThreadPoolExecutor(1) as threads, ThreadPoolExecutor(1) as others:
            for func, args, kept, foreseen in ((mm, (x, x), MIB, MIB), (addmm, (x, x, x), 0, 0)):
                assert threads.submit(run, func, args, kept).result() == foreseen
            assert others.submit(run, addmm, (x, x, x), MIB).result() == MIB  # with shapes that are known
        assert run(self.add, (x, x), 0) == 0


class TestOutOfMemory:
    def test_operation_is_retried_after_eviction(self, engine: HostEngine) -> None:
        with FailingMode() as failing, OffloadMode(engine, CPU, 1 << 40):
            kept = [block(i) for i in range(3)]
            failing.missing = 1
            assert (kept[2] + 1).mean().item() == 3
            assert offloaded(kept) == [0, 1]
            failing.missing = 2
            with pytest.raises(torch.OutOfMemoryError):
                kept[2] + 1
            assert failing.missing == 1  # no storage is left to evict

    @pytest.mark.parametrize("name", ["add_", "bernoulli"])
    def test_writing_or_random_operation_is_not_retried(self, engine: HostEngine, name: str) -> None:
        with FailingMode() as failing, OffloadMode(engine, CPU, 1 << 40):
            kept = [block(i) for i in range(3)]
            failing.missing = 1
            with pytest.raises(torch.OutOfMemoryError):
                getattr(kept[1], name)(*[1] * (name == "add_"))
            assert failing.missing == 0
            assert offloaded(kept) == []
            assert kept[1].mean().item() == 1

    def test_kernel_of_the_program_is_not_retried(self, engine: HostEngine) -> None:
        runs = []

        def fails() -> None:
            runs.append(1)
            raise torch.OutOfMemoryError("there is none")

        with torch.library._scoped_library("mempool_failing", "FRAGMENT") as library:
            library.define("fails() -> ()")
            library.impl("fails", fails, "CompositeExplicitAutograd")
            with OffloadMode(engine, CPU, 1 << 40):
                kept = block(1)
                with pytest.raises(torch.OutOfMemoryError):
                    torch.ops.mempool_failing.fails()
                assert offloaded([kept]) == []
        assert len(runs) == 1


class TestKernelsOfTheProgram:
    @pytest.mark.parametrize(
        ("key", "schema"),
        [
            *itertools.product(
                ("", "CompositeImplicitAutograd", "CompositeExplicitAutograd"),
                ("(Tensor x) -> Tensor", "() -> Tensor", "(int n) -> Tensor"),
            ),
            ("CPU", "(Tensor x) -> Tensor"),
        ],
    )
    def test_kernel_runs_once(self, engine: HostEngine, schema: str, key: str) -> None:
        runs = []

        def kernel(*_: Any) -> Any:
            runs.append(1)
            return torch.rand(1000)

        args = {"(Tensor x) -> Tensor": (torch.ones(9),), "(int n) -> Tensor": (3,)}.get(schema, ())
        with torch.library._scoped_library("mempool_once", "FRAGMENT") as library:
            library.define(f"once{schema}")
            library.impl("once", kernel, key)
            torch.manual_seed(0)
            with OffloadMode(engine, CPU, 1024):
                drawn = torch.ops.mempool_once.once(*args).clone()
                after = torch.rand(1000)
        torch.manual_seed(0)
        assert torch.equal(drawn, torch.rand(1000))
        assert torch.equal(after, torch.rand(1000))
        assert len(runs) == 1

    def test_fake_implementation_does_not_run(self, engine: HostEngine) -> None:
        fakes = []

        @torch.library.custom_op("mempool_once::faked", mutates_args=())
        def faked(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        faked.register_fake(lambda x: (fakes.append(1), torch.empty_like(x))[1])
        with OffloadMode(engine, CPU, 1024):
            faked(torch.ones(1000))
        assert fakes == []

    def test_replaced_kernel_of_pytorch_is_not_native(self) -> None:
        lcm = torch.ops.aten.lcm.default
        assert lcm in NATIVE
        with torch.library._scoped_library("aten", "IMPL") as library:
            library.impl("lcm", lambda x, y: x + y, "CompositeExplicitAutograd")
            assert lcm not in NATIVE
        assert lcm in NATIVE


@given(st.lists(st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 9), st.booleans()))), max_size=6))
def test_recorded_iteration_yields_the_accesses_of_each_operation(
    course: list[tuple[bool, list[tuple[int, bool]]]],
) -> None:
    """Views belong to the preceding operation."""
    recording, expected, at = RecordedIteration(), [], -1
    for is_operation, touches in course:
        if is_operation:
            at += 1
            recording.first_access.append(len(recording.access_codes))
        for number, wrote in touches:
            recording.access_codes.append(number << 1 | wrote)
            expected.append((number, max(at, 0), wrote))
    assert list(recording.accesses()) == expected
