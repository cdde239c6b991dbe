"""Usable memory of GPUs by name, in bytes, and their compute capability."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from mempool.errors import UsageError


@dataclass(frozen=True)
class Card:
    """A GPU that people own or rent.

    Attributes:
        name: the maker's name, without "NVIDIA" and "GeForce", with the size if there are several.
        memory_bytes: total memory as CUDA reports it, which is less than the advertised size.
        capability: compute capability, by which PyTorch chooses kernels.
        processors: number of streaming multiprocessors, which sizes some kernels' scratch memory.
        caveat: a line about effects that are not modelled; "" for none.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    processors: int
    caveat: str = ""


# A program gets less than the advertised memory: the driver keeps some 2 %, and error correction (ECC), if
# enabled, another 6 %. The figures, in MiB, are from programs' output in public logs up to 2026: mainly
# `total_memory` of PyTorch's device properties, directly or in the first line of Ultralytics' YOLO ("CUDA:0
# (NVIDIA GeForce RTX 4090, 24081MiB)"), and PyTorch's out of memory errors ("total capacity of 14.56 GiB", a
# T4). Figures marked (*) are from lines of other programs (hashcat, llama.cpp, nvidia-smi's free memory of an
# idle card, rocminfo). Drivers differ by up to 1.5 %; the table has the smallest figure reported by a Linux
# driver. Windows reports the advertised memory, and lends it to other programs. Cards marked (=), without any
# such line, have the smallest figure of a card of the same memory and generation.
_CARDS = {
    "GTX 1080 Ti": (11172, (6, 1)),
    "RTX 2060": (5735, (7, 5)),  # (*)
    "RTX 2060 SUPER": (7972, (7, 5)),  # (=)
    "RTX 2070": (7972, (7, 5)),  # (=)
    "RTX 2070 SUPER": (7972, (7, 5)),
    "RTX 2080": (7972, (7, 5)),  # (=)
    "RTX 2080 SUPER": (7982, (7, 5)),
    "RTX 2080 Ti": (10825, (7, 5)),
    "TITAN RTX": (24212, (7, 5)),
    "RTX 3050": (7833, (8, 6)),  # (=), with 8 GB
    "RTX 3050 Laptop": (3759, (8, 6)),  # (*), with 4 GB
    "RTX 3050 Ti Laptop": (3902, (8, 6)),
    "RTX 3060 Laptop": (5806, (8, 6)),  # (*)
    "RTX 3060": (11908, (8, 6)),  # with 12 GB
    "RTX 3060 Ti": (7833, (8, 6)),
    "RTX 3070": (7973, (8, 6)),
    "RTX 3070 Laptop": (7982, (8, 6)),
    "RTX 3070 Ti": (7840, (8, 6)),  # (*)
    "RTX 3070 Ti Laptop": (7966, (8, 6)),
    "RTX 3080 10GB": (9830, (8, 6)),  # (*)
    "RTX 3080 12GB": (12117, (8, 6)),
    "RTX 3080 Laptop 8GB": (7966, (8, 6)),  # (=)
    "RTX 3080 Laptop 16GB": (15993, (8, 6)),
    "RTX 3080 Ti": (11910, (8, 6)),
    "RTX 3080 Ti Laptop": (15993, (8, 6)),  # (=)
    "RTX 3090": (24123, (8, 6)),
    "RTX 3090 Ti": (24114, (8, 6)),
    "RTX 4050 Laptop": (5806, (8, 9)),  # 5.67 GiB
    "RTX 4060": (7806, (8, 9)),
    "RTX 4060 Laptop": (7806, (8, 9)),
    "RTX 4060 Ti 8GB": (7806, (8, 9)),
    "RTX 4060 Ti 16GB": (15943, (8, 9)),
    "RTX 4070": (11994, (8, 9)),
    "RTX 4070 Laptop": (7806, (8, 9)),
    "RTX 4070 SUPER": (11994, (8, 9)),  # (=)
    "RTX 4070 Ti": (12007, (8, 9)),
    "RTX 4070 Ti SUPER": (15934, (8, 9)),
    "RTX 4080": (16049, (8, 9)),
    "RTX 4080 Laptop": (11994, (8, 9)),  # (=), with 12 GB
    "RTX 4080 SUPER": (15944, (8, 9)),
    "RTX 4090 Laptop": (15944, (8, 9)),  # (=), with 16 GB
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
    "A16": (14909, (8, 6)),  # (=), each of its four GPUs
    "A30": (24164, (8, 0)),
    "A40": (45416, (8, 6)),
    "L4": (22558, (8, 9)),  # 22.03 GiB
    "L40": (45465, (8, 9)),  # 44.4 GiB
    "L40S": (45495, (8, 9)),
    "A100 40GB": (40326, (8, 0)),
    "A100 80GB": (81038, (8, 0)),
    "H20": (97285, (9, 0)),
    "H100": (81008, (9, 0)),  # 80 GB, on PCIe; 81,082 as SXM
    "H100 NVL": (95320, (9, 0)),
    "H200": (143156, (9, 0)),
    # 94.50 GiB, the version with 96 GB of HBM3, named "GH200 480GB" for its host's memory
    "GH200": (96768, (9, 0)),
    "B200": (182631, (10, 0)),
    "GB200": (188728, (10, 0)),  # 184.31 GiB
    "B300": (274109, (10, 3)),  # 267.69 GiB
    "GB300": (283130, (10, 3)),  # 276.50 GiB
    "MI300X": (196592, (8, 0)),  # (*); PyTorch's ROCm has 191.98 GiB, and a capability of its own
}
_CAVEATS = {"MI300X": "AMD's kernels and context are not modelled: those of an A100 are taken for them"}

