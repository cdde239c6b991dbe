"""How much memory a GPU of a name really offers to a program, in bytes, and which kernels it can run."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from mempool.errors import UsageError


@dataclass(frozen=True)
class Card:
    """A GPU that people own or rent.

    Attributes:
        name: as its maker calls it, without "NVIDIA" and "GeForce", with the size where there are several.
        memory_bytes: total memory as CUDA reports it, which is less than what is written on the box.
        capability: of computation, by which PyTorch chooses kernels.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]


# What is on the box is not what a program gets: the driver keeps some 2 % for itself, and error correction
# (ECC), where it is on, another 6 %. The figures, in MiB, are what programs printed in public logs up to
# 2026: first of all `total_memory` of PyTorch's device properties, as itself or in the first line of
# Ultralytics' YOLO ("CUDA:0 (NVIDIA GeForce RTX 4090, 24081MiB)"), and PyTorch's out of memory errors
# ("total capacity of 14.56 GiB", a T4). Those marked (*) are from other programs' lines (hashcat,
# llama.cpp, nvidia-smi's free memory of an idle card). Drivers differ by up to 1.5 %; of what Linux's were
# seen to report it is the least. Windows reports all that is on the box, and lends it to others.
_CARDS = {
    "GTX 1080 Ti": (11172, (6, 1)),
    "RTX 2080 Ti": (10825, (7, 5)),
    "TITAN RTX": (24212, (7, 5)),
    "RTX 3060": (11908, (8, 6)),  # with 12 GB
    "RTX 3070": (7973, (8, 6)),
    "RTX 3080 10GB": (9830, (8, 6)),  # (*)
    "RTX 3080 12GB": (12117, (8, 6)),
    "RTX 3090": (24123, (8, 6)),
    "RTX 3090 Ti": (24114, (8, 6)),
    "RTX 4060": (7806, (8, 9)),
    "RTX 4060 Ti 8GB": (7806, (8, 9)),
    "RTX 4060 Ti 16GB": (15943, (8, 9)),
    "RTX 4070": (11994, (8, 9)),
    "RTX 4070 Ti SUPER": (15934, (8, 9)),
    "RTX 4080": (16049, (8, 9)),
    "RTX 4090": (24081, (8, 9)),
    "RTX 5060 Ti 16GB": (15841, (12, 0)),
    "RTX 5070": (11755, (12, 0)),  # (*)
    "RTX 5070 Ti": (15833, (12, 0)),
    "RTX 5080": (15840, (12, 0)),
    "RTX 5090": (32102, (12, 0)),
    "RTX A4000": (15089, (8, 6)),  # (*), with ECC
    "RTX A5000": (24114, (8, 6)),
    "RTX A6000": (48537, (8, 6)),
    "RTX 6000 Ada": (48539, (8, 9)),
    "RTX PRO 6000": (97250, (12, 0)),  # Blackwell
    "P100": (16269, (6, 0)),
    "V100 16GB": (16130, (7, 0)),
    "V100 32GB": (32494, (7, 0)),
    "T4": (14909, (7, 5)),
    "A10": (22599, (8, 6)),
    "A10G": (22587, (8, 6)),
    "A40": (45416, (8, 6)),
    "L4": (22558, (8, 9)),  # 22.03 GiB
    "L40S": (45495, (8, 9)),
    "A100 40GB": (40326, (8, 0)),
    "A100 80GB": (81038, (8, 0)),
    "H20": (97285, (9, 0)),
    "H100": (81008, (9, 0)),  # 80 GB, on PCIe; 81,082 as SXM
    "H100 NVL": (95320, (9, 0)),
    "H200": (143156, (9, 0)),
    "B200": (182631, (10, 0)),
}

CARDS = tuple(Card(name, mib << 20, capability) for name, (mib, capability) in _CARDS.items())
#: What may be said beside the name and tells nothing.
_NOISE = re.compile(
    r"nvidia|geforce|tesla|quadro|blackwell|workstation|server|generation|edition|hbm\d?e?|pcie|sxm\d?"
)


def card(name: str) -> Card:
    """The card of a name, such as "RTX 4090", "NVIDIA A100-SXM4-80GB" or "h100".

    Raises:
        UsageError: there is none, or the name is that of several sizes; it says which there are.
    """
    wanted = _key(name)
    for one in CARDS:
        if wanted and wanted in _keys(one.name):
            return one
    sizes = [one.name for one in CARDS if re.fullmatch(re.escape(wanted) + r"\d+gb", _key(one.name))]
    if wanted and sizes:
        raise UsageError(f"there are several sizes of {name!r}: {', '.join(sizes)}")
    keys = {key: one.name for one in CARDS for key in _keys(one.name)}
    near = dict.fromkeys(keys[key] for key in difflib.get_close_matches(wanted, keys, n=4, cutoff=0.5))
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(_CARDS)}"
    raise UsageError(f"no card {name!r}; {hint} Any other: --limit SIZE")


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _NOISE.sub("", name.lower()))


def _keys(name: str) -> set[str]:
    """Spellings of a card's name: with and without "RTX", and with the "80GB" of the only size."""
    key = _key(name)
    keys = {key, key.removeprefix("rtx"), key.removeprefix("gtx")}
    size = {"h100": "80gb", "rtx4090": "24gb", "rtx3090": "24gb", "rtx3060": "12gb"}.get(key, "")
    return keys | {one + size for one in keys}
