"""Bootstrap of ``mempool run`` inside the program, active from before its first line to after its last.

Until the program imports a framework, this file imports no framework and no other module of this project. The
bootstrap must not change the program's behavior, so no exception leaves this file.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType

VARIABLE = "MEMPOOL_RUN"
#: Adapter, with an ``install`` that takes options of a pool, by module of the framework.
ADAPTERS = {"numpy": "mempool.numpy", "torch": "mempool.torch", "cupy": "mempool.cupy"}
#: This project's packages, whose names are common words.
OURS = ("mempool", "solvers", "traces")
#: Signals that end a process by default.
DEADLY = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
#: File name of the import system's frames, which Python omits from tracebacks.
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - without another import
#: Folder of this project's packages, whatever the program's folder contains.
_PLACE = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))  # noqa: PTH120
_run: Run | None = None


def begin() -> None:
    """Read the options, restore the environment and the path, and wait for a framework."""
    global _run
    folder = os.path.join(_FOLDER, "startup")  # noqa: PTH118
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    text = os.environ.get(VARIABLE)
    if text is None:
        return
    options: dict[str, Any] = json.loads(text)
    if not options["children"]:
        del os.environ[VARIABLE]
        if options["pythonpath"] is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = options["pythonpath"]
    _run = Run(options)
    _run.begin()


class Run:
    """A process that runs under the pool.

    Attributes:
        options: the options from `mempool.cli.run.command`, passed in the environment.
        pools: the installed pools, by framework.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.pools: dict[str, Any] = {}
        self._pid = os.getpid()
        self._is_fork = False  # true in a child forked from a process with pools
        self._finishing = False
        self._killed_by = 0
        self._accesses: Any = None  # PyTorch's recording of accesses
        self._watches_forks = False
        self._monitor: Any = None
        self._not_the_programs = 0.0  # CPU seconds of our child processes, such as a compiler
        self._masks: dict[int, Any] = {}  # signal masks before a fork, by thread

    @property
    def is_child(self) -> bool:
        """Return true in child processes of the process that `mempool run` became."""
        return bool(os.getpid() != self.options["pid"])

    def begin(self) -> None:
        """Install the import hook, the signal handlers, the fork handlers and the exit handler."""
        sys.meta_path.insert(0, AfterImport(self.install))
        atexit.register(self.finish)  # registered first, so called last
        os.register_at_fork(
            before=self._hold_signals,
            after_in_parent=self._release_signals,
            after_in_child=self._after_fork_without_pools,
        )
        for number in DEADLY:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._on_signal)

    def install(self, framework: str) -> None:
        """Install a pool in a framework that has just been imported."""
        before = _seconds_of_children()
        try:
            self._install(framework)
        except Exception as error:
            _print_line(f"no pool for {framework}: {type(error).__name__}: {error}")
        self._not_the_programs += _seconds_of_children() - before

    def _install(self, framework: str) -> None:
        import importlib

        with ProjectFinder():
            for name in (*OURS, ADAPTERS[framework]):
                adapter = importlib.import_module(name)
            if not getattr(adapter, "is_there", lambda: True)():
                return  # a pool is useless; the program fails or continues unchanged
        record = self._path_of_process(self.options["record"])
        accesses = self.options["accesses"] and framework == "torch"
        pool = adapter.install(
            **getattr(adapter, "UNDER_RUN", {}),
            **({"share": self._on_the_gpu} if framework == "cupy" else {}),
            record=None if accesses else record,
            plan=self.options["plan"] if self.options["plan_client"] in ("", framework) else None,
            **self._remember(),
            max_reserved=self.options["max_reserved"],
            **({name: self.options[name] for name in ("limit", "backend")} if framework == "torch" else {}),
        )
        pool.leave_open_at_exit()  # `finish` reports and closes it later
        self.pools[framework] = pool
        self._begin_monitor()
        if accesses:
            with ProjectFinder():
                self._accesses = adapter.record(record)
            self._accesses.__enter__()
        if not self._watches_forks:
            # Registered after the adapter's handler, so that the adapter resets its state first. Children
            # inherit this handler.
            self._watches_forks = True
            os.register_at_fork(after_in_child=self._after_fork)

    def _begin_monitor(self) -> None:
        """Start the monitor: status line, and samples of memory for a page."""
        from mempool.cli.run.monitor import Monitor, terminal_shows_status

        shows = not (self.options["quiet"] or self.is_child) and terminal_shows_status()
        if self._monitor is None and (shows or self.options["plot"]):
            self._monitor = Monitor(self.pools, shows=shows, samples=bool(self.options["plot"]))

    def _on_the_gpu(self) -> Any:
        """Return PyTorch's pool if on a GPU, where memory is scarce and CuPy shares the pool."""
        from mempool import _core

        pool = self.pools.get("torch")
        if pool is None or not pool.can_be_shared:
            return None
        return pool if isinstance(pool.device, _core.CudaDevice) else None

    def _remember(self) -> dict[str, Any]:
        """Return the option about the last run's plan: ``--fresh``, else the environment's, else "long".

        A forked child keeps no plan, which would replace its parent's plan.
        """
        if self._is_fork:
            return {"remember": False}
        if self.options["fresh"]:
            return {"remember": "fresh"}
        return {} if os.environ.get("MEMPOOL_REMEMBER", "").strip() else {"remember": "long"}

    def _path_of_process(self, path: str | None) -> str | None:
        """Return the path for this process; a child's file name contains the process number."""
        if path is None or not self.is_child:
            return path
        stem, suffix = os.path.splitext(path)  # noqa: PTH122
        return f"{stem}.{os.getpid()}{suffix}"

    def finish(self) -> None:
        """Finish the trace and write the report; without effect when repeated or in a fork."""
        if self._finishing or self._pid != os.getpid():
            return
        self._finishing = True
        try:
            self._end_monitor()
            self._report()
        except Exception as error:
            _print_line(f"no report: {type(error).__name__}: {error}")
        if self._killed_by:
            _end_by_signal(self._killed_by)
        if getattr(sys, "last_type", None) is KeyboardInterrupt:
            _interrupted()

    def _end_monitor(self) -> None:
        """Clear the status line, and write the page of the memory."""
        if self._monitor is None:
            return
        self._monitor.stop()
        if (path := self._path_of_process(self.options["plot"])) is not None:
            from mempool.per_rank_files import own_file
            from mempool.reporting.memory_history import page
            from traces.files import atomic

            try:
                with atomic(own_file(path)) as temporary:
                    temporary.write_text(page(list(self._monitor.histories.values())), encoding="utf-8")
            except Exception as error:
                _print_line(f"no page: {type(error).__name__}: {error}")

    def _did_children_work(self, reports: dict[str, Any]) -> bool:
        """Return true if children without pools did the work.

        The criterion is that this process's pools had no work, and that all children together used more CPU
        time.
        """
        if self.options["children"] or any(pool.settings.mode == "off" for pool in self.pools.values()):
            return False
        if any(report.has_work for report in reports.values()):
            return False
        own = os.times()
        return bool(_seconds_of_children() - self._not_the_programs > own.user + own.system)

    def _report(self) -> None:
        reports = {name: pool.report() for name, pool in self.pools.items()}
        did_it = self._did_children_work(reports)
        explained = {name: pool.explain() for name, pool in self.pools.items() if self.options["explain"]}
        # The trace of the last used pool has the file name that the user gave.
        order = sorted(self.pools, key=lambda name: bool(reports[name].values["allocations"]))
        for number, name in enumerate(order, start=1):
            pool = self.pools[name]
            try:
                self._close(name, pool)
                if number < len(self.pools):
                    self._rename_trace(name, used=bool(reports[name].values["allocations"]))
            except Exception as error:
                _print_line(f"the trace of {name} was not written: {error}")
        if self.options["json"] is not None and not self.is_child:
            from mempool.cli.output import write_json
            from mempool.per_rank_files import own_file

            said = {name: report.to_dict() for name, report in reports.items()}
            write_json({"pid": os.getpid(), "pools": said}, own_file(self.options["json"]))
        if not self.options["quiet"]:
            self._print(reports, explained, did_it=did_it)

    def _print(self, reports: dict[str, Any], explained: dict[str, str], *, did_it: bool) -> None:
        """Print a line for each pool that had work, and requested tables."""
        who = f" (process {os.getpid()})" if self.is_child else ""
        for name, report in reports.items():
            if report.has_work:
                for line in report.verdict.splitlines():
                    _write(f"mempool{who}: {line}")
                if self.options["report"]:
                    _write(report.table())
                if name in explained:
                    _write(explained[name])
        if not self.is_child:
            self._remark(reports, did_it=did_it)

    def _remark(self, reports: dict[str, Any], *, did_it: bool) -> None:
        """Report ignored options, a program without a framework, and work of child processes."""
        if reports and (whose := self.options["plan_client"]) not in ("", *sys.modules):
            _print_line(f"the plan was not used: it is of {whose}, and the program has no such memory")
        if reports and self.options["limit"] is not None and "torch" not in reports:
            _print_line(
                "nothing was held within the limit, which is of PyTorch's tensors, and the program has none; "
                "--max-reserved limits what any pool takes"
            )
        if not reports:
            _print_line(f"nothing to report: the program imported none of {', '.join(ADAPTERS)}")
        elif all(pool.settings.mode == "off" for pool in self.pools.values()):
            _print_line("no pool: MEMPOOL=off")
        elif not (did_it or any(report.has_work for report in reports.values())):
            _print_line(f"nothing to report: {' and '.join(reports)} never had 1 MiB in use")
        if did_it:
            _print_line(
                "child processes did the work, and ran without a pool: if they are Python's, say "
                "`mempool run --children`"
            )

    def _close(self, framework: str, pool: Any) -> None:
        """Finish the files that the pool of a framework writes."""
        if framework != "torch":
            pool.close()
            return
        if self._accesses is not None:
            self._accesses.__exit__(None, None, None)
        pool.close_at_exit()

    def _rename_trace(self, framework: str, *, used: bool) -> None:
        """Rename a framework's trace if another framework may need the file name; delete an empty trace."""
        from mempool.per_rank_files import own_file

        path = self._path_of_process(self.options["record"])
        path = None if path is None else own_file(path)
        if path is None or not os.path.isfile(path):  # noqa: PTH113
            return
        stem, suffix = os.path.splitext(path)  # noqa: PTH122
        if used:
            os.replace(path, f"{stem}.{framework}{suffix}")  # noqa: PTH105
        else:
            os.unlink(path)  # noqa: PTH108

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Finish the trace, then end the process with the signal's default action."""
        if self._finishing and self._pid == os.getpid():
            self._killed_by = number
            return
        self.finish()
        _end_by_signal(number)

    def _hold_signals(self) -> None:
        """Block deadly signals during a fork.

        Python drops signals that a child receives before Python has reset the child's state.
        """
        self._masks[_thread.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, DEADLY)

    def _release_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.pop(_thread.get_ident()))

    def _after_fork(self) -> None:
        """Continue in a forked child, with a pool only if children get pools."""
        try:
            self._begin_in_child()
        finally:
            self._release_signals()

    def _begin_in_child(self) -> None:
        pools, self.pools = self.pools, {}
        self._accesses = self._monitor = None
        for pool in pools.values():
            pool.close()
        if not self.options["children"]:
            for number in DEADLY:
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL)
            return
        self._pid, self._is_fork, self._finishing = os.getpid(), True, False
        for framework in pools:
            self.install(framework)
        self._finish_with_multiprocessing()

    def _after_fork_without_pools(self) -> None:
        """Continue in a child that was forked before any pool exists.

        Children of multiprocessing's fork server may install a pool later.
        """
        if self._watches_forks:
            return  # `_after_fork` runs later
        if self.options["children"]:
            self._pid = os.getpid()
            self._finish_with_multiprocessing()
        self._release_signals()

    def _finish_with_multiprocessing(self) -> None:
        """Register `finish` with multiprocessing for the processes that it forks.

        These processes end by ``os._exit``, which skips `atexit`, but multiprocessing has its own exit
        handlers.
        """
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(self, lambda me: util.Finalize(me, me.finish, exitpriority=-1000))


