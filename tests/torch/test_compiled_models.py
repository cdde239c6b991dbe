"""The test models compiled within limits: bit-identical losses and parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from models import MODELS
from test_training import needs
from torch._dynamo.exc import BackendCompilerFailed

if TYPE_CHECKING:
    from collections.abc import Callable

#: Of the way from the least possible limit to what a step needs without one.
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
