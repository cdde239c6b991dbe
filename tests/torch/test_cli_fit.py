"""``mempool fit`` on a model of transformers, run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import torch

import mempool.torch
from mempool.cli.app import call
from traces.formats.parquet import read_trace

pytestmark = pytest.mark.usefixtures("shared_isolation", "folder")

SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 200}
GPT2 = f"transformers:gpt2({', '.join(f'{name}={size}' for name, size in SIZES.items())})"
SHORT = (GPT2, "--seq", "32")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_verdict_comes_first_and_is_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    alone = ("--batch", "4", "--no-largest-batch", "--no-remedies")
    assert call(["fit", *SHORT, *alone, "--limit", "8GiB"]) == 0
    assert capsys.readouterr().out.startswith("fits in 8 GiB with ")
    assert call(["fit", *SHORT, *alone, "--limit", "1MiB"]) == 1
    assert capsys.readouterr().out.startswith("does not fit in 1 MiB: ")


def test_largest_batch_fits_and_the_next_does_not(fit_json: Any) -> None:
    limit = ["--limit", "20MiB", "--device", "cpu", "-a", "planned"]
    largest = fit_json(*SHORT, "--batch", "4", *limit, "--no-remedies")["largest_batch"]
    assert largest > 4
    rest = ["--no-largest-batch", "--no-remedies"]
    assert fit_json(*SHORT, "--batch", str(largest), *limit, *rest)["fits"] is True
    assert fit_json(*SHORT, "--batch", str(largest + 1), *limit, *rest, code=1)["fits"] is False


def test_sweep_lists_the_estimate_of_each_size(capsys: pytest.CaptureFixture[str], fit_json: Any) -> None:
    rows = fit_json(GPT2, "--batch", "2,8", "--seq", "16,32")
    assert [(row["seq"], row["batch"]) for row in rows] == [(16, 2), (16, 8), (32, 2), (32, 8)]
    alone = fit_json(*SHORT, "--batch", "8")
    assert rows[3]["peak_bytes"] == alone["peak_bytes"]
    assert rows[3].keys() == alone.keys()
    assert call(["fit", *SHORT, "--batch", "2,8", "--limit", "1GiB"]) == 0
    assert capsys.readouterr().out.startswith("2 of 2 sizes fit in 1 GiB")
    assert call(["fit", *SHORT, "--batch", "2,8", "--limit", "1MiB"]) == 1


def test_the_trace_of_a_fit_is_read_by_the_other_verbs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fit_json: Any
) -> None:
    answer = fit_json(*SHORT, "--batch", "4", "--trace", "fit.trace")
    assert len(read_trace(tmp_path / "fit.trace")) > 0
    assert call(["compare", "fit.trace", "-a", "pytorch", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["peak_reserved_bytes"] == answer["reserved_bytes"]["pytorch"]
    for more in ([], ["--bandwidth", "1000GB"]):
        assert call(["swap", "fit.trace", "--json", *more]) == 0
        out, error = capsys.readouterr()
        assert ("times are those of A100 80GB's full rates" in error) == (not more)
        swaps = json.loads(out)
        assert swaps["limits"]
        assert swaps["repeats"]
        assert swaps["peak_load_bytes"] == pytest.approx(answer["peak_bytes"], rel=0.05)  # as a GPU rounds


@pytest.mark.parametrize(
    ("limit", "more"), [("12GiB", ""), ("12 GB", ""), ("48GiB", ", which is more than programs get of it")]
)
def test_limit_overrides_the_card_with_a_note(limit: str, more: str, fit_json: Any) -> None:
    answer = fit_json(*SHORT, "--card", "RTX 4090", "--limit", limit, "--no-largest-batch")
    assert answer["limit_bytes"] == {"12GiB": 12 << 30, "12 GB": 12 * 10**9, "48GiB": 48 << 30}[limit]
    size = {"12 GB": "11.18 GiB"}.get(limit, limit.replace("G", " G"))
    line = f"--limit {size} counts{more}, not the 23.52 GiB of the RTX 4090, whose kernels are taken"
    assert line in answer["warnings"]
    alone = fit_json(*SHORT, "--card", "RTX 4090", "--no-largest-batch")
    assert alone["limit_bytes"] == 24081 << 20
    assert not any("counts" in text for text in alone["warnings"])


def test_card_without_modelled_kernels_gives_a_warning(fit_json: Any) -> None:
    answer = fit_json(*SHORT, "--card", "MI300X", "--no-largest-batch")
    assert any(text.startswith("MI300X: AMD's kernels and context are not") for text in answer["warnings"])


def test_remedies_are_printed_with_code_if_the_job_does_not_fit(
    capsys: pytest.CaptureFixture[str], fit_json: Any
) -> None:
    sizes = [*SHORT, "--batch", "64", "--no-largest-batch", "--limit"]
    assert call(["fit", *sizes, "1MiB", "--remedies-seconds", "1"]) == 1
    text = capsys.readouterr().out
    assert "what would help" in text
    assert "saves" in text
    assert fit_json(*sizes, "8GiB")["remedies"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["gone.py", "--main"], 3, "gone.py: No such file"),
        (["train.py"], 2, "--main runs train.py as a program; fit a model of your own in Python"),
        (["train.py:Net"], 2, "'train.py:Net' names no model; give transformers:NAME"),
        ([*SHORT, "--optimizer", "adamx"], 2, "did you mean adamax"),
        ([*SHORT, "--loss", "crossentropy"], 2, "did you mean cross-entropy"),
        ([*SHORT, "--optimizer", "sgd(nestrov=True)"], 2, "nestrov"),
        ([*SHORT, "--", "--bs", "4"], 2, "--main and arguments are for a script.py that runs as a program"),
        ([*SHORT, "-a", "nobody"], 2, "no allocator 'nobody'"),
    ],
)
def test_invalid_arguments_give_the_nearest_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, reason: str
) -> None:
    assert call(["fit", *arguments]) == code
    error = capsys.readouterr().err
    assert reason in " ".join(error.split())
    assert "Traceback" not in error


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_command_and_python_call_agree_on_each_device(
    fit_json: Any, device: str, autocast: torch.dtype | None
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    lower = [] if autocast is None else ["--autocast", "bfloat16"]
    command = fit_json(*SHORT, "--batch", "4", "--device", device, "--optimizer", "sgd", *lower)
    tokens = torch.zeros(4, 32, dtype=torch.long)
    python = mempool.torch.fit(
        lambda: GPT2LMHeadModel(GPT2Config(**SIZES)), {"input_ids": tokens, "labels": tokens.clone()},
        torch.optim.SGD, device=device, autocast=autocast,
    )  # fmt: skip
    assert command["device"] == device
    for name in ("peak_bytes", "by_class_bytes", "reserved_bytes", "by_phase_bytes", "margin_bytes"):
        assert command[name] == getattr(python, name)