#: Streaming multiprocessors by the beginning of a card's name, as in NVIDIA's data sheets.
_PROCESSORS = {
    "GTX 1080 Ti": 28, "RTX 2060 SUPER": 34, "RTX 2060": 30, "RTX 2070 SUPER": 40, "RTX 2070": 36,
    "RTX 2080 SUPER": 48, "RTX 2080 Ti": 68, "RTX 2080": 46, "TITAN RTX": 72, "RTX 3050 Laptop": 16,
    "RTX 3050": 20, "RTX 3060 Laptop": 30, "RTX 3060 Ti": 38, "RTX 3060": 28, "RTX 3070 Laptop": 40,
    "RTX 3070 Ti": 48, "RTX 3070": 46, "RTX 3080 10GB": 68, "RTX 3080 12GB": 70, "RTX 3080 Laptop": 48,
    "RTX 3080 Ti Laptop": 58, "RTX 3080 Ti": 80, "RTX 3090 Ti": 84, "RTX 3090": 82, "RTX 4050 Laptop": 20,
    "RTX 4060 Ti": 34, "RTX 4060": 24, "RTX 4070 Laptop": 36, "RTX 4070 SUPER": 56, "RTX 4070 Ti SUPER": 66,
    "RTX 4070 Ti": 60, "RTX 4070": 46, "RTX 4080 Laptop": 58, "RTX 4080 SUPER": 80, "RTX 4080": 76,
    "RTX 4090 Laptop": 76, "RTX 4090": 128, "RTX 5060 Ti": 36, "RTX 5070 Ti": 70, "RTX 5070": 48,
    "RTX 5080": 84, "RTX 5090": 170, "RTX A4000": 48, "RTX A5000": 64, "RTX A6000": 84, "RTX 6000 Ada": 142,
    "RTX PRO 6000": 188, "P100": 56, "V100": 80, "T4": 40, "A100": 108, "A10G": 80, "A10": 72, "A16": 10,
    "A30": 56, "A40": 84, "L40": 142, "L4": 58, "H20": 78, "H100": 132, "H200": 132, "GH200": 132,
    "B200": 148, "GB200": 148, "B300": 148, "GB300": 148, "MI300X": 304,
}  # fmt: skip


def _processors(name: str) -> int:
    matching = [known for known in _PROCESSORS if name.startswith(known)]
    return _PROCESSORS[max(matching, key=len)]


CARDS = tuple(
    Card(name, mib << 20, capability, _processors(name), _CAVEATS.get(name, ""))
    for name, (mib, capability) in _CARDS.items()
)
#: Bytes of the kernels of PyTorch, cuBLAS and cuDNN that a training loads when first used.
KERNEL_BYTES = 96 << 20
#: Words beside the name that are ignored.
_NOISE = re.compile(
    r"nvidia|geforce|tesla|quadro|blackwell|workstation|server|generation|edition|hbm\d?e?|pcie|sxm\d?"
    r"|\bac\b|\bgpu\b|amd|instinct|superchip"
)
#: A size after a name. For a card of one size, the advertised size is accepted, which is up to 10 % larger.
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
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(_CARDS)}."
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
