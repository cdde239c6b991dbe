"""Room for an operation: how much it needs, and what leaves for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from models import MODELS
from torch.utils._python_dispatch import TorchDispatchMode

from mempool.recording.torch.ledger import storages_in
from mempool.recording.torch.operations import learn
from mempool.torch.eager.eviction_policy import Governor, _enough
from mempool.torch.eager.mode import Swapper
from mempool.torch.eager.next_use import Uses
from mempool.torch.eager.op_footprints import Counters, Needs
from mempool.torch.eager.recorded_iteration import Tape
from mempool.torch.eager.storages import HERE
from mempool.torch.offload.host_engine import HostEngine
from solvers.swap import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture
def engine() -> Iterator[HostEngine]:
    engine = HostEngine(1 << 30)
    yield engine
    engine.close()


def block(value: float) -> Any:
    """A MiB."""
    return torch.full((MIB // 4,), float(value))


def away(tensors: list[Any]) -> list[int]:
    here = torch._C.StorageBase.nbytes  # a storage itself says what it has when it is here
    return [i for i, tensor in enumerate(tensors) if here(tensor.untyped_storage()) == 0]


class Room(NamedTuple):
    room: int


class TestWhatLeaves:
    @given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 200))
    def test_enough_leaves_and_nothing_that_is_not_needed(self, rooms: list[int], missing: int) -> None:
        order = [Room(room) for room in rooms]
        chosen: Any = _enough(order, missing)  # type: ignore[arg-type]
        at = [i for held in chosen for i, other in enumerate(order) if other is held]
        assert at == sorted(set(at))
        total = sum(held.room for held in chosen)
        if total < missing:
            assert len(chosen) == len(order)
        else:
            assert all(total - held.room < missing for held in chosen)

    @given(st.data())
    @settings(max_examples=50)
    def test_the_next_use_is_the_first_that_comes(self, data: st.DataObject) -> None:
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
        uses = Uses(step)
        for at_row, (_, _, stays) in enumerate(rows):
            for at in range(k):
                later = [op for op in used[at_row] if op >= at] + [op + k for op in used[at_row] if stays]
                if later:
                    assert uses.until(at_row, at) == min(later) - at
                elif not stays:
                    assert uses.until(at_row, at) == 2 * max(end[at_row] - at, 0)
                else:
                    assert uses.until(at_row, at) >= k - at

    def test_without_a_plan_what_was_unused_for_longest_leaves(self, engine: HostEngine) -> None:
        with Swapper(engine, CPU, 4 * MIB):
            kept = [block(i) for i in range(4)]
            for i in (0, 2, 3, 1):
                kept[i].add_(1)
            kept.append(block(4))
            assert away(kept) == [0]

    def test_on_a_plan_what_is_used_last_leaves(self, engine: HostEngine) -> None:
        """The order of use differs from that of the uses before: the last tape knows better."""
        with Swapper(engine, CPU, 64 * MIB) as swapper:
            kept = [block(i) for i in range(4)]

            def iteration(extra: bool) -> list[int]:
                for i in (1, 2, 3, 0):
                    kept[i].add_(1)
                more = torch.full((MIB // 4 if extra else 16,), 0.0)
                gone = away(kept)
                for i in (0, 1, 3, 2):
                    kept[i].add_(1)
                del more
                swapper.step()
                return gone

            for _ in range(3):
                iteration(False)
            assert swapper.iterations.plan is not None
            swapper._governor.limit_bytes = 4 * MIB
            assert iteration(True) == [2]

    @pytest.mark.parametrize(("age", "first"), [(6, "clean"), (4, "dirty")])
    def test_what_has_a_good_copy_leaves_for_half_the_price(self, age: int, first: str) -> None:
        held = [
            SimpleNamespace(key=key, movable=True, state=HERE, room=MIB, clean=key == "clean", last=last)
            for key, last in (("dirty", 90), ("clean", 100 - age))
        ]
        storages: Any = SimpleNamespace(known={h.key: h for h in held}, here_bytes=2 * MIB)
        governor = Governor(storages, None, None, MIB)  # type: ignore[arg-type]
        assert governor._order((), 100)[0].key == first

    def test_what_the_operation_needs_stays_even_beyond_the_limit(self, engine: HostEngine) -> None:
        with Swapper(engine, CPU, 2 * MIB) as swapper:
            kept = [block(i) for i in range(4)]
            assert torch.stack(kept).mean().item() == 1.5
            assert swapper.counts.over > 0

    def test_copies_are_on_their_way_together(self) -> None:
        log: list[str] = []

        class Logged(HostEngine):
            def offload(self, data: Any, at: int = -1) -> Any:
                log.append("out")
                return super().offload(data, at)

            def reload(self, copy: Any, data: Any) -> Any:
                log.append("back")
                return super().reload(copy, data)

            def wait(self, transfer: Any) -> float:
                log.append("wait")
                return super().wait(transfer)

        engine = Logged(1 << 26)
        with Swapper(engine, CPU, 6 * MIB):
            kept = [block(i) for i in range(5)]
            log.clear()
            large = torch.full((4 * MIB // 4,), 1.0)
            assert log[:3] == ["out"] * 3
            del large
            log.clear()
            torch.stack(kept)
            assert log.index("back") < len(log) - 1
            assert "wait" not in log[log.index("back") : log.index("back") + len(away(kept)) + 2]
        engine.close()

    def test_a_larger_batch_in_the_middle_stays_within_the_limit(self, engine: HostEngine) -> None:
        def train() -> tuple[list[float], list[Any]]:
            torch.manual_seed(0)
            model = MODELS["gpt"]()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            losses = []
            for step, size in enumerate((2, 2, 4, 2)):
                optimizer.zero_grad()
                loss = model.loss(*model.batch(step, size))
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
            return losses, list(model.state_dict().values())

        plain, state = train()
        with Swapper(engine, CPU, 1 << 40) as free:
            train()
        limit = int(0.6 * free.counts.peak_bytes)
        with Swapper(engine, CPU, limit) as swapper:
            losses, swapped = train()
        assert losses == plain
        assert all(torch.equal(a, b) for a, b in zip(state, swapped, strict=True))
        assert swapper.counts.peak_bytes <= limit
        assert swapper.counts.over == 0


class Asked(TorchDispatchMode):
    """What operations were said to make, and what they made."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = learn(func)
        if operation.asks or operation.views:
            return func(*args, **kwargs)
        need = Needs().of(func, args, kwargs, 0, 0)
        given = {id(storage) for _, storage in storages_in((args, kwargs))}
        result = func(*args, **kwargs)
        made = {id(s): s.nbytes() for _, s in storages_in(result) if id(s) not in given}
        self.told.append((operation.name, need.made, sum(made.values())))
        return result


