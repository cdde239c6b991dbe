"""Train a small model on a GPU, with or without a limit; print JSON.

    python limited.py native|pool|swapping|streams|eager|inductor MODEL LIMIT

"native" is PyTorch's allocator; "eager" and "inductor" rewrite graphs, with PyTorch's allocator. "streams" is
swapping with every other step on a second stream. A limit of 0 is none. The models are those of the tests on
the CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))

STEPS, SIZE = 10, 128
GRAPHS = ("eager", "inductor")


def train(way: str, name: str, limit: int) -> dict[str, Any]:
    """Train; return losses and parameters exactly, and the peak of the last steps in bytes."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    torch.use_deterministic_algorithms(True)
    pool = None
    if way in ("pool", "swapping", "streams"):
        import mempool.torch

        pool = mempool.torch.install(
            device="cuda", backend="pluggable", background=False, **({"limit": limit} if limit else {})
        )
    from models import MODELS

    torch.manual_seed(0)
    model = MODELS[name]().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    loss_of: Any = model.loss
    if way in GRAPHS:
        from mempool.torch.compiled.backend import register

        register()
        options = {"inner": way, **({"limit": limit} if limit else {})}
        loss_of = torch.compile(model.loss, backend="mempool", options=options)
    losses, peaks, stream = [], [], torch.cuda.Stream()
    for number in range(STEPS):
        batch = [part.to("cuda") for part in model.batch(number, SIZE)]
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream if way == "streams" and number % 2 else torch.cuda.current_stream()):
            optimizer.zero_grad()
            loss = loss_of(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        del loss, batch
        if pool is not None:
            pool.step()
            pool.plan_now()
    parts = [part.detach().cpu().numpy().tobytes() for part in model.parameters()]
    return {
        "losses": losses,
        "parameters": hashlib.sha256(b"".join(parts)).hexdigest()[:16],
        "peak_bytes": max(peaks[-3:]),
        "bypassed": 0 if pool is None or not limit else pool.report().values["swapping"]["bypassed"],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(train(sys.argv[1], sys.argv[2], int(sys.argv[3]))) + "\n")
