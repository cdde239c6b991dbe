"""The access recorder on models: compared with PyTorch's tracker, on fake and real tensors."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from models import MODELS
from recorded import adamw, buffer_counts, marks, momentum, recorder, train
from torch.distributed._tools import mem_tracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from mempool.recording.torch.ledger import storages_in, tensors_in
from mempool.recording.torch.operations import learn
from traces import EventType, Trace

#: Models tested by default; the others run with ``-m full``.
OFTEN = [
    pytest.param(name, marks=[pytest.mark.full] if name in ("seq2seq", "bert", "unet") else [])
    for name in MODELS
]
STEP = ["forward", "backward", "optimizer", "step"]


def tracker(step: Any, optimizer: Any, batches: Any) -> MemTracker:
    made = MemTracker()
    made.track_external(step, optimizer, *[tensor for batch in batches for tensor in batch])
    return made


def tracked(name: str, optimizer: Callable[[Any], Any], **attributes: Any) -> dict[str, int]:
    """Return the peak of PyTorch's own tracker."""
    found = train(
        name,
        tracker,
        fake=True,
        optimizer=optimizer,
        after=lambda tracker: tracker.reset_mod_stats(),  # the tracker covers one iteration
        **attributes,
    )
    peak = found.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {getattr(key, "value", key): size for key, size in peak.items()}


@functools.cache
def traced(name: str, *, fake: bool = True) -> Trace:
    """Return the trace of two steps with AdamW."""
    trace: Trace = train(name, recorder, fake=fake).trace()
    trace.validate()
    return trace


def at_peak(trace: Trace) -> Counter[str]:
    """Return the bytes of each category at the peak, computed event by event."""
    alive: dict[int, tuple[str, int]] = {}
    best: Counter[str] = Counter()
    for kind, buffer, size, category in zip(
        trace.kind.tolist(), trace.buffer.tolist(), trace.size.tolist(), trace.category.tolist(), strict=True
    ):
        if kind == EventType.ALLOC:
            alive[buffer] = trace.names[category], size
            if sum(size for _, size in alive.values()) > best.total():
                best = Counter()
                for name, held in alive.values():
                    best[name] += held
        elif kind == EventType.FREE:
            del alive[buffer]
    return best


