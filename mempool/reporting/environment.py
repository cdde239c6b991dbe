"""Facts about the machine and the installation, for bug reports."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import sys
import sysconfig
from importlib import metadata
from typing import Any

from mempool.cuda import DRIVER
from mempool.errors import UsageError
from mempool.settings import TESTED, untested

#: Packages whose versions may explain a behavior: frameworks, trainers, and dependencies of mempool.
PACKAGES = (
    "numpy", "torch", "cupy", "cupy-cuda12x", "cupy-cuda13x", "numba", "numba-cuda", "rmm-cu12", "rmm-cu13",
    "transformers", "lightning", "accelerate", "trl", "diffusers", "deepspeed", "bitsandbytes",
    "ortools", "pyarrow", "rich", "typer", "bokeh",
)  # fmt: skip
#: Prefixes of environment variables that change allocators or devices.
VARIABLES = ("MEMPOOL", "PYTORCH_", "CUDA_VISIBLE", "OMP_NUM_THREADS", "LD_PRELOAD", "CXX")


def environment(driver: str = DRIVER) -> dict[str, Any]:
    """Return versions, devices, driver, compiler and findings, ready for JSON; change nothing.

    Args:
        driver: library of the CUDA driver.
    """
    cuda = _cuda(driver)
    return {
        "mempool": _version("mempool"),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "compiler": _compiler(),
        "cuda": cuda,
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)},
        "findings": _findings(has_gpu=bool(cuda["devices"])),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> str | None:
    """Return the C++ compiler for the libraries that are compiled against PyTorch."""
    from mempool.torch import compiled_library

    try:
        return " ".join(compiled_library.compiler())
    except UsageError:
        return None


def _cuda(library: str) -> dict[str, Any]:
    """Return the version and the devices of the CUDA driver, or the reason why there are none."""
    said: dict[str, Any] = {"driver": None, "devices": [], "error": None}
    try:
        driver = ctypes.CDLL(library)
        version, count = ctypes.c_int(), ctypes.c_int()
        if code := driver.cuDriverGetVersion(ctypes.byref(version)) or driver.cuInit(0):
            return said | {"error": f"the driver answers with error {code}"}
        said["driver"] = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
        driver.cuDeviceGetCount(ctypes.byref(count))
        for device in range(count.value):
            name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
            driver.cuDeviceGetName(name, len(name), device)
            driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
            said["devices"].append({"name": name.value.decode(errors="replace"), "memory_bytes": total.value})
    except (OSError, AttributeError) as error:
        return said | {"error": str(error)}
    return said


def _findings(*, has_gpu: bool) -> list[dict[str, str]]:
    """Return conditions that prevent or limit the use of a pool, each with its remedy."""
    found = []
    for name in TESTED:
        if _version(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # the report must show a framework that fails to import
            problem = f"{name} cannot be imported: {type(error).__name__}: {error}"
            found.append(_finding("import", "stops", problem, f"install {name} anew"))
            continue
        if (problem := untested(name) or "") and name != "torch":
            found.append(_finding("version", "warns", problem, "should something fail, try a tested version"))
    if "torch" in sys.modules:
        from mempool.torch import diagnose

        said = [dict(one) for one in diagnose().to_dict()["findings"]]
        found += [one for one in said if has_gpu or one["name"] != "cpu_build"]
    return found


def _finding(name: str, severity: str, problem: str, remedy: str) -> dict[str, str]:
    return {"name": name, "severity": severity, "problem": problem, "remedy": remedy}
