"""Memory of a CUDA device, of every kind, on a driver without a GPU."""

from __future__ import annotations

import pytest
from fake_cuda import (
    OUT_OF_MEMORY,
    FakeCuda,
    calls,
)

from mempool import _core

MIB = 1 << 20


# --- memory


def test_memory_is_taken_from_the_device_and_returned(fake: FakeCuda) -> None:
    fake.set_capacity(4 * MIB)
    device = fake.device()
    memory = calls(fake, device)
    assert (device.alignment, device.page) == (512, 0)
    address = memory.reserve(3 * MIB)
    assert device.memory() == (MIB, 4 * MIB)
    assert memory.commit(address, 3 * MIB)
    memory.decommit(address, MIB)
    assert memory.resize(address, 3 * MIB, 4 * MIB) == 0
    assert fake.live_bytes() == 3 * MIB
    assert memory.reserve(2 * MIB) == 0
    assert memory.reserve(0) == 0
    assert device.errors == 0  # to be out of memory is none
    memory.release(address, 3 * MIB)
    assert device.memory() == (4 * MIB, 4 * MIB)


def test_devices_without_a_limit_of_their_own_answer_zeros() -> None:
    for device in (_core.HostDevice(), _core.SimulatedDevice()):
        assert device.memory() == (0, 0)
        assert not _core.DeviceCalls(device).capturing(0)
        assert _core.DeviceCalls(device).synchronize()


@pytest.mark.parametrize("given", [256, 512])
@pytest.mark.parametrize("alignment", [512, 4096, 2 * MIB])
def test_addresses_are_aligned_whatever_the_driver_returns(
    fake: FakeCuda, given: int, alignment: int
) -> None:
    fake.set_alignment(given)
    memory = calls(fake)
    addresses = [memory.reserve(10_000, alignment) for _ in range(4)]
    assert all(address != 0 and address % alignment == 0 for address in addresses)
    for address in addresses:
        memory.zero(address, 10_000)  # all of it is the device's
    assert memory.synchronize()
    for address in addresses:
        memory.release(address, 10_000)
    fake.set_capacity(20_000)
    memory.reserve(10_000)
    assert memory.reserve(10_000, 16_384) == 0  # no room for a larger alignment
    assert fake.live_allocations == 1


def test_address_moved_up_for_alignment_is_freed_correctly_when_reused(fake: FakeCuda) -> None:
    memory = calls(fake)
    seen: dict[int, set[int]] = {256: set(), 512: set()}
    for _ in range(50):
        for given in (256, 512):
            fake.set_alignment(given)
            address = memory.reserve(MIB)
            seen[given].add(address)
            memory.release(address, MIB)
    assert seen[256] & seen[512]  # or nothing has been tested
    assert fake.live_allocations == 0


def test_refused_driver_call_is_counted_and_named(fake: FakeCuda) -> None:
    device = fake.device()
    assert (device.errors, device.last_error) == (0, None)
    fake.fail("cuMemAlloc_v2")
    assert calls(fake, device).reserve(512) == 0
    assert device.errors == 1
    assert device.last_error == "cuMemAlloc_v2 (512 bytes): CUDA_ERROR_INVALID_VALUE (1): of the fake driver"
    fake.fail("cuMemGetInfo_v2")
    assert device.memory() == (0, 0)
    assert device.errors == 2


def test_unavailable_context_is_tried_again(fake: FakeCuda) -> None:
    device = fake.device()
    fake.fail("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY, times=1)
    assert calls(fake, device).reserve(512) == 0
    assert device.errors == 1
    assert calls(fake, device).reserve(512) != 0


def test_page_of_small_buffers_uses_no_possibly_destroyed_stream(fake: FakeCuda) -> None:
    """The trim waits for the stream; a later owner of the page cannot."""
    pool = _core.Pool(device=fake.device())
    client = _core.Client(pool, "test")
    gone, keeps, comes = fake.stream(), fake.stream(), fake.stream()
    kept, freed = client.allocate(100, keeps), client.allocate(100, gone)
    assert client.free(freed, gone)
    pool.trim()
    before = fake.calls("cuEventRecord"), fake.calls("cuStreamWaitEvent")
    assert client.allocate(100, comes) == freed
    assert (fake.calls("cuEventRecord"), fake.calls("cuStreamWaitEvent")) == before
    assert client.free(freed, comes)
    assert client.free(kept, keeps)
