"""Meta results by rule and from the cache, compared with PyTorch's own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from fit_jobs import NAMES, job_of
from torch._subclasses.fake_tensor import FakeTensorMode

from mempool.torch.estimate.fake import meta_results
from mempool.torch.estimate.fake.fake_run import run
from mempool.torch.estimate.fake.mode import ValuelessMode
from traces.trace import COLUMNS

pytestmark = pytest.mark.usefixtures("shared_isolation")

FORWARD, BACKWARD = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.native_batch_norm_backward.default,
)
#: Functions that return a tensor of the same rank in another memory layout.
LAYOUTS = [
    lambda x: x,
    lambda x: x.transpose(0, -1),
    lambda x: x[..., ::2],
    lambda x: x[..., :1].expand(x.shape) if x.numel() else x,
    lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
]


@st.composite
def norms(draw: Any) -> dict[str, Any]:
    return {
        "shape": draw(st.lists(st.integers(0, 4), min_size=1, max_size=5)),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])),
        "of_weight": draw(st.sampled_from([torch.float32, None])),
        "layouts": draw(st.tuples(st.sampled_from(LAYOUTS), st.sampled_from([LAYOUTS[0], *LAYOUTS]))),
        "training": draw(st.booleans()),
        "running": draw(st.booleans()),
        "mask": draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        "channels": draw(st.sampled_from([None, None, None, 1, 3])),
    }


def strides(tensor: Any) -> list[int]:
    """Return the strides of dimensions with more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def told(mode: Any, norm: dict[str, Any]) -> Any:
    """Sizes, strides and dtypes of what both directions answer with, or that it cannot be."""
    with mode:
        shape = norm["shape"]
        x, gradient = (layout(torch.empty(shape, dtype=norm["dtype"])) for layout in norm["layouts"])
        channels = norm["channels"] or (x.shape[1] if len(shape) > 1 else 1)
        weight = None if norm["of_weight"] is None else torch.empty(channels, dtype=norm["of_weight"])
        mean, var = (torch.empty(channels), torch.empty(channels)) if norm["running"] else (None, None)
        answers = []
        try:
            out = FORWARD(x, weight, weight, mean, var, norm["training"], 0.1, 1e-5)
            answers += out
            answers += BACKWARD(
                gradient, x, weight, mean, var, out[1], out[2], norm["training"], 1e-5, list(norm["mask"])
            )
        except (AssertionError, IndexError, RuntimeError, ZeroDivisionError) as error:
            answers.append(type(error))
        return [
            (tuple(a.shape), strides(a), a.dtype, a.device) if isinstance(a, torch.Tensor) else a
            for a in answers
        ]


@given(norms())
@settings(max_examples=80, deadline=None)
def test_batch_norm_rule_equals_pytorch(norm: dict[str, Any]) -> None:
    answered, found = told(ValuelessMode(), norm), told(FakeTensorMode(), norm)
    assert answered == found


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.complex64,
]
FLOATS = DTYPES[:4]
aten = torch.ops.aten
numbers = st.sampled_from([2, 0.5, True])
dims = st.integers(-3, 2)
sizes = st.lists(st.sampled_from([-1, 1, 2, 3, 4, 6, 8, 12]), max_size=3)


@st.composite
def calls(draw: Any, operations: Any) -> tuple[Any, Any, dict[str, Any]]:
    """An operation and what makes its arguments: of each tensor the shape, type and layout."""
    operation = draw(st.sampled_from(operations))
    named = [a for a in operation._schema.arguments if not a.kwarg_only]
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    usual = draw(st.booleans())
    dtype = draw(st.sampled_from(FLOATS if usual else DTYPES))
    given: list[Any] = []
    for argument in named:
        kind = str(argument.type)
        if "Tensor" in kind:
            of = shape if usual or draw(st.booleans()) else draw(st.lists(st.integers(0, 4), max_size=4))
            if argument.name in ("weight", "bias") and operation is aten.native_layer_norm.default:
                of = of[-1:]
            if operation in (aten.mm.default, aten.addmm.default):
                of = [
                    draw(st.integers(1, 3))
                    for _ in range(1 if argument.name == "self" and len(named) > 2 else 2)
                ]
            layout = LAYOUTS[0] if usual else draw(st.sampled_from(LAYOUTS))
            made = (of, dtype if usual else draw(st.sampled_from(DTYPES)), layout)
            given.append([made] * draw(st.integers(0, 3)) if "List" in kind else made)
        elif kind == "List[int]":
            given.append(shape[-1:] if operation is aten.native_layer_norm.default else draw(sizes))
        else:
            given.append(draw({"bool": st.booleans(), "int": dims}.get(kind, numbers)))
    kwargs = {}
    if any(a.name == "dtype" for a in operation._schema.arguments):
        kwargs = {"dtype": draw(st.sampled_from([None, *DTYPES]))}
    return operation, given, kwargs


def tensor(made: Any) -> Any:
    if isinstance(made, tuple):
        shape, dtype, layout = made
        try:
            return layout(torch.zeros(shape, dtype=dtype))
        except (IndexError, RuntimeError):
            return torch.zeros(shape, dtype=dtype)
    return (
        [tensor(one) if isinstance(one, tuple) else one for one in made] if isinstance(made, list) else made
    )


