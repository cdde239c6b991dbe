"""Estimates of a step's memory: totals, shares, the largest batch, and an unchanged process."""

from __future__ import annotations

import copy
import functools
import gc
import json
import random
import sys
import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import models
import torch
from around import OptimizerWrapper
from fit_programs import WithLoss
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer

import mempool.torch
from mempool.errors import UsageError
from mempool.torch.estimate import Fit, Job, fit_job, run
from mempool.torch.estimate.attribution import CATEGORIES, steps_of
from mempool.torch.estimate.estimator import largest
from mempool.torch.estimate.options import OPTIONS
from traces import EventType


def job_of(name: str, **options: Any) -> Job:
    make = models.MODELS[name]
    start: dict[str, Any] = {"optimizer": torch.optim.AdamW, "batch": 4, "device": "cpu"}
    batches = make()
    return Job(lambda: WithLoss(make()), lambda size: (batches.batch(0, size), {}), **start | options)


def mlp(width: int = 32, depth: int = 3) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 4))


X, Y = torch.zeros(8, 32), torch.zeros(8, dtype=torch.long)


def fit_mlp(**options: Any) -> Fit:
    options = {"loss": nn.functional.cross_entropy, "labels": Y} | options
    return mempool.torch.fit(mlp, X, **options)


def answer(fit: Fit) -> dict[str, Any]:
    return fit.to_dict()


jobs = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["train", "train", "inference"]),
        "device": st.sampled_from(["cuda", "cpu"]),
        "batch": st.integers(1, 40),
        "accumulate": st.integers(1, 3),
        "hold_output": st.booleans(),
        "dtype": st.sampled_from([None, torch.float64]),
        "optimizer": st.sampled_from([torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor]),
    }
)


@given(jobs)
@settings(max_examples=25, print_blob=False)
def test_shares_by_class_module_and_phase_add_up_to_the_peak(options: dict[str, Any]) -> None:
    inputs = {"dtype": torch.float64} if options["dtype"] else {}
    job = Job(model=mlp, inputs=lambda size: ((torch.zeros(size, 32, **inputs),), {}), **options)
    fit = fit_job(job)
    assert sum(fit.by_class_bytes.values()) == fit.peak_bytes
    assert fit.by_class_bytes.keys() <= set(CATEGORIES)
    for depth in (None, 0, 1, 2):
        shares = fit.by_module if depth is None else fit.modules(depth)
        assert sum(share.bytes for share in shares) == fit.peak_bytes
        assert all(sum(share.by_class_bytes.values()) == share.bytes for share in shares)
        assert len({share.module for share in shares}) == len(shares)
    assert max(fit.by_phase_bytes.values()) == fit.peak_bytes
    assert fit.by_phase_bytes[fit.peak_phase] == fit.peak_bytes
    assert all(size >= fit.peak_bytes for size in fit.reserved_bytes.values())
    assert fit.needed_bytes == fit.reserved_bytes["pytorch"] + sum(fit.margin_bytes.values())
    assert json.loads(json.dumps(answer(fit))) == answer(fit)


