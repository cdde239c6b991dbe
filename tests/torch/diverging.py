"""Training loops with irregular steps, run in a separate process; the results are printed as JSON.

python diverging.py plain|marked|unmarked OBSERVER SCENARIO...
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from models import GPT, ResNet
from torch.nn import functional as F
from training import digest, keep_slow_plans, observed

#: Number of steps, and the step from which on all steps are regular.
STEPS, CALM = 48, 36
#: Number of steps of scenarios with many variants.
LONG = 96


class Loop:
    """A model, its optimizer and a training step, which scenarios modify."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, foreach=True)
        self.losses: list[str] = []
        self.kept: list[Any] = []
        self.last: torch.Tensor | None = None

    def data(self, number: int, size: int = 4, length: int = GPT.length) -> torch.Tensor:
        return self.model.batch(number, size)[0][:, : length + 1]

    def outputs(self, words: torch.Tensor) -> torch.Tensor:
        x = self.model.embed(words[:, :-1]) + self.model.place.weight[: words.shape[1] - 1]
        for layer in self.model.layers:
            x = layer(x)
        return self.model.head(self.model.norm(x))

    def loss(self, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.outputs(words).flatten(0, 1), words[:, 1:].flatten())

    def step(self, number: int, **shape: int) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(self.data(number, **shape))
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item().hex())


def extra_tensor(loop: Loop, number: int) -> None:
    """Keep a further tensor through the step, in one step out of sixteen."""
    extra = torch.full((3000,), float(number)) if number % 16 == 9 and number < CALM else None
    loop.step(number)
    assert extra is None or bool((extra == number).all())


def logged_clones(loop: Loop, number: int) -> None:
    """Keep copies of a parameter for a log."""
    loop.step(number)
    if number % 8 == 5 and number < CALM:
        loop.kept.append((loop.model.head.weight.detach().clone(), loop.losses[-1]))


def evaluation(loop: Loop, number: int) -> None:
    """Evaluate after some steps, without gradients."""
    loop.step(number)
    if number % 12 == 7 and number < CALM:
        loop.model.eval()
        with torch.no_grad():
            loop.kept.append(loop.loss(loop.data(1000 + number, size=8)).item().hex())
        loop.model.train()


def last_batch(loop: Loop, number: int) -> None:
    """Make every twelfth batch smaller."""
    loop.step(number, size=1 if number % 12 == 11 else 4)


def lengths(loop: Loop, number: int) -> None:
    """Alternate between two lengths."""
    loop.step(number, length=GPT.length if number % 2 else GPT.length // 2)


def random_lengths(loop: Loop, number: int) -> None:
    """Draw one of four lengths; keep the outputs until the next step has new ones."""
    _late_gradients(
        loop, number, random.Random(number).choice([GPT.length // 4 * part for part in (1, 2, 3, 4)])
    )


def any_lengths(loop: Loop, number: int) -> None:
    """Draw one of many lengths; the longest and the shortest come early."""
    early = {2: GPT.length, 5: GPT.length // 2}
    _late_gradients(
        loop, number, early.get(number, random.Random(number).randint(GPT.length // 2, GPT.length))
    )


def _late_gradients(loop: Loop, number: int, length: int) -> None:
    words = loop.data(number, length=length)
    outputs = loop.outputs(words)
    loss = F.cross_entropy(outputs.flatten(0, 1), words[:, 1:].flatten())
    loop.optimizer.zero_grad()  # after the forward pass, so that the previous gradients are alive during it
    loss.backward()
    loop.optimizer.step()
    loop.losses.append(loss.item().hex())
    loop.last = outputs


def gathered(loop: Loop, number: int) -> None:
    """Accumulate gradients over a random number of batches."""
    loss = loop.loss(loop.data(number))
    loss.backward()
    if random.Random(number).random() < 0.4:
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.losses.append(loss.item().hex())


def exception(loop: Loop, number: int) -> None:
    """End some steps early by an exception."""
    if number % 16 == 9 and number < CALM:
        with contextlib.suppress(ZeroDivisionError):
            loop.loss(loop.data(number)).backward()
            1 / 0  # noqa: B018
        loop.optimizer.zero_grad()
    loop.step(number)


def out_of_memory(loop: Loop, number: int) -> None:
    """End some steps early by running out of memory."""
    if number % 16 == 9 and number < CALM:
        with contextlib.suppress(RuntimeError):
            loss = loop.loss(loop.data(number))
            torch.empty(1 << 46, dtype=torch.uint8)
            loss.backward()
        loop.optimizer.zero_grad()
    loop.step(number)


def second_model(loop: Loop, number: int) -> None:
    """Train a second network for twelve steps."""
    loop.step(number)
    if number == 20:
        loop.kept.append(ResNet(8))
    if 20 <= number < 32:
        other = loop.kept[0]
        loss = other.loss(*other.batch(number, 2))
        loss.backward()
        loop.losses.append(loss.item().hex())


def saved(loop: Loop, number: int) -> None:
    """Write checkpoints."""
    loop.step(number)
    if number % 16 == 9 and number < CALM:
        buffer = io.BytesIO()
        torch.save({"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}, buffer)
        loop.kept.append(len(buffer.getvalue()))


def frozen(loop: Loop, number: int) -> None:
    """Freeze half of the parameters at one step, which changes the pattern for all later steps."""
    if number == 16:
        for parameter in itertools.islice(loop.model.parameters(), 12):
            parameter.requires_grad_(False)
    loop.step(number)


def scheduled(loop: Loop, number: int) -> None:
    """Change the learning rate by a scheduler."""
    if number == 0:
        loop.kept.append(torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, STEPS))
    loop.step(number)
    loop.kept[0].step()


SCENARIOS: dict[str, Callable[[Loop, int], None]] = {
    scenario.__name__: scenario
    for scenario in (
        extra_tensor, logged_clones, evaluation, last_batch, lengths, random_lengths, any_lengths, gathered,
        exception, out_of_memory, second_model, saved, frozen, scheduled,
    )
}  # fmt: skip


def numbers(name: str, pool: Any, *, marks: bool) -> Iterator[int]:
    """Yield the numbers of the steps; run the planner after each."""
    for number in range(LONG if name in ("random_lengths", "any_lengths", "gathered") else STEPS):
        yield number
        if marks:
            pool.step()
        if pool is not None:
            pool.plan_now()


def results(name: str, pool: Any = None, *, marks: bool = False) -> dict[str, Any]:
    """Run a scenario; return its results and, with a pool, the total misses at the end of each step."""
    torch.manual_seed(0)
    loop, misses = Loop(pool), []
    for number in numbers(name, pool, marks=marks):
        SCENARIOS[name](loop, number)
        if pool is not None:
            misses.append(pool.report().to_dict()["misses"])
    kept = [text for text in loop.kept if isinstance(text, (str, int))]
    return {"losses": loop.losses, "parameters": digest(loop.model), "kept": kept, "misses": misses}


def pooled(name: str, observer: ctypes.CDLL, *, marks: bool) -> dict[str, Any]:
    import mempool.torch

    keep_slow_plans()
    with mempool.torch.install(background=False) as pool:
        said = results(name, pool, marks=marks)
        known = len(pool.planner.registry)
        return said | {"overlaps": observer.overlaps(), "known": known, "report": pool.report().to_dict()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    way, library, *names = sys.argv[1:]
    if way == "plain":
        told = {name: results(name) for name in names}
    else:
        watching = observed(library)
        told = {name: pooled(name, watching, marks=way == "marked") for name in names}
    print(json.dumps(told))
