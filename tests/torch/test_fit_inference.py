"""Estimates of inference, and decisions by values of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import sys

import torch
from torch import nn

from mempool.torch.estimate import Job, fit_job
from mempool.torch.estimate.device.emulation import MASKED, emulate_device
from mempool.torch.estimate.fake.mode import ValuelessMode
from mempool.torch.estimate.program.child import read_zero
from mempool.torch.estimate.program.run import ProgramOutcome
from traces.trace import EventType

pytestmark = pytest.mark.usefixtures("shared_isolation")


LAYERS, WIDTH, TOKENS, WORDS = 4, 256, 512, 1000
CACHE = 2 * LAYERS * WIDTH * TOKENS * 4
LOGITS = TOKENS * WORDS * 4


def llama(**changes: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=WORDS,
        **changes,
    )
    made: nn.Module = transformers.LlamaForCausalLM(config)
    return made


def tokens(batch: int, mask: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    given = {"input_ids": torch.zeros(batch, TOKENS, dtype=torch.int64)}
    return (), given | ({} if mask is None else {"attention_mask": mask(given["input_ids"])})


def job(**changes: Any) -> Job:
    return Job(**{"model": llama, "inputs": tokens, "batch": 1, "mode": "inference"} | changes)


def test_key_value_cache_is_a_separate_class() -> None:
    classes = fit_job(job()).by_class_bytes
    assert classes["key_value_cache"] == CACHE
    assert "key_value_cache" not in fit_job(job(model=lambda: llama(use_cache=False))).by_class_bytes


def test_cache_in_a_tuple_is_found() -> None:
    def inputs(batch: int) -> Any:
        args, given = tokens(batch)
        return args, given | {"return_dict": False}

    assert fit_job(job(inputs=inputs)).by_class_bytes["key_value_cache"] == CACHE


def test_cache_of_a_decoder_with_an_encoder_has_both_parts() -> None:
    config = transformers.T5Config(
        d_model=WIDTH,
        d_kv=64,
        d_ff=512,
        num_layers=2,
        num_heads=4,
        vocab_size=WORDS,
        decoder_start_token_id=0,
    )

    def inputs(batch: int) -> Any:
        encoded = torch.zeros(batch, TOKENS, dtype=torch.int64)
        return (), {"input_ids": encoded, "decoder_input_ids": encoded[:, :128]}

    given = job(model=lambda: transformers.T5ForConditionalGeneration(config), inputs=inputs)
    trace = fit_job(given).trace
    cached = (trace.kind == EventType.ALLOC) & (trace.category == trace.names.index("key_value_cache"))
    steps = 2
    assert int(trace.size[cached].sum()) == steps * 2 * 2 * WIDTH * (TOKENS + 128) * 4


def test_inference_counts_a_single_output_unless_the_loop_holds_two() -> None:
    usual, held = fit_job(job()), fit_job(job(hold_output=True))
    assert held.peak_bytes - usual.peak_bytes == CACHE + LOGITS
    assert held.by_class_bytes["key_value_cache"] == 2 * CACHE


def test_training_counts_the_key_value_cache() -> None:
    def inputs(batch: int) -> Any:
        _, given = tokens(batch)
        return (), given | {"labels": given["input_ids"], "use_cache": True}

    train = job(mode="train", inputs=inputs, optimizer=torch.optim.AdamW)
    assert fit_job(train).by_class_bytes["key_value_cache"] >= CACHE


def test_mask_costs_a_square_of_the_length_with_a_warning() -> None:
    half = {"dtype": torch.bfloat16}
    masked, plain = fit_job(job(inputs=lambda b: tokens(b, torch.ones_like), **half)), fit_job(job(**half))
    assert masked.peak_bytes - plain.peak_bytes > TOKENS * TOKENS
    assert (MASKED in masked.warnings, MASKED in plain.warnings) == (True, False)


SCRIPT = """
import torch
from torch import nn

