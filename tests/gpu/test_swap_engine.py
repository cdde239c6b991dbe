"""Copies of a GPU's memory and back: the bytes, the link, what is locked.

What may go wrong between streams is tried without a GPU: tests/torch/test_cuda_engine.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch_gpu")]


def made(host_bytes: int) -> Any:
    """The engine of the first GPU."""
    import torch

    from mempool.torch.offload.cuda_engine import CudaEngine

    return CudaEngine(torch.device("cuda", 0), host_bytes)


def test_reloaded_bytes_equal_offloaded_bytes_on_any_stream() -> None:
    """Copies, kernels that write before and after, and memory that is taken again, by three streams."""
    import torch

    device, numbers, engine = torch.device("cuda", 0), random.Random(0), made(1 << 30)
    streams = [torch.cuda.current_stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device)]
    for turn in range(200):
        size, value = numbers.randrange(1, 8 << 20), turn % 250 + 1
        with torch.cuda.stream(numbers.choice(streams)):
            engine.note_stream()
            data = torch.full((size,), value, dtype=torch.uint8, device=device)
            copy, leaving = engine.offload(data)
            engine.wait(leaving)
            engine.fence()
            del data, leaving
            torch.full((size,), 255, dtype=torch.uint8, device=device)  # where it was
            back = torch.empty(size, dtype=torch.uint8, device=device)
            engine.wait(engine.reload(copy, back))
        with torch.cuda.stream(numbers.choice(streams)):
            engine.note_stream()
            assert bool((back == value).all())
            back.record_stream(torch.cuda.current_stream(device))
            engine.drop(copy)
    engine.close()


def test_the_link_is_that_of_locked_memory() -> None:
    engine = made(1 << 28)
    link = engine.link()
    assert 1e9 < 1 / link.out_per_byte < 1e12
    assert 1e9 < 1 / link.in_per_byte < 1e12
    assert engine.host_bytes == 0
    engine.close()


def test_copies_are_requested_without_waiting_and_pinned_memory_stays_within_its_limit() -> None:
    import torch

    from mempool.torch.offload.engine import HostFullError

    engine = made(256 << 20)
    engine.reserve(200 << 20)
    data = torch.ones(64 << 20, dtype=torch.uint8, device="cuda:0")
    torch.cuda._sleep(1 << 30)  # half a second of the stream's
    asked = [engine.offload(data) for _ in range(3)]
    assert not any(transfer.ended.query() for _, transfer in asked)
    with pytest.raises(HostFullError):
        engine.offload(torch.ones(128 << 20, dtype=torch.uint8, device="cuda:0"))
    assert engine.host_bytes <= 256 << 20
    engine.close()