@given(jobs)
@settings(max_examples=10)
def test_peak_equals_a_walk_through_the_second_step(options: dict[str, Any]) -> None:
    job = Job(model=mlp, inputs=lambda size: ((torch.zeros(size, 32),), {}), **options | {"dtype": None})
    fit = fit_job(job)
    rounds = 512 if job.device == "cuda" else 1
    alive: dict[int, tuple[int, str]] = {}
    most: tuple[int, dict[int, tuple[int, str]]] = (-1, {})
    steps, trace = 0, fit.trace
    for row in range(len(trace)):
        buffer = int(trace.buffer[row])
        if trace.kind[row] == EventType.ALLOC:
            size = -(-int(trace.size[row]) // rounds) * rounds
            alive[buffer] = size, trace.names[trace.category[row]]
        elif trace.kind[row] == EventType.FREE:
            del alive[buffer]
        steps += trace.kind[row] == EventType.MARK and trace.names[trace.operation[row]] == "step"
        load = sum(size for size, _ in alive.values())
        if steps == 1 and load > most[0]:
            most = load, dict(alive)
    assert fit.peak_bytes == most[0]
    for category, held in fit.by_class_bytes.items():
        assert held == sum(size for size, name in most[1].values() if name == category)


def test_second_step_peaks_like_all_following_steps() -> None:
    trace = run(job_of("gpt"), steps=4)
    load, steps = trace.load(), steps_of(trace)
    assert len(steps) == 4
    peaks = [int(load[a:b].max()) for a, b in zip([0, *steps[:-1]], steps, strict=True)]
    assert len(set(peaks[1:])) == 1


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return mlp()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_inside() -> nn.Module:
    model = mlp()
    model[1] = compiled(model[1])
    return model


def compiled_in_place() -> nn.Module:
    model = mlp()
    model.compile(backend="eager")
    return model


WAYS = {
    "a factory": lambda: mlp,
    "a module": mlp,
    "a module on meta": on_meta,
    "a factory on meta": lambda: on_meta,
    "compiled": lambda: compiled(mlp()),
    "compiled inside": compiled_inside,
    "compiled in place": compiled_in_place,
    "on several GPUs": lambda: nn.DataParallel(mlp()),
    "compiled on several GPUs": lambda: compiled(nn.DataParallel(mlp())),
}


@pytest.mark.parametrize("way", WAYS)
def test_form_of_the_model_does_not_change_the_estimate(way: str) -> None:
    given_so = mempool.torch.fit(WAYS[way](), X, loss=nn.functional.cross_entropy, labels=Y)
    assert answer(given_so) == answer(fit_mlp())


def test_model_that_cannot_be_copied_is_refused() -> None:
    model = mlp()
    model.lock = threading.Lock()
    with pytest.raises(UsageError, match=r"cannot be copied .* give a function that makes it"):
        mempool.torch.fit(model, X)


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_shortcuts_of_the_fake_mode_do_not_change_the_trace(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried() -> list[Any]:
        trace = run(job_of(name, device="cuda"))
        return [trace.names, *(getattr(trace, c).tolist() for c in ("kind", "buffer", "size", "operation"))]

    ours = tried()
    module = sys.modules["mempool.torch.estimate.fake.fake_run"]
    monkeypatch.setattr(module, "fake_mode", lambda: FakeTensorMode(allow_non_fake_inputs=True))
    assert tried() == ours


def test_active_fake_mode_is_used() -> None:
    with FakeTensorMode() as mode:
        made = mlp()
    with mode:
        fit = mempool.torch.fit(made, X, loss=nn.functional.cross_entropy, labels=Y)
    assert answer(fit) == answer(fit_mlp())


def test_optimizer_reading_values_is_estimated_with_a_warning() -> None:
    assert any("looks at values" in text for text in fit_mlp(optimizer=torch.optim.Adafactor).warnings)
    assert not fit_mlp().warnings


def test_checkpointed_blocks_hold_less() -> None:
    def deep() -> nn.Module:
        layers = [nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()]
        return nn.Sequential(*(nn.Sequential(*copy.deepcopy(layers)) for _ in range(6)), nn.Linear(64, 4))

    x = torch.zeros(4096, 64)
    loss = {"loss": lambda out: out.sum(), "optimizer": torch.optim.SGD}
    kept, again = (mempool.torch.fit(deep, x, checkpoint=which, **loss).peak_bytes for which in (False, True))
    assert again < 0.7 * kept
    with pytest.raises(UsageError, match="nothing to checkpoint"):
        mempool.torch.fit(lambda: nn.Linear(32, 8), X, checkpoint=True)


def test_optimizer_of_real_parameters_is_refused_with_its_class() -> None:
    """A wrapper around such an optimizer is refused too."""
    made = torch.optim.SGD([nn.Parameter(torch.ones(3))], 0.1)
    for one in (made, OptimizerWrapper(made)):
        with pytest.raises(UsageError, match="is a SGD of real parameters"):
            fit_mlp(optimizer=one)


def test_higher_peak_of_the_first_step_gives_a_warning() -> None:
    class Big(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if not self.state:
                self.state["made"] = torch.zeros(1 << 20)[:1].clone()
            return super().step(closure)

    fit = fit_mlp(optimizer=Big)
    assert fit.first_step_bytes >= fit.peak_bytes + (2 << 20)
    assert any("first step" in text for text in fit.warnings)
    assert fit.reserved_bytes["planned"] >= fit.first_step_bytes


@given(st.lists(st.integers(0, 50), min_size=1, max_size=300), st.integers(0, 3000), st.data())
def test_largest_batch_equals_exhaustive_search(steps: list[int], limit: int, data: st.DataObject) -> None:
    need = np.cumsum(steps)
    beyond = int(need[-1]) + 1 + max(0, limit)
    tried: list[int] = []

    def needs(batch: int) -> int:
        tried.append(batch)
        return int(need[batch - 1]) if batch <= len(need) else beyond + batch

    first = data.draw(st.integers(1, 400))
    found = largest(needs, limit, first)
    assert found == max((b for b in range(1, len(need) + 1) if need[b - 1] <= limit), default=0)
    assert len(tried) == len(set(tried)) <= OPTIONS.batch_tries


@given(st.integers(1, 10_000), st.integers(1, 1 << 26), st.integers(1, 1000))
def test_the_search_ends_where_memory_comes_by_segments(sample: int, segment: int, first: int) -> None:
    limit = 5_000_000 * sample

    def needs(batch: int) -> int:
        return -(-batch * sample // segment) * segment

    found = largest(needs, limit, first)
    assert needs(found) <= limit < needs(found + 1)


def test_endless_search_gives_a_warning() -> None:
    with pytest.raises(UsageError, match="still fits, and no more is tried"):
        largest(lambda _: 1, 2)
    fit = mempool.torch.fit(nn.Linear(2, 2), torch.zeros(1 << 23, 2), limit="1TiB")
    assert (fit.fits, fit.largest_batch) == (True, None)
    assert fit.warnings[-1].startswith("no largest batch: one of")


def test_missing_bytes_are_the_difference_to_the_limit() -> None:
    whole = fit_mlp()
    fit = fit_mlp(limit=whole.needed_bytes - 1000, largest=False)
    assert (fit.fits, fit.missing_bytes, fit.largest_batch) == (False, 1000, None)
    assert fit_mlp(limit=whole.needed_bytes, largest=False).fits
    assert "does not fit" in str(fit)
    assert fit_mlp(limit="1MiB", remedies=False).largest_batch == 0


def state_of_the_process() -> list[Any]:
    return [
        torch.get_rng_state().tolist(),
        gc.get_freeze_count(),
        random.getstate(),
        [str(part) for part in np.random.get_state()],  # noqa: NPY002
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        [str(value) for name, value in vars(nn.modules.module).items() if "_global_" in name],
        len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        torch.overrides._len_torch_function_stack(),
        nn.Module._apply,
        nn.init._no_grad_trunc_normal_,
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
        torch._subclasses.fake_tensor.log.disabled,
    ]


class Changing(nn.Module):
    """Module that changes the process's defaults, and fails at a given place."""

    def __init__(self, fail: str) -> None:
        super().__init__()
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
        self.layer, self.fail = nn.Linear(4, 4), fail
        if fail == "made":
            raise ValueError("in the making")

    def forward(self, x: Tensor) -> Tensor:
        np.random.random(), random.random()  # noqa: NPY002
        x = self.layer(x.double()) + torch.rand(4)
        if self.fail == "forward":
            raise ValueError("in the forward")
        if self.fail == "value":
            x = x * x.sum().item()
        if self.fail == "backward":
            x.register_hook(lambda _: 1 // 0)
        return nn.functional.dropout(x)


@pytest.mark.parametrize("ambient", ["plain", "float64", "no_grad", "inference_mode", "autocast", "meta"])
@pytest.mark.parametrize("fail", ["", "made", "forward", "value", "backward"])
def test_process_state_is_restored(ambient: str, fail: str) -> None:
    around = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu"),
        "meta": lambda: torch.device("meta"),
    }
    try:
        if ambient == "float64":
            torch.set_default_dtype(torch.float64)
        with around.get(ambient, torch.enable_grad)():
            x = torch.zeros(2, 4)
            before = state_of_the_process()
            errors = {"": (), "value": UsageError, "backward": ZeroDivisionError}.get(fail, ValueError)
            if errors:
                with pytest.raises(errors):
                    mempool.torch.fit(lambda: Changing(fail), x)
            else:
                mempool.torch.fit(lambda: Changing(fail), x)
            assert state_of_the_process() == before
    finally:
        torch.set_default_dtype(torch.float32)


def test_functools_caches_keep_no_fake_tensor() -> None:
    @functools.lru_cache
    def mask(n: int) -> Tensor:
        return torch.tril(torch.ones(n, n))

    @functools.cache
    def deep(n: int) -> dict[str, list[nn.Module]]:
        return {"layers": [nn.Linear(n, n)]}

    @functools.cache
    def thing(_: int) -> object:
        return object()

    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            thing(len(x))
            return super().forward(x) @ mask(x.size(1)) + deep(x.size(1))["layers"][0](x)

    kept = mask(3)
    for batch in (2, 3):
        mempool.torch.fit(lambda: Masked(4, 4), torch.zeros(2, 4), batch=batch, mode="inference")
    assert (mask.cache_info().currsize, deep.cache_info().currsize) == (0, 0)
    assert thing.cache_info().currsize > 0
    assert type(mask(4)) is Tensor
    assert mask(3).equal(kept)
    mempool.torch.fit(lambda: nn.Linear(4, 4), torch.zeros(2, 4))
    assert mask.cache_info().currsize == 2  # an estimate does not clear the program's cache


def test_model_and_inputs_stay_unchanged() -> None:
    model = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4))
    model.eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    tensors = [*model.parameters(), *model.buffers(), model[0].weight.grad, X, Y]
    values = [(t.clone(), t.data_ptr(), t._version, type(t)) for t in tensors]
    kept = [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]
    for mode in ("train", "inference"):
        mempool.torch.fit(model, X, loss=nn.functional.cross_entropy, labels=Y, mode=mode, dtype=torch.half)
    after = [*model.parameters(), *model.buffers(), model[0].weight.grad, X, Y]
    for tensor, (value, address, version, kind) in zip(after, values, strict=True):
        assert (tensor.data_ptr(), tensor._version, type(tensor)) == (address, version, kind)
        assert torch.equal(tensor, value)
    assert kept == [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]
    assert not model.training


def test_threads_get_their_own_estimates_and_errors() -> None:
    told: dict[int, Any] = {}

    def ask(number: int) -> None:
        try:
            told[number] = answer(fit_mlp(batch=8 * (number + 1))) if number % 2 else None
            if number % 2 == 0:
                mempool.torch.fit(lambda: Changing("value"), torch.zeros(2, 4))
        except UsageError as error:
            told[number] = str(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for number in range(6):
        if number % 2:
            assert told[number] == answer(fit_mlp(batch=8 * (number + 1)))
        else:
            assert "a value is read" in told[number]
