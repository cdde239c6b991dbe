"""The backend of torch.compile: options, training, predictions, and the pool."""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from typing import TYPE_CHECKING

from compiled_programs import ALL, PLAIN, adamw_state_bytes, compiled, same, trained, waves
from torch import nn
from training import MODELS, Setup, run

import mempool.torch.compiled
from mempool.errors import UsageError
from mempool.torch.compiled.options import UNDECIDED, Options, parse_options
from mempool.torch.compiled.runtime import RUNTIME, TransferCounters
from mempool.torch.compiled.shared_limit import SHARED_LIMITS
from solvers.swap import Link

if TYPE_CHECKING:
    from mempool.torch.compiled.decide import StepDecision

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def point(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def slope(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(waves(x).sum(), x)[0]


def test_valid_options_are_parsed() -> None:
    """Sizes as text, links by name."""
    made = parse_options({"limit": "8GiB", "link": "pcie4", "beside": 0})
    assert made.limit == 8 << 30
    assert parse_options({"limit": 12e9, "name": "teacher"}) == Options(limit=12_000_000_000, name="teacher")
    assert parse_options({"limit": np.int64(12)}).limit == 12
    assert parse_options({"limit": "80%"}) == Options(limit=UNDECIDED, share=0.8)
    assert isinstance(made.link, Link)
    assert parse_options(None) == Options()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limits": 1}, "has no option 'limits'"),
        ({"limit": "much"}, "'much' is not a size"),
        ({"limit": "101%"}, "limit is '101%', not between 0% and 100%"),
        ({"limit": "5", "share": 0.5}, "has no option 'share'"),
        ({"limit": 0}, "more than 0 bytes"),
        ({"limit": -5}, "more than 0 bytes"),
        ({"limit": True}, "no size in bytes"),
        ({"limit": 1.5}, "no size in bytes"),
        ({"inner": "xla"}, "there are 'inductor' and 'eager'"),
        ({"link": "rope"}, "'rope' is no link"),
        ({"link": 3}, "neither a Link nor a text"),
    ],
)
def test_invalid_options_are_named(options: dict[str, Any], said: str) -> None:
    """One line names the option."""
    with pytest.raises(UsageError, match=said):
        parse_options(options)
    with pytest.raises(UsageError, match="has no mode 'max-autotune'"):
        parse_options({}, "max-autotune")


@pytest.mark.parametrize("options", ["limit", 5, ["limit"], {"limit"}])
def test_options_must_be_a_dictionary(options: Any) -> None:
    with pytest.raises(UsageError, match="no dictionary"):
        parse_options(options)


def test_pytorch_finds_the_backend_by_name() -> None:
    """`torch.compile(backend="mempool")` works and names a wrong option."""
    assert "mempool" in torch._dynamo.list_backends()
    with pytest.raises(Exception, match="has no option 'speed'"):
        compiled(waves, {"speed": 9})(point())


@pytest.mark.usefixtures("everything_leaves")
def test_training_with_offloads_is_bit_identical() -> None:
    """Losses, parameters and buffers of three steps are equal."""

    def make() -> nn.Module:
        layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)]
        return nn.Sequential(*layers, *copy.deepcopy(layers))

    plain = trained(make, PLAIN)
    assert same(trained(make, ALL), plain)
    assert RUNTIME.counters.offloads > 0


@pytest.mark.usefixtures("everything_leaves")
def test_retained_graph_keeps_host_copies_for_a_second_backward_pass() -> None:
    x = point()
    loss = compiled(waves, ALL)(x).sum()
    loss.backward(retain_graph=True)
    assert RUNTIME.host_copies > 0
    loss.backward()
    assert torch.equal(x.grad, 2 * slope(point()))
    del loss
    assert RUNTIME.host_copies == 0


@pytest.mark.usefixtures("everything_leaves")
def test_interleaved_passes_have_separate_copies() -> None:
    """Backward passes run in another order than the forward passes."""
    run, xs = compiled(waves, ALL), [point(seed) for seed in range(3)]
    results = [run(x).sum() for x in xs]
    for i in (1, 2, 0):
        results[i].backward()
    assert all(torch.equal(x.grad, slope(point(seed))) for seed, x in enumerate(xs))


@pytest.mark.usefixtures("everything_leaves")
def test_failed_backward_pass_releases_all_copies() -> None:
    """The next pass is right."""
    run, x = compiled(waves, ALL), point()

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    y = (x * 1).requires_grad_()
    y.register_hook(fail)
    result = run(y).sum()
    with pytest.raises(ZeroDivisionError):
        result.backward()
    del result, y
    gc.collect()
    assert RUNTIME.host_copies == 0
    run(x).sum().backward()
    assert torch.equal(x.grad, slope(point()))


