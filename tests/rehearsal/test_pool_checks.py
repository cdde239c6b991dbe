"""The pool's checks of a GPU (tests/gpu/checks.py) on PyTorch's CUDA build and the stand-in."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from processes import alone, run_each_alone

GPU = Path(__file__).parents[1] / "gpu"
sys.path.insert(0, str(GPU))

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import checks
    import standin_torch
    import torch._dynamo  # noqa: F401 - for all processes, as an optimizer imports it

    import mempool.torch

#: Checks of requests, which have the same answer on each kind of memory.
EACH_MEMORY = ["record_stream", "graphs", "limits", "planned"]
CHECKS = ["autograd_threads", "out_of_memory", "statistics", "snapshots", "loader"]


@pytest.mark.parametrize(
    ("check", "memory"),
    [
        *((check, "plain") for check in EACH_MEMORY + CHECKS),
        *((check, "growing") for check in EACH_MEMORY),
        *(
            (check, "managed") for check in EACH_MEMORY if check != "limits"
        ),  # managed memory is the host's, too
    ],
)
@alone
def test_check_of_a_gpu_holds(check: str, memory: str) -> None:
    if check == "autograd_threads":  # the order of the threads decides whether an arena is in the way
        logging.getLogger("mempool").setLevel(logging.ERROR)
    checks.CHECKS[check](mempool.torch.install(device="cuda", memory=memory))
    assert standin_torch.driver().faults == []


if __name__ == "__main__":
    run_each_alone(globals())
