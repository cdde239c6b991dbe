"""GPUs by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mempool.errors import UsageError
from mempool.hardware.gpu_memory import CARDS, card


@pytest.mark.parametrize("one", CARDS, ids=lambda one: one.name)
def test_card_is_found_by_its_name_in_any_spelling(one) -> None:
    for spelling in (one.name, one.name.lower(), one.name.replace(" ", "-"), f"NVIDIA GeForce {one.name}"):
        assert card(spelling) is one


def test_card_names_printed_by_pytorch_are_understood() -> None:
    for text, name in {
        "NVIDIA A100-SXM4-80GB": "A100 80GB",
        "NVIDIA A100-PCIE-40GB": "A100 40GB",
        "NVIDIA H100 80GB HBM3": "H100",
        "Tesla V100-SXM2-16GB": "V100 16GB",
        "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000",
        "4090": "RTX 4090",
        "NVIDIA GeForce RTX 3060 Laptop GPU": "RTX 3060 Laptop",
        "RTX 3080 mobile 16GB": "RTX 3080 Laptop 16GB",
        "GeForce RTX 2070 SUPER": "RTX 2070 SUPER",
        "3060 ti": "RTX 3060 Ti",
        "NVIDIA GH200 480GB": "GH200",
        "GH200 96GB": "GH200",
        "NVIDIA B300 SXM6 AC": "B300",
        "AMD Instinct MI300X": "MI300X",
        "NVIDIA A30 24GB": "A30",
        "L40 48 GB": "L40",
    }.items():
        assert card(text).name == name


def test_cards_page_of_the_docs_agrees_with_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cards.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    said = [(name, int(mib.replace(",", "")), capability) for name, mib, capability in rows]
    assert said == [(c.name, c.memory_bytes >> 20, "{}.{}".format(*c.capability)) for c in CARDS]


@pytest.mark.parametrize("one", CARDS, ids=lambda one: one.name)
def test_usable_card_memory_is_within_a_tenth_of_the_advertised_memory(one) -> None:
    boxes = (4, 6, 8, 10, 11, 12, 16, 24, 32, 40, 48, 80, 94, 96, 141, 180, 192, 288)
    gib = one.memory_bytes / (1 << 30)
    assert any(0.9 * box <= gib <= box for box in boxes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A100", "several sizes of 'A100': A100 40GB, A100 80GB"),
        ("RTX 2050", "did you mean RTX 3050"),
        ("RTX 3060 8GB", "did you mean RTX 3060"),
        ("RTX 9999 1TB", "Any other: --limit 24GiB"),
        ("RTX 4091", "did you mean RTX 4090"),
        ("", "there are GTX"),
        ("toaster", r"no card 'toaster'; there are GTX.*MI300X\. Any other: --limit"),
    ],
)
def test_unknown_card_names_the_nearest(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        card(text)
