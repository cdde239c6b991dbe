"""Peak of one operation's training step: as `fit` tells it, and as the pool sees it. Prints JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mempool.torch
from mempool.torch.estimate import Job, fit_job

ROWS, WIDTH = 32, 1024


class One(nn.Module):
    """A parameter, then the operation, then something whose gradient has memory."""

    def __init__(self, work: Callable[..., Any], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.work, self.weight = work, nn.Parameter(torch.rand(shape) + 0.5)
        self.register_buffer("index", torch.randint(0, 32, (ROWS, WIDTH)))
        self.register_buffer("row", torch.randint(0, 32, (48,)))
        self.register_buffer("mask", torch.rand(ROWS, WIDTH) > 0.5)
        self.register_buffer("other", torch.rand(ROWS, WIDTH))
        self.register_buffer("label", torch.randint(0, 32, (ROWS,)))

    def forward(self) -> Tensor:
        made = self.work(self.weight * 1.0, self)
        return (made * 1.0).sum()


PLANE = (2, 4, 64, 64)

#: By name: the operation of a parameter and the module, and the parameter's shape where it is another.
OPS: dict[str, tuple[Any, ...]] = {
    "gradients that meet": (lambda w, m: (lambda v: v.neg().add_(v, alpha=3.0))(w.repeat(8, 1)),),
    "gather": (lambda w, m: torch.gather(w, 1, m.index),),
    "take_along_dim": (lambda w, m: torch.take_along_dim(w, m.index, 1),),
    "index_select": (lambda w, m: w.index_select(0, m.row),),
    "index": (lambda w, m: w[m.row],),
    "index by mask": (lambda w, m: w * m.mask,),
    "take": (lambda w, m: w.take(m.index),),
    "put": (lambda w, m: w.put(m.index[:16], m.other[:16]),),
    "masked_fill": (lambda w, m: w.masked_fill(m.mask, 0.0),),
    "masked_scatter": (lambda w, m: m.other.masked_scatter(m.mask, w),),
    "where": (lambda w, m: torch.where(m.mask, w, m.other),),
    "clamp": (lambda w, m: w.clamp(0.6, 1.2),),
    "clamp by tensors": (lambda w, m: torch.clamp(w, m.other, m.other + 0.5),),
    "cumsum": (lambda w, m: w.cumsum(1),),
    "cumprod": (lambda w, m: w.cumprod(1),),
    "logcumsumexp": (lambda w, m: w.logcumsumexp(1),),
    "cummax": (lambda w, m: w.cummax(1).values,),
    "prod": (lambda w, m: w.prod(),),
    "prod of rows": (lambda w, m: w.prod(1),),
    "norm 1": (lambda w, m: w.norm(1, 1),),
    "norm 1.5": (lambda w, m: w.norm(1.5, 1),),
    "norm 2": (lambda w, m: w.norm(2, 1),),
    "norm 3": (lambda w, m: w.norm(3, 1),),
    "norm inf": (lambda w, m: w.norm(float("inf"), 1),),
    "normalize": (lambda w, m: F.normalize(w, dim=1),),
    "renorm": (lambda w, m: w.renorm(2, 0, 1.0),),
    "matmul, broadcast": (lambda w, m: w.view(4, 8, WIDTH) @ m.other.T,),
    "matmul of a matrix": (lambda w, m: m.other.T.expand(3, WIDTH, ROWS) @ w[:, :256],),
    "bmm": (lambda w, m: torch.bmm(w.view(4, 8, WIDTH), w.view(4, 8, WIDTH).mT),),
    "einsum": (lambda w, m: torch.einsum("abc,dc->adb", w.view(4, 8, WIDTH), m.other),),
    "linear": (lambda w, m: F.linear(w, m.other),),
    "embedding": (lambda w, m: F.embedding(m.index, w), (32, 16)),
    "embedding_bag": (lambda w, m: F.embedding_bag(m.index, w), (32, 64)),
    "index_put": (lambda w, m: m.other.index_put((m.row[:32],), w),),
    "index_put, self": (lambda w, m: w.index_put((m.row[:32],), m.other),),
    "scatter": (lambda w, m: w.scatter(0, m.index, m.other),),
    "scatter of it": (lambda w, m: m.other.scatter(0, m.index, w),),
    "scatter_add": (lambda w, m: w.scatter_add(0, m.index, w),),
    "scatter_reduce": (lambda w, m: m.other.scatter_reduce(0, m.index, w, "amax"),),
    "index_add": (lambda w, m: w.index_add(0, m.row[:32], m.other),),
    "index_copy": (lambda w, m: w.index_copy(0, m.row[:32], m.other),),
    "index_fill": (lambda w, m: w.index_fill(0, m.row[:32], 1.0),),
    "logsumexp": (lambda w, m: w.logsumexp(1),),
    "softmax": (lambda w, m: w.softmax(1),),
    "log_softmax": (lambda w, m: w.log_softmax(1),),
    "var": (lambda w, m: w.var(1),),
    "std": (lambda w, m: w.std(1),),
    "mean": (lambda w, m: w.mean(1),),
    "nansum": (lambda w, m: w.nansum(1),),
    "cdist": (lambda w, m: torch.cdist(w, m.other),),
    "cdist 1": (lambda w, m: torch.cdist(w, m.other, p=1.0),),
    "pdist": (lambda w, m: F.pdist(w),),
    "cosine_similarity": (lambda w, m: F.cosine_similarity(w, m.other),),
    "kthvalue": (lambda w, m: w.kthvalue(3, 0).values,),
    "sort": (lambda w, m: w.sort(1).values,),
    "topk": (lambda w, m: w.topk(5, 0).values,),
    "median": (lambda w, m: w.median(0).values,),
    "median of all": (lambda w, m: w.median(),),
    "mode": (lambda w, m: w.mode(0).values,),
    "max": (lambda w, m: w.max(0).values,),
    "max of all": (lambda w, m: w.max(),),
    "amax": (lambda w, m: w.amax(0),),
    "maximum": (lambda w, m: torch.maximum(w, m.other),),
    "quantile": (lambda w, m: w.quantile(0.3, 0),),
    "max_pool2d": (lambda w, m: F.max_pool2d(w, 2), PLANE),
    "avg_pool2d": (lambda w, m: F.avg_pool2d(w, 2), PLANE),
    "adaptive_avg_pool2d": (lambda w, m: F.adaptive_avg_pool2d(w, 3), PLANE),
    "interpolate, nearest": (lambda w, m: F.interpolate(w, scale_factor=2), PLANE),
    "interpolate, bilinear": (lambda w, m: F.interpolate(w, scale_factor=2, mode="bilinear"), PLANE),
    "pad": (lambda w, m: F.pad(w, (1, 2)),),
    "pad, reflected": (lambda w, m: F.pad(w, (1, 1, 1, 1), mode="reflect"), PLANE),
    "unfold": (lambda w, m: F.unfold(w, 3), PLANE),
    "Tensor.unfold": (lambda w, m: w.unfold(1, 4, 2),),
    "grid_sample": (lambda w, m: F.grid_sample(w, m.other.view(2, 64, 128, 2), align_corners=False), PLANE),
    "pixel_shuffle": (lambda w, m: F.pixel_shuffle(w, 2), PLANE),
    "roll": (lambda w, m: w.roll(3, 1),),
    "flip": (lambda w, m: w.flip(1),),
    "repeat": (lambda w, m: w.repeat(2, 2),),
    "repeat_interleave": (lambda w, m: w.repeat_interleave(2, 0),),
    "expand": (lambda w, m: w[None].expand(3, ROWS, WIDTH),),
    "cat": (lambda w, m: torch.cat([w, m.other]),),
    "stack": (lambda w, m: torch.stack([w, w]),),
    "split": (lambda w, m: torch.cat(w.split(8)[::-1]),),
    "unbind": (lambda w, m: w.unbind(0)[3],),
    "slice": (lambda w, m: w[4:20],),
    "tril": (lambda w, m: w.tril(),),
    "diagonal": (lambda w, m: w.diagonal(),),
    "diag_embed": (lambda w, m: w[:, :64].diag_embed(),),
    "trace": (lambda w, m: w.trace(),),
    "kron": (lambda w, m: torch.kron(w[:4], m.other[:4, :8]),),
    "pow of it": (lambda w, m: 2.0**w,),
    "pow by it": (lambda w, m: m.other**w,),
    "pow": (lambda w, m: w**2.5,),
    "abs": (lambda w, m: w.abs(),),
    "gelu": (lambda w, m: F.gelu(w),),
    "silu": (lambda w, m: F.silu(w),),
    "glu": (lambda w, m: F.glu(w),),
    "prelu": (lambda w, m: F.prelu(m.other, w[0, :1]),),
    "logit": (lambda w, m: w.logit(),),
    "xlogy": (lambda w, m: torch.xlogy(w, m.other),),
    "lerp": (lambda w, m: torch.lerp(w, m.other, m.other),),
    "addcdiv": (lambda w, m: torch.addcdiv(w, w, m.other),),
    "used twice": (lambda w, m: w.sin() + w.cos(),),
    "used thrice": (lambda w, m: w.sin() + w.cos() + w.tanh(),),
    "residual": (lambda w, m: w + F.relu(w),),
    "dropout": (lambda w, m: F.dropout(w, 0.5),),
    "bce with logits": (lambda w, m: F.binary_cross_entropy_with_logits(w, m.other),),
    "bce with logits, weighed": (
        lambda w, m: F.binary_cross_entropy_with_logits(w, m.other, pos_weight=m.other[0]),
    ),
    "bce": (lambda w, m: F.binary_cross_entropy(w.sigmoid(), m.other),),
    "huber_loss": (lambda w, m: F.huber_loss(w, m.other),),
    "smooth_l1_loss": (lambda w, m: F.smooth_l1_loss(w, m.other),),
    "mse_loss": (lambda w, m: F.mse_loss(w, m.other),),
    "l1_loss": (lambda w, m: F.l1_loss(w, m.other),),
    "kl_div": (lambda w, m: F.kl_div(w, m.other, reduction="batchmean"),),
    "nll_loss": (lambda w, m: F.nll_loss(w, m.label),),
    "cross_entropy": (lambda w, m: F.cross_entropy(w, m.label),),
    "cross_entropy, smoothed": (lambda w, m: F.cross_entropy(w, m.label, label_smoothing=0.1),),
    "cross_entropy, smoothed, weighed": (
        lambda w, m: F.cross_entropy(w, m.label, m.other[0], label_smoothing=0.1),
    ),
    "cross_entropy of shares": (lambda w, m: F.cross_entropy(w, m.other),),
    "hinge_embedding_loss": (lambda w, m: F.hinge_embedding_loss(w, m.mask * 2 - 1),),
    "margin_ranking_loss": (lambda w, m: F.margin_ranking_loss(w, m.other, m.mask * 2 - 1),),
    "triplet_margin_loss": (lambda w, m: F.triplet_margin_loss(w, m.other, m.other * 2),),
    "multi_margin_loss": (lambda w, m: F.multi_margin_loss(w, m.label),),
    "layer_norm": (lambda w, m: F.layer_norm(w, (WIDTH,)),),
    "rms_norm": (lambda w, m: F.rms_norm(w, (WIDTH,)),),
    "group_norm": (lambda w, m: F.group_norm(w, 2), PLANE),
    "instance_norm": (lambda w, m: F.instance_norm(w), PLANE),
    "batch_norm": (lambda w, m: F.batch_norm(w, None, None, training=True), PLANE),
    "local_response_norm": (lambda w, m: F.local_response_norm(w, 2), PLANE),
    "attention": (lambda w, m: F.scaled_dot_product_attention(*(w.view(2, 4, 64, 64),) * 3),),
    "attention, masked": (
        lambda w, m: F.scaled_dot_product_attention(*(w.view(2, 4, 64, 64),) * 3, m.mask.view(2, 4, 64, 64)),
    ),
    "attention, masked, dropped": (
        lambda w, m: F.scaled_dot_product_attention(
            *(w.view(2, 4, 64, 64),) * 3, m.mask.view(2, 4, 64, 64), 0.1
        ),
    ),
    "attention, added, dropped": (
        lambda w, m: F.scaled_dot_product_attention(
            *(w.view(2, 4, 64, 64),) * 3, m.other.view(2, 4, 64, 64), 0.1
        ),
    ),
    "det": (lambda w, m: torch.linalg.det(w), (64, 64)),
    "inv": (lambda w, m: torch.linalg.inv(w), (64, 64)),
    "solve": (lambda w, m: torch.linalg.solve(w, m.other), (32, 32)),
    "svdvals": (lambda w, m: torch.linalg.svdvals(w), (64, 64)),
    "qr": (lambda w, m: torch.linalg.qr(w)[0], (64, 64)),
    "cholesky": (lambda w, m: torch.linalg.cholesky(w @ w.mT + 64 * torch.eye(64)), (64, 64)),
    "eigh": (lambda w, m: torch.linalg.eigh(w @ w.mT)[0], (64, 64)),
    "vector_norm": (lambda w, m: torch.linalg.vector_norm(w, 3.0),),
    "fft": (lambda w, m: torch.fft.rfft(w).abs(),),
    "trunc_normal_, wide": (lambda w, m: w + nn.init.trunc_normal_(torch.empty(ROWS, WIDTH), std=0.02),),
    "trunc_normal_": (lambda w, m: w + nn.init.trunc_normal_(torch.empty(ROWS, WIDTH)),),
    "trunc_normal_, narrow": (
        lambda w, m: w + nn.init.trunc_normal_(torch.empty(ROWS, WIDTH), a=-0.1, b=0.1),
    ),
}


class Deberta(nn.Module):
    """A small DeBERTa-v2, whose disentangled attention gathers scores by distance."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import DebertaV2Config, DebertaV2Model

        sizes = {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}
        self.inner = DebertaV2Model(DebertaV2Config(**sizes, **relative, intermediate_size=128))
        self.register_buffer("words", torch.randint(0, 500, (16, 24)))

    def forward(self) -> Tensor:
        return self.inner(input_ids=self.words).last_hidden_state.square().mean()


def job_of(name: str) -> Job:
    """A step of SGD on the CPU."""

    def make() -> nn.Module:
        if name == "DeBERTa-v2":
            return Deberta()
        work, *shape = OPS[name]
        return One(work, shape[0] if shape else (ROWS, WIDTH))

    return Job(make, lambda _: ((), {}), 1, optimizer=torch.optim.SGD, device="cpu", hold_output=False)


def real(pool: Any, job: Job) -> int:
    """Most that was asked for in the second step, in bytes, without any mode."""
    torch.manual_seed(1)
    stats = pool.client.stats
    before = stats()["requested"]["current"]
    model = job.model().train()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        pool.client.reset_peaks()
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    return int(stats()["requested"]["peak"] - before)


def main() -> None:
    """Print the predicted peak of each operation and the bytes requested of the pool, as JSON."""
    torch.set_num_threads(1)
    found = {}
    with mempool.torch.install(device="cpu") as pool:
        for name in (*OPS, "DeBERTa-v2"):
            job = job_of(name)
            fitted = fit_job(job, allocators=("pytorch",), remedies=False, largest=False)
            found[name] = (fitted.peak_bytes, real(pool, job))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
