"""Compiled steps with offloads have the same bits, by operation, by model, and in two processes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import re

from combinations import combinations
from compiled_programs import ALL, PLAIN, force, gradients, same
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from joint_trace import trace_joint
from models import MODELS
from rewriting_graphs import rewritings
from test_training import needs
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor
from torch.nn import functional as F

from mempool.torch.compiled.partition import eliminate_common_subexpressions
from mempool.torch.compiled.runtime import RUNTIME
from mempool.torch.compiled.shared_limit import SHARED_LIMITS

pytest.importorskip("torch", reason="PyTorch is not installed")


#: PyTorch's compiler asks tensors between two graphs for their gradients, and is warned by PyTorch.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
#: With a given link, threads make small copies too.
LINK = {"link": "pcie4"}
#: Each example is compiled, so shrinking takes too long.
UNSHRUNK: dict[str, Any] = {"phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}


class Called(torch.nn.Module):
    """A function as a module with one trained parameter."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.scale = function, torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale)


def random(*shape: int, grad: bool = True, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.mul_(3).sin_().relu_()
    z = y * 2
    z[0] = y[1]
    return z * z.sin()


def input_written(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    counts.add_(1)
    return (x.exp() * counts).sin() * x


def view_of_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.exp().tanh().view(-1)[3:], x[1:]


def views_of_saved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    a, b = y.split(4, 1)
    return (y.t() @ (a @ w)).sin() + (b.t() @ b).exp().sum() + y[::2, 1:].cos().sum()


def expanded(x: torch.Tensor) -> torch.Tensor:
    y = x[:, :1].exp().expand(-1, 64)
    return (y * y.sin()).cumsum(0) * y


def dropped(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = F.dropout(x.exp().tanh(), 0.5)
    return x


def drawn_twice(x: torch.Tensor) -> torch.Tensor:
    one, other = (torch.empty_like(x).exponential_() for _ in range(2))
    return (x.exp() * one).tanh() + (x.exp() * other).sin()


def integers(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    y, where = F.max_pool2d(x[None, None].exp(), 2, return_indices=True)
    picked = F.embedding(at.remainder(4), x.exp())
    return y.sin().sum() + picked.cos() + where.sum() + x.argmax(1).sum()


def empty(x: torch.Tensor) -> torch.Tensor:
    none = x[:0].exp()
    return (torch.cat([none.sin(), x.exp().sin()]) ** 3).sum() + none.sum()


def complexes(x: torch.Tensor) -> torch.Tensor:
    y = torch.fft.fft(x.exp())
    return (y.conj() * y.exp()).abs().sin()


def half(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x.exp(), x.sin()).tanh()
        return F.linear(y, y.cos()).float().exp()


def half_norm(x: torch.Tensor) -> torch.Tensor:
    """The traced mean has another type than the real mean."""
    w = torch.ones(x.shape[-1]) + x.detach().mean(0)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            x = F.layer_norm(F.gelu(F.linear(x, x.detach().T @ x.detach())), w.shape, w, w)
    return x.float()


def channels_last(x: torch.Tensor) -> torch.Tensor:
    y = x.view(1, 2, 8, 4).to(memory_format=torch.channels_last)
    for _ in range(2):
        y = F.conv2d(y.sin(), torch.ones(2, 2, 3, 3), padding=1).tanh()
    return y * y.exp()


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    def block(y: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(y.exp().tanh(), 0.3).sin(), 0.2).cos()

    for _ in range(2):
        x = torch.utils.checkpoint.checkpoint(
            block, x, use_reentrant=False
        )  # the kept values can be recomputed
    return x.exp()


def depends_on_data(x: torch.Tensor) -> torch.Tensor:
    y = x.exp().sin()
    if y.sum() > 0:
        y = y.cos() * y
    return y.exp() * y.tanh()


def attention(x: torch.Tensor) -> torch.Tensor:
    y = x.exp().view(1, 2, 4, 8)
    return F.scaled_dot_product_attention(y.sin(), y.tanh(), y.cos(), dropout_p=0.3).exp()


def ordered(x: torch.Tensor) -> torch.Tensor:
    y, order = x.exp().sort(1)
    return y.sin() * torch.zeros_like(x).scatter(1, order, x.cos()).exp()


PROGRAMS: dict[Callable[..., Any], tuple[Any, ...]] = {
    in_place: (random(8, 8),),
    input_written: (random(8, 8), torch.arange(8.0)),
    view_of_input: (random(8, 8),),
    views_of_saved: (random(8, 8), random(4, 8, seed=1)),
    expanded: (random(8, 8),),
    dropped: (random(32, 32),),
    drawn_twice: (random(8, 8),),
    integers: (random(8, 8), torch.arange(5)),
    empty: (random(8, 8),),
    complexes: (random(8, 8),),
    half: (random(8, 8),),
    half_norm: (random(64, 48),),
    channels_last: (random(8, 8),),
    checkpointed: (random(8, 8),),
    depends_on_data: (random(8, 8),),
    attention: (random(8, 8),),
    ordered: (random(8, 8),),
}


@functools.cache
def expected(program: Callable[..., Any]) -> list[torch.Tensor]:
    """Return the results without any decision."""
    return gradients(program, PLAIN, *PROGRAMS[program])


@pytest.mark.usefixtures("everything_leaves")
@pytest.mark.parametrize(("program", "copied"), combinations(list(PROGRAMS), [{}, LINK], every=3))
def test_offloads_are_bit_identical(program: Callable[..., Any], copied: dict[str, str]) -> None:
    """Results and gradients equal those without offloads."""
    plain = expected(program)
    got = gradients(program, ALL | copied, *PROGRAMS[program])
    assert RUNTIME.counters.reloads > 0
    assert same(got, plain)
    assert RUNTIME.host_copies == 0


@pytest.mark.usefixtures("everything_leaves")
@pytest.mark.full  # compiled by inductor
@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_inductor_offloads_are_bit_identical_without_vectors(program: Callable[..., Any]) -> None:
    """With vectors, the contents of a kernel decide the order of sums."""
    inner = {"inner": "inductor"}
    with inductor.patch({"cpp.simdlen": 1}):
        plain = gradients(program, inner, *PROGRAMS[program])
        got = gradients(program, ALL | inner, *PROGRAMS[program])
    assert RUNTIME.counters.reloads > 0
    assert same(got, plain)


def test_repeated_random_draws_are_not_repeatable() -> None:
    """PyTorch wraps a repeated draw in an operation with nested results."""
    gradients(checkpointed, {"inner": "eager", "limit": 1 << 40}, *PROGRAMS[checkpointed])
    captured = SHARED_LIMITS[-1].graphs[0].decision.captured
    assert operator.getitem not in [node.target for node in captured.operations]
    again = [captured.graph.kinds[kind] for kind in captured.graph.kind[captured.graph.repeatable]]
    assert {"aten.tanh", "aten.native_dropout_backward"} <= set(again)
    assert not any("rng" in one for one in again)


def test_common_subexpressions_merge_except_random_draws() -> None:

    def calls(program: Callable[..., Any], operation: Any) -> int:
        joint = trace_joint(Called(program), (random(8, 8),), torch.sum).module
        eliminate_common_subexpressions(joint)
        return len(joint.graph.find_nodes(op="call_function", target=operation))

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sin() * x.exp().cos()

    assert calls(twice, torch.ops.aten.exp.default) == 1
    assert calls(drawn_twice, torch.ops.aten.exponential.default) == 2


def check_any_decision(data: st.DataObject, program: Callable[..., Any]) -> None:
    """Check that a random decision is bit-identical and leaves no host copies."""
    plain = expected(program)
    with pytest.MonkeyPatch.context() as patch:
        force(patch, lambda graph: data.draw(rewritings(graph)))
        got = gradients(program, ALL | data.draw(st.sampled_from([{}, LINK])), *PROGRAMS[program])
    assert same(got, plain)
    assert RUNTIME.host_copies == 0


@settings(max_examples=8, derandomize=True, **UNSHRUNK)
@given(data=st.data(), program=st.sampled_from([views_of_saved, integers, in_place]))
def test_random_decisions_are_bit_identical(data: st.DataObject, program: Callable[..., Any]) -> None:
    """Random offloads, reader groups, triggers, releases and recomputations."""
    check_any_decision(data, program)


@pytest.mark.full
@pytest.mark.timeout(1200)
@settings(max_examples=400, **UNSHRUNK)
@given(data=st.data(), program=st.sampled_from(list(PROGRAMS)))
def test_random_decisions_are_bit_identical_for_all_programs(
    data: st.DataObject, program: Callable[..., Any]
) -> None:
    check_any_decision(data, program)


#: Limits, as fractions of the range from the least limit to the unlimited peak.
SHARES = {"eager": (0.95, 0.5, 0.05), "inductor": (0.5,)}


def least_and_unlimited(model: str, inner: str, *, checkpointing: bool) -> tuple[int, int, int]:
    """Return the least limit and the unlimited peak, both with AdamW's state, and the state's bytes."""
    from compiled_programs import adamw_state_bytes, compiled

    import mempool.torch.compiled

    made = MODELS[model]()
    made.checkpointing = checkpointing
    kept = adamw_state_bytes(made)
    options, limit = {"inner": inner, "beside": kept}, 1000
    for _ in range(10):  # a function of several graphs is refused for one after the other
        try:
            compiled(made.loss, {**options, "limit": limit})(*made.batch(0, 2))
            break
        except BackendCompilerFailed as refused:
            (limit,) = map(int, re.findall(r"no step fits .* needs (\d+)", str(refused)))
    compiled(made.loss, {**options, "limit": 1 << 40})(*made.batch(0, 2))
    return limit, mempool.torch.compiled.report().graphs[-1]["plain_peak_bytes"], kept


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")
@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.full
@pytest.mark.parametrize(("inner", "checkpointing"), [("eager", False), ("eager", True), ("inductor", False)])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "seq2seq"])  # Dynamo traces no LSTM
def test_models_train_bit_identically_within_limits(
    model: str, inner: str, checkpointing: bool, trained: Callable[..., dict[str, Any]]
) -> None:
    """From nearly the unlimited peak down to nearly the least limit."""
    needs({"model": model})
    least, plain, kept = least_and_unlimited(model, inner, checkpointing=checkpointing)
    setup: dict[str, Any] = {"model": model, "size": 2, "steps": 3, "checkpointing": checkpointing}
    setup["vectors"] = inner == "eager"  # which kernels have them depends on what was measured
    expected = trained("plain", **setup, rewriting={"inner": inner})
    for share in SHARES[inner]:
        limit = int(least + share * max(plain - least, 0))
        got = trained("plain", **setup, rewriting={"inner": inner, "beside": kept, "limit": limit})
        assert got["losses"] == expected["losses"]
        assert got["parameters"] == expected["parameters"]
