"""Peak, step time and losses of graph rewriting, compared with PyTorch's own methods at the same limits.

    python tests/benchmarks/rewriting_peers.py [--device cuda] [--inner inductor] [--only MODEL ...]

Each run is a separate process. The pool counts the peak load on the CPU, and PyTorch's allocator on CUDA. The
peers run first, then this project's backend within the peak of each peer. With ``--inner eager`` compiled
graphs run operation by operation, so that runs differ only in which values are kept, offloaded and
recomputed; with ``--inner inductor`` the peers are inductor's memory budgets. The step time is the least of
the timed steps: processor time of one core on the CPU, and wall-clock time on CUDA.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any

import own_process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from models import Model
    from torch import fx

BUDGETED = tuple(f"budget {share}" for share in (0.5, 0.3, 0.1))
PEERS = (
    "plain",
    "compiled",
    "save_on_cpu",
    "checkpoint",
    "offloading",
    *BUDGETED,
)
#: Peers of each inner backend; fewer for inductor, with which a run takes minutes.
PEERS_OF = {"eager": PEERS, "inductor": ("plain", "compiled", *BUDGETED)}
STEPS, TIMED = 9, 6


def models(device: str) -> dict[str, tuple[Callable[[], Model], int]]:
    """Return the constructor and batch size of each model."""
    return own_process.models(device) | ({"attention": (_attention, 64)} if device == "cpu" else {})


def _attention() -> Model:
    """Return a model of additive attention over 24 words."""
    import torch
    from models import Model
    from rewriting_networks import Additive

    class Words(Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Additive(96, 500)

        def batch(self, number: int, size: int) -> tuple[Any, ...]:
            random = torch.Generator().manual_seed(number)
            return tuple(torch.randint(0, 500, (size, 24), generator=random) for _ in range(2))

        def loss(self, *batch: Any) -> Any:
            return self.again(self.inner, *batch)

    return Words()


def budget_backend(share: float) -> Any:
    """Return a backend of `torch.compile` with PyTorch's partitioner and its ``activation_memory_budget``."""
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(joint: fx.GraphModule, inputs: Sequence[object], **given: Any) -> Any:
        with config.patch(activation_memory_budget=share):
            return min_cut_rematerialization_partition(joint, inputs, **given)

    return _backend(partition)


def offload_backend(device: str) -> Any:
    """Return a backend of `torch.compile` that offloads all activations by PyTorch's own means."""
    from torch._functorch import config
    from torch._functorch.partitioners import default_partition

    def partition(joint: fx.GraphModule, inputs: Sequence[object], **given: Any) -> Any:
        for node in joint.graph.nodes:
            node.meta["should_offload"] = True
        separate = {"activation_offload_separate_stream": True, "activation_reload_prefetch": True}
        with config.patch(enable_activation_offloading=True, **(separate if device == "cuda" else {})):
            parts = default_partition(joint, inputs, **given)
        if device == "cpu":
            for module in parts:
                _replace_transfers(module)
        return parts

    return _backend(partition)


def _replace_transfers(module: fx.GraphModule) -> None:
    """Replace transfers, which copy nothing from CPU to CPU, by copies to memory outside the pool."""
    import torch

    from mempool import _core

    def leave(tensor: Any, *_: Any, **__: Any) -> Any:
        with _core.Bypass():
            return tensor.clone()

    def come(tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor.clone()

    for node in module.graph.nodes:
        if node.target is torch.ops.prims.device_put.default:
            node.target = leave if node.name.startswith("cpu_offload") else come
    module.recompile()


def _backend(partition: Any) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition)


def compile_arguments(way: str, device: str, limit: int | None, beside: int, inner: str) -> Any:
    """Return the arguments of `torch.compile` for a method; None to run the program uncompiled."""
    if way.startswith("budget") and inner == "inductor":
        from torch._functorch import config

        config.activation_memory_budget = float(way.split()[1])
        return {"backend": inner}
    if way.startswith("budget"):
        return {"backend": budget_backend(float(way.split()[1]))}
    if way == "offloading":
        return {"backend": offload_backend(device)}
    if way in ("ours", "compiled"):
        from mempool.torch.compiled import backend

        backend.register()
        options = {"inner": inner}
        return {
            "backend": "mempool",
            "options": options if limit is None else {**options, "limit": limit, "beside": beside},
        }
    return None


def train(way: str, name: str, device: str, limit: int | None, inner: str) -> dict[str, Any]:
    """Train in this process; return step time, peak and a digest of the losses."""
    import torch
    from offloading import saved_on_host

    import mempool.torch

    torch.set_num_threads(1)
    if device == "cpu":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.use_deterministic_algorithms(True)
    pool = mempool.torch.install(background=False) if device == "cpu" else None
    torch.manual_seed(0)
    make, size = models(device)[name]
    model = make().to(device)
    if inner == "inductor":  # the layout that inductor chooses by itself for the peers
        model = model.to(memory_format=torch.channels_last)
    model.checkpointing = way == "checkpoint"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    state = 2 * sum(one.nbytes for one in model.parameters())
    asked = compile_arguments(way, device, limit, state, inner)
    loss_of = model.loss if asked is None else torch.compile(model.loss, **asked)
    clock = time.perf_counter if device == "cuda" else time.process_time
    losses, seconds, peaks = [], [], []
    for step in range(STEPS):
        batch = [part.to(device) for part in model.batch(step, size)]
        begin = _begin(pool, clock)
        optimizer.zero_grad()
        with saved_on_host(device) if way == "save_on_cpu" else contextlib.nullcontext():
            loss = loss_of(*batch)
        loss.backward()
        peaks.append(_peak(pool))
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        seconds.append(clock() - begin)
        del loss
    told = {
        "seconds": min(seconds[-TIMED:]),
        "peak_bytes": max(peaks[-TIMED:]),
        "losses": own_process.digest(losses),
    }
    if pool is not None:
        pool.close()
    return told


def _begin(pool: Any, clock: Callable[[], float]) -> float:
    import torch

    if pool is None:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    else:
        pool.client.reset_peaks()
    return clock()


def _peak(pool: Any) -> int:
    import torch

    return int(torch.cuda.max_memory_allocated() if pool is None else pool.client.stats()["live"]["peak"])


def main() -> None:
    """Print the tables, or run one training."""
    parser = own_process.parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--inner", choices=list(PEERS_OF), default="eager")
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(train(*json.loads(chosen.one))))
        return
    peers = PEERS_OF[chosen.inner]
    results = {
        name: own_process.compare(__file__, name, chosen.device, chosen.inner, peers=peers, matched=peers[2:])
        for name in chosen.only or models(chosen.device)
    }
    own_process.write(results, chosen.json)


if __name__ == "__main__":
    main()
