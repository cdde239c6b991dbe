"""Schedules followed in C++: no wrong byte, the limit kept, and Python called only where something moves."""

from __future__ import annotations

import os
import random
import sys
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import mempool.torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ELEMENTS, COUNT = 1 << 14, 12  #: of the tensors of `Tensors`
BYTES = 4 * ELEMENTS


class Tensors:
    """A loop over tensors of one shape, some of them offloaded, with the values that they must have."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.values = [float(number + 1) for number in range(COUNT)]
        self.tensors = [torch.full((ELEMENTS,), value) for value in self.values]

    def check(self, tensor: torch.Tensor, value: float) -> None:
        assert (tensor[0].item(), tensor[-1].item()) == (value, value)

    def iterate(self, order: list[int]) -> None:
        """Read and write the tensors in an order; the operations and shapes are the same for each order."""
        for one, other in zip(order, order[1:] + order[:1], strict=True):
            sums = self.tensors[one] + self.tensors[other]
            self.check(sums, self.values[one] + self.values[other])
            self.tensors[one].mul_(-1)
            self.values[one] *= -1
            self.check(self.tensors[one], self.values[one])

    def shuffled(self) -> list[int]:
        return self.random.sample(range(COUNT), COUNT)


@pytest.fixture
def pool() -> Iterator[mempool.torch.TensorPool]:
    pool = mempool.torch.install(limit=BYTES * (COUNT - 4), background=False)
    yield pool
    pool.close()


def mode_of(pool: mempool.torch.TensorPool) -> Any:
    assert pool.offloading is not None
    return pool.offloading.mode


def iterate(pool: mempool.torch.TensorPool, work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()
        pool.step()
        pool.plan_now()


def settle(pool: mempool.torch.TensorPool, work: Callable[[], None]) -> None:
    """Repeat an iteration until nothing but the interposer sees its operations."""
    for _ in range(80):
        iterate(pool, work, 1)
        if mode_of(pool).follower.is_following:
            return
    raise AssertionError("no schedule is followed")


def swapping(pool: mempool.torch.TensorPool) -> dict[str, Any]:
    values: dict[str, Any] = pool.report().to_dict()["swapping"]
    return values


def followed(pool: mempool.torch.TensorPool, work: Callable[[], None]) -> int:
    """The operations of one iteration that no mode saw."""
    before = swapping(pool)["followed"]
    iterate(pool, work, 1)
    return int(swapping(pool)["followed"] - before)


@pytest.mark.parametrize("seed", range(3))
def test_operations_with_other_tensors_than_scheduled_read_and_write_them(
    pool: mempool.torch.TensorPool, seed: int
) -> None:
    """The operations and shapes are as scheduled, so each tensor is met where another one is expected."""
    program = Tensors(seed)
    settle(pool, lambda: program.iterate(list(range(COUNT))))
    assert followed(pool, lambda: program.iterate(list(range(COUNT)))) > 3 * COUNT
    assert swapping(pool)["iteration_out_bytes"] > BYTES
    for _ in range(12):
        iterate(pool, lambda: program.iterate(program.shuffled()), 1)
        iterate(pool, lambda: program.iterate(list(range(COUNT))), 1)


@pytest.mark.parametrize("seed", range(4))
def test_iterations_that_diverge_anywhere_lose_no_bytes(pool: mempool.torch.TensorPool, seed: int) -> None:
    program = Tensors(seed)
    usual = list(range(COUNT))
    settle(pool, lambda: program.iterate(usual))

    def unusual() -> None:
        at = program.random.randrange(COUNT)
        program.iterate(usual[:at]) if at else None
        what = program.random.randrange(5)
        if what == 0:
            program.tensors[at] = program.tensors[at].clone()
        elif what == 1:
            torch.ones(program.random.randrange(1, 3 * ELEMENTS)).sum()
        elif what == 2:
            with pytest.raises(RuntimeError, match="size"):
                program.tensors[at] + torch.ones(ELEMENTS - 1)
        elif what == 3:
            with torch.inference_mode():
                program.check(program.tensors[at] * 1, program.values[at])
        else:
            return
        program.iterate(usual[at:] + usual[:at])

    for _ in range(10):
        iterate(pool, unusual, 1)
        iterate(pool, lambda: program.iterate(usual), program.random.randrange(1, 4))
    program.iterate(usual)


def test_iteration_like_the_last_calls_python_for_moves_only(pool: mempool.torch.TensorPool) -> None:
    program = Tensors()
    settle(pool, lambda: program.iterate(list(range(COUNT))))
    mode = mode_of(pool)
    seen, calls = [], mode.follower.calls
    dispatch = mode._dispatch
    mode._dispatch = lambda func, *rest: seen.append(func) or dispatch(func, *rest)
    iterate(pool, lambda: program.iterate(list(range(COUNT))), 1)
    del mode._dispatch
    schedule = mode.iterations.schedule
    assert schedule is not None
    moving = sum(bool(one.before or one.after or one.dropped_copies) for one in schedule.actions)
    assert moving > 0
    assert mode.follower.calls - calls <= 2 * moving
    assert [str(func) for func in seen if "item" not in str(func) and "local_scalar" not in str(func)] == []


def test_two_kinds_of_iterations_are_both_followed(pool: mempool.torch.TensorPool) -> None:
    program = Tensors()
    kinds = [lambda: program.iterate(list(range(COUNT))), lambda: program.iterate(list(range(COUNT // 2)))]
    for _ in range(40):
        for work in kinds:
            iterate(pool, work, 1)
    assert followed(pool, kinds[0]) > 3 * COUNT
    assert followed(pool, kinds[1]) > 3 * COUNT // 2


def test_operations_between_marked_iterations_belong_to_none(pool: mempool.torch.TensorPool) -> None:
    program, usual = Tensors(), list(range(COUNT))

    def marked() -> None:
        with pool.iteration():
            program.iterate(usual)
        pool.plan_now()
        program.iterate(usual[: program.random.randrange(3)] or usual[:1])

    for _ in range(80):
        marked()
    before = swapping(pool)["followed"]
    marked()
    assert swapping(pool)["followed"] - before > 3 * COUNT


def test_forked_child_goes_on_in_the_middle_of_a_followed_iteration(pool: mempool.torch.TensorPool) -> None:
    program, usual = Tensors(), list(range(COUNT))
    settle(pool, lambda: program.iterate(usual))
    program.iterate(usual[: COUNT // 2])
    if (child := os.fork()) == 0:
        try:
            program.iterate(usual)
        finally:
            os._exit(sys.exc_info()[0] is not None)
    assert os.waitpid(child, 0)[1] == 0
    program.iterate(usual)


def train(limit: int | None, steps: int = 20) -> tuple[list[float], list[torch.Tensor], dict[str, Any], int]:
    torch.manual_seed(0)
    pool = mempool.torch.install(limit=limit, background=False)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.GELU()) for _ in range(8)
    ]
    model, losses = torch.nn.Sequential(*layers), []
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(256, 64)
    for _ in range(steps):
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        pool.plan_now()
    report = pool.report().to_dict()
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    peak = pool.client.stats()["live"]["peak"]
    pool.close()
    return losses, parameters, report.get("swapping") or {}, peak


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_training_is_the_same_to_the_bit_and_within_the_limit(share: float) -> None:
    losses, parameters, _, peak = train(None)
    same, alike, values, _ = train(int(share * peak))
    assert values["followed"] > 200
    assert values["iteration_out_bytes"] > 0
    assert values["beyond"] == 0
    assert same == losses
    assert all(torch.equal(one, other) for one, other in zip(parameters, alike, strict=True))