model = nn.Linear(1000, 1000)
with torch.no_grad():
{0}
"""
ANSWER = ("def answer(x):", "    return model(x).sum()")
WRAPPED = ("def wrapped(x):", "    return [model(x)]")


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.parametrize(
    ("lines", "outputs"),
    [
        (["for _ in range(3):", "    y = model(torch.zeros(5000, 1000))"], 2),
        (["for _ in range(3):", "    y = model(torch.zeros(5000, 1000))", "    del y"], 1),
        (["y = model(torch.zeros(5000, 1000))"], 1),
        ([*ANSWER, "for _ in range(3):", "    y = answer(torch.zeros(5000, 1000))"], 1),
        ([*WRAPPED, "for _ in range(3):", "    y = wrapped(torch.zeros(5000, 1000))"], 2),
        (["kept = []", "for _ in range(3):", "    kept.append(model(torch.zeros(5000, 1000)))"], 3),
    ],
)  # fmt: skip
def test_program_holds_a_former_output_only_if_the_loop_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fit_json: Any,
    lines: list[str],
    outputs: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assistant.py").write_text(SCRIPT.format("\n".join(f"    {line}" for line in lines)))
    found = fit_json("assistant.py", "--main")
    assert found["mode"] == "inference"
    floats = found["peak_bytes"] // 4
    assert floats // 5_000_000 == outputs + 1  # the inputs


#: Lines of a program: those that end with a comment read a condition or a number, the others nothing.
READS = {
    "if": "if x.any():  # condition\n    y = 1",
    "compared": "if x.sum() > 3:  # condition\n    y = 1",
    "negated": "for k in range(3):\n    if not (x < 0).all():  # condition\n        break",
    "function": "def done():\n    return bool((x > 0).all())  # condition\nif done():\n    y = 1",
    "conditional": "y = 1 if x.any() else 2  # condition",
    "comprehension": "y = [v for v in x if v > 0]  # condition",
    "item": "if x.sum().item() < 0.5:  # number\n    y = 1",
    "float": "v = float(x.mean())  # number\nfor k in range(3):\n    print(x.sum().item())  # number",
    "whole number": "n = x.argmax().item()  # number\ny = x[:n]",
    "list of values": "y = x.tolist()  # number",
    "order": "for k in torch.randperm(4).tolist():  # number\n    y = x[k]",
    "known": "if torch.tensor(0.5).item() < 1:\n    y = 1",
    "shape": "if x.shape[0] > 3 and x.dim() == 1:\n    y = 1",
    "nan": "if torch.isnan(x).any():\n    raise ValueError",
    "infinity": "if not torch.isfinite(x).all():\n    raise ValueError",
    "nan or infinity": "if x.isnan().any() or not x.isfinite().all() or not x.mean().isfinite():\n"
    "    raise ValueError",
    "masks together": "if (x.isnan() | x.isinf()).any():  # condition\n    raise ValueError",
    "distribution": "torch.distributions.Normal(x, 1 + x.abs()).log_prob(x)",
}
HEAD = "import torch\nk, x = 0, torch.rand(4)\n"


def recorded() -> tuple[list[str], list[str]]:
    """Return the lines of train.py that read conditions, and those that read numbers."""
    outcome = ProgramOutcome("")
    code = compile(Path("train.py").read_text(), "train.py", "exec")
    with ValuelessMode() as mode, emulate_device("cuda"):
        mode.on_read = functools.partial(read_zero, outcome)
        torch.distributions.Distribution.set_default_validate_args(False)
        exec(code, {"__name__": "__main__"})
    return list(outcome.decisions), list(outcome.value_reads)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("lines", READS.values(), ids=READS)
def test_reads_of_conditions_and_numbers_are_found_at_their_lines(tmp_path: Path, lines: str) -> None:
    text = HEAD + lines + "\n"
    (tmp_path / "train.py").write_text(text)
    for kind, found in zip(("condition", "number"), recorded(), strict=True):
        marked = [k for k, line in enumerate(text.splitlines(), 1) if line.endswith(f"# {kind}")]
        assert found == [f"train.py:{k}" for k in marked]


def test_condition_in_a_library_names_the_calling_line(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "deciding.py"
    library.parent.mkdir()
    library.write_text("def f(x):\n    if x.any():\n        return 1\n")
    path = f"sys.path.insert(0, {str(library.parent)!r})"  # absolute: Python caches finders by name
    lines = f"import sys\n{path}\nsys.modules.pop('deciding', 0)\nimport deciding"
    (tmp_path / "train.py").write_text(f"{HEAD}{lines}\ndeciding.f(x)\ndeciding.f(-x)\n")
    assert recorded() == (["train.py:7", "train.py:8"], [])
