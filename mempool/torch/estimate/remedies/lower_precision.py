"""Parameters and inputs of lower precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from mempool.torch.estimate.fake.tensors import to_fake

if TYPE_CHECKING:
    from mempool.torch.estimate.training_step import Job


def in_low_precision(job: Job, dtype: torch.dtype = torch.bfloat16) -> Job:
    """Return the job with floating-point parameters, inputs, gradients and optimizer state of a type."""

    def inputs(batch: int) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: _cast(t, dtype), to_fake(job.inputs(batch)))

    return job.but(dtype=dtype, inputs=inputs)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
