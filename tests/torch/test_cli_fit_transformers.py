"""``mempool fit transformers:...``: families and sizes without network, inputs from their configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")


from mempool.cli.app import call
from mempool.torch.estimate.device.emulation import allow_fake_tensors
from mempool.torch.estimate.fake.mode import fake_mode
from mempool.torch.estimate.sources.transformers_models import plain_name, transformers_model
from mempool.torch.model_presets import SHAPES

pytestmark = pytest.mark.usefixtures("shared_isolation")

_TWO = "hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128"
SMALL = {
    "bert": f"{_TWO}, vocab_size=200",
    "gpt2": "n_embd=64, n_layer=2, n_head=2, vocab_size=200",
    "llama": f"{_TWO}, vocab_size=200",
    "mistral": f"{_TWO}, num_key_value_heads=1, vocab_size=200, head_dim=32",
    "t5": "d_model=64, d_ff=128, num_layers=2, num_heads=2, vocab_size=200, d_kv=32",
    "vit": f"{_TWO}, image_size=32",
}
#: Class that each family gets without a task.
CLASSES = {
    "bert": "BertForMaskedLM", "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM", "t5": "T5ForConditionalGeneration", "vit": "ViTForImageClassification",
}  # fmt: skip


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f in ("gpt2", "t5", "vit") else [pytest.mark.full]) for f in SMALL],
)
def test_family_is_trained_with_its_usual_head(family: str, fit_json: Any) -> None:
    target = f"transformers:{family}({SMALL[family]})"
    sizes = ["--batch", "2"] if family == "vit" else ["--batch", "2", "--seq", "32"]
    trained = fit_json(target, *sizes)
    assert trained["model"].startswith(CLASSES[family])
    assert trained["warnings"] == []  # the loss is the model's own
    assert trained["by_class_bytes"]["optimizer_state"] >= trained["by_class_bytes"]["parameters"]
    run = fit_json(target, *sizes, "--mode", "inference")
    assert "optimizer_state" not in run["by_class_bytes"]
    assert run["peak_bytes"] < trained["peak_bytes"]


def test_more_samples_and_longer_sequences_need_more(fit_json: Any) -> None:
    rows = fit_json(f"transformers:gpt2({SMALL['gpt2']})", "--batch", "1,4", "--seq", "64,256")
    assert [(row["seq"], row["batch"]) for row in rows] == [(64, 1), (64, 4), (256, 1), (256, 4)]
    peaks = [row["peak_bytes"] for row in rows]
    assert peaks[0] < peaks[1] < peaks[3]
    assert peaks[0] < peaks[2] < peaks[3]


def test_head_follows_the_task_or_the_configuration(tmp_path: Path, fit_json: Any) -> None:
    classify = fit_json(
        f"transformers:bert({SMALL['bert']})", "--task", "sequence-classification", "--seq", "32"
    )
    assert classify["model"].startswith("BertForSequenceClassification")
    config = transformers_model(
        "bert", {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    ).config
    config.architectures = ["BertForTokenClassification"]
    config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        answer = fit_json(f"transformers:{path}", "--seq", "16")
        assert answer["model"] == "BertForTokenClassification of bert (token-classification)"
        assert answer["seq"] == 16


@pytest.mark.parametrize(
    ("name", "count"),  # of parameters, as the models' cards tell them
    [
        ("gpt2-medium", 354_823_168), ("gpt2-xl", 1_557_611_200), ("t5-base", 222_903_552),
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616), ("llama-2-13b", 13_015_864_320),
        ("Meta-Llama-3-8B", 8_030_261_248), ("llama-3.2-1b", 1_235_814_400), ("llama-3.2-3b", 3_212_749_824),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096), ("mixtral-8x7b", 46_702_792_704),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768), ("qwen2.5-7b", 7_615_616_512),
        ("TinyLlama-1.1B", 1_100_048_384), ("llama-2-70b", 68_976_648_192),
    ],
)  # fmt: skip
def test_a_size_has_as_many_parameters_as_were_published(name: str, count: int) -> None:
    with fake_mode(), allow_fake_tensors():
        assert sum(p.numel() for p in transformers_model(name, {}).model().parameters()) == count


@pytest.mark.parametrize("name", SHAPES)
def test_every_preset_makes_a_configuration(name: str) -> None:
    assert plain_name(name) == name
    assert transformers_model(name, {}).config.model_type == SHAPES[name][0]


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["transformers:gpt22"], 2, "did you mean gpt2"),
        (["transformers:GPT2Config(n_embed=64)"], 2, "GPT2Config has no 'n_embed'; did you mean n_embd"),
        (["transformers:gpt2(n_embd='x')"], 2, "n_embd"),
        (["transformers:gpt2", "--task", "image-classification"], 2, "it has causal-lm"),
        (["transformers:gpt2", "--task", "poetry"], 2, "no task 'poetry'"),
        (["transformers:bert", "--seq", "513"], 2, "BertForMaskedLM has positions for 512 only"),
        (["transformers:vit", "--seq", "16"], 2, "--seq would change nothing"),
        (["transformers:./gone"], 3, "No such file"),
        (["transformers:broken.json"], 2, "broken.json: "),
    ],
)
def test_unknown_names_and_arguments_give_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    assert call(["fit", *arguments]) == code
    error = capsys.readouterr().err
    assert reason in error
    assert "Traceback" not in error


def test_missing_transformers_gives_the_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert call(["fit", "transformers:gpt2"]) == 2
    assert "is not installed: pip install transformers" in capsys.readouterr().err
