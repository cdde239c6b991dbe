"""One task a file: each file yields a result or an error, whichever worker runs or dies."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
from files_that_kill import size_or_death, slow_size

from mempool.analysis.compare_many import map_files


def test_each_file_has_its_result_or_its_own_error() -> None:
    with ThreadPoolExecutor(2) as executor:
        found = dict(map_files(["a", "bad", "abc"], size_or_death, executor))
    assert (found["a"], found["abc"]) == (1, 3)
    assert isinstance(found["bad"], ValueError)


def test_only_the_file_killing_a_process_fails() -> None:
    found = dict(map_files(["kill", "abc"], size_or_death))
    assert isinstance(found.pop("kill"), BrokenProcessPool)
    assert found == {"abc": 3}


@pytest.mark.filterwarnings("ignore")  # Dask's own, of its versions and of ports in use
def test_dask_cluster_losing_a_worker_loses_no_result() -> None:
    distributed = pytest.importorskip("distributed")
    files = ["x" * k for k in range(1, 13)]
    with (
        distributed.LocalCluster(2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
        client.get_executor(pure=False, retries=2) as executor,
    ):
        pids = client.run(os.getpid)
        found = {}
        for file, result in map_files(files, slow_size, executor):
            if not found:
                os.kill(next(iter(pids.values())), signal.SIGKILL)
            found[file] = result
    assert found == {file: len(file) for file in files}
