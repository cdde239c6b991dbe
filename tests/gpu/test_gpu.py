"""Tests of PyTorch on a GPU: the checks of checks.py, training within limits, and the offload engine."""

from __future__ import annotations

import json
import random
from typing import Any

import compare
import pytest
import runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch_gpu")]


@pytest.mark.parametrize("check", compare.CHECKS)
def test_check_holds_with_pytorch(check: str) -> None:
    answer, error = runs.run_script("checks.py", check)
    assert (answer, error) == ("holds", "")


@pytest.mark.parametrize("workload", compare.NAMES)
def test_training_is_the_same_to_the_bit(workload: str) -> None:
    told = {
        way: json.loads(runs.run_script("worker.py", way, workload)[0])
        for way in ("native", "mempool", "growing")
    }
    assert len({way["losses"] for way in told.values()}) == 1


def trained(way: str, model: str, limit: int = 0) -> dict[str, Any]:
    line, error = runs.run_script("limited.py", way, model, str(limit), seconds=250)
    assert error == "", (way, limit)
    told: dict[str, Any] = json.loads(line)
    return told


@pytest.mark.parametrize("model", ["resnet", "gpt", "seq2seq", "llama"])
def test_swapping_changes_no_bit(model: str) -> None:
    native, pool = trained("native", model), trained("pool", model)
    assert (pool["losses"], pool["parameters"]) == (native["losses"], native["parameters"])
    limit = int(0.8 * pool["peak_bytes"])
    swapped = trained("swapping", model, limit)
    assert (swapped["losses"], swapped["parameters"]) == (native["losses"], native["parameters"])
    assert swapped["peak_bytes"] <= limit


@pytest.mark.parametrize("way", ["swapping", "streams"])
@pytest.mark.parametrize("model", ["resnet", "gpt"])
def test_operations_that_are_not_seen_change_no_bit(way: str, model: str) -> None:
    native = trained("native", model)
    within = trained(way, model, 4 * trained("pool", model)["peak_bytes"])
    assert (within["losses"], within["parameters"]) == (native["losses"], native["parameters"])
    assert within["bypassed"] > 0


@pytest.mark.parametrize("model", ["resnet", "gpt", "bert"])
@pytest.mark.parametrize("way", ["eager", "inductor"])
def test_rewriting_changes_no_bit(way: str, model: str) -> None:
    free = trained(way, model)
    limit = int(0.8 * free["peak_bytes"])
    within = trained(way, model, limit)
    assert (within["losses"], within["parameters"]) == (free["losses"], free["parameters"])
    assert within["peak_bytes"] <= limit


def cuda_engine(host_bytes: int) -> Any:
    """Return the offload engine of the first GPU."""
    import torch

    from mempool.torch.offload.cuda_engine import CudaEngine

    return CudaEngine(torch.device("cuda", 0), host_bytes)


def test_reloaded_bytes_equal_offloaded_bytes_on_any_stream() -> None:
    """Three streams copy, run kernels that write before and after the copies, and reuse the memory."""
    import torch

    device, numbers, engine = torch.device("cuda", 0), random.Random(0), cuda_engine(1 << 30)
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
            torch.full((size,), 255, dtype=torch.uint8, device=device)  # likely in the same place
            back = torch.empty(size, dtype=torch.uint8, device=device)
            engine.wait(engine.reload(copy, back))
        with torch.cuda.stream(numbers.choice(streams)):
            engine.note_stream()
            assert bool((back == value).all())
            back.record_stream(torch.cuda.current_stream(device))
            engine.drop(copy)
    engine.close()


def test_the_link_is_that_of_locked_memory() -> None:
    engine = cuda_engine(1 << 28)
    link = engine.link()
    assert 1e9 < 1 / link.out_per_byte < 1e12
    assert 1e9 < 1 / link.in_per_byte < 1e12
    assert engine.host_bytes == 0
    engine.close()


def test_copies_are_requested_without_waiting_and_pinned_memory_stays_within_its_limit() -> None:
    import torch

    from mempool.torch.offload.engine import HostFullError

    engine = cuda_engine(256 << 20)
    engine.reserve(200 << 20)
    data = torch.ones(64 << 20, dtype=torch.uint8, device="cuda:0")
    torch.cuda._sleep(1 << 30)  # keeps the stream busy for half a second
    asked = [engine.offload(data) for _ in range(3)]
    assert not any(transfer.ended.query() for _, transfer in asked)
    with pytest.raises(HostFullError):
        engine.offload(torch.ones(128 << 20, dtype=torch.uint8, device="cuda:0"))
    assert engine.host_bytes <= 256 << 20
    engine.close()
