"""Memory outside a graph counts for the limit: predictions against a pool's counters over whole steps."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from compiled_programs import compiled, named_limit, same
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from mempool.torch.compiled import shared_limit as rewriting_budget
from mempool.torch.compiled.optimizer_state import future_states
from mempool.torch.compiled.partition import incoming_gradients
from mempool.torch.compiled.shared_limit import SHARED_LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.torch import TensorPool

pytestmark = [
    pytest.mark.usefixtures("no_vectors", "few_objects"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),  # of PyTorch's own modules
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # Dynamo asks results of graphs
    pytest.mark.filterwarnings("ignore:.* bytes are on the device"),  # what tests compare with is there, too
]


class Late(nn.Module):
    """Two graphs: the first has the peak, the second most parameters and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.wide = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), nn.Linear(2048, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        row = x.mean(0)
        torch._dynamo.graph_break()
        return self.wide(row.repeat(32)).sin()


class Tied(nn.Module):
    """Two graphs that read one parameter: one gradient is pending during the other backward run."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4096, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.table[:64]).sin()
        torch._dynamo.graph_break()
        return (y[:16] @ self.table.t()).sin()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x)


class Regions(nn.Module):
    """Blocks that are compiled separately."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Parts(nn.Module):
    """Two parts without a common caller."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Sequential(*[one for _ in range(4) for one in (nn.Linear(64, 64), nn.Tanh())])
        self.wide = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128), nn.Tanh())


Step = "Callable[[torch.Tensor], torch.Tensor]"


def once(model: nn.Module, options: dict[str, Any]) -> Step:
    return compiled(lambda x: model(x).square().mean(), options)


def twice(model: nn.Module, options: dict[str, Any]) -> Step:
    """Run the model twice before the backward pass."""
    run = compiled(model, options)
    return lambda x: run(x).square().mean() + run(x.flip(0)).square().mean()


def by_regions(model: nn.Module, options: dict[str, Any]) -> Step:
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="mempool", options=options)
    return lambda x: model(x).square().mean()


def by_parts(model: nn.Module, options: dict[str, Any]) -> Step:
    """Compile each part and the loss separately; an uncompiled function calls all of them."""
    torch._dynamo.reset()
    parts = [torch.compile(one, backend="mempool", options=options) for one in (model.narrow, model.wide)]
    loss_of = torch.compile(lambda x: x.sin().square().mean(), backend="mempool", options=options)

    def step(x: torch.Tensor) -> torch.Tensor:
        for part in parts:
            x = part(x)
        return loss_of(x)

    return step


def loss_outside(model: nn.Module, options: dict[str, Any]) -> Step:
    """Compute the loss uncompiled, which takes most memory between the passes."""
    run = compiled(model, options)
    return lambda x: run(x).repeat(1, 8).square().mean()


def accumulated(model: nn.Module, options: dict[str, Any]) -> Step:
    """Accumulate the gradients of two backward passes."""
    run = once(model, options)

    def step(x: torch.Tensor) -> torch.Tensor:
        run(x).backward()
        return run(x)

    return step


def steps_of(
    pool: TensorPool, make: type[nn.Module], compile_step: Callable[..., Any], options: dict[str, Any]
) -> tuple[list[torch.Tensor], list[int]]:
    """Return loss and gradients of the last of four steps, and the peak bytes of each step."""
    torch.manual_seed(0)
    gc.collect()
    before = pool.client.stats()["requested"]["current"]
    model, peaks = make(), []
    step = compile_step(model, options)
    for _ in range(4):
        x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))
        model.zero_grad()
        pool.client.reset_peaks()
        loss = step(x)
        loss.backward()
        peaks.append(pool.client.stats()["requested"]["peak"] - before)
    return [loss.detach(), *(one.grad for one in model.parameters())], peaks


def least_of(
    pool: TensorPool, make: type[nn.Module], compile_step: Callable[..., Any], options: dict[str, Any]
) -> tuple[int, list[torch.Tensor], list[int]]:
    """Return the limit that repeated refusals lead to, and the results with that limit."""
    limit = 1000
    for _ in range(9):
        try:
            return limit, *steps_of(pool, make, compile_step, {**options, "limit": limit})
        except BackendCompilerFailed as refused:
            named = named_limit(refused)
            assert named > limit
            limit = named
    raise AssertionError("refused too often")


OPTIONS = {"inner": "eager", "link": "pcie3"}
PROGRAMS = [
    (Late, once, 0.85, 0.999),
    (Regions, by_regions, 0.6, 0.85),
    pytest.param(Wide, twice, 0.75, 0.9, marks=pytest.mark.full),
    (Parts, by_parts, 0.75, 0.9),
    pytest.param(Wide, loss_outside, 0.9, 0.9, marks=pytest.mark.full),
    (Late, accumulated, 0.9, 0.9),
]


@pytest.mark.parametrize(("make", "compile_step", "share", "used"), PROGRAMS)
def test_steps_hold_the_least_limit_named_by_refusals(
    make: type[nn.Module], compile_step: Callable[..., Any], share: float, used: float, pool: TensorPool
) -> None:
    """The least limit is held bit-identically, and nearly used up."""
    plain, peaks = steps_of(pool, make, compile_step, {"inner": "eager"})
    least, got, taken = least_of(pool, make, compile_step, OPTIONS)
    assert least < share * peaks[-1]
    assert used * least < taken[-1] <= least
    assert taken[2] <= least
    assert same(got, plain)


class Deep(nn.Sequential):
    """Saved activations are most of the peak."""

    def __init__(self) -> None:
        super().__init__(*(part for _ in range(8) for part in (nn.Linear(64, 64), nn.Sigmoid())))


class OwnAdam(torch.optim.Adam):
    """An optimizer that nothing foresees, since its state may differ."""


@pytest.mark.parametrize("kind", [torch.optim.Adam, OwnAdam])
def test_limit_holds_when_the_first_step_makes_optimizer_state(
    kind: type[torch.optim.Optimizer], pool: TensorPool
) -> None:
    """State of PyTorch's own optimizers is foreseen; other state counts from the first step on."""
    _, peaks = steps_of(pool, Deep, once, {**OPTIONS, "limit": 1 << 40})
    limit = max(peaks) + (1 << 16)  # leaves no room for the state
    torch.manual_seed(0)
    gc.collect()
    before = pool.client.stats()["requested"]["current"]
    model, peaks = Deep(), []
    run = once(model, {**OPTIONS, "limit": limit})
    optimizer = kind(model.parameters(), 1e-3)
    x = torch.randn(1024, 64)
    for _ in range(3):
        pool.client.reset_peaks()
        run(x).backward()
        peaks.append(pool.client.stats()["requested"]["peak"] - before)
        optimizer.step()
        optimizer.zero_grad()
    assert sum(one.nbytes for entry in optimizer.state.values() for one in entry.values()) > 1 << 17
    assert max(peaks) <= limit


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adadelta, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
    ],
)
def test_foreseen_optimizer_state_equals_the_state_after_a_step(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 3, bias=False))
    parameters = list(model.parameters())
    optimizer = kind(parameters, lr=0.1, **options)

    def state() -> int:
        entries = (one for some in optimizer.state.values() for one in some.values())
        return sum(one.numel() for one in entries if isinstance(one, torch.Tensor) and one.numel() > 1)

    before = state()
    foreseen = sum(count * one.numel() for one, count in future_states(parameters))
    for one in parameters:
        one.grad = torch.ones_like(one)
    optimizer.step()
    assert state() - before == foreseen
    assert sum(count for _, count in future_states(parameters)) == 0


