"""Parts of ``mempool fit`` that need no PyTorch: options, plot, and the error without PyTorch."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mempool.cli.app import call
from mempool.cli.fit.plot import draw

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )


@pytest.mark.usefixtures("without_torch")
def test_missing_pytorch_is_a_single_line_with_the_install_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(["fit", "pkg:make"]) == 4
    assert capsys.readouterr().err == (
        "mempool: fit needs PyTorch, which is not installed: pip install 'mempool[torch]'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no model"], "names no model"),
        (["m:f", "--batch", "0"], "--batch: '0' is no number"),
        (["m:f", "--seq", "x"], "--seq: 'x' is no number"),
        (["m:f", "--limit", "much"], "--limit: 'much' is not a size"),
        (["m:f", "--limit", "0"], "--limit: nothing fits"),
        (["m:f", "--card", "RTX 4091"], "did you mean RTX 4090"),
        (["m:f", "--mode", "trian"], "--mode: no 'trian'"),
        (["m:f", "--device", "tpu"], "--device: no 'tpu'"),
        (["m:f", "--dtype", "fp7"], "--dtype: no type 'fp7'"),
        (["m:f", "--inputs", "x"], "--inputs: 'x' is no input"),
        (["m:f", "--plot", "x.pdf", "--batch", "1,2"], "ends neither in .html nor in .svg"),
        (["m:f", "--plot", "x.svg"], "--plot draws several sizes"),
        (["m:f", "--trace", "x.trace", "--batch", "1,2"], "--trace is of one size"),
        (["m:f", "--main"], "--main and arguments are for scripts"),
        ([], "Missing argument"),
    ],
)
@pytest.mark.usefixtures("without_torch")
def test_invalid_options_are_reported_before_any_import(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert call(["fit", *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_unwritable_output_is_reported_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["fit", "m:f", "--trace", str(tmp_path)]) == 3
    assert "Is a directory" in capsys.readouterr().err


def test_names_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mempool.cli.fit import command

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    cards = command.complete_cards("rtx 40")
    assert {"RTX 4060", "RTX 4060 Ti 8GB", "RTX 4080", "RTX 4090"} < set(cards)
    assert all(card.startswith("RTX 40") for card in cards)
    assert "train.py" in command.complete_targets("tr")
    assert "planned" in command.allocators()("pl")


def size_result(batch: int, seq: int, needed: int, limit: int | None) -> Any:
    command = SimpleNamespace(
        needed_bytes=needed, peak_bytes=needed // 2, limit_bytes=limit, fits=limit is None or needed <= limit,
        allocator="pytorch", reserved_bytes={"pytorch": needed}, warnings=[],
    )  # fmt: skip
    target = SimpleNamespace(title="<Net> & co", seq=seq)
    return SimpleNamespace(
        fit=command, job=SimpleNamespace(batch=batch, mode="train"), target=target, image=None
    )


@pytest.mark.parametrize("limit", [None, 5 << 30])
def test_plot_has_a_point_for_each_size_and_a_line_for_each_length_and_the_limit(limit: int | None) -> None:
    results = [
        size_result(batch, seq, batch * seq << 20, limit) for seq in (512, 1024) for batch in (1, 2, 4, 8)
    ]
    drawing = ET.fromstring(draw(results, page=False))
    space = "{http://www.w3.org/2000/svg}"
    points = drawing.findall(f"{space}circle")
    assert len(points) == len(results)
    strokes = [path for path in drawing.findall(f"{space}path") if path.get("stroke-width") == "2"]
    assert len(strokes) == 2
    assert bool(drawing.findall(f"{space}path[@stroke-dasharray]")) is (limit is not None)
    heights = [float(point.get("cy", "")) for point in points[:4]]
    assert heights == sorted(heights, reverse=True)
    assert "<Net> & co" in "".join(drawing.itertext())


def test_plot_page_has_the_numbers_too_and_loads_nothing() -> None:
    page = draw([size_result(batch, 512, batch << 30, None) for batch in (1, 3)], page=True)
    assert "<td>3 GiB</td>" in page
    assert "src=" not in page
    assert "&lt;Net&gt; &amp; co" in page


def test_plot_of_a_single_value_without_memory_is_drawn() -> None:
    ET.fromstring(draw([size_result(1, 1, 0, None), size_result(1, 1, 0, None)], page=False))
