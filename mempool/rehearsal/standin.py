"""The stand-in for CUDA's libraries: written for an installed PyTorch, and loaded before PyTorch.

The dynamic linker uses an already loaded library of the requested name instead of NVIDIA's file. So the
stand-in is a few small libraries with those names. ``libmempool_standin.so``, which is built with this
package, has the functions with a behavior. ``libmempool_generated.so``, written on each machine, has all
other functions that PyTorch imports, so that a new release of PyTorch needs no new code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mempool import _core
from mempool.errors import UsageError
from mempool.rehearsal.elf import read_exports, read_imports, read_needed, write_library

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = Path(_core.__file__).parent / "rehearsal" / "libmempool_standin.so"
#: Environment variables for the program and its child processes: settings, and the folder of libraries.
SETTINGS, FOLDER = "MEMPOOL_STANDIN", "MEMPOOL_STANDIN_LIBRARIES"
DRIVER = "driver"  #: subfolder with the driver under its own name, for linkers
_HANDLER = "mempool_standin_missing"
_GENERATED = "libmempool_generated.so"
#: Functions of CUDA's libraries.
_FUNCTION = re.compile(
    r"(__cuda|cu(da|blas|blasLt|dnn|solver|solverMg|sparse|sparseLt|fft|rand|pti|File)?[A-Z]"
    r"|nccl[A-Z]|pnccl[A-Z]|nvml|nvrtc|nvJitLink|nvshmem|nvtx)\w*$"
)
#: Prefixes of the names of libraries that the stand-in replaces.
_REPLACED = re.compile(
    r"lib(cuda|cudart|cublas|cublasLt|cudnn\w*|cusolver|cusolverMg|cusparse|cusparseLt|cufft|curand|cupti"
    r"|cufile|nccl|nvrtc|nvJitLink|nvshmem_host|nvToolsExt|nvidia-ml)\.so\b"
)
#: Functions with results in their arguments: if the stand-in lacks one, its calls must fail.
_ANSWERS = re.compile(r"Get|Create|Query|Find|[Bb]ufferSize|Size|Export|Import|Alloc|Open|Search|Select")
#: Prefix of the stand-in's faults about memory that two streams use.
_UNORDERED = "memory is used by work of two streams that nothing orders: "
_CAPABILITY = (75, 76)  #: attributes of a device: major and minor number of the compute capability
_OPENED = ("libcuda.so.1", "libnvidia-ml.so.1")  #: libraries that programs open by name


@dataclass(frozen=True)
class Installation:
    """An installed CUDA build of PyTorch.

    Attributes:
        folder: the package's folder.
        version: version of PyTorch, such as "2.11.0+cu130".
        cuda: version of CUDA that PyTorch was built with, such as "13.0".
        cudnn: version of the installed package of cuDNN, in cuDNN's format: 91900 for 9.19.0. None without a
            package.
    """

    folder: Path
    version: str
    cuda: str
    cudnn: int | None = None


def find_installation() -> Installation:
    """Return the PyTorch of this Python, without importing PyTorch.

    Raises:
        UsageError: no PyTorch is installed, or a build without CUDA.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UsageError("a rehearsal needs PyTorch: pip install 'mempool[torch]'")
    folder = Path(spec.origin).parent
    version, cuda = _versions(folder / "version.py")
    if not has_cuda_build():
        raise UsageError(
            f"PyTorch {version} at {folder} is a build without CUDA; a rehearsal runs a CUDA build,"
            " but needs no GPU: pip install torch gets one on Linux"
        )
    return Installation(folder, version, cuda, _cudnn_version(folder.parent, cuda))


