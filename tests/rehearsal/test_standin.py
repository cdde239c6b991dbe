"""The stand-in for CUDA as a library: runtime, pages of the driver, and NVML, in a process per test.

The driver's plain functions are tested with the pool, in tests/mempool/test_cuda_*.py.
"""

from __future__ import annotations

import ctypes
import mmap

from standin_calls import Cuda, child, on_standin

MIB = 1 << 20
TO_DEVICE, TO_HOST = 1, 2
OUT_OF_MEMORY, INVALID_VALUE, INVALID_DEVICE, NOT_READY = 2, 1, 101, 600
#: Bytes of a cudaDeviceProp, and the places of its name, memory, major, minor and number of processors.
LAYOUTS = {12: (1032, 0, 288, 360, 364, 388), 13: (1008, 0, 288, 360, 364, 384)}


# --- memory


@on_standin(f"memory={64 * MIB},context={16 * MIB}")
def test_memory_ends_at_the_capacity_of_the_card_with_the_context_counted(cuda: Cuda) -> None:
    assert cuda.memory() == (48 * MIB, 64 * MIB)
    large, small = cuda.get("cudaMalloc", 47 * MIB), cuda.get("cudaMalloc", MIB)
    assert cuda.memory() == (0, 64 * MIB)
    assert cuda.code("cudaMalloc", ctypes.byref(ctypes.c_uint64()), 1) == OUT_OF_MEMORY
    assert [cuda.code("cudaGetLastError") for _ in range(2)] == [OUT_OF_MEMORY, 0]
    cuda.do("cudaFree", large)
    assert cuda.memory()[0] == 47 * MIB
    assert cuda.get("cudaMalloc", 0) == 0
    for address in (0, small):
        cuda.do("cudaFree", address)
    assert cuda.memory()[0] == 48 * MIB
    assert cuda.faults() == []
    assert cuda.code("cudaFree", large) == INVALID_VALUE
    assert cuda.faults() == ["memory is freed that is not allocated"]


@on_standin(f"devices=3,memory={64 * MIB},context={MIB}")
def test_each_device_has_its_own_memory_and_a_context_from_its_first_use(cuda: Cuda) -> None:
    cuda.do("cudaSetDevice", 2)
    block = cuda.get("cudaMalloc", 8 * MIB)
    assert [cuda.library.fake_live_bytes(device) for device in range(3)] == [0, 0, 9 * MIB]
    cuda.do("cudaSetDevice", 0)
    assert cuda.memory()[0] == 63 * MIB
    cuda.do("cudaFree", block)
    assert [cuda.library.fake_live_bytes(device) for device in range(3)] == [MIB, 0, MIB]
    assert cuda.code("cudaSetDevice", 3) == INVALID_DEVICE
    assert cuda.get("cudaGetDevice", kind=ctypes.c_int) == 0


@on_standin(f"memory={64 * MIB},context={MIB}")
def test_pool_of_a_device_holds_all_its_memory_but_the_context(cuda: Cuda) -> None:
    pool = cuda.get("cudaDeviceGetDefaultMemPool", 0)
    held = []
    for block in [cuda.get("cudaMallocAsync", 8 * MIB, 0) for _ in range(2)]:
        held.append([cuda.get("cudaMemPoolGetAttribute", pool, which, first=False) for which in (5, 6)])
        cuda.do("cudaFreeAsync", block, 0)
    assert held == [[16 * MIB, 16 * MIB], [8 * MIB, 16 * MIB]]


@on_standin()
def test_small_copies_read_back_and_computed_values_are_zero(cuda: Cuda) -> None:
    block, data = cuda.get("cudaMalloc", MIB), bytes(range(1, 251)) * 300
    assert cuda.read(block, 8) == bytes(8)
    cuda.do("cudaMemcpy", block, data, 65536, TO_DEVICE)
    assert cuda.read(block, 65536) == data[:65536]
    assert cuda.read(block, 100) == bytes(100)  # a part may be of a buffer that kernels write
    cuda.do("cudaMemcpy", block + 65536, block, 65536, 3)
    assert cuda.read(block + 65536, 65536) == data[:65536]
    cuda.do("cudaMemsetAsync", block, 7, 1, 0)
    assert cuda.read(block, 65536) == bytes(65536)
    cuda.do("cudaMemcpy", block, data, 65537, TO_DEVICE)
    assert cuda.read(block, 65537) == bytes(65537)


