"""The simulated allocator accepts and refuses the same settings as PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from solvers.simulators.pytorch import PyTorch

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_setAllocatorSettings"),
    reason="this PyTorch does not tell what it takes",
)


@pytest.mark.parametrize(
    "conf",
    [
        "max_split_size_mb:20",
        "max_split_size_mb:19",
        "max_split_size_mb:128,garbage_collection_threshold:0.5",
        "large_segment_size_mb:10",
        "large_segment_size_mb:11",
        "large_segment_size_mb:12,max_split_size_mb:12",
        "large_segment_size_mb:12,max_split_size_mb:11",
        "large_segment_size_mb:40,max_split_size_mb:30",
        "max_split_size_mb:30,large_segment_size_mb:40",
        "large_segment_size_mb:12,max_non_split_rounding_mb:12",
        "max_non_split_rounding_mb:19",
        "large_segment_size_mb:40",
        "large_segment_size_mb:40,max_non_split_rounding_mb:30",
        "garbage_collection_threshold:1",
        "roundup_power2_divisions:8",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[]",
        "roundup_power2_divisions:[>:8]",
        "roundup_power2_divisions:[4:2,64:8]",
        "roundup_power2_divisions:[3:1]",
        "roundup_power2_divisions:[4:2,64:3]",
        "expandable_segments:true",
        " pinned_use_background_threads : True , expandable_segments:False,",
    ],
)
def test_settings_accepted_by_pytorch_are_accepted(conf: str) -> None:
    def takes(read: object) -> bool:
        try:
            read(conf)  # type: ignore[operator]
        except ValueError:
            return False
        return True

    theirs = takes(torch._C._accelerator_setAllocatorSettings)
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    assert takes(lambda text: PyTorch(conf=text)) == theirs
