"""Recording, plans and arena of the guest in front of PyTorch's own CUDA allocator.

Each test is a process of its own: the guest stays in front of PyTorch's allocator for good.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import alone, run_each_alone

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import torch
    from guest_programs import (
        MIB,
        allow,
        counts,
        install,
        iteration,
        native_allocations,
        tensor,
        train,
        values,
    )
    from standin_torch import driver


@alone
def test_marked_training_hits_after_the_plan_and_misses_are_native() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    pool = install(small_bytes=0)  # CUDA is in use
    pool.watch(optimizer)
    train_model(pool, model, optimizer, 12)
    before, native = counts(pool), native_allocations()
    train_model(pool, model, optimizer, 20)
    after = counts(pool)
    hits, misses = after["hits"] - before["hits"], after["misses"] - before["misses"]
    assert hits > 500
    assert hits / (hits + misses) >= 0.99
    assert native_allocations() - native == after["requests"] - before["requests"] - hits
    assert driver().faults == []


def train_model(pool: Any, model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(256, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        pool.plan_now()


@alone
def test_unmarked_training_hits_after_the_plan_and_misses_are_native() -> None:
    pool = install()
    for _ in range(40):
        iteration()
        pool.plan_now()
    before, native = counts(pool), native_allocations()
    for _ in range(40):
        iteration()
    after = counts(pool)
    hits, requests = after["hits"] - before["hits"], after["requests"] - before["requests"]
    assert hits / requests >= 0.99
    assert native_allocations() - native == requests - hits
    assert driver().faults == []


@alone
def test_saved_plan_replays_from_the_first_iteration_and_takes_the_arena_once(tmp_path: str) -> None:
    plan = Path(tmp_path) / "train.plan"
    pool = install()
    train(pool)
    pool.save(plan)
    pool.close()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    again, native = install(plan=plan), native_allocations()
    train(again, 3)
    assert (values(again)["misses"], values(again)["hit_rate"]) == (0, 1.0)
    assert native_allocations() - native == 1 + counts(again)["requests"] - values(again)["hits"]
    assert values(again)["hits"] > 80
    assert driver().faults == []


@alone
def test_cache_of_the_warm_up_is_released_when_the_arena_is_taken() -> None:
    pool = install()
    tensor(64 * MIB)
    assert torch.cuda.memory_reserved() >= 64 * MIB
    train(pool)
    assert values(pool)["hits"] > 0
    assert torch.cuda.memory_reserved() < 4 * MIB


@alone
def test_arena_is_released_by_empty_cache_and_taken_again() -> None:
    pool = install()
    train(pool)
    torch.cuda.empty_cache()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    hits = values(pool)["hits"]
    train(pool, 4)
    assert values(pool)["hits"] > hits


@pytest.mark.parametrize("recorded", ["True", "False"])
@alone
def test_memory_of_an_arena_released_for_a_larger_iteration_leaves_the_cache(recorded: str) -> None:
    """The largest buffers come last, and the smaller ones before them would split that memory."""
    pool = install()

    def layers(size: int) -> int:
        kept = [tensor(size) for _ in range(12)]
        free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        del kept
        return free

    for _ in range(8):
        pool.step()
        layers(30 * MIB)
        pool.plan_now()
    assert pool.client.pool.stats()["arena_bytes"] >= 360 * MIB
    pool.client.set_recording(recorded == "True")
    pool.step()
    assert layers(33 * MIB) < 36 * MIB
    assert pool.client.pool.stats()["arena_bytes"] == 0
    assert driver().faults == []


@alone
def test_iterations_smaller_than_a_known_iteration_use_the_idle_arena() -> None:
    pool = install()

    def layers(size: int, first: int = 0) -> int:
        pool.step()
        kept = [tensor((first or size) * MIB), *(tensor(size * MIB) for _ in range(11))]
        held = torch.cuda.memory_reserved()
        del kept
        return held

    def known(size: int) -> None:
        for _ in range(8):
            layers(size)
            pool.plan_now()

    known(30)
    arena = pool.client.pool.stats()["arena_bytes"]
    assert arena == 360 * MIB
    assert layers(20) < arena + 20 * MIB
    known(10)
    assert layers(20) < arena + 20 * MIB, "larger than the iteration before"
    assert layers(20, first=30) < arena + 10 * 20 * MIB, "from the ninth difference on"
    hits = values(pool)["hits"]
    layers(30)
    assert values(pool)["hits"] == hits + 12
    assert pool.client.pool.stats()["arena_bytes"] == arena
    assert driver().faults == []


def run(pool: Any, batches: list[int], gradients: str, size: int) -> int:
    """Train with activations of `batches` MiB; return the most bytes held.

    Args:
        pool: the pool, or None.
        batches: of each iteration, the size of an activation.
        gradients: ``"first"`` in an iteration, or in its ``"middle"``, those of the last one are freed.
        size: of a gradient.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    kept: list[torch.Tensor] = []
    for batch in batches:
        if pool is not None:
            pool.step()
        if gradients == "first":
            kept.clear()
        activations = [tensor(batch * MIB) for _ in range(6)]
        kept.clear()
        while activations:
            tensor(batch * MIB)
            activations.pop()
            kept.append(tensor(size * MIB))
        if pool is not None:
            pool.plan_now()
    kept.clear()
    return int(torch.cuda.max_memory_reserved())


