"""Random programs on streams, with graphs and threads, on the stand-in: memory is never used too early."""

from __future__ import annotations

import logging
import os
import warnings

import pytest
from processes import alone, run_each_alone

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import standin_torch
    import torch

    import mempool.torch

MIB = 1 << 20
#: Programs of each kind; a soak asks for more.
SEEDS = range(int(os.environ.get("MEMPOOL_STREAM_SEEDS", "2")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("memory", ["guest", "plain", "growing", "managed"])
@alone
def test_random_program_reads_its_own_bytes(memory: str, seed: str) -> None:
    options = {"backend": "guest"} if memory == "guest" else {"memory": memory}
    pool = mempool.torch.install(device="cuda", background=False, **options)
    standin_torch.Program(int(seed), pool).run(250)
    standin_torch.check_nothing_is_left(pool)


@pytest.mark.parametrize("seed", SEEDS)
@alone
def test_repeated_program_with_streams_reads_its_own_bytes(seed: str) -> None:
    """The same random program in each iteration, so that its tensors are planned."""
    pool = mempool.torch.install(device="cuda", background=False)
    program = standin_torch.Program(0, pool)
    program._steps = [
        step for step in program._steps if step.__name__ in ("_make", "_use", "_free", "_free_and_join")
    ]
    for _ in range(16):
        pool.step()
        program._random.seed(int(seed))
        program.run(60)
        pool.plan_now()
    assert pool.report().to_dict()["hits"] > 50
    del program
    standin_torch.check_nothing_is_left(pool)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("backend", ["guest", "pluggable"])
@alone
def test_threads_with_streams_and_graphs_read_their_own_bytes(backend: str, seed: str) -> None:
    if backend == "guest":
        # with them PyTorch's own allocator breaks a capture if another thread empties the cache
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    pool = mempool.torch.install(device="cuda", backend=backend, background=True)
    standin_torch.run_on_threads(int(seed), pool)
    standin_torch.check_nothing_is_left(pool)


@pytest.mark.parametrize("seed", SEEDS)
@alone
def test_interleaved_programs_that_share_the_default_stream_read_their_own_bytes(seed: str) -> None:
    pool = mempool.torch.install(device="cuda", backend="pluggable", background=False)
    standin_torch.run_interleaved(int(seed), pool)
    standin_torch.check_nothing_is_left(pool)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("limit", ["6MiB", "10MiB"])
@alone
def test_random_program_within_a_limit_reads_its_own_bytes(limit: str, seed: str) -> None:
    """Tensors leave and come back on other streams, at other addresses, but not those that a graph uses."""
    logging.getLogger("mempool").setLevel(logging.ERROR)  # so small a limit is exceeded
    warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # its capture needs an offloaded tensor
    memory = ("plain", "growing")[int(seed) % 2]
    pool = mempool.torch.install(
        device="cuda", limit=limit, host_limit="128MiB", memory=memory, background=False
    )
    program = standin_torch.Program(int(seed), pool, streams=1 + int(seed) % 3)
    program.run(200)
    assert pool.report().to_dict()["swapping"]["out_bytes"] > MIB
    assert program.replays > 0
    del program
    standin_torch.check_nothing_is_left(pool)


@pytest.mark.parametrize("seed", SEEDS)
@alone
def test_random_program_reads_its_own_bytes_if_cuda_refuses_to_lock_memory(seed: str) -> None:
    """One warning names the remedy; pageable memory takes the place of what is not locked."""
    logger, warned = logging.getLogger("mempool"), list[str]()
    logger.addHandler(handler := logging.Handler())
    logger.propagate = False
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # its capture needs an offloaded tensor
    standin_torch.driver().set_lockable(20 * MIB)  # of which the program itself locks 16
    pool = mempool.torch.install(device="cuda", limit="10MiB", host_limit="64MiB", background=False)
    program = standin_torch.Program(int(seed), pool)
    program.run(200)
    swapping = pool.report().to_dict()["swapping"]
    assert swapping["out_bytes"] > MIB
    assert swapping["host_full"] == 0
    assert 4 * MIB < swapping["host_bytes"] <= 64 * MIB
    assert sum("page-locks no" in message for message in warned) == 1
    del program
    standin_torch.check_nothing_is_left(pool)


if __name__ == "__main__":
    run_each_alone(globals())
