"""The command ``nvidia-smi`` of a rehearsal: its answers, however a program calls it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mempool.hardware.gpu_memory import card
from mempool.rehearsal import Machine, nvidia_smi

USUAL = "--query-gpu=name,memory.total,memory.used,driver_version"
MEMORY = card("RTX 4090").memory_bytes >> 20
ROW = f"NVIDIA RTX 4090, {MEMORY}, 0, {nvidia_smi.DRIVER}\n"


@pytest.fixture(autouse=True)
def _on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(card("RTX 4090"), devices=2).devices_shown | {"cuda": "13.0"}
    nvidia_smi.write_command(tmp_path, machine)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def call(command: str) -> str:
    with os.popen(command) as output:
        return output.read()


def test_command_is_found_through_shells_and_directly() -> None:
    words = ["nvidia-smi", USUAL, "--format=csv,noheader,nounits"]
    text = " ".join(words)
    assert subprocess.check_output(words, text=True) == 2 * ROW
    assert subprocess.check_output(["bash", "-c", text], text=True) == 2 * ROW
    assert call(text) == 2 * ROW


def test_query_has_a_header_units_and_chosen_devices() -> None:
    free = call("nvidia-smi --query-gpu=index,memory.free --format=csv -i 1")
    assert free == f"index, memory.free [MiB]\n1, {MEMORY} MiB\n"
    assert (
        call("nvidia-smi --query-gpu=gpu_name --format=csv,noheader --id=GPU-stand-in-0")
        == "NVIDIA RTX 4090\n"
    )
    assert call("nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader") == ""


def test_list_and_overview_show_each_device() -> None:
    assert call("nvidia-smi -L").splitlines()[1] == "GPU 1: NVIDIA RTX 4090 (UUID: GPU-stand-in-1)"
    overview = call("nvidia-smi")
    assert overview.count(f"0MiB / {MEMORY}MiB") == 2
    assert "CUDA Version: 13.0" in overview


@pytest.mark.parametrize(
    "arguments", ["topo -m", "-q -x", "--query-gpu=fan.speed --format=csv", "--query-gpu=name"]
)
def test_other_arguments_are_refused_in_a_line(arguments: str) -> None:
    done = subprocess.run(["nvidia-smi", *arguments.split()], check=False, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("nvidia-smi: this is a rehearsal without a GPU, and ")
    assert done.stderr.count("\n") == 1