@pytest.mark.parametrize(
    ("batches", "gradients", "size"),
    [
        (6 * "48 " + 4 * "72 ", "first", 4),  # an empty arena is released for a larger iteration
        (8 * "1 ", "middle", 24),  # the arena is taken once the gradients are gone
        (6 * "24 " + 5 * "48 ", "middle", 8),  # an arena to be replaced serves on while it drains
        (8 * "16 " + 8 * "64 ", "middle", 4),  # and is released as soon as it is empty
    ],
)
@alone
def test_changing_iterations_hold_hardly_more_than_with_native(
    batches: str, gradients: str, size: str
) -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True,large_segment_size_mb:12")
    sizes = list(map(int, batches.split()))
    native = run(None, sizes, gradients, int(size))
    pool = install()
    assert run(pool, sizes, gradients, int(size)) < native + 90 * MIB
    assert values(pool)["hits"] > 0
    assert driver().faults == []


@alone
def test_cache_is_released_again_once_the_last_iteration_without_arena_has_left_nothing() -> None:
    pool = install()
    run(pool, 9 * [48], "middle", 60)
    assert torch.cuda.memory_reserved() == pool.client.pool.stats()["arena_bytes"] > 0


@alone
def test_arena_is_taken_after_deleted_graphs_have_run() -> None:
    pool, side, source = install(), torch.cuda.Stream(), tensor(MIB)
    for _ in range(12):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            copied = source.clone()
        graph.replay()
        del graph, copied
        pool.step()
        made = [tensor(size * MIB) for size in (1, 2, 3)]
        del made
        pool.plan_now()
    assert values(pool)["hits"] > 0
    assert driver().faults == []


@pytest.mark.parametrize("expandable", ["True", "False"])
@alone
def test_arena_that_does_not_hold_every_plan_is_not_taken(expandable: str) -> None:
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
    pool = install()
    allow(80 * MIB)
    beside: list[torch.Tensor] = []
    hits = []
    for number in range(16):
        pool.step()
        kept = [tensor(8 * MIB)]  # while `beside` leaves no room for the larger plan
        beside.clear()
        kept += [tensor(8 * MIB) for _ in range(5 if number % 2 else 1)]
        kept.clear()
        with pool.dynamic():
            beside.append(tensor(40 * MIB))
        pool.plan_now()
        hits.append(values(pool)["hits"])
    assert (values(pool)["arena_bytes"], hits[8]) == (0, hits[-1])
    assert "no arena of 48 MiB for plan 2" in pool.explain()
    sizes = [segment["total_size"] for segment in torch.cuda.memory_snapshot()]
    assert 16 * MIB not in sizes, "the segment of the former arena"


@alone
def test_free_pages_of_expandable_segments_are_room_for_the_arena() -> None:
    pool = install()
    allow(80 * MIB)
    before = tensor(60 * MIB)
    behind = tensor(4 * MIB)
    del before
    for _ in range(12):
        pool.step()
        for _ in range(2):
            made = [tensor(8 * MIB) for _ in range(6)]
            del made
        pool.plan_now()
    assert values(pool)["arena_bytes"] == 48 * MIB
    assert behind.nbytes == 4 * MIB


if __name__ == "__main__":
    run_each_alone(globals())
