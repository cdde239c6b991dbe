"""GPUs by name: usable memory, compute capability and multiprocessors, from `gpus.csv`.

Usable memory is less than the advertised memory: the driver keeps some 2 %, and error correction (ECC), if
enabled, another 6 %. The figures are from programs' output in public logs up to 2026: mainly `total_memory`
of PyTorch's device properties, directly or in the first line of Ultralytics' YOLO ("CUDA:0 (NVIDIA GeForce
RTX 4090, 24081MiB)"), and PyTorch's out of memory errors ("total capacity of 14.56 GiB", a T4). "Another
program" in the notes is hashcat, llama.cpp, rocminfo, or nvidia-smi for the free memory of an idle card.
Drivers differ by up to 1.5 %; the table has the smallest figure of a Linux driver. Windows reports the
advertised memory, and shares it with other programs. A card without a known figure has the smallest figure of
a card of the same memory and generation ("of a similar card"). Multiprocessors are from NVIDIA's data sheets.
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from mempool.errors import UsageError


@dataclass(frozen=True)
class Card:
    """A GPU that people own or rent.

    Attributes:
        name: the maker's name, without "NVIDIA" and "GeForce", with the size if there are several.
        memory_bytes: total memory as CUDA reports it, which is less than the advertised size.
        capability: compute capability, which determines PyTorch's kernels.
        processors: number of streaming multiprocessors, which determines some kernels' workspaces.
        caveat: a line about effects that are not modelled; "" without one.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    processors: int
    caveat: str = ""


_CAVEATS = {"MI300X": "AMD's kernels and context are not modelled: those of an A100 are taken for them"}

_TABLE = Path(__file__).with_name("gpus.csv").read_text("utf-8")
#: Rows of the table, by name of the card.
GPUS = {row["name"]: row for row in csv.DictReader(_TABLE.splitlines())}
CARDS = tuple(
    Card(
        name,
        int(row["memory_mib"]) << 20,
        (int(row["capability"].split(".")[0]), int(row["capability"].split(".")[1])),
        int(row["multiprocessors"]),
        _CAVEATS.get(name, ""),
    )
    for name, row in GPUS.items()
)
#: Bytes of the kernels of PyTorch, cuBLAS and cuDNN that a training loads on first use.
KERNEL_BYTES = 96 << 20
#: Ignored words of a name.
_NOISE = re.compile(
    r"nvidia|geforce|tesla|quadro|blackwell|workstation|server|generation|edition|hbm\d?e?|pcie|sxm\d?"
    r"|\bac\b|\bgpu\b|amd|instinct|superchip"
)
#: Pattern of a size after a name. For a card of one size, the advertised size is accepted, which is up to 10
#: % larger.
_SIZE = re.compile(r"^(.*?)[\s-]*\b(\d+)\s*gi?b\b", re.IGNORECASE)


def card(name: str) -> Card:
    """Return the card of a name, such as "RTX 4090", "NVIDIA A100-SXM4-80GB" or "h100".

    Raises:
        UsageError: no card or several sizes have the name; the message lists candidates.
    """
    wanted = _key(name)
    for gpu in CARDS:
        if wanted and wanted in _keys(gpu.name):
            return gpu
    if (sized := _SIZE.match(name)) is not None:
        base, box = _key(sized[1]), int(sized[2]) << 30
        for gpu in CARDS:
            if base and base in _keys(gpu.name) and 0.9 * box <= gpu.memory_bytes <= box:
                return gpu
    sizes = [gpu.name for gpu in CARDS if re.fullmatch(re.escape(wanted) + r"\d+gb", _key(gpu.name))]
    if wanted and sizes:
        raise UsageError(f"there are several sizes of {name!r}: {', '.join(sizes)}")
    keys = {key: gpu.name for gpu in CARDS for key in _keys(gpu.name)}
    near = dict.fromkeys(keys[key] for key in difflib.get_close_matches(wanted, keys, n=4, cutoff=0.5))
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(GPUS)}."
    other = "Any other: --limit 24GiB, say, with the memory that nvidia-smi tells"
    raise UsageError(f"no card {name!r}; {hint} {other}")


def _key(name: str) -> str:
    plain = _NOISE.sub("", name.lower()).replace("mobile", "laptop")
    return re.sub(r"[^a-z0-9]", "", plain)


def _keys(name: str) -> set[str]:
    """Return spellings of a card's name: with and without "RTX", and with the "80GB" of the only size."""
    key = _key(name)
    keys = {key, key.removeprefix("rtx"), key.removeprefix("gtx")}
    sizes = {"h100": "80gb", "rtx4090": "24gb", "rtx3090": "24gb", "rtx3060": "12gb", "gh200": "480gb"}
    size = sizes.get(key, "")
    return keys | {gpu + size for gpu in keys}


def context_bytes(capability: tuple[int, int]) -> int:
    """Return the size of a CUDA context with kernels loaded lazily, PyTorch's default since 1.13.

    Reported sizes: 274 MiB in 2022 (pytorch#86509), "around 400MB" (pytorch#109888), 426 MiB on an RTX 6000
    Ada with CUDA 13 (unsloth-zoo#1053). The size grows with the number of multiprocessors, whose stacks are
    included, and with the driver; the value for Hopper and later is scaled, not observed.
    """
    if capability >= (9, 0):
        return 512 << 20
    return (426 if capability >= (8, 0) else 300) << 20
