"""Runs programs on the stand-in, one process each, and collects the outcomes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mempool.hardware.gpu_memory import KERNEL_BYTES, context_bytes
from mempool.rehearsal import child, compilation, kept_files, nvidia_smi, ranks, standin
from mempool.rehearsal.job import PYTORCH_SETTINGS, Job, Outcome
from mempool.rehearsal.kernel_arguments import write_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.hardware.gpu_memory import Card
    from mempool.rehearsal.standin import Installation

#: Memory of a device without a card, in bytes: more than any program requests.
UNLIMITED = 1 << 40
_STARTUP = Path(__file__).parent / "startup"


@dataclass(frozen=True)
class Machine:
    """Simulated devices of a rehearsal.

    Attributes:
        card: the kind of device; None for an H100 with more memory than any program requests.
        devices: number of devices.
        values: "zero" or "random", the values that a program reads from a device.
        own_capability: compute capability without a card; None for an H100's.
    """

    card: Card | None = None
    devices: int = 1
    values: str = "zero"
    own_capability: tuple[int, int] | None = None

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the devices."""
        return (self.own_capability or (9, 0)) if self.card is None else self.card.capability

    @property
    def devices_shown(self) -> dict[str, Any]:
        """Number, name, memory and compute capability of the devices, and the driver's version."""
        return {
            "devices": self.devices,
            "name": "H100" if self.card is None else self.card.name,
            "memory": UNLIMITED if self.card is None else self.card.memory_bytes,
            "capability": "{}.{}".format(*self.capability),
            "driver": nvidia_smi.DRIVER,
        }

    def settings(self, installation: Installation) -> str:
        """Return the settings of the stand-in."""
        major, _, minor = installation.cuda.partition(".")
        values = self.devices_shown | {
            "context": context_bytes(self.capability) + KERNEL_BYTES,
            "processors": 132 if self.card is None else self.card.processors,
            "runtime": 1000 * int(major or 13) + 10 * int(minor or 0),
            "values": self.values,
        }
        if installation.cudnn is not None:
            values["cudnn"] = installation.cudnn
        return ",".join(f"{key}={value}" for key, value in values.items())


class StandInRunner:
    """The libraries of the stand-in for the installed PyTorch, in a folder that lives as long as the runner.

    Attributes:
        installation: the installed PyTorch.
        folder: a temporary folder; `run` makes one in it for each run.
    """

    def __init__(self, folder: Path) -> None:
        """Write the libraries.

        Raises:
            UsageError: no CUDA build of PyTorch is installed, or the machine is of an unknown kind.
        """
        self.installation = standin.find_installation()
        self.folder = folder
        self._libraries = folder / "libraries"
        self._libraries.mkdir()
        standin.write_libraries(self._libraries, self.installation)
        self._runs, self._began_ns = 0, time.time_ns()
        self._arguments: Path | None = None  # table of the kernels' arguments

    def new_folder(self) -> Path:
        """Return a new folder for one run."""
        self._runs += 1
        folder = self.folder / f"run-{self._runs}"
        folder.mkdir()
        return folder

    def run(self, job: Job, machine: Machine, *, output: int = 2) -> Outcome:
        """Run a program to its end, or to the end of its steps.

        Args:
            job: the program; ``job.folder`` gets ``history.pickle``, PyTorch's own snapshot, if asked for.
            machine: the devices.
            output: file descriptor for what the program prints; by default standard error, whatever
                ``sys.stderr`` is.

        Returns:
            The outcome. A program that dies by a signal has the outcome "signal".
        """
        flags = [] if not sys.flags.isolated else ["-s"]
        process = subprocess.Popen(  # noqa: S603 - the user's own program
            [sys.executable, *flags, *job.program],
            env=self._environment(job, machine),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C, or a signal that ends this process
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            process.kill()
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # child processes that would outlive the program
            kept = kept_files.finish(Path(job.folder))
        outcome = _outcome(job, code)
        outcome.processes = [Outcome.read(path) for path in sorted(Path(job.folder).glob("process-*.json"))]
        written = (file for each in outcome.processes for file in each.redirected)
        outcome.redirected = list(dict.fromkeys((*outcome.redirected, *written, *kept.written)))
        if kept.not_removed:
            more = f" and {len(kept.not_removed) - 3} more" * (len(kept.not_removed) > 3)
            outcome.notes.append(f"not removed: {', '.join(kept.not_removed[:3])}{more}")
        if kept.left:
            folders = ", ".join(map(os.path.relpath, kept.left))
            outcome.notes.append(f"new folders stay, as libraries or others wrote files there: {folders}")
        return outcome

    def _argument_table(self, machine: Machine) -> Path:
        if self._arguments is None:
            self._arguments = self.folder / "arguments.txt"
            write_table(self._arguments, self.installation.folder / "lib", machine.capability)
        return self._arguments

    def _environment(self, job: Job, machine: Machine) -> dict[str, str]:
        before = os.environ.get("PYTHONPATH")
        path = str(_STARTUP) if before is None else os.pathsep.join((str(_STARTUP), before))
        settings = machine.settings(self.installation)
        if job.check_streams:
            settings += f",arguments={self._argument_table(machine)}"
        environment = os.environ | {
            "PYTHONPATH": path,
            "TORCH_CUSTOM_PYTHONPATH": path,  # of processes that compile
            standin.SETTINGS: settings,
            standin.FOLDER: str(self._libraries),
            child.VARIABLE: job.to_json(),
            child.PROCESS: "",
        }
        environment |= compilation.environment(self._libraries / standin.DRIVER)
        tools = Path(job.folder) / "tools"
        tools.mkdir()
        nvidia_smi.write_command(tools, machine.devices_shown | {"cuda": self.installation.cuda})
        environment["PATH"] = os.pathsep.join((str(tools), os.environ.get("PATH", os.defpath)))
        if setting := PYTORCH_SETTINGS.get(job.allocator):
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                environment[name] = ",".join(filter(None, (environment.get(name), setting)))
        if not job.allow_writes:
            environment |= kept_files.environment(Path(job.folder), self._began_ns)
        if job.ranks > 1:
            sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
            environment |= ranks.ENVIRONMENT | dict.fromkeys(sizes, str(job.ranks))
        return environment


def _outcome(job: Job, code: int) -> Outcome:
    """Return the outcome of a program that has ended by this exit code, or by a signal if it is negative."""
    path = Path(job.folder) / "outcome.json"
    if path.is_file():
        outcome = dataclasses.replace(Outcome.read(path), exit_code=code)
        if code and outcome.ended == "program":
            outcome.ended, outcome.message = "error", f"the program ended by exit code {code}"
        return outcome
    ended = "signal" if code < 0 else "error"
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Outcome(job.allocator, ended=ended, exit_code=code, message=f"the program ended by {how}")


@contextlib.contextmanager
def open_runner() -> Iterator[StandInRunner]:
    """Yield a runner, whose folder is removed afterwards.

    Raises:
        UsageError: see `StandInRunner`.
    """
    with tempfile.TemporaryDirectory(prefix="mempool-rehearsal-") as folder:
        yield StandInRunner(Path(folder))