class TestNeeds:
    @pytest.mark.parametrize("name", ["resnet", "gpt"])
    def test_what_a_step_makes_is_known_before(self, name: str) -> None:
        model = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        with Asked() as asked:
            model.loss(*model.batch(0, 2)).backward()
            optimizer.step()
        assert [told for told in asked.told if told[1] != told[2]] == []

    def test_where_data_decide_it_is_a_bound(self) -> None:
        x = torch.randint(0, 5, (40, 3))
        with Asked() as asked:
            x.nonzero()
            x[x > 2]
            x.masked_select(x > 1)
            x.unique()
            x.unique(return_inverse=True, return_counts=True)
            x.unique(dim=0, return_inverse=True)
            x.flatten().unique_consecutive()
        assert {"aten::nonzero", "aten::index.Tensor", "aten::_unique2", "aten::unique_dim"} <= {
            name for name, _, _ in asked.told
        }
        assert [told for told in asked.told if told[1] < told[2]] == []

    def test_of_what_nobody_can_tell_it_is_the_most_that_was_seen(self) -> None:
        needs, func = Needs(), torch.ops.aten.repeat_interleave.Tensor
        for counts, expected in (([1, 2], 0), ([3, 5], 24), ([1], 64)):
            args = (torch.tensor(counts),)
            need = needs.of(func, args, {}, 8 * len(counts) + expected, 0)
            assert need.made == expected
            needs.end(func, need, 8 * len(counts), func(*args).untyped_storage().nbytes())

    def test_what_is_remembered_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mempool.torch.eager.op_footprints._MOST", 8)
        needs, func = Needs(), torch.ops.aten.add.Tensor
        for at in range(50):
            x = torch.ones(at + 1)
            assert needs.of(func, (x, x), {}, 4 * (at + 1), 0).made == 4 * (at + 1)
        assert len(needs._known) <= 8

    def test_a_learning_rate_that_changes_makes_no_difference(self) -> None:
        needs, x = Needs(), torch.ones(4)
        for rate in (0.1, 0.2):
            needs.of(torch.ops.aten.mul.Scalar, (x, rate), {}, 16 if rate < 0.15 else 17, 0)
        assert len(needs._known) == 1
        for end in (4.0, 8.0):
            assert needs.of(torch.ops.aten.arange.default, (end,), {}, 0, 0).made == 4 * end

    def test_only_what_is_not_given_is_made(self) -> None:
        x = torch.ones(4, 4)
        assert Needs().of(torch.ops.aten.add_.Tensor, (x, x), {}, 64, 0).made == 0
        assert Needs().of(torch.ops.aten.add.out, (x, x), {"out": x}, 64, 0).made == 0

    def test_what_is_away_has_its_shape(self) -> None:
        x = torch.ones(4, 4)
        x.untyped_storage().resize_(0)
        assert Needs().of(torch.ops.aten.add.Tensor, (x, x), {}, 64, 0).made == 64

    def test_where_there_is_ample_room_nothing_is_asked_of_what_never_made_much(self) -> None:
        needs, x, add = Needs(), torch.ones(4), torch.ops.aten.add.Tensor
        first = needs.of(add, (x, x), {}, 16, 1 << 20)
        assert first.made == 16
        needs.end(add, first, 16, 16)
        y = torch.ones(5)
        need = needs.of(add, (y, y), {}, 20, 1 << 20)
        assert need.made == 0
        needs.end(add, need, 20, 20)
        assert needs.of(add, (y, y), {}, 20, 0).made == 20
        column, row = torch.ones(64, 1), torch.ones(1, 64)  # broadcast: it makes far more than it is given
        assert needs.of(add, (column, row), {}, 512, 1 << 20).made == 64 * 64 * 4

    def test_what_is_made_of_little_is_asked_from_then_on(self) -> None:
        needs, x, repeat = Needs(), torch.ones(4), torch.ops.aten.repeat.default
        for many in (100, 200):
            need = needs.of(repeat, (x, [many]), {}, 16, 1 << 20)
            assert need.made == many * 16
            needs.end(repeat, need, 16, many * 16)

    def test_what_an_operation_takes_for_itself_depends_on_strides(self) -> None:
        needs, x, gelu = Needs(), torch.ones(8, 8), torch.ops.aten.gelu_backward.default
        assert needs.of(gelu, (x, x), {}, 256, 0) is needs.of(gelu, (x + 1, x), {}, 256, 0)
        assert needs.of(gelu, (x, x), {}, 256, 0) is not needs.of(gelu, (x.t(), x), {}, 256, 0)

    @given(st.lists(st.integers(-40, 40), min_size=1, max_size=30), st.integers(0, 15))
    def test_what_is_counted_is_no_less_than_what_was_taken(self, changes: list[int], before: int) -> None:
        class Client:
            def __init__(self) -> None:
                self.live = {"current": 0, "peak": 0, "total": 0}

            def change(self, size: int) -> None:
                size = max(size, -self.live["current"])
                self.live = {
                    "current": self.live["current"] + size,
                    "peak": max(self.live["peak"], self.live["current"] + size),
                    "total": self.live["total"] + max(size, 0),
                }

            def stats(self) -> Any:
                return {"live": self.live}

        client = Client()
        for size in changes[:before]:
            client.change(size)
        counters = Counters(client)  # type: ignore[arg-type]
        counters.begin()
        base = most = client.live["current"]
        allocated = client.live["total"]
        for size in changes[before:]:
            client.change(size)
            most = max(most, client.live["current"])
        assert most - base <= counters.taken() <= client.live["total"] - allocated