@on_standin()
def test_promised_values_read_back_until_the_range_is_written(cuda: Cuda) -> None:
    block = cuda.get("cudaMalloc", MIB)
    size, one = ctypes.c_size_t(MIB), ctypes.c_ubyte(1)
    cuda.library.mempool_standin_promise(ctypes.c_void_p(block), size, one)
    assert cuda.read(block + 5, 70_000) == b"\1" * 70_000
    cuda.do("cudaMemset", block + 100, 0, 1)
    assert cuda.read(block, 4) == bytes(4)
    cuda.library.mempool_standin_promise(ctypes.c_void_p(block), size, one)
    cuda.library.mempool_standin_forget(ctypes.c_void_p(block), size)
    assert cuda.read(block, 4) == bytes(4)


@on_standin("values=copied")
def test_copied_values_come_from_fills_and_from_copies_of_any_size(cuda: Cuda) -> None:
    block, data = cuda.get("cudaMalloc", 2 * MIB), bytes(range(256)) * 4096
    cuda.do("cudaMemcpy", block, data, MIB, TO_DEVICE)
    cuda.do("cudaMemset", block + MIB, 7, MIB)
    assert cuda.read(block, 2 * MIB) == data + b"\x07" * MIB


@on_standin()
def test_large_copies_to_the_host_are_zero_without_resident_pages(cuda: Cuda) -> None:
    """Only the first and the last page, which the copy shares with other data, are written."""
    size, edge, page = 16 * MIB, 100, mmap.PAGESIZE
    host = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    host.write(b"\xff" * size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    block = cuda.get("cudaMalloc", size)
    cuda.do("cudaMemcpy", address + edge, block, size - 2 * edge, TO_HOST)
    resident = ctypes.create_string_buffer(size // page)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), resident) == 0
    assert [i for i, flag in enumerate(resident.raw) if flag & 1] == [0, size // page - 1]
    assert host[:] == b"\xff" * edge + bytes(size - 2 * edge) + b"\xff" * edge


@on_standin()
def test_large_copies_into_shared_host_memory_are_zero(cuda: Cuda) -> None:
    size = 4 * MIB
    host = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    host.write(b"\xff" * size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    cuda.do("cudaMemcpy", address, cuda.get("cudaMalloc", size), size, TO_HOST)
    assert host[:] == bytes(size)


@on_standin("queues=late,values=copied,arguments=/dev/null")
def test_late_copies_leave_pageable_memory_before_they_return(cuda: Cuda) -> None:
    source, destination = (ctypes.create_string_buffer(text, 8) for text in (b"first", b"none"))
    block, side = cuda.get("cudaMalloc", 8), cuda.get("cudaStreamCreateWithFlags", 1)
    cuda.do("cudaMemcpyAsync", block, source, 8, TO_DEVICE, side)
    source.value = b"later"
    cuda.do("cudaMemcpyAsync", destination, block, 8, TO_HOST, side)
    assert destination.value == b"first"
    locked = cuda.get("cudaHostAlloc", 8, 0)
    cuda.do("cudaMemcpyAsync", locked, block, 8, TO_HOST, side)
    assert ctypes.string_at(locked) == b""
    cuda.do("cudaStreamSynchronize", side)
    assert ctypes.string_at(locked) == b"first"


@on_standin(f"memory={32 * MIB}")
def test_pages_of_expandable_segments_count_while_a_handle_or_mapping_holds_them(cuda: Cuda) -> None:
    """As PyTorch does: reserve addresses, make a handle of several pages, map it, let the handle go."""
    prop = (ctypes.c_int * 8)(1, 0, 1, 0)
    access = (ctypes.c_int * 3)(1, 0, 3)
    cuda.do("cuInit", 0)
    assert cuda.get("cuMemGetAllocationGranularity", prop, 0) == 2 * MIB
    space = cuda.get("cuMemAddressReserve", 64 * MIB, 0, 0, 0)
    for begin in (0, 20 * MIB):
        handle = cuda.get("cuMemCreate", 12 * MIB, prop, 0)
        cuda.do("cuMemMap", space + begin, 12 * MIB, 0, handle, 0)
        cuda.do("cuMemSetAccess", space + begin, 12 * MIB, access, 1)
        cuda.do("cuMemRelease", handle)
    assert cuda.memory()[0] == 8 * MIB
    assert cuda.code("cuMemCreate", ctypes.byref(ctypes.c_uint64()), 10 * MIB, prop, 0) == OUT_OF_MEMORY
    cuda.do("cudaMemsetAsync", space + 20 * MIB, 0, 12 * MIB, 0)
    assert cuda.faults() == []
    cuda.do("cudaMemsetAsync", space + 12 * MIB, 0, MIB, 0)
    assert cuda.faults()[0] == "work is queued on memory that is not allocated"
    cuda.do("cuMemUnmap", space, 12 * MIB)
    assert cuda.memory()[0] == 20 * MIB
    cuda.do("cuMemUnmap", space + 20 * MIB, 12 * MIB)
    cuda.do("cuMemAddressFree", space, 64 * MIB)
    assert cuda.memory()[0] == 32 * MIB
    assert (cuda.library.fake_live_memories(), cuda.library.fake_live_allocations()) == (0, 0)


@on_standin("queues=late,arguments=/dev/null")
def test_collectives_use_the_whole_of_their_buffers(cuda: Cuda) -> None:
    bytes_, float32, ranks = MIB, 7, 2
    communicators = (ctypes.c_uint64 * ranks)()
    cuda.do("ncclCommInitAll", communicators, ranks, 0)
    side = cuda.get("cudaStreamCreateWithFlags", 1)  # the default stream does not wait for it
    block = cuda.get("cudaMalloc", 3 * bytes_)
    own, gathered = block, block + bytes_
    cuda.do("ncclAllGather", own, gathered, bytes_ // 4, float32, communicators[0], side)
    assert cuda.faults() == []
    cuda.do("cudaMemsetAsync", gathered + bytes_, 0, 4, 0)  # the part of the other rank
    order = "memory is used by work of two streams that nothing orders: a collective and a copy or a fill"
    assert cuda.faults() == [order]
    cuda.do("ncclAllReduce", gathered, gathered, 2 * bytes_ // 4, float32, 0, communicators[0], side)
    cuda.do("ncclAllReduce", gathered, gathered, 2 * bytes_ // 4 + 1, float32, 0, communicators[0], side)
    assert cuda.faults()[-1] == "work is queued on memory that is not allocated"


# --- streams, events and graphs


@on_standin()
def test_events_are_done_at_once_and_time_passes_between_any_two(cuda: Cuda) -> None:
    stream = cuda.get("cudaStreamCreateWithFlags", 1)
    begin, end, unused = (cuda.get("cudaEventCreate") for _ in range(3))
    for event in (begin, end):
        cuda.do("cudaEventRecord", event, stream)
        cuda.do("cudaEventQuery", event)
    assert cuda.get("cudaEventElapsedTime", begin, end, kind=ctypes.c_float) > 0
    assert cuda.get("cudaEventElapsedTime", begin, begin, kind=ctypes.c_float) > 0
    assert cuda.code("cudaEventElapsedTime", ctypes.byref(ctypes.c_float()), begin, unused) == 400
    cuda.do("cudaStreamQuery", stream)
    for event in (begin, end, unused):
        cuda.do("cudaEventDestroy", event)
    cuda.do("cudaStreamDestroy", stream)
    assert (cuda.library.fake_live_events(), cuda.library.fake_live_streams()) == (0, 0)


@on_standin("queues=late")
def test_late_work_runs_when_somebody_waits_with_all_that_comes_before(cuda: Cuda) -> None:
    first, second = (cuda.get("cudaStreamCreateWithFlags", 1) for _ in range(2))
    event, block, order = cuda.get("cudaEventCreate"), cuda.get("cudaMalloc", 512), []
    cuda.do("cudaMemsetAsync", block, 0, 512, first)
    cuda.do("cudaEventRecord", event, first)
    cuda.do("cudaStreamWaitEvent", second, event, 0)
    assert [cuda.code("cudaStreamQuery", stream) for stream in (first, second)] == [NOT_READY] * 2
    assert cuda.code("cudaEventQuery", event) == NOT_READY
    assert cuda.code("cudaGetLastError") == 0
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda data: order.append(cuda.code("cudaEventQuery", event))
    )
    cuda.do("cudaLaunchHostFunc", second, function, 0)
    assert order == [0]
    cuda.do("cudaStreamQuery", first)


@on_standin("queues=late")
def test_memory_that_queued_work_uses_is_a_fault_to_free_by_the_driver_alone(cuda: Cuda) -> None:
    """The runtime's cudaFree waits for the device first, as the real function does."""
    stream = cuda.get("cudaStreamCreateWithFlags", 1)
    for function in ("cudaFree", "cuMemFree_v2"):
        assert cuda.faults() == []
        block = cuda.get("cudaMalloc", 512)
        cuda.do("cudaMemsetAsync", block, 0, 512, stream)
        cuda.do(function, block)
    assert cuda.faults() == ["memory is freed that queued work uses"]


@on_standin("queues=late,arguments=/dev/null")
def test_streams_that_share_a_divided_block_conflict_in_the_same_bytes_alone(cuda: Cuda) -> None:
    first, second = (cuda.get("cudaStreamCreateWithFlags", 1) for _ in range(2))
    event, block = cuda.get("cudaEventCreate"), cuda.get("cudaMalloc", 1024)
    cuda.do("cudaMemsetAsync", block, 0, 1024, first)
    cuda.do("cudaEventRecord", event, first)
    cuda.do("cudaStreamWaitEvent", second, event, 0)
    cuda.do("cudaMemsetAsync", block, 0, 512, second)
    cuda.do("cudaMemsetAsync", block + 512, 0, 512, first)
    assert cuda.faults() == []
    cuda.do("cudaMemsetAsync", block, 0, 512, first)
    assert len(cuda.faults()) == 1


@on_standin("queues=late,arguments=/dev/null")
def test_small_use_leaves_a_larger_earlier_use_in_conflict_with_other_streams(cuda: Cuda) -> None:
    first, second = (cuda.get("cudaStreamCreateWithFlags", 1) for _ in range(2))
    block = cuda.get("cudaMalloc", 1024)
    cuda.do("cudaMemsetAsync", block, 0, 1024, first)
    cuda.do("cudaMemsetAsync", block, 0, 512, first)
    cuda.do("cudaMemsetAsync", block + 512, 0, 512, second)
    assert len(cuda.faults()) == 1


@on_standin("values=copied")
def test_graphs_hold_captured_work_until_they_are_launched(cuda: Cuda) -> None:
    stream, block = cuda.get("cudaStreamCreateWithFlags", 1), cuda.get("cudaMalloc", 64)
    cuda.do("cudaStreamBeginCapture", stream, 1)
    assert cuda.get("cudaStreamIsCapturing", stream, kind=ctypes.c_int, first=False) == 1
    for i in range(3):
        cuda.do("cudaMemsetAsync", block + 8 * i, i + 1, 8, stream)
    graph = cuda.get("cudaStreamEndCapture", stream, first=False)
    assert cuda.get("cudaStreamIsCapturing", stream, kind=ctypes.c_int, first=False) == 0
    assert cuda.get("cudaGraphGetNodes", graph, None, first=False) == 3
    executable = cuda.get("cudaGraphInstantiate", graph, 0)
    cuda.do("cudaGraphDestroy", graph)
    assert cuda.read(block, 24) == bytes(24)
    cuda.do("cudaGraphLaunch", executable, stream)
    assert cuda.read(block, 24) == b"\1" * 8 + b"\2" * 8 + b"\3" * 8
    cuda.do("cudaGraphExecDestroy", executable)
    assert cuda.code("cudaGraphLaunch", executable, stream) == INVALID_VALUE
    cuda.do("cudaFree", block)
    assert cuda.faults() == []


@on_standin()
def test_graph_whose_memory_was_freed_is_a_fault_to_launch(cuda: Cuda) -> None:
    """PyTorch frees the memory before it destroys the graph."""
    stream, block = cuda.get("cudaStreamCreateWithFlags", 1), cuda.get("cudaMalloc", 64)
    cuda.do("cudaStreamBeginCapture", stream, 1)
    cuda.do("cudaMemsetAsync", block, 0, 64, stream)
    graph = cuda.get("cudaStreamEndCapture", stream, first=False)
    executable = cuda.get("cudaGraphInstantiate", graph, 0)
    cuda.do("cudaFree", block)
    assert cuda.faults() == []
    cuda.do("cudaGraphLaunch", executable, stream)
    assert cuda.faults()[0] == "a graph is launched whose memory was freed"


# --- other libraries


# --- devices


@on_standin(f"name=NVIDIA L4,memory={23034 * MIB},capability=8.9,processors=58,devices=2")
def test_properties_have_the_layouts_of_cuda_12_and_13(cuda: Cuda) -> None:
    for symbol, version in (("cudaGetDeviceProperties_v2", 12), ("cudaGetDeviceProperties", 13)):
        size, name, memory, major, minor, processors = LAYOUTS[version]
        into = ctypes.create_string_buffer(b"\xff" * (size + 8), size + 8)
        cuda.do(symbol, into, 1)
        numbers = [int.from_bytes(into[at : at + 4], "little") for at in (major, minor, processors)]
        assert numbers == [8, 9, 58]
        assert into[name : name + 10] == b"NVIDIA L4\0"
        assert int.from_bytes(into[memory : memory + 8], "little") == 23034 * MIB
        assert into[size:] == b"\xff" * 8
        assert cuda.code(symbol, into, 2) == INVALID_DEVICE
    attributes = [cuda.get("cudaDeviceGetAttribute", which, 0, kind=ctypes.c_int) for which in (75, 76, 16)]
    assert attributes == [8, 9, 58]


@on_standin(f"name=NVIDIA L4,memory={64 * MIB},context={MIB},devices=2,driver=580.65")
def test_nvml_counts_devices_and_their_memory_in_use(cuda: Cuda) -> None:
    cuda.do("nvmlInit_v2")
    assert cuda.get("nvmlDeviceGetCount_v2", kind=ctypes.c_uint) == 2
    cuda.do("cudaSetDevice", 1)
    cuda.get("cudaMalloc", 8 * MIB)
    handles = [cuda.get("nvmlDeviceGetHandleByIndex_v2", index, first=False) for index in range(2)]
    info, found = (ctypes.c_ulonglong * 3)(), []
    for handle in handles:
        cuda.do("nvmlDeviceGetMemoryInfo", handle, info)
        found.append(list(info))
    assert found == [[64 * MIB, 64 * MIB, 0], [64 * MIB, 55 * MIB, 9 * MIB]]
    text = ctypes.create_string_buffer(96)
    cuda.do("nvmlDeviceGetName", handles[0], text, 96)
    assert text.value == b"NVIDIA L4"
    cuda.do("nvmlSystemGetDriverVersion", text, 96)
    assert text.value == b"580.65"
    cuda.do("nvmlDeviceGetUUID", handles[1], text, 96)
    assert cuda.get("nvmlDeviceGetHandleByUUID", text, first=False) == handles[1]
    assert cuda.code("nvmlDeviceGetHandleByIndex_v2", 2, ctypes.byref(ctypes.c_uint64())) == 2


def test_unknown_settings_end_the_process_with_their_name() -> None:
    from mempool.rehearsal.standin import LIBRARY

    bad = [
        "speed=3",
        "devices=two",
        "memory=-1",
        "memory=",
        "values=all",
        "queues=1",
        "capability=9.x",
        "late",
    ]
    for setting in bad:
        done = child(f"devices=1,{setting}", "-c", f"import ctypes; ctypes.CDLL({str(LIBRARY)!r})")
        line = f"mempool: MEMPOOL_STANDIN has no setting {setting}\n"
        assert (done.returncode, done.stderr) == (2, line)
