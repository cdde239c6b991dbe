"""One job, first predicted and then done; prints both as JSON.

python predicted_worker.py JOB cuda|cpu

On the CPU, which stands in for a GPU to see that all this runs, batches are small and a recorder measures.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any, Self

import torch
from predicted_jobs import JOBS, SMALL
from torch.utils import _pytree as pytree

from mempool.recording.torch import AccessRecorder
from mempool.torch.estimate import Job, fit_job
from mempool.torch.estimate.margins import in_allocator

STEPS = 4


class Gpu:
    """The counters of PyTorch's allocator, and of the driver."""

    def __enter__(self) -> Self:
        self.free, self.total = torch.cuda.mem_get_info()
        return self

    def settle(self) -> None:
        """The first step is done: what follows is like all steps."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.read = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "used": self.total - torch.cuda.mem_get_info()[0],
            "context": self.total - self.free,  # of a GPU that nobody else uses
        }


class StandIn:
    """A recorder's peak for every counter."""

    def __enter__(self) -> Self:
        self.recorder = AccessRecorder().__enter__()
        return self

    def settle(self) -> None:
        """Nothing to do."""

    def __exit__(self, *error: object) -> None:
        self.recorder.__exit__(*error)  # type: ignore[arg-type]
        peak = int(self.recorder.trace().load().max())
        self.read = {"allocated": peak, "reserved": peak, "used": peak, "context": 0}


def predicted(job: Job) -> dict[str, Any]:
    """What fit says."""
    fitted = fit_job(job, allocators=("pytorch",), remedies=False, largest=False)
    inside = in_allocator(fitted.margin_bytes)
    return {
        "predicted_allocated": fitted.peak_bytes + inside,
        "predicted_reserved": fitted.reserved_bytes["pytorch"] + inside,
        "predicted_used": fitted.needed_bytes,
        "margins": fitted.margin_bytes,
        "peak_operation": f"{fitted.peak_operation} ({fitted.peak_phase})",
    }


def train(job: Job, meter: Gpu | StandIn) -> None:
    """The loop that a user would write."""
    given = lambda what: pytree.tree_map_only(torch.Tensor, lambda t: t.to(job.device), what)  # noqa: E731
    model = job.model().to(job.device, job.dtype).train(job.mode == "train")
    optimizer = (
        job.optimizer(model.parameters()) if job.optimizer is not None and job.mode == "train" else None
    )
    lower = torch.autocast(job.device, job.autocast) if job.autocast else contextlib.nullcontext()
    for step in range(STEPS):
        args, kwargs = given(job.inputs(job.batch))
        labels = given(job.labels(job.batch)) if job.labels else None
        args = pytree.tree_map_only(torch.Tensor, lambda t: _in(t, job.dtype), args)
        with lower, torch.set_grad_enabled(optimizer is not None):
            output = model(*args, **kwargs)
            if optimizer is not None:
                loss = (
                    output.loss
                    if job.loss is None
                    else job.loss(output, *([] if labels is None else [labels]))
                )
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            meter.settle()


def _in(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def main(name: str, device: str) -> dict[str, Any]:
    """Both, in bytes; or what is missing."""
    try:
        job = JOBS[name]()
    except ImportError as error:
        return {"missing": str(error)}
    if device == "cpu":
        lower = (
            torch.bfloat16 if job.autocast is torch.float16 else job.autocast
        )  # the other takes minutes there
        job = job.replace(device="cpu", batch=SMALL.get(name, 1), autocast=lower)
        told, meter = predicted(job), StandIn()
    else:
        job = job.replace(device="cuda", capability=torch.cuda.get_device_capability())
        told, meter = predicted(job), Gpu()
    with meter:
        train(job, meter)
    return told | meter.read | {"torch": torch.__version__}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2])) + "\n")