class Failing(TorchDispatchMode):
    """Below swapping: operations find no memory as often as they are told, before they do anything."""

    missing = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.missing and learn(func).name.startswith(("aten::add", "aten::bernoulli")):
            self.missing -= 1
            raise torch.OutOfMemoryError("there is none")
        return func(*args, **(kwargs or {}))


class Scratch:
    """A pool that serves an operation so many bytes for itself."""

    def __init__(self) -> None:
        self.total = 0

    def stats(self) -> Any:
        return {"live": {"current": 0, "peak": 1 << 40, "total": self.total}}


class TestOwnMemory:
    conv = torch.ops.aten.convolution.default
    add = torch.ops.aten.add.Tensor

    def need(self, needs: Needs, func: Any, side: int) -> Any:
        x = torch.ones(1, 1, side, side)
        args = (x, x) if func is self.add else (x, x, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        return needs.of(func, args, {}, 8 * side * side, 0)

    def test_it_is_guessed_until_it_was_measured_and_then_known(self) -> None:
        pool = Scratch()
        needs = Needs(Counters(pool))  # type: ignore[arg-type]
        assert self.need(needs, self.add, 4).room == 0
        need = self.need(needs, self.conv, 4)
        assert need.room == 8 * 16 + need.made  # nobody knows: as much as it is given and makes
        for taken, known in (
            (100, 100),
            (60, 60),
            (900, 60),
        ):  # others may allocate meanwhile: the least counts
            needs.begin()
            pool.total += taken + need.made
            needs.end(self.conv, need, 8 * 16, need.made)
            assert need.room == known
        assert self.need(needs, self.conv, 4) is need

    def test_with_other_shapes_it_is_the_same_part(self) -> None:
        pool = Scratch()
        needs = Needs(Counters(pool))  # type: ignore[arg-type]
        need = self.need(needs, self.add, 4)
        needs.begin()
        pool.total += 2 * (8 * 16 + 64) + 64
        needs.end(self.add, need, 8 * 16, 64)
        assert self.need(needs, self.add, 8).room == 2 * (8 * 64 + 256)

    def test_it_counts_within_the_limit(self, engine: HostEngine) -> None:
        with Swapper(engine, CPU, 3 * MIB + 4096) as swapper:
            pool: Any = Scratch()
            swapper._needs = Needs(Counters(pool))
            kept = [block(i) for i in range(2)]
            kept[1].sum()
            assert away(kept) == []
            for need in swapper._needs._known.values():
                need.room, need.samples = 2 * MIB, 9
            swapper.iterations.needs.clear()
            kept[1].sum()
            assert away(kept) == [0]
            assert swapper.iterations.tape.rooms[len(swapper.iterations.tape) - 1] == 2 * MIB


class TestOutOfMemory:
    def test_room_is_made_and_an_operation_runs_once_more(self, engine: HostEngine) -> None:
        with Failing() as failing, Swapper(engine, CPU, 1 << 40):
            kept = [block(i) for i in range(3)]
            failing.missing = 1
            assert (kept[2] + 1).mean().item() == 3
            assert away(kept) == [0, 1]
            failing.missing = 2
            with pytest.raises(torch.OutOfMemoryError):
                kept[2] + 1
            assert failing.missing == 1  # nothing is left that could leave

    @pytest.mark.parametrize("name", ["add_", "bernoulli"])
    def test_one_that_writes_or_draws_runs_once(self, engine: HostEngine, name: str) -> None:
        with Failing() as failing, Swapper(engine, CPU, 1 << 40):
            kept = [block(i) for i in range(3)]
            failing.missing = 1
            with pytest.raises(torch.OutOfMemoryError):
                getattr(kept[1], name)(*[1] * (name == "add_"))
            assert failing.missing == 0
            assert away(kept) == []
            assert kept[1].mean().item() == 1


@given(st.lists(st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 9), st.booleans()))), max_size=6))
def test_a_tape_tells_what_each_operation_touched(course: list[tuple[bool, list[tuple[int, bool]]]]) -> None:
    """An operation with what it touched, or views, which belong to the operation before."""
    tape, expected, at = Tape(), [], -1
    for is_operation, touches in course:
        if is_operation:
            at += 1
            tape.first.append(len(tape.touched))
        for number, wrote in touches:
            tape.touched.append(number << 1 | wrote)
            expected.append((number, max(at, 0), wrote))
    assert list(tape.accesses()) == expected
