"""Masks of the memory-efficient attention: which lengths need a copy, of how many heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from mempool.torch.estimate import Job, fit_job
from traces.trace import Kind

pytestmark = pytest.mark.usefixtures("shared_isolation")

BATCH, HEADS, WIDTH = 2, 8, 64


class Attends(nn.Module):
    """Attention with a mask that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = x @ self.weight
        return scaled_dot_product_attention(q, q, q, attn_mask=mask)


def allocated(length: int, *, mask_heads: int = 1) -> list[int]:
    """Return the bytes of each copy that attention makes of its mask, in two forwards."""

    def inputs(batch: int) -> Any:
        x = torch.zeros(batch, HEADS, length, WIDTH)
        return (x, torch.zeros(batch, mask_heads, length, length)), {}

    trace = fit_job(Job(Attends, inputs, BATCH, mode="inference", capability=(8, 0))).trace
    padding = [k for k, name in enumerate(trace.names) if "pad" in name]
    allocs = (trace.kind == Kind.ALLOC) & np.isin(trace.operation, padding)
    sizes: list[int] = trace.size[allocs].tolist()
    return sizes


@pytest.mark.parametrize("length", [640, 648, 656])
def test_mask_whose_rows_begin_at_multiples_of_eight_is_not_copied(length: int) -> None:
    assert allocated(length) == []


@pytest.mark.parametrize(("length", "row"), [(650, 656), (641, 648), (655, 656)])
@pytest.mark.parametrize("mask_heads", [1, HEADS])
def test_other_mask_is_copied_before_it_is_expanded_to_all_heads(
    length: int, row: int, mask_heads: int
) -> None:
    copies = allocated(length, mask_heads=mask_heads)
    assert copies == [BATCH * mask_heads * length * row * 4] * 2  # one in each of two steps


def test_padded_lengths_near_each_other_need_nearly_the_same() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, vocab_size=100,
        max_position_embeddings=1024,
    )  # fmt: skip

    def peak(length: int) -> int:
        def inputs(batch: int) -> Any:
            tokens = torch.zeros(batch, length, dtype=torch.int64)
            return (), {"input_ids": tokens, "attention_mask": torch.zeros_like(tokens), "labels": tokens}

        job = Job(lambda: transformers.BertForMaskedLM(config), inputs, 4, optimizer=torch.optim.AdamW)
        return fit_job(job).peak_bytes

    peaks = [peak(length) for length in (640, 648, 650, 656)]
    assert max(peaks) < 1.06 * min(peaks)