def has_cuda_build() -> bool:
    """Return whether the PyTorch of this Python is a build with CUDA."""
    spec = importlib.util.find_spec("torch")
    return (
        spec is not None
        and spec.origin is not None
        and (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").is_file()
    )


def _versions(path: Path) -> tuple[str, str]:
    text = path.read_text("utf-8") if path.is_file() else ""
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda[^=]*= '([\d.]+)'", text, re.MULTILINE)
    return version[1] if version else "unknown", cuda[1] if cuda else ""


def _cudnn_version(packages: Path, cuda: str) -> int | None:
    """Return the version of NVIDIA's package of cuDNN for a version of CUDA, or None."""
    pattern = f"nvidia_cudnn_cu{cuda.partition('.')[0]}-*.dist-info"
    for path in packages.glob(pattern):
        if version := re.search(r"-(\d+)\.(\d+)\.(\d+)", path.name):
            major, minor, patch = map(int, version.groups())
            return 10_000 * major + 100 * minor + patch
    return None


def write_libraries(folder: Path, installation: Installation) -> None:
    """Write the libraries that replace NVIDIA's for an installed PyTorch to a folder.

    Raises:
        UsageError: the machine or PyTorch's libraries are not supported.
    """
    names, functions = set(_OPENED), set[str]()
    for library in sorted((installation.folder / "lib").glob("*.so*")):
        needed, imported = read_imports(library)
        names.update(filter(_REPLACED.match, needed))
        functions.update(filter(_FUNCTION.match, imported))
    for library in _nvidia_libraries(installation.folder.parent, names):
        functions.update(filter(_FUNCTION.match, read_exports(library)))
    _write_functions(folder / _GENERATED, functions - read_exports(LIBRARY))
    for name in sorted(names):
        # PyTorch loads NVIDIA's libraries by path if the process has a file named libcudart.so.
        file = folder / name.replace("lib", "standin-", 1)
        write_library(file, name, silent=[], missing=[], needed=[LIBRARY.name, _GENERATED], handler=_HANDLER)
    (folder / DRIVER).mkdir()
    (folder / DRIVER / "libcuda.so.1").symlink_to(folder / "standin-cuda.so.1")


def _write_functions(path: Path, functions: set[str]) -> None:
    missing = sorted(filter(_ANSWERS.search, functions))
    silent = sorted(functions.difference(missing))
    write_library(path, path.name, silent=silent, missing=missing, needed=[LIBRARY.name], handler=_HANDLER)


def _nvidia_libraries(packages: Path, names: set[str]) -> Iterator[Path]:
    """Yield NVIDIA's installed libraries, of which extensions may use further functions."""
    for library in sorted((packages / "nvidia").glob("*/lib/lib*.so*")):
        if library.name in names:
            yield library


def load(folder: Path) -> None:
    """Load the stand-in and the libraries in a folder into this process, before PyTorch is imported."""
    ctypes.CDLL(str(LIBRARY), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / _GENERATED), mode=ctypes.RTLD_GLOBAL)
    for library in sorted(folder.glob("standin-*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    _serve_extensions(folder)


def _serve_extensions(folder: Path) -> None:
    """Serve extensions that use functions of CUDA which PyTorch does not import."""
    library, loader = cast("Any", ctypes.CDLL), cast("Any", ExtensionFileLoader)
    load_library, make_module = library.__init__, loader.create_module
    made: list[Path] = []

    def serve(path: Any) -> None:
        if not isinstance(path, (str, os.PathLike)) or not os.path.isfile(path):  # noqa: PTH113
            return
        with contextlib.suppress(OSError, UsageError):
            if not any(map(_REPLACED.match, read_needed(Path(path)))):
                return
            wanted = filter(_FUNCTION.match, read_imports(Path(path))[1])
            process = ctypes.CDLL(None)
            if functions := {name for name in wanted if not hasattr(process, name)}:
                made.append(folder / f"libmempool_extension_{os.getpid()}_{len(made)}.so")
                _write_functions(made[-1], functions)
                ctypes.CDLL(str(made[-1]), mode=ctypes.RTLD_GLOBAL)

    @functools.wraps(load_library)
    def loading(itself: Any, name: Any, *args: Any, **options: Any) -> None:
        serve(name)
        load_library(itself, name, *args, **options)

    @functools.wraps(make_module)
    def making(itself: Any, spec: Any) -> Any:
        serve(spec.origin)
        return make_module(itself, spec)

    library.__init__, loader.create_module = loading, making


def stream_faults() -> list[str]:
    """Return the pairs of kernels that used the same memory on two unordered streams."""
    library, text = ctypes.CDLL(str(LIBRARY)), ctypes.create_string_buffer(1 << 12)
    found = []
    for index in range(library.fake_faults()):
        library.fake_fault(ctypes.c_size_t(index), text, ctypes.c_size_t(len(text)))
        fault, _, kernels = text.value.decode("utf-8", "replace").partition(_UNORDERED)
        if kernels and not fault:
            found.append(kernels)
    return found


def present_capability() -> tuple[int, int] | None:
    """Return the compute capability of this machine's first GPU; None without a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found = []
    for attribute in _CAPABILITY:
        value = ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0):
            return None
        found.append(value.value)
    return found[0], found[1]


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU."""
    return Path("/dev/nvidiactl").exists()