class ProjectFinder:
    """Import finder that resolves this project's packages to this file's folder, as a context manager."""

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(
        self, name: str, _: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of this project's packages; None for any other name."""
        if name not in OURS:
            return None
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, [_PLACE], target)


class AfterImport:
    """Import finder that calls a function after the import of a framework or module.

    A package of this project may import a framework. The package is unusable during its import, so the call
    then waits for the end of the package's import.
    """

    def __init__(
        self, then: Callable[[str], None], names: Sequence[str] = tuple(ADAPTERS), *, waits: bool = True
    ) -> None:
        """Wait for imports.

        Args:
            then: called with the name of an imported module.
            names: modules to wait for.
            waits: whether the call waits for packages of this project; at most one finder may wait.
        """
        self._names, self._waiting, self._then = names, set(names), then
        self._packages = OURS if waits else ()
        self._imported: list[str] = []
        self._ours = 0  # number of this project's modules under import

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return another finder's spec with a wrapped loader."""
        if name not in self._waiting and name.partition(".")[0] not in self._packages:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None and (name in self._waiting or _is_ours(spec)):
                    spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None

    def begins(self, name: str) -> None:
        """Record the start of a module's code."""
        self._ours += name not in self._names

    def ends(self, name: str, *, fails: bool) -> None:
        """Record the end of a module's code.

        Call back for frameworks unless one of our modules is loading.
        """
        self._ours -= name not in self._names
        if name in self._waiting and not fails:
            self._waiting.discard(name)
            self._imported.append(name)
        if not self._waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._imported and not self._ours:
            self._then(self._imported.pop(0))


