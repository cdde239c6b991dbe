"""`mempool diagnose`: versions, devices and findings for a bug report."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any

import pytest
from answers import Cli
from fake_cuda import FakeCuda

from mempool.reporting import environment as module
from mempool.reporting.environment import environment


def test_answer_has_versions_and_settings(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPOOL_CACHE", "/somewhere")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    said = cli.answer("diagnose")
    assert said["mempool"] == metadata.version("mempool")
    assert said["python"].startswith(platform.python_version())
    assert said["packages"]["numpy"] == metadata.version("numpy")
    assert said["variables"]["MEMPOOL_CACHE"] == "/somewhere"
    assert "hidden" not in str(said)


def test_text_names_driver_and_findings(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TESTED", {"numpy": ((0, 1), (0, 2))})
    monkeypatch.setattr("mempool.settings.TESTED", {"numpy": ((0, 1), (0, 2))})
    text = cli.printed("diagnose")
    assert "CUDA driver" in text
    assert "mempool was tested with numpy 0.1 to 0.2" in text


def test_devices_come_from_the_driver(fake_library: Any, fake: FakeCuda) -> None:
    cuda = environment(str(fake_library))["cuda"]
    assert cuda["error"] is None
    assert cuda["driver"].startswith("CUDA 1")
    assert len(cuda["devices"]) == 2
    assert all(device["name"] and device["memory_bytes"] > 0 for device in cuda["devices"])


def test_driver_without_a_device_is_an_error_with_its_number(fake_library: Any, fake: FakeCuda) -> None:
    fake.fail("cuInit", 100)
    assert environment(str(fake_library))["cuda"]["error"] == "the driver answers with error 100"


def test_framework_that_does_not_import_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "broken.py").write_text("raise ImportError('no libbroken.so')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    monkeypatch.setattr(module, "TESTED", {"broken": ((1, 0), (1, 0))})
    monkeypatch.setattr(module, "_version", lambda _: "1.0")
    [finding, *_] = environment()["findings"]
    assert finding["severity"] == "stops"
    assert "no libbroken.so" in finding["problem"]
