"""Properties of a job's model and optimizer that decide which remedies apply."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mempool.torch.estimate.checkpointing import BlockSelection, block_selections, recomputed_shares
from mempool.torch.estimate.device.emulation import emulate_device
from mempool.torch.estimate.fake.copies import fake_model, to_fake
from mempool.torch.estimate.fake.isolation import isolated
from mempool.torch.estimate.fake.mode import fake_mode
from mempool.torch.estimate.remedies.model_changes import can_chunk

if TYPE_CHECKING:
    from mempool.torch.estimate.job import Job


@dataclass(frozen=True)
class JobTraits:
    """Properties of a job that decide which remedies apply.

    Attributes:
        block_selections: selections of blocks to checkpoint.
        shares: for each of ``block_selections``, each block's share of the forward's operations, or
            None.
        optimizer: class name; "" for none.
        optimizer_path: package and name of the optimizer's class, as written in a program.
        settings: default values of the optimizer's group settings.
        floats: types of the floating-point parameters.
        normalizes: whether the model has batch normalisation, whose statistics depend on the batch.
        caching: name of the module that keeps a key-value cache, as models of transformers do; None if no
            module does.
        chunkable: whether the loss can be computed in pieces.
    """

    block_selections: list[BlockSelection]
    shares: list[list[float] | None]
    optimizer: str
    optimizer_path: str
    settings: dict[str, Any]
    floats: frozenset[torch.dtype]
    normalizes: bool
    caching: str | None
    chunkable: bool


def inspect_job(job: Job) -> JobTraits:
    """Make a job's model and optimizer without memory and return their properties. The model is called.

    Raises:
        Exception: any error of making the model; a job that has been tried raises none.
    """
    with isolated(), fake_mode(), emulate_device(job.device, capability=job.capability):
        model = fake_model(job.model, None)
        model.train(job.mode == "train")
        args, kwargs = to_fake(job.inputs(job.batch))
        found = block_selections(model) if job.mode == "train" and not job.checkpoint else []
        optimizer = None
        if job.optimizer is not None and job.mode != "inference":
            optimizer = job.optimizer([nn.Parameter(torch.empty(1))])
        return JobTraits(
            block_selections=found,
            shares=[_shares(model, way, args, kwargs) for way in found],
            optimizer=type(optimizer).__name__ if optimizer else "",
            optimizer_path=_class_path(type(optimizer)),
            settings=dict(optimizer.defaults) if optimizer else {},
            floats=frozenset(p.dtype for p in model.parameters() if p.is_floating_point()),
            normalizes=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()),
            caching=_caching(model),
            chunkable=job.mode == "train" and job.loss is None and can_chunk(model, kwargs),
        )


def _class_path(kind: type) -> str:
    """Return the package and name of an optimizer's class, without the modules inside a known package."""
    package = next((p for p in ("torch.optim", "bitsandbytes.optim") if kind.__module__.startswith(p)), None)
    return f"{package or kind.__module__}.{kind.__name__}"


def _shares(
    model: nn.Module, way: BlockSelection, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[float] | None:
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return recomputed_shares(model, way, args, kwargs)
    except Exception:
        return None


def _caching(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if getattr(getattr(module, "config", None), "use_cache", None) is True:
            return str(name)
    return None
