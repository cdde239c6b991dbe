"""Predict a job, train it on the GPU or the stand-in, and print both results as JSON.

python predicted_worker.py JOB
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import torch
from predicted_jobs import JOBS
from torch.utils import _pytree as pytree

from mempool.torch.estimate import Job, fit_job
from mempool.torch.estimate.margins import IN_ALLOCATOR

STEPS = 4


def predicted(job: Job) -> dict[str, Any]:
    """Return the prediction of `fit_job`."""
    fitted = fit_job(job, allocators=("pytorch",), remedies=False, largest=False)
    inside = sum(fitted.margin_bytes.get(name, 0) for name in IN_ALLOCATOR)
    return {
        "predicted_allocated": fitted.peak_bytes + inside,
        "predicted_reserved": fitted.reserved_bytes["pytorch"] + inside,
        "predicted_used": fitted.needed_bytes,
        "margins": fitted.margin_bytes,
        "peak_operation": f"{fitted.peak_operation} ({fitted.peak_phase})",
    }


def train(job: Job) -> dict[str, int]:
    """Train in a plain loop; return the counters of PyTorch's allocator and of the driver."""

    def given(what: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to("cuda"), what)

    free, total = torch.cuda.mem_get_info()
    model = job.model().to("cuda", job.dtype).train(job.mode == "train")
    optimizer = (
        job.optimizer(model.parameters()) if job.optimizer is not None and job.mode == "train" else None
    )
    lower = torch.autocast("cuda", job.autocast) if job.autocast else contextlib.nullcontext()
    for step in range(STEPS):
        args, kwargs = given(job.inputs(job.batch))
        labels = [given(job.labels(job.batch))] if job.labels else []
        args = pytree.tree_map_only(torch.Tensor, lambda t: _in(t, job.dtype), args)
        with lower, torch.set_grad_enabled(optimizer is not None):
            output = model(*args, **kwargs)
            if optimizer is not None:
                loss = output.loss if job.loss is None else job.loss(output, *labels)
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        if step == 0:
            torch.cuda.reset_peak_memory_stats()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "used": total - torch.cuda.mem_get_info()[0],
        "context": total - free,  # if no other process uses the GPU
    }


def _in(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def compare(name: str) -> dict[str, Any]:
    """Predict and train a job; return both results in bytes, or the missing package."""
    try:
        job = JOBS[name]()
    except ImportError as error:
        return {"missing": str(error)}
    job = job.replace(capability=torch.cuda.get_device_capability())
    return predicted(job) | train(job) | {"torch": torch.__version__}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compare(sys.argv[1])) + "\n")