def answered(mode: Any, call: Any, times: int = 1) -> Any:
    """Return sizes, strides and storages of an operation's last result, or "raises"."""
    operation, given, kwargs = call
    with mode:
        args = [tensor(made) for made in given]
        told: Any = None
        for _ in range(times):
            try:
                told = operation(*args, **kwargs)
            except Exception:
                return "raises"
        parts = list(told) if isinstance(told, (list, tuple)) else [told]
        there = [
            a
            for arg in args
            for a in (arg if isinstance(arg, list) else [arg])
            if isinstance(a, torch.Tensor)
        ]
        return [
            (
                tuple(part.shape),
                strides(part),
                part.storage_offset(),
                part.dtype,
                part.device,
                part.layout,
                part.untyped_storage().nbytes(),
                [part is a for a in there],
                [part.untyped_storage() is a.untyped_storage() for a in there],
                str(torch._C._dispatch_key_set(part)),
            )
            if isinstance(part, torch.Tensor)
            else part
            for part in parts
        ]


@given(calls(list(meta_results.RULES)))
@settings(max_examples=300, deadline=None)
def test_shape_rules_equal_pytorch(call: Any) -> None:
    meta_results.CACHE.clear()
    found = answered(FakeTensorMode(), call)
    if found != "raises":  # what is wrong may be said to be right: no program that runs asks it
        assert answered(ValuelessMode(), call) == found


def test_each_shape_rule_covers_a_usual_call() -> None:
    """So that the property above is not about rules that never say anything."""
    x, square = ([4, 3], torch.float32, LAYOUTS[0]), ([3, 3], torch.float32, LAYOUTS[0])
    vector = ([3], torch.float32, LAYOUTS[0])
    given = {
        aten.view.default: [x, [2, -1]],
        aten._unsafe_view.default: [x, [2, -1]],
        aten.transpose.int: [x, 0, 1],
        aten.mm.default: [x, square],
        aten.addmm.default: [vector, x, square],
        aten.native_layer_norm.default: [x, [3], vector, vector, 1e-5],
        aten.native_dropout.default: [x, 0.5, True],
    }
    for operation, rule in meta_results.RULES.items():
        if operation in (FORWARD, BACKWARD):
            continue
        named = [a for a in operation._schema.arguments if not a.kwarg_only]
        kinds = {"Tensor": x, "List[Tensor]": [x, x], "str": "none"}
        call = given.get(operation) or [kinds.get(str(a.type), 0.5) for a in named]
        with ValuelessMode():
            assert rule(tuple(tensor(one) for one in call), {}) is not None, operation


#: Cached operations without a rule: several results, views, and arguments returned unchanged.
REMEMBERED = [
    *(aten.cat.default, aten.index.Tensor, aten.slice.Tensor, aten.select.int, aten.expand.default),
    *(aten.split.Tensor, aten.unbind.int, aten.permute.default, aten.as_strided.default, aten.bmm.default),
    *(aten.add_.Tensor, aten.copy_.default, aten.squeeze.dim, aten.unsqueeze.default, aten.sum.dim_IntList),
    *(
        aten.sort.default,
        aten._foreach_sqrt.default,
        aten.eq.Tensor,
        aten.real.default,
    ),
    *(aten.where.self, aten.embedding.default, aten._to_copy.default, aten.nonzero.default, aten.t_.default),
    *(aten.resize_.default, aten.bernoulli.default, aten._softmax.default, aten.var_mean.correction),
    *(aten._conj.default, aten._neg_view.default, aten.view_as_real.default, aten._unsafe_view.default),
]


@given(calls(REMEMBERED))
@settings(max_examples=400, deadline=None)
@example((aten.as_strided.default, [([], torch.complex64, LAYOUTS[0]), [], [], 2], {}))
def test_cached_meta_results_equal_pytorch(call: Any) -> None:
    assume(answered(nullcontext(), call, 2) != "raises")  # a view beyond its memory: fake, it makes it longer
    assert answered(ValuelessMode(), call, 2) == answered(FakeTensorMode(), call, 2)


def test_known_values_stay_known() -> None:
    with ValuelessMode():
        count = torch.tensor(3)
        count.add_(4)
        assert (count + 1).item() == 8
        assert torch.cat([torch.tensor([]), torch.empty(2)]).shape == (2,)
        count.add_(torch.empty((), dtype=torch.int64))
        with pytest.raises(Exception, match="local_scalar_dense"):
            count.item()


def _columns(job: Any) -> list[list[int]]:
    trace = run(job)
    names = [(None if name == "time_ns" else getattr(trace, name).tolist()) for name in COLUMNS]
    return [column for column in names if column is not None] + [list(trace.names)]  # type: ignore[list-item]


CHEAP = ("resnet", "gpt", "hf-t5")


@pytest.mark.parametrize(
    "name", [name if name in CHEAP else pytest.param(name, marks=pytest.mark.full) for name in NAMES]
)
def test_trace_is_the_same_without_rules_and_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"autocast": torch.bfloat16} if name == "hf-t5" else {}
    said = _columns(job_of(name, **changes)), _columns(job_of(name, **changes))
    monkeypatch.setattr(meta_results.MetaCache, "key", lambda *_: None)
    assert said[0] == said[1] == _columns(job_of(name, **changes))
