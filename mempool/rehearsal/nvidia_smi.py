"""Command ``nvidia-smi`` of a rehearsal, which answers for the stand-in's devices.

`write_command` writes the command, which runs this file as a script: so the file imports nothing of mempool.
"""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

DRIVER = "580.65.06"  #: version of a driver for CUDA 13; the stand-in's NVML gets it by its settings
_ANSWERED = "-L, --query-gpu=FIELDS --format=csv[,noheader][,nounits], -i N, and nothing"
_QUERIES = ("--query-gpu", "--query-compute-apps")


def write_command(folder: Path, machine: dict[str, Any]) -> None:
    """Write the command into a folder.

    Args:
        folder: the folder.
        machine: number of ``devices``, their ``name``, ``memory`` in bytes and ``capability``, and the
            version of ``cuda``.
    """
    command = folder / "nvidia-smi"
    words = shlex.join([sys.executable, "-IS", __file__, json.dumps(machine)])
    command.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    command.chmod(0o755)


def answer(machine: dict[str, Any], arguments: list[str]) -> str:
    """Return the text that the command prints.

    Raises:
        ValueError: an argument or a field is unknown; the message says which are known.
    """
    options: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        name = {"-i": "--id", "--list-gpus": "-L"}.get(name, name)
        if name not in ("-L", "--id", "--format", *_QUERIES):
            raise ValueError(_unknown(f"the argument {word}"))
        options[name] = value if equals or name == "-L" else next(words, "")
    devices = [_fields(machine, index) for index in range(machine["devices"])]
    if wanted := options.get("--id"):
        devices = [each for each in devices if {each["index"], each["uuid"]} & set(wanted.split(","))]
    if "-L" in options:
        return "".join(f"GPU {each['index']}: {each['name']} (UUID: {each['uuid']})\n" for each in devices)
    for name in _QUERIES:
        if name in options:
            rows = devices if name == "--query-gpu" else []
            return _table(options[name].split(","), options.get("--format", "").split(","), rows)
    if set(options) - {"--id"}:
        raise ValueError(_unknown(f"the arguments {shlex.join(arguments)}"))
    return _overview(machine, devices)


def _unknown(subject: str) -> str:
    return f"nvidia-smi: this is a rehearsal without a GPU, and {subject} is not answered, only {_ANSWERED}"


def _fields(machine: dict[str, Any], index: int) -> dict[str, str]:
    """Return the values of a device by the names of fields, with units behind a space."""
    total = machine["memory"] >> 20
    values = {
        "index": str(index),
        "count": str(machine["devices"]),
        "name": f"NVIDIA {machine['name']}",
        "uuid": f"GPU-stand-in-{index}",
        "driver_version": DRIVER,
        "compute_cap": machine["capability"],
        "pstate": "P0",
        "pci.bus_id": f"00000000:{index + 1:02X}:00.0",
        "memory.total": f"{total} MiB",
        "memory.used": "0 MiB",
        "memory.free": f"{total} MiB",
        "utilization.gpu": "0 %",
        "utilization.memory": "0 %",
        "temperature.gpu": "30",
        "power.draw": "0.00 W",
    }
    return values | {f"gpu_{name}": values[name] for name in ("name", "uuid")}


def _table(names: list[str], form: list[str], rows: list[dict[str, str]]) -> str:
    """Return rows of fields, separated by commas."""
    names = [name.strip() for name in names]
    if "csv" not in form:
        raise ValueError(_unknown("a query without --format=csv"))
    if missing := [name for row in rows for name in names if name not in row]:
        raise ValueError(_unknown(f"the field {missing[0]}"))
    lines = [[row[name] for name in names] for row in rows]
    if "nounits" in form:
        lines = [[cell.partition(" ")[0] if cell[:1].isdigit() else cell for cell in line] for line in lines]
    units = {"memory": " [MiB]", "utilization": " [%]", "power": " [W]"}
    if "noheader" not in form:
        lines.insert(0, [name + units.get(name.partition(".")[0], "") for name in names])
    return "".join(", ".join(line) + "\n" for line in lines)


def _overview(machine: dict[str, Any], devices: list[dict[str, str]]) -> str:
    """Return the table that the command prints without arguments."""
    versions = f"NVIDIA-SMI {DRIVER}   Driver Version: {DRIVER}   CUDA Version: {machine['cuda']}"
    lines = [versions, "of a rehearsal: no GPU is here, and memory in use is that of an idle one"]
    for each in devices:
        used, total = (each[name].replace(" ", "") for name in ("memory.used", "memory.total"))
        lines.append(f"{each['index']:>3}  {each['name']:<28} {used} / {total}   0%   Default")
    edge = f"+{'-' * 90}+\n"
    return edge + "".join(f"| {line:<88} |\n" for line in lines) + edge


if __name__ == "__main__":
    try:
        sys.stdout.write(answer(json.loads(sys.argv[1]), sys.argv[2:]))
    except ValueError as error:
        sys.exit(f"{error}")
