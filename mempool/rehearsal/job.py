"""Requests and results of rehearsals, passed between processes as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

#: PyTorch's setting, or the kind of memory of a pool, by allocator of a rehearsal.
PYTORCH_SETTINGS = {
    "native": "",
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
}
POOLS = {"mempool": "growing", "mempool-plain": "plain"}
ALLOCATORS = (*PYTORCH_SETTINGS, *POOLS)


@dataclass(frozen=True)
class Job:
    """One run of a program under one allocator.

    Attributes:
        program: the command line after Python: a script or ``-m MODULE``, and the program's arguments.
        allocator: one of `ALLOCATORS`.
        steps: optimizer steps after which the program ends.
        seconds: seconds after which the program ends, or None.
        timeout: seconds without an optimizer step after which the program counts as hanging.
        limit_bytes: most bytes that PyTorch's allocator may hold on each device, or None.
        offload_limit: limit of offloading in bytes or as a share, for a pool or, if `compiled`, for compiled
            graphs; None without offloading.
        compiled: compile with this project's backend, within `offload_limit`.
        card: card of the modelled times for offloading; None for an H100.
        ranks: number of simulated training processes, of which the program is the first.
        allow_writes: let the program change files (`mempool.rehearsal.kept_files`).
        select: "none" or "all", the elements that unknown masks select.
        check_streams: detect memory that two unordered streams use.
        history: record every allocation with its stack.
        plan: path of a plan for a pool of this project, or None.
        remember: keep the pool's plan for the next run (`mempool.planning.remembered_plans`).
        folder: folder for the result, and for redirected files.
        child: true for a child process of the program, which ends by itself or after its steps, and has a
            result if it used a device.
    """

    program: tuple[str, ...]
    folder: str
    allocator: str = "native"
    steps: int = 4
    seconds: float | None = None
    timeout: float = 600.0
    limit_bytes: int | None = None
    offload_limit: int | str | None = None
    compiled: bool = False
    card: str | None = None
    ranks: int = 1
    allow_writes: bool = False
    select: str = "none"
    check_streams: bool = False
    history: bool = True
    plan: str | None = None
    remember: bool = False
    child: bool = False

    def of_child(self) -> Self:
        """Return the job of the program's child processes."""
        return dataclasses.replace(self, history=False, remember=False, offload_limit=None, child=True)

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the job of a text."""
        values = json.loads(text)
        return cls(**values | {"program": tuple(values["program"])})


@dataclass
class Outcome:
    """The memory that a program held on its fullest device, and how the program ended.

    Attributes:
        allocator: one of `ALLOCATORS`.
        steps: optimizer steps that the program finished.
        ended: "steps" or "seconds" for an end by the rehearsal; "program" for an end by the program itself;
            "out of memory", "error", "hang" or "signal".
        exit_code: exit code of the process.
        device: index of the device of the numbers.
        devices_used: number of devices that held memory.
        peak_allocated_bytes: largest size of all live tensors, as PyTorch reports.
        peak_reserved_bytes: largest size of PyTorch's segments, or of the pool.
        allocated_bytes, reserved_bytes: allocated and reserved bytes at the end of the last step.
        segments: number of segments at the end.
        device_bytes: largest memory in use on the device, with the context and memory that other libraries
            take from the driver.
        out_of_memory_in_step: number of the step, from 1, that ran out of memory, or None.
        message: the error or the reason for the end, in one line; "" if all went well.
        line: source line at which the program ended, as ``file:line``, or "".
        value_reads: number of value reads from the device, by source line of the program.
        shape_reads: number of results whose shape depended on such values, by source line.
        stream_faults: pairs of kernels that used the same memory on two unordered streams.
        redirected: files that were redirected to the rehearsal's folder.
        notes: further sentences for the user.
        seconds: host seconds of the run.
        host_bytes: largest resident host memory of the process.
        offloading: the cost of the job's `offload_limit`, or None: see `OffloadSession.cost`. A compiled
            program has no times if the limit is refused.
        compiles: whether the program calls torch.compile.
        step_peaks: peak of allocated bytes up to the end of each step.
        name: name of a child process, such as "SpawnProcess-1", or of its script; "" for the program's own.
        pid: number of the process.
        processes: outcomes of the program's child processes that requested device memory.
    """

    allocator: str
    steps: int = 0
    ended: str = "error"
    exit_code: int = 0
    device: int = 0
    devices_used: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    segments: int = 0
    device_bytes: int = 0
    out_of_memory_in_step: int | None = None
    message: str = ""
    line: str = ""
    value_reads: dict[str, int] = field(default_factory=dict)
    shape_reads: dict[str, int] = field(default_factory=dict)
    stream_faults: list[str] = field(default_factory=list)
    redirected: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    host_bytes: int = 0
    offloading: dict[str, Any] | None = None
    compiles: bool = False
    step_peaks: list[int] = field(default_factory=list)
    name: str = ""
    pid: int = 0
    processes: list[Outcome] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Return true if the measured memory covers a whole run."""
        return self.ended in ("steps", "seconds", "program")

    @property
    def asked_device(self) -> bool:
        """Return true if the process requested device memory."""
        return self.peak_reserved_bytes > 0 or self.out_of_memory_in_step is not None

    @property
    def failed(self) -> bool:
        """Return true if the program ended by an error other than a lack of memory."""
        return not self.complete and self.ended != "out of memory"

    def write(self, path: Path) -> None:
        """Write the outcome to a file."""
        path.write_text(json.dumps(dataclasses.asdict(self)), "utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the outcome in a file."""
        values: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return cls(**values)