@pytest.mark.filterwarnings("ignore:Module is None:UserWarning")  # the tracker's
class TestTracker:
    @pytest.mark.parametrize("name", OFTEN)
    def test_the_peak_is_that_of_their_own_tracker_to_the_byte(self, name: str) -> None:
        assert int(traced(name).load().max()) == tracked(name, adamw)["Total"]

    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_peak_equals_the_tracker_with_cuda_rounding_and_checkpoints(
        self, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
    ) -> None:
        monkeypatch.setattr(
            mem_tracker._WeakRefInfo,
            "_calculate_mem_consumed",
            lambda info: math.ceil(info.size * info.element_size / 512) * 512,
        )
        seen = train("gpt", recorder, fake=True, optimizer=momentum, checkpointing=checkpointing).trace()
        rounded = Trace.of(seen.kind, seen.buffer, -(-seen.size // 512) * 512)
        assert int(rounded.load().max()) == tracked("gpt", momentum, checkpointing=checkpointing)["Total"]

    def test_categories_of_buffers_equal_the_tracker(self) -> None:
        """The tracker counts all forward buffers as activations, and unaccumulated gradients as temporary."""
        theirs = tracked("resnet", adamw)
        ours = at_peak(traced("resnet"))
        assert ours["parameters"] == theirs["Parameter"]
        assert ours["module_buffers"] == theirs["Buffer"]
        assert ours["optimizer_state"] == theirs["Optstate"]
        assert ours["inputs"] == theirs["Other"]
        assert ours["activations"] == theirs["Activation"]
        assert ours["gradients"] + ours["temporaries"] == theirs["Gradient"] + theirs["Temp"]
        assert ours["gradients"] >= theirs["Gradient"]


class TestModels:
    # All models but two: the LSTM's fused kernel allocates less than its parts, and transformers asks a real
    # mask
    # whether it is all ones.
    @pytest.mark.parametrize("name", ["gpt", pytest.param("bert", marks=pytest.mark.full)])
    def test_real_tensors_are_recorded_as_fake_ones(self, name: str) -> None:
        fake, real = (traced(name, fake=fake) for fake in (True, False))
        assert fake.names == real.names
        for column in ("kind", "buffer", "size", "operation", "module", "category"):
            assert np.array_equal(getattr(fake, column), getattr(real, column)), column

    @pytest.mark.parametrize("name", OFTEN)
    def test_every_buffer_has_a_category_and_each_step_its_phases(self, name: str) -> None:
        trace = traced(name)
        assert marks(trace) == 2 * STEP
        assert None not in buffer_counts(trace)
        parameters = len(list(MODELS[name]().parameters()))
        kinds = buffer_counts(trace)
        assert (kinds["parameters"], kinds["gradients"]) == (parameters, 2 * parameters)
        assert kinds["optimizer_state"] == 3 * parameters

    def test_second_and_third_step_have_equal_events(self) -> None:
        trace = train("gpt", recorder, fake=True, steps=3).trace()
        ends = np.flatnonzero((trace.kind == EventType.MARK) & (trace.operation == trace.names.index("step")))
        second, third = slice(ends[0] + 1, ends[1] + 1), slice(ends[1] + 1, ends[2] + 1)
        for column in ("kind", "size", "operation", "module", "category"):
            assert np.array_equal(getattr(trace, column)[second], getattr(trace, column)[third])

    def test_modules_are_named_as_in_the_model_in_the_backward_too(self) -> None:
        trace = traced("gpt")
        head = trace.names.index("Step.model.head")
        rows = np.flatnonzero((trace.module == head) & (trace.kind == EventType.WRITE))
        phases = {phase_of(trace, row) for row in rows.tolist()}
        assert {"forward", "backward"} <= phases
        paths = {name for name, _ in torch.nn.Module.named_modules(MODELS["gpt"]())} - {"", "layers"}
        paths -= {f"layers.{n}.mlp" for n in range(3)}  # only its children run operations
        assert {f"Step.model.{path}" for path in paths} <= set(buffer_counts(trace, "module"))


def phase_of(trace: Trace, row: int) -> str:
    before = np.flatnonzero(trace.kind[:row] == EventType.MARK)
    return trace.names[trace.operation[before[-1]]]


class Compared(TorchDispatchMode):
    """Compares the arguments before and after each operation with the writes of the operation's schema."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.unsaid: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = learn(func)
        written = {
            id(storage)
            for a in operation.arguments
            if a.written
            for _, storage in storages_in(args[a.position] if a.position < len(args) else kwargs.get(a.name))
        }
        before = [(tensor, tensor.clone()) for tensor in tensors_in((args, kwargs))]
        result = func(*args, **kwargs)
        self.seen.add(operation.name)
        for tensor, bytes_before in before:
            changed = not torch.equal(tensor.detach().nan_to_num(), bytes_before.nan_to_num())
            if changed and id(tensor.untyped_storage()) not in written:
                self.unsaid.append(operation.name)
        return result


@pytest.mark.parametrize("training", [True, False])
def test_every_write_of_a_step_is_known(training: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(3, 4, 3),
        torch.nn.BatchNorm1d(4),
        torch.nn.RReLU(),
        torch.nn.Dropout(0.5),
        torch.nn.InstanceNorm1d(4, track_running_stats=True),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(4),
    )
    batch = torch.randn(5, 3, 8)
    model(batch)
    model.train(training)
    optimizer = torch.optim.AdamW(model.parameters())
    with Compared() as compared:
        for _ in range(2):
            model(batch).sum().backward()
            optimizer.step()
    assert compared.unsaid == []
    assert any("batch_norm" in name for name in compared.seen)


def test_every_write_of_a_recurrent_layer_is_known() -> None:
    layer = torch.nn.LSTM(3, 4)
    with Compared() as compared:
        out = layer(torch.randn(5, 2, 3))[0].sum()
        for _ in range(2):
            out.backward(retain_graph=True)
    assert compared.unsaid == []


def test_running_statistics_that_are_only_read_are_not_written() -> None:
    for name in ("native_batch_norm_backward", "_native_batch_norm_legit_no_training"):
        assert not any(a.written for a in learn(getattr(torch.ops.aten, name).default).arguments)
