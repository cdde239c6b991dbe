"""PyTorch's simulated allocator beside the allocator itself, in PyTorch's CUDA build on the stand-in."""

from __future__ import annotations

import pytest
from processes import alone, run_each_alone

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import standin_torch
    import torch
    from recordings import random_trace

    from solvers.simulators import simulate
    from traces import EventType

MIB = 1 << 20
CONFS = [
    "",
    "max_split_size_mb:24,max_non_split_rounding_mb:30",
    "roundup_power2_divisions:4,large_segment_size_mb:12",
    "roundup_power2_divisions:[4:2,64:8],garbage_collection_threshold:0.5",
    "max_split_size_mb:40,garbage_collection_threshold:0.8",
]


@pytest.mark.parametrize("largest", [3 * MIB, 40 * MIB])
@pytest.mark.parametrize("expandable", ["False", "True"])
@pytest.mark.parametrize("conf", CONFS)
@alone
def test_each_event_leaves_the_bytes_and_reuses_the_addresses_of_pytorch(
    conf: str, expandable: str, largest: str
) -> None:
    """With little more memory than the peak load, so that caches go back and requests fail."""
    trace = random_trace(5, 1200, largest=int(largest))
    limit = int(trace.load().max()) * 11 // 10 // MIB * MIB + 2 * MIB
    torch._C._accelerator_setAllocatorSettings(f"{conf},expandable_segments:{expandable}".strip(","))
    torch.cuda.init()
    torch.empty(0, device="cuda")  # makes the context
    if expandable == "True":  # which a fraction limits before the memory that is mapped already counts
        standin_torch.driver().set_capacity(standin_torch.driver().live_bytes() + limit)
    else:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((limit + 0.5) / total)
    name = "pytorch_expandable" if expandable == "True" else "pytorch"
    simulated = simulate(trace, name, limit_bytes=limit, conf=conf)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    kept: dict[int, torch.Tensor] = {}
    same: dict[int, int] = {}
    for row in range(len(trace)):
        buffer, address = int(trace.buffer[row]), int(simulated.address[row])
        if trace.kind[row] == EventType.ALLOC and trace.size[row]:
            with torch.cuda.stream(streams[int(trace.stream[row])]):
                try:
                    kept[buffer] = torch.empty(int(trace.size[row]), dtype=torch.uint8, device="cuda")
                except torch.OutOfMemoryError:
                    assert address == -1, row
            if buffer in kept:
                assert same.setdefault(kept[buffer].data_ptr(), address) == address, row
        elif trace.kind[row] == EventType.FREE:
            kept.pop(buffer, None)
        assert torch.cuda.memory_allocated() == simulated.live[row], row
        assert torch.cuda.memory_reserved() == simulated.reserved[row], row
    assert len(set(same.values())) == len(same) > 10


if __name__ == "__main__":
    run_each_alone(globals())
