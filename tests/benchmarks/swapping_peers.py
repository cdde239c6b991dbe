"""Peak, step time and losses of swapping, compared with other methods on the same models.

    python tests/benchmarks/swapping_peers.py [--only MODEL ...] [--json FILE] [--shares-only]

Each run is a separate process with the pool, which counts the peak load. The peers run first, then the pool's
swapping within the peak of each peer (not with ``--shares-only``) and within fractions of the plain peak. The
step time is the least of the timed steps: processor time of all threads on the CPU, which a busy machine
changes little, and wall-clock time on CUDA.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import own_process

PEERS = ("plain", "save_on_cpu", "offload", "checkpoint")
SHARES = (0.7, 0.5, 0.35)
STEPS, TIMED = 8, 4


def train(way: str, name: str, device: str, limit: int | None) -> dict[str, Any]:
    """Train in this process; return step time, peaks and a digest of the losses."""
    import torch
    from offloading import LastKept, Stream, Thread, saved_on_host

    import mempool.torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    pool = mempool.torch.install(device=device, background=False, **({"limit": limit} if limit else {}))
    torch.manual_seed(0)
    make, size = own_process.models(device)[name]
    model = make().to(device)
    model.checkpointing = way == "checkpoint"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    hooks: Any = contextlib.nullcontext()
    if way == "save_on_cpu":
        hooks = saved_on_host(device)
    elif way == "offload":
        hooks = LastKept(Stream() if device == "cuda" else Thread())
    clock = time.perf_counter if device == "cuda" else time.process_time
    losses, seconds, peaks = [], [], []
    for step in range(STEPS):
        batch = [part.to(device) for part in model.batch(step, size)]
        pool.client.reset_peaks()
        begin = clock()
        optimizer.zero_grad()
        with hooks:
            loss = model.loss(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        seconds.append(clock() - begin)
        peaks.append(pool.client.stats()["live"]["peak"])
        if way == "offload":
            hooks.end_of_step()
        del loss
        pool.step()
        pool.plan_now()
    told = {
        "seconds": min(seconds[-TIMED:]),
        "peak_bytes": max(peaks[-TIMED:]),
        "highest_bytes": max(peaks),
        "losses": own_process.digest(losses),
        "reserved_bytes": pool.report().to_dict()["reserved_bytes"],
    }
    pool.close()
    return told


def main(device: str, arguments: list[str] | None = None) -> dict[str, Any]:
    """Print the tables for a kind of device; return the rows of each model."""
    parser = own_process.parser(__doc__)
    parser.add_argument("--shares-only", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.one:
        print(json.dumps(train(*json.loads(chosen.one))))
        return {}
    runs: dict[str, Any] = {
        "peers": PEERS,
        "matched": () if chosen.shares_only else PEERS[1:],
        "shares": SHARES,
    }
    names = chosen.only or own_process.models(device)
    results = {name: own_process.compare(__file__, name, device, **runs) for name in names}
    return own_process.write(results, chosen.json)


if __name__ == "__main__":
    main("cpu")