def test_checkpointed_regions_are_counted(pool: TensorPool) -> None:
    """Blocks under a checkpoint run again in the backward pass."""

    def checkpointed(model: nn.Module, options: dict[str, Any]) -> Step:
        by_regions(model, options)

        def step(x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            for block in model.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return x.square().mean()

        return step

    plain, _ = steps_of(pool, Regions, checkpointed, {"inner": "eager"})
    least, got, taken = least_of(pool, Regions, checkpointed, {"inner": "eager", "link": "pcie3"})
    assert max(taken[2:]) <= 1.02 * least
    assert same(got, plain)


@pytest.mark.full
def test_pending_gradients_are_counted_and_accumulate_in_place(pool: TensorPool) -> None:
    """Reading a tensor's storage creates a share, and PyTorch then no longer accumulates in place."""
    _, peaks = steps_of(pool, Tied, once, {"inner": "inductor"})
    options = {"inner": "inductor", "link": "pcie3"}
    _, most = steps_of(pool, Tied, once, {**options, "limit": 1 << 40})
    assert max(most[1:]) <= peaks[-1]
    least, _, taken = least_of(pool, Tied, once, options)
    assert taken[-1] <= least
    first = SHARED_LIMITS[-1].graphs[0]
    assert first.decision.peak_of(backward=True) + 4096 * 64 * 4 <= least


def test_new_high_water_mark_restarts_the_observation(pool: TensorPool) -> None:
    """After many steps of single runs, the function runs twice before the backward pass."""
    options = {"inner": "eager", "link": "pcie3"}
    limit, _, _ = least_of(pool, Wide, twice, options)
    torch.manual_seed(0)
    gc.collect()
    before = pool.client.stats()["requested"]["current"]
    model, peaks = Wide(), []
    run = compiled(model, {**options, "limit": limit})
    pool.client.reset_peaks()
    for step in range(9):
        x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))
        model.zero_grad()
        loss = run(x).square().mean()
        if step > 4:
            pool.client.reset_peaks()
            loss = loss + run(x.flip(0)).square().mean()
        loss.backward()
        peaks.append(pool.client.stats()["requested"]["peak"] - before)
    assert max(peaks[:5]) <= limit
    assert max(peaks[5:7]) > 1.1 * limit
    assert max(peaks[7:]) <= limit


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_kept_bytes_equal_live_bytes_between_the_passes(inner: str, pool: TensorPool) -> None:
    """Results count, gradients given to the backward pass do not."""
    gc.collect()
    before = pool.client.stats()["requested"]["current"]
    model = Wide()
    run = compiled(model, {"inner": inner, "link": "pcie3", "limit": 4 << 20})
    x = torch.randn(1024, 64)
    for _ in range(2):
        model.zero_grad()
        result = run(x)
        (part,) = SHARED_LIMITS[-1].graphs.values()
        kept = part.decision.pause_bytes(0)
        assert kept - 64 <= pool.client.stats()["requested"]["current"] - before <= kept
        result.sum().backward()
        del result


