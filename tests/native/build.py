"""Builds the native test programs from the packages' sources, without Python; objects are kept by content."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORE = HERE.parents[1] / "mempool" / "native"
TRACES = HERE.parents[1] / "traces" / "native"
SOLVERS = HERE.parents[1] / "solvers" / "native"
SANITIZERS = {
    "none": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


def compiler() -> str:
    """The C++ compiler: $CXX, or c++."""
    return os.environ.get("CXX", "c++")


#: Parts of the core that are no part of the simulated world: those on top of it, and for frameworks.
OUTSIDE_THE_WORLD = ("hook", "torch_", "checked", "c_api")


#: Of the solvers' headers, and of nothing else.
OF_KERNELS = ("packing",)


def flags(
    sanitizer: str, mutations: bool, *, world: bool = False, timed: bool = False, soon: bool = False
) -> list[str]:
    """Compiler flags of one kind of build; `soon`: what compiles soon and runs slowly."""
    plain = ["-O3", "-DNDEBUG"] if timed else ["-O2"]
    watched = ["-O0" if soon else "-O1", "-g", "-fno-omit-frame-pointer"]
    optimisation = plain if sanitizer == "none" else watched
    extra = ["-DMEMPOOL_MUTATIONS"] if mutations or world else []
    extra += ["-DMEMPOOL_WORLD", f"-I{HERE}"] if world else []
    common = ["-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror"]
    folders = [f"-I{folder}" for folder in (CORE, TRACES, SOLVERS)]
    return [*common, *folders, *optimisation, *SANITIZERS[sanitizer], *extra]


@functools.cache
def has_sanitizer(sanitizer: str) -> bool:
    """Whether the compiler links, and the machine runs, a program with it."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "a.cpp"), Path(folder, "a")
        source.write_text("int main() { return 0; }\n")
        build = [compiler(), *SANITIZERS[sanitizer], str(source), "-o", str(program)]
        done = subprocess.run(build, capture_output=True, check=False)
        return (
            done.returncode == 0
            and subprocess.run([program], capture_output=True, check=False).returncode == 0
        )


def build(
    program: str, folder: Path, *, sanitizer: str = "none", mutations: bool = False, soon: bool = False
) -> Path:
    """Compile tests/native/PROGRAM.cpp with the core, or with the kernels of the solvers.

    "world" has the simulated world's threads in it; what ends in "_bench" is compiled as it is shipped.
    With `soon`, a build with a sanitizer is not optimised.

    Raises:
        RuntimeError: with the compiler's output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    world, kernels = program == "world", program in OF_KERNELS
    left_out = ("bind_", "cupy_", "module", "numpy_", *(OUTSIDE_THE_WORLD if world else ()))
    core = [p for p in sorted(CORE.glob("*.cpp")) if not p.name.startswith(left_out)]
    sources = [] if kernels else core
    sources += sorted((HERE / "world").glob("*.cpp")) if world else []
    folders = (SOLVERS,) if kernels else (CORE, TRACES, HERE, HERE / "world")
    headers = b"".join(p.read_bytes() for folder in folders for p in sorted(folder.glob("*.h*")))
    options = flags(sanitizer, mutations, world=world, timed=program.endswith("_bench"), soon=soon)

    def compiled(source: Path) -> Path:
        key = hashlib.sha256(
            repr((compiler(), options)).encode() + headers + source.read_bytes()
        ).hexdigest()[:20]
        target = folder / f"{source.stem}-{key}.o"
        if not target.exists():
            _run([compiler(), *options, "-c", str(source), "-o", f"{target}.part"])
            Path(f"{target}.part").replace(target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        objects = list(workers.map(compiled, [HERE / f"{program}.cpp", *sources]))
    key = hashlib.sha256("".join(map(str, objects)).encode()).hexdigest()[:20]
    target = folder / f"{program}-{key}"
    if not target.exists():
        _run([compiler(), *options, *map(str, objects), "-ldl", "-o", f"{target}.part"])
        Path(f"{target}.part").replace(target)
    return target


def build_library(name: str, folder: Path, *, sanitizer: str = "none", defines: tuple[str, ...] = ()) -> Path:
    """Compile tests/native/NAME/*.cpp, which need nothing of the core, to a shared library.

    Raises:
        RuntimeError: with the compiler's output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted((HERE / name).glob("*.cpp"))
    options = [*flags(sanitizer, mutations=False), "-shared", "-fPIC", *(f"-D{name}" for name in defines)]
    if sanitizer != "none":  # they guess the size of a library's thread-local memory, at times wildly wrong
        options.append("-ftls-model=initial-exec")
    texts = b"".join(p.read_bytes() for p in sorted((HERE / name).iterdir()))
    key = hashlib.sha256(repr((compiler(), options)).encode() + texts).hexdigest()[:20]
    target = folder / f"lib{name}-{key}.so"
    if not target.exists():
        _run([compiler(), *options, *map(str, sources), "-o", f"{target}.part"])
        Path(f"{target}.part").replace(target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    kind = sys.argv[2] if len(sys.argv) > 2 else "none"
    print(build(sys.argv[1], Path("build/native"), sanitizer=kind, mutations="mutations" in sys.argv))
