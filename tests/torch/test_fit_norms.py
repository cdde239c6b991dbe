"""What batch norm answers with, against PyTorch's own way of finding it out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode

from mempool.torch.fitting.fake import ValuelessMode

FORWARD, BACKWARD = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.native_batch_norm_backward.default,
)
#: Of a tensor: one of as many dimensions that lies otherwise in memory.
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
    """Of the dimensions where a stride says anything."""
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
@settings(max_examples=150, deadline=None)
def test_batch_norm_answers_as_pytorch_finds_out(norm: dict[str, Any]) -> None:
    answered, found = told(ValuelessMode(), norm), told(FakeTensorMode(), norm)
    assert answered == found


def test_batch_norm_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    original = FakeTensorMode._dispatch_impl

    def noted(self: Any, func: Any, *given: Any) -> Any:
        looked.append(func)
        return original(self, func, *given)

    monkeypatch.setattr(FakeTensorMode, "_dispatch_impl", noted)
    with ValuelessMode():
        out = torch.nn.BatchNorm2d(7)(torch.empty(3, 7, 5, 11))
        assert out.shape == (3, 7, 5, 11)
        (out * out).sum().backward()
    assert not {FORWARD, BACKWARD} & set(looked)