def test_gradient_inputs_exclude_random_generators() -> None:
    """On a GPU, generator states follow the gradients."""
    graph = torch.fx.Graph()
    for name in ("tanh", "tangents_1", "tangents_2", "bwd_rng_state_0"):
        graph.placeholder(name)
    graph.output(())
    assert incoming_gradients(torch.fx.GraphModule({}, graph)) == slice(1, 3)


def test_unexplained_excess_over_the_limit_warns(pool: TensorPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of other code counts for the limit only through the option `beside`."""
    del pool

    def steps(options: dict[str, Any]) -> None:
        monkeypatch.setattr(rewriting_budget, "SHARED_LIMITS", [])
        model = Wide()
        run = once(model, {"inner": "eager", "link": "pcie3", "limit": "8MiB", **options})
        for _ in range(5):
            model.zero_grad()
            run(torch.randn(1024, 64)).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps({})
    other = torch.zeros(1 << 21)
    with pytest.warns(UserWarning, match="are on the device, more than the limit of 8388608") as warned:
        steps({})
    assert len(warned) == 1
    del other


class Grows(nn.Module):
    """Two graphs: the batch size matters only for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        y = x.reshape(-1, 64, 64).mean(0)
        torch._dynamo.graph_break()
        y = y.repeat(48, 1)
        for _ in range(6):
            y = torch.sigmoid(y * y.sin())
        return y.square().mean()


def test_recompiled_earlier_graph_keeps_the_limit(pool: TensorPool, nothing_leaves: None) -> None:
    """The first graph is recompiled for a larger batch, the second is not."""
    torch.manual_seed(0)
    before = pool.client.stats()["requested"]["current"]
    model = Grows()

    def peaks(step: Step, *lengths: int) -> list[int]:
        found = []
        for length in lengths:
            model.zero_grad()
            x = torch.randn(length, 64)
            pool.client.reset_peaks()
            step(x).backward()
            found.append(pool.client.stats()["requested"]["peak"] - before)
            del x
        return found

    options = {"inner": "eager", "link": "pcie3"}
    limit = peaks(compiled(model, {**options, "limit": 1 << 40}), 2048, 2048)[-1]
    step = compiled(model, {**options, "limit": limit})
    assert peaks(step, 64, 64)[-1] < limit
    assert max(peaks(step, *[2048] * 4)[2:]) <= limit


class Frozen(nn.Module):
    """Frozen features and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(512, 512).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.features(x).sin()
        torch._dynamo.graph_break()
        return self.head(y)


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_parameters_of_forward_only_graphs_count(inner: str) -> None:
    """A forward-only graph above the limit warns, since nothing can move."""
    model, options = Frozen(), {"inner": inner, "limit": 1 << 40}
    batch = torch.randn(1024, 512)
    compiled(model, options)(batch).sum().backward()
    (part,) = SHARED_LIMITS[-1].graphs.values()
    assert part.external.parameters == 4 * (512 * 512 + 512)
    step = compiled(model, {**options, "limit": 1 << 20})
    with (
        pytest.warns(UserWarning, match="no backward pass, and needs"),
        pytest.raises(BackendCompilerFailed, match="no step fits"),  # the other one
    ):
        step(batch)


def test_refusal_names_concurrent_runs(pool: TensorPool, nothing_leaves: None) -> None:
    """The second step is refused: the first shows the number of concurrent runs."""
    plain, peaks = steps_of(pool, Wide, twice, {"inner": "eager"})
    del plain
    with pytest.raises(BackendCompilerFailed, match="other runs of it hold"):
        steps_of(pool, Wide, twice, {"inner": "eager", "limit": int(0.62 * peaks[-1])})