def _is_ours(spec: ModuleSpec) -> bool:
    return spec.origin is not None and spec.origin.startswith(os.path.join(_PLACE, ""))  # noqa: PTH118


class _Loader:
    """Loader wrapper that reports start and end of a module's code, invisible to the module."""

    def __init__(self, loader: Any, listener: AfterImport) -> None:
        self._loader, self._listener = loader, listener

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._listener.begins(module.__name__)
        fails = True
        try:
            self._loader.exec_module(module)
            fails = False
        finally:
            self._listener.ends(module.__name__, fails=fails)

    exec_module.__code__ = exec_module.__code__.replace(co_filename=_IMPORT_SYSTEM)


def _seconds_of_children() -> float:
    """Return the CPU seconds of all awaited child processes."""
    times = os.times()
    return times.children_user + times.children_system


def _end_by_signal(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _interrupted() -> None:
    """Make Python end by SIGINT, as after an uncaught interrupt.

    Python drops the interrupt at the next `exec` of a string, which imports for the report may call
    (dataclasses).
    """
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")  # noqa: S102


def _print_line(message: str) -> None:
    _write("mempool: " + " ".join(message.split()))


def _write(text: str) -> None:
    """Write to file descriptor 2, even if the program has replaced ``sys.stderr``."""
    with contextlib.suppress(Exception):
        if sys.stderr is not None:
            sys.stderr.flush()
    with contextlib.suppress(OSError):
        os.write(2, (text + "\n").encode(errors="backslashreplace"))