@pytest.mark.usefixtures("everything_leaves")
def test_inference_offloads_nothing() -> None:
    run = compiled(waves, ALL)
    with torch.no_grad():
        assert torch.equal(run(point()), waves(point()))
    assert RUNTIME.counters.offloads == 0


@pytest.mark.usefixtures("everything_leaves")
def test_copying_hooks_on_saved_tensors_are_refused() -> None:
    """A copied ticket keeps no host copy alive: an error instead of wrong gradients."""
    run, x = compiled(waves, ALL), point()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved):
        result = run(x).sum()
    with pytest.raises(UsageError, match="hooks on saved tensors"):
        result.backward()
    x.grad = None
    run(x).sum().backward()  # and nothing is left behind that a later pass would meet
    assert torch.equal(x.grad, slope(point()))


@pytest.mark.usefixtures("everything_leaves")
def test_checkpoint_around_a_compiled_function() -> None:
    """The checkpoint discards and recomputes the saved values."""
    run, x = compiled(waves, ALL), point()
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, slope(point()))
    assert RUNTIME.host_copies == 0


@pytest.mark.usefixtures("everything_leaves")
def test_offloads_with_dynamic_sizes() -> None:
    """Sizes known only at run time are saved with the values."""
    run = compiled(waves, ALL, dynamic=True)
    for rows in (4, 6, 9, 5):
        x, y = (torch.ones(rows, 3).cumsum(0).requires_grad_() for _ in range(2))
        run(x).sum().backward()
        assert torch.equal(x.grad, slope(y))
    assert RUNTIME.counters.reloads > 0


LINK = Link(1e-5, 1e-10, 1e-5, 1e-10)


def last() -> StepDecision:
    """Return the decision about the latest graph."""
    (part,) = SHARED_LIMITS[-1].graphs.values()
    return part.decision


def row() -> torch.Tensor:
    return torch.linspace(0, 1, 4096).view(64, 64).requires_grad_()


def test_checkpoint_recomputations_have_separate_memory() -> None:
    """A node of the same name in both graphs stands for two values."""

    def again(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(waves, x * 2, use_reentrant=False)
        return result.sum()

    compiled(again, {**PLAIN, "limit": 1 << 30, "link": LINK})(row())
    graph = last().captured.graph
    made_again = np.flatnonzero(graph.backward[graph.producer] & (graph.producer >= 0) & (graph.size > 0))
    kinds = {graph.kinds[graph.kind[graph.producer[value]]] for value in made_again}
    assert {"aten.exp", "aten.sin", "aten.tanh"} <= kinds


def test_host_limit_is_checked_when_deciding() -> None:
    """The refusal comes before anything runs."""
    options = {**PLAIN, "link": LINK}
    compiled(waves, {**options, "limit": 1 << 30})(row())
    limit = int(0.9 * last().plain.peak_bytes)
    compiled(waves, {**options, "limit": limit})(row())
    host = last().simulated.host_bytes
    with pytest.raises(Exception, match=f"with {host - 1} bytes on the host"):
        compiled(waves, {**options, "limit": limit, "host_limit": host - 1})(row())


def test_pool_replays_compiled_graphs_with_offloads(one_thread: None) -> None:
    """Every allocation hits, and losses are bit-identical."""
    options: dict[str, Any] = {"inner": "eager", "link": "pcie3"}

    def training(given: dict[str, Any], *, pooled: bool) -> dict[str, Any]:
        torch._dynamo.reset()
        RUNTIME.counters = TransferCounters()
        return run(Setup("resnet", size=2, steps=7, rewriting=given), None, pooled=pooled)

    model = MODELS["resnet"]()
    compiled(model.loss, {**options, "limit": 1 << 40})(*model.batch(0, 2))
    plain = mempool.torch.compiled.report().graphs[-1]["plain_peak_bytes"]
    expected = training({"inner": "eager"}, pooled=False)
    kept = adamw_state_bytes(model)
    got = training({**options, "limit": int(0.9 * plain) + kept, "beside": kept}, pooled=True)
    assert RUNTIME.counters.reloads > 0
    assert got["losses"] == expected["losses"]
    assert got["parameters"] == expected["parameters"]
    report = got["report"]
    assert (report["state"], report["misses_total"], report["hit_rate"]) == ("replaying", 0, 1.0)
    assert report["planned_arena_bytes"] <= 1.01 * report["peak_load_bytes"]
