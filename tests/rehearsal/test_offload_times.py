"""Times of training within a limit on a modelled GPU: the schedule predicts them."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from processes import alone, run_each_alone

if TYPE_CHECKING:
    from collections.abc import Callable

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import torch
    from torch.nn import functional

    import mempool.torch
    from mempool.hardware.gpu_throughput import rates_of
    from mempool.rehearsal import clock
    from solvers.swap import Link

WIDTH, CLASSES, ROWS, LAYERS = 512, 4096, 4096, 6
STEPS = 18  #: until the schedule is final, the arena has places for all tensors, and moves are native


def of_layers() -> tuple[Any, Callable[[Any], Any]]:
    """Return a model of alike layers whose last results are the largest, and the function of its loss."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(WIDTH, CLASSES)).cuda()
    batch = torch.randn(ROWS, WIDTH, device="cuda"), torch.zeros(ROWS, dtype=torch.long, device="cuda")
    return model, lambda model: functional.cross_entropy(model(batch[0]), batch[1])


def of_images() -> tuple[Any, Callable[[Any], Any]]:
    """Return a model of convolutions, which take workspaces, and the function of its loss."""
    sides = (16, *[64] * 5)
    blocks = [
        torch.nn.Sequential(
            torch.nn.Conv2d(*pair, 3, padding=1), torch.nn.BatchNorm2d(pair[1]), torch.nn.ReLU()
        )
        for pair in pairwise(sides)
    ]
    model = torch.nn.Sequential(*blocks).cuda()
    batch = torch.randn(64, sides[0], 32, 32, device="cuda")
    return model, lambda model: model(batch).square().mean()


def step_seconds(
    make: Callable[[], tuple[Any, Callable[[Any], Any]]], share: str
) -> tuple[list[float], list[float], Any]:
    """Return the modelled seconds of each step within a limit, those waited, and the last schedule."""
    clock.start(rates_of("H100", (9, 0)), Link.of_rate(50e9))
    seconds, waited = [], [0.0]
    with mempool.torch.install(device="cuda", backend="pluggable", limit=share, background=False) as pool:
        model, loss_of = make()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for _ in range(STEPS):
            begin = clock.now()
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            loss.item()
            del loss
            seconds.append(clock.now() - begin)
            pool.plan_now()
            waited.append(pool.report().to_dict()["swapping"]["waited_seconds"])
        offloading = pool.offloading
        assert offloading is not None
        assert offloading.mode.transfers.makes_native_moves
        schedule = offloading.mode.iterations.schedule
    return seconds, [now - before for before, now in pairwise(waited)], schedule


def check(make: Callable[[], tuple[Any, Callable[[Any], Any]]], share: str) -> None:
    seconds, waited, schedule = step_seconds(make, share)
    predicted = schedule.recorded.step.duration + schedule.swap.stall_seconds
    assert schedule.swap.stall_seconds > 0
    assert abs(seconds[-1] / predicted - 1) < 0.01, (seconds, predicted)
    assert abs(waited[-1] / schedule.swap.stall_seconds - 1) < 0.01, (waited, schedule.swap.stall_seconds)


@alone
def test_step_of_alike_layers_takes_the_predicted_time() -> None:
    check(of_layers, "70%")


@alone
def test_step_of_convolutions_takes_the_predicted_time() -> None:
    check(of_images, "70%")


if __name__ == "__main__":
    run_each_alone(globals())
