"""PyTorch's samples of its operations have the same results under random moves."""

from __future__ import annotations

import itertools
import sys
import types
import unittest
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from adversary import Adversary
from torch.utils._pytree import tree_leaves

PARTS = 12
#: Operations with another backward formula under a dispatch mode.
OTHER_FORMULA = ("prod",)


def operations() -> Any:
    """Return PyTorch's list of operations with samples."""
    if "expecttest" not in sys.modules:  # PyTorch's test modules import it, but these tests do not use it
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return op_db


def plain(value: Any) -> list[Any]:
    """Return the bytes of all tensors in nested values, read by operations and `tolist` alone."""
    found: list[Any] = []
    for tensor in tree_leaves(value):
        if not isinstance(tensor, torch.Tensor):
            continue
        dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        whole = dense.resolve_conj().resolve_neg().clone().contiguous().view(-1)
        found.append((str(tensor.dtype), tuple(tensor.shape), bytes(whole.view(torch.uint8).tolist())))
    return found


def results(operation: Any, mode: Adversary | None) -> list[Any]:
    """Run samples of an operation; return results, gradients and the inputs afterwards."""

    def offload_all() -> None:
        if mode is not None:
            mode.offload_all()

    kind = torch.float32 if torch.float32 in operation.dtypes else next(iter(operation.dtypes))
    torch.manual_seed(0)
    samples = operation.sample_inputs("cpu", kind, requires_grad=operation.supports_autograd)
    found: list[Any] = []
    for sample in itertools.islice(samples, 4):
        given = (sample.input, sample.args, sample.kwargs)
        offload_all()
        torch.manual_seed(1)
        try:
            out = operation(sample.input, *sample.args, **sample.kwargs)
            offload_all()
            found.append(plain(out))
            outs, leaves = (
                [t for t in tree_leaves(v) if isinstance(t, torch.Tensor) and t.requires_grad]
                for v in (out, given)
            )
            outs = [t if t.layout is torch.strided else t.to_dense() for t in outs if t.is_floating_point()]
            if outs and leaves:
                loss = sum(t.sum() for t in outs)
                offload_all()
                found.append(plain(torch.autograd.grad(loss, leaves, allow_unused=True)))
        except Exception as error:  # this build cannot run the sample
            found.append(type(error).__name__)
        offload_all()
        found.append(plain(given))
    return found


def wanders(operation: Any, first: list[Any]) -> bool:
    """Return true if results depend on addresses, as those of LAPACK's least squares do."""
    between = []
    for number in range(40):
        between.append(torch.empty(16 * number + 1))
        if results(operation, None) != first:
            return True
    return False


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_operator_samples_are_byte_identical(part: int) -> None:
    compared = 0
    for number, operation in enumerate(operations()[part::PARTS]):
        if operation.name in OTHER_FORMULA:
            continue
        try:
            first = results(operation, None)
            if first != results(operation, None):
                continue  # the results contain uninitialised memory
        except Exception:  # no samples on this build
            continue
        with Adversary(number, share=0.9) as mode:
            offloaded = results(operation, mode)
        assert offloaded == first or wanders(operation, first), operation.name
        compared += 1
    assert compared > 40
