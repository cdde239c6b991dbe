"""Peaks predicted by `fit`, compared with the peaks of real training on the CPU.

    python tests/benchmarks/predicted.py [--json FILE] [MODEL ...]

Each model is trained in a separate process with one thread and a pool, which sees every allocation, also
those inside kernels. The peak is that of the second step. Two further steps are recorded; the table lists the
buffers alive at their peak that belong to no operation, and the operation at the peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "support"))

#: (name of the model, changed attributes of its job).
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet": ("resnet", {"batch": 32}),
    "U-Net": ("unet", {"batch": 16}),
    "LSTM to LSTM": ("seq2seq", {"batch": 64}),
    "GPT": ("gpt", {"batch": 32}),
    "BERT, small": ("bert", {"batch": 32}),
    "Llama, small": ("llama", {"batch": 32}),
    "BERT": ("hf-bert", {"batch": 8}),
    "GPT-2": ("hf-gpt2", {"batch": 8}),
    "Llama": ("hf-llama", {"batch": 8}),
    "Llama, bfloat16 autocast": ("hf-llama", {"batch": 8, "autocast": "bfloat16"}),
    "T5": ("hf-t5", {"batch": 8}),
    "ViT": ("hf-vit", {"batch": 8}),
    "Qwen2": ("hf-qwen2", {"batch": 8}),
    "ResNet, SGD": ("resnet", {"batch": 32, "optimizer": "SGD"}),
    "GPT-2, inference": ("hf-gpt2", {"batch": 8, "mode": "inference", "hold_output": True}),
}


def job_of_run(name: str) -> Any:
    """Return the job of a row."""
    import torch
    from fit_jobs import job_of

    model, changes = RUNS[name]
    named = {key: getattr(torch, changes[key]) for key in ("autocast",) if key in changes}
    named |= {key: getattr(torch.optim, changes[key]) for key in ("optimizer",) if key in changes}
    return job_of(model, "medium", **{**changes, **named, "device": "cpu"})


def real(name: str) -> dict[str, Any]:
    """Return the peak bytes that a training process allocates, and the estimate made before.

    The peak is counted by the pool, without a dispatch mode, since a mode would change the behaviour of
    autograd. The position of the peak, and the buffers of no operation, are those of two further steps under
    a recorder, whose peak may differ.
    """
    import torch

    import mempool.torch
    from mempool.torch.estimate import fit_job
    from mempool.torch.estimate.attribution import PeakAttribution

    torch.set_num_threads(1)
    job = job_of_run(name)
    fitted = fit_job(job, allocators=("pytorch",), remedies=False, largest=False)
    with mempool.torch.install(device="cpu") as pool:
        before = pool.client.stats()["requested"]["current"]
        steps = _steps(job)
        model, optimizer = next(steps)
        next(steps)
        pool.client.reset_peaks()
        next(steps)
        peak_bytes = int(pool.client.stats()["requested"]["peak"] - before)
        with mempool.torch.record(None, model, [optimizer] if optimizer else []) as recording:
            for _ in range(2):
                next(steps)
                recording.step()
        trace = recording.trace
    recorded = PeakAttribution.of(trace)
    inside = _unseen(trace, recorded.peak.event)
    return {
        "predicted_bytes": fitted.peak_bytes,
        "real_bytes": peak_bytes,
        "recorded_bytes": recorded.peak.bytes,
        "inside_bytes": sum(inside.values()),
        "inside": inside,
        "predicted_at": f"{fitted.peak_operation} ({fitted.peak_phase})",
        "real_at": f"{recorded.name(trace.operation)} ({recorded.name(recorded.phase)})",
    }


def _steps(job: Any) -> Any:
    """Train in a plain loop: yield the model and its optimizer first, and nothing after each step."""
    import contextlib

    import torch

    model = job.model().train(job.mode == "train")
    optimizer = job.optimizer(model.parameters()) if job.mode == "train" else None
    yield model, optimizer
    while True:
        args, kwargs = job.inputs(job.batch)
        lower = torch.autocast("cpu", job.autocast) if job.autocast else contextlib.nullcontext()
        with lower, torch.set_grad_enabled(job.mode == "train"):
            output = model(*args, **kwargs)
        if optimizer is not None:
            loss = job.loss(output) if job.loss else output.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        yield None


def _unseen(trace: Any, event: int) -> dict[str, int]:
    """Return the live bytes that are no operand of an operation, by the operation that allocated them."""
    import numpy as np

    from traces.buffers import buffers_of
    from traces.trace import EventType

    buffers = buffers_of(trace)
    touched = set(trace.buffer[(trace.kind == EventType.READ) | (trace.kind == EventType.WRITE)].tolist())
    found: dict[str, int] = {}
    for row in buffers.start[(buffers.start <= event) & (event < buffers.end)].tolist():
        if int(trace.buffer[row]) not in touched:
            before = np.flatnonzero(trace.operation[: row + 1] >= 0)
            name = trace.names[trace.operation[before[-1]]] if len(before) else "before"
            found[name] = found.get(name, 0) + int(trace.size[row])
    return found


def main() -> int:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        sys.stdout.write(json.dumps(real(chosen.one)) + "\n")
        return 0
    results = {}
    print("| model | predicted | real | difference | inside kernels at the recorded peak | it is in |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for name in chosen.models or RUNS:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE), "--one", name],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.stderr.write(f"{name}: {done.stderr}\n")
            return 1
        row = results[name] = json.loads(done.stdout.splitlines()[-1])
        more = row["predicted_bytes"] / row["real_bytes"] - 1
        print(
            f"| {name} | {row['predicted_bytes']:,} | {row['real_bytes']:,} | {more:+.2%} "
            f"| {row['inside_bytes']:,} | {row['real_at']} |",
            flush=True,
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
