"""``mempool diagnose``: versions, devices and findings, for a bug report."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mempool.cli.output import facts, print_json
from mempool.units import binary


def diagnose(*, json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show versions, devices, driver and compiler, and what is in the way of a pool.

    Nothing is changed, and no GPU memory is used. Bug reports need the output
    of `mempool diagnose --json`; it holds environment variables whose names
    begin with MEMPOOL, PYTORCH_, CUDA_VISIBLE, OMP_NUM_THREADS, LD_PRELOAD or
    CXX, so look at their values before you publish them.

    For example:

        mempool diagnose
        mempool diagnose --json
    """
    from mempool.reporting.environment import environment

    said = environment()
    if json:
        print_json(said)
    else:
        facts("diagnosis", list(_rows(said)))


def _rows(said: dict[str, Any]) -> list[tuple[str, str]]:
    cuda = said["cuda"]
    rows = [
        ("mempool", said["mempool"] or "not installed"),
        ("Python", said["python"] + ", free-threaded" * said["free_threaded"]),
        ("system", f"{said['system']}, {said['processors']} processors, {binary(said['memory_bytes'])}"),
        *said["packages"].items(),
        ("C++ compiler", said["compiler"] or "none: PyTorch's tensors need one (Debian: apt install g++)"),
        ("CUDA driver", cuda["driver"] or f"none: {cuda['error']}"),
        *(("GPU", f"{gpu['name']}, {binary(gpu['memory_bytes'])}") for gpu in cuda["devices"]),
        *(said["variables"].items()),
    ]
    found = [
        (finding["severity"], f"{finding['name']}: {finding['problem']}; {finding['remedy']}")
        for finding in said["findings"]
    ]
    return [*rows, *(found or [("found", "nothing is in the way")])]
