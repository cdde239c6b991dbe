"""Predicted peaks equal those of PyTorch's memory tracker and of real steps, by model and by operation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.nn.functional as F
from fit_jobs import NAMES, job_of
from torch import Tensor
from torch.distributed._tools import mem_tracker
from torch.utils import _pytree as pytree

from mempool.torch.estimate import Job, fit_job
from mempool.torch.estimate.device.emulation import emulate_device
from mempool.torch.estimate.fake.copies import fake_model, to_fake
from mempool.torch.estimate.fake.fake_run import loss_of
from mempool.torch.estimate.fake.mode import ValuelessMode, fake_mode

pytestmark = pytest.mark.usefixtures("shared_isolation")
OPTIMIZERS = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor)
MODES = ("train", "inference")


class Tracker(mem_tracker.MemTracker):  # type: ignore[misc]
    """Tracker without figures by module, which fail for a module that is called twice."""

    def _pre_fw_hook(self, *_: Any) -> None: ...
    def _post_fw_hook(self, *_: Any) -> None: ...
    def _pre_bw_hook(self, *_: Any) -> None: ...
    def _post_bw_hook(self, *_: Any) -> None: ...


def in_parameters_type(inputs: Any, job: Job) -> Any:
    """Convert the inputs as estimates do, also for a model that would convert them itself."""
    if job.dtype is None or job.autocast is not None:
        return inputs
    return pytree.tree_map_only(Tensor, lambda t: t.to(job.dtype) if t.is_floating_point() else t, inputs)


def tracked(job: Job, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return PyTorch's tracker's peak of the second step of a plain loop."""
    unit = 512 if job.device == "cuda" else 1
    monkeypatch.setattr(
        mem_tracker._WeakRefInfo,
        "_calculate_mem_consumed",
        lambda self: math.ceil(self.size * self.element_size / unit) * unit,
    )
    tracker = Tracker()
    given: Any = ()
    with fake_mode() as mode, emulate_device(job.device, capability=job.capability):
        model = fake_model(job.model, job.dtype).train(job.mode == "train")
        optimizer = (
            None if job.optimizer is None or job.mode == "inference" else job.optimizer(model.parameters())
        )
        lower = torch.autocast(job.device, job.autocast) if job.autocast else contextlib.nullcontext()
        for step in range(2):
            if step == 1:
                batch = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
                tracker.track_external(model, *([optimizer] if optimizer else []), *batch)
                del batch
            with tracker if step == 1 else contextlib.nullcontext():
                given = in_parameters_type(to_fake(job.inputs(job.batch)), job)
                if job.mode == "train":
                    with lower:
                        loss = loss_of(job, model(*given[0], **given[1]), None, lambda _: None)
                    loss.backward()
                    del loss
                    mode.on_read = lambda _: 1.0
                    optimizer.step()
                    mode.on_read = None
                    optimizer.zero_grad()
                else:
                    with torch.no_grad(), lower:
                        model(*given[0], **given[1])
    return sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())


def check(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = fit_job(job, allocators=("pytorch",), remedies=False, largest=False)
    assert fitted.peak_bytes == tracked(job, monkeypatch)
    assert sum(fitted.by_class_bytes.values()) == fitted.peak_bytes
    assert sum(share.bytes for share in fitted.by_module) == fitted.peak_bytes


#: Tests with all models on CUDA; on the CPU, without rounding, with two models, or all with ``-m full``.
TRAININGS = [
    *((name, torch.optim.AdamW, "cuda") for name in NAMES),
    *(
        pytest.param(
            name, torch.optim.SGD, "cpu", marks=[] if name in ("resnet", "hf-t5") else pytest.mark.full
        )
        for name in NAMES
    ),
]


@pytest.mark.parametrize(("name", "optimizer", "device"), TRAININGS)
def test_training_peaks_where_pytorchs_tracker_says(
    name: str, optimizer: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(job_of(name, optimizer=optimizer, device=device, hold_output=False), monkeypatch)


@pytest.mark.parametrize("name", ["resnet", "hf-gpt2", "hf-t5"])
def test_passes_without_gradients_do_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(job_of(name, mode="inference", hold_output=False), monkeypatch)


@pytest.mark.parametrize("name", ["gpt", "hf-bert"])
@pytest.mark.parametrize(
    "more", [{"optimizer": torch.optim.Adafactor}, {"autocast": torch.bfloat16}, {"dtype": torch.bfloat16}]
)
def test_other_optimizers_and_lower_precisions_do_too(
    name: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(job_of(name, hold_output=False, **more), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_everything_does(
    name: str, optimizer: Any, mode: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for more in ({}, {"autocast": torch.bfloat16}, {"dtype": torch.bfloat16, "capability": (9, 0)}):
        check(
            job_of(name, optimizer=optimizer, mode=mode, device=device, hold_output=False, **more),
            monkeypatch,
        )


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": lambda o, y, **more: F.binary_cross_entropy(o.sigmoid(), y.sigmoid(), **more),
    "bce_with_logits": lambda o, y, **more: F.binary_cross_entropy_with_logits(o, y.sigmoid(), **more),
    "soft_margin": lambda o, y, **more: F.soft_margin_loss(o, y.sign(), **more),
    "kl": lambda o, y, **more: F.kl_div(o, y, **more),
    "poisson": F.poisson_nll_loss,
    "cross_entropy": lambda o, _, **more: F.cross_entropy(o, torch.zeros(8, dtype=torch.int64), **more),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_storage_of_a_reduced_loss_is_as_large_as_in_a_real_run(
    loss: Callable[..., Tensor], reduction: str
) -> None:
    """PyTorch writes the mean of some losses into the storage of the loss of each element."""

    def storage_bytes() -> Any:
        output = torch.zeros(8, 5).requires_grad_()
        made = loss(output, torch.zeros(8, 5), reduction=reduction)
        made.sum().backward()
        return made.untyped_storage().nbytes(), made.shape, output.grad is not None

    real = storage_bytes()
    with ValuelessMode():
        assert storage_bytes() == real
