"""``mempool fit script.py --main`` with a CUDA build of PyTorch: a rehearsal of the program."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from mempool.cli.rehearse.arguments import OF_ALL_RUNS, Request
from mempool.cli.rehearse.command import rehearse_request
from mempool.hardware.gpu_memory import card
from mempool.rehearsal import Job, Machine
from mempool.rehearsal.standin import has_cuda_build

if TYPE_CHECKING:
    from pathlib import Path

    from mempool.cli.fit.arguments import FitRequest

#: Allocators of a rehearsal, by allocator of an estimate.
_ALLOCATORS = {"pytorch": "native", "pytorch_expandable": "expandable", "planned": "mempool"}
#: GPU of an estimate without a named GPU, with its memory as the limit.
_DEFAULT_CARD = "A100 80GB"


def can_rehearse(request: FitRequest) -> bool:
    """Return whether the request is for a program on CUDA, and the installed PyTorch has CUDA."""
    return request.main and request.job.get("device") != "cpu" and has_cuda_build()


def rehearse_program(request: FitRequest, trace: Path | None, *, json: bool) -> None:
    """Rehearse the program of a request, whose limit is the memory of the device.

    Raises:
        typer.BadParameter: an option has no meaning in a rehearsal.
        Stop: as `rehearse_request`.
    """
    if unknown := [name for name in request.allocators if name not in _ALLOCATORS]:
        raise typer.BadParameter(f"-a {unknown[0]}: a program is rehearsed with {', '.join(_ALLOCATORS)}")
    gpu = None if request.card is None else card(request.card)
    if request.limit_bytes is not None:
        gpu = dataclasses.replace(gpu or card(_DEFAULT_CARD), memory_bytes=request.limit_bytes)
    allocators = request.allocators or ("pytorch",)
    if trace is not None:
        allocators = allocators[:1]
    options = {field.name: field.default for field in dataclasses.fields(Job) if field.name in OF_ALL_RUNS}
    rehearse_request(
        Request(
            program=(request.target.where, *request.arguments),
            machine=Machine(gpu),
            allocators=tuple(_ALLOCATORS[name] for name in allocators),
            vary=None,
            limit=None,
            options=options,
            quiet=json,
        ),
        trace,
        json=json,
    )
