"""Inference: the key-value cache, masks of ones, positions, and outputs that a loop keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from torch import nn

import mempool.torch
from mempool.torch.estimate import Job, fit_job
from mempool.torch.estimate.fake.copies import holds_ones, to_fake
from mempool.torch.estimate.fake.mode import fake_mode
from traces.trace import EventType

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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


def test_inference_counts_a_single_output_and_notes_the_bytes_of_two() -> None:
    usual, held = fit_job(job()), fit_job(job(hold_output=True))
    assert held.peak_bytes - usual.peak_bytes == CACHE + LOGITS
    assert held.by_class_bytes["key_value_cache"] == 2 * CACHE
    (note,) = usual.warnings
    assert note.startswith("the output of a step, 5.953 MiB, is taken to be gone before the next forward")
    assert held.warnings == fit_job(job(hold_output=False)).warnings == []


def test_training_counts_the_key_value_cache() -> None:
    def inputs(batch: int) -> Any:
        _, given = tokens(batch)
        return (), given | {"labels": given["input_ids"], "use_cache": True}

    train = job(mode="train", inputs=inputs, optimizer=torch.optim.AdamW)
    assert fit_job(train).by_class_bytes["key_value_cache"] >= CACHE


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones_like,
        lambda ids: torch.ones(ids.shape, dtype=torch.int64),
        lambda ids: torch.full(ids.shape, 1),
        lambda ids: torch.ones_like(ids, dtype=torch.bool).long()[:, :TOKENS],
    ],
)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_mask_of_true_values_costs_as_little_as_no_mask(mask: Any, capability: tuple[int, int]) -> None:
    half = {"dtype": torch.bfloat16, "capability": capability}
    without = fit_job(job(**half))
    assert (
        fit_job(job(inputs=lambda b: tokens(b, mask), **half)).peak_bytes - without.peak_bytes <= 8 * TOKENS
    )


def _padded(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[:, 100:] = 0
    return mask


@pytest.mark.parametrize("mask", [_padded, torch.zeros_like, torch.empty_like])
def test_mask_with_possible_zeros_costs_a_square_of_the_length(mask: Any) -> None:
    half = {"dtype": torch.bfloat16}
    more = fit_job(job(inputs=lambda b: tokens(b, mask), **half)).peak_bytes - fit_job(job(**half)).peak_bytes
    assert more > TOKENS * TOKENS


def test_real_mask_is_known_to_be_full_unless_padded() -> None:
    real = torch.ones(2, 8, dtype=torch.int64)
    padded = real.clone()
    padded[1, 7] = 0
    with fake_mode():
        full, part = to_fake((real, padded))
        assert holds_ones(full)
        assert holds_ones(full.bool()[:, :4])
        assert not holds_ones(part)
        view = full[0]
        view.zero_()
        assert not holds_ones(full)
        assert not holds_ones(view)


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({"max_position_embeddings": TOKENS}, False),
        ({"max_position_embeddings": TOKENS - 1}, True),
        (
            {
                "max_position_embeddings": TOKENS // 2,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            },
            False,
        ),
    ],
)
def test_sequences_beyond_the_positions_bring_a_warning(changes: dict[str, Any], *, warns: bool) -> None:
    def warned(found: Any) -> bool:
        return any("512 tokens are longer than the" in text for text in found.warnings)

    model = llama(**changes)
    assert warned(fit_job(job(model=lambda: model))) is warns
    asked = torch.zeros(1, TOKENS, dtype=torch.int64)
    assert warned(mempool.torch.fit(model, asked, mode="inference")) is warns


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
