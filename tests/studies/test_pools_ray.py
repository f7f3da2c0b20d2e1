"""A study on a Ray cluster of this machine with two workers: the same results as in this process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from deltune.studies.jobs.pool import Scheduler
from deltune.studies.jobs.store import ResultStore
from deltune.train.progress import ProgressDisplay
from studies.test_engine import Here, drive, scores, study

ray = pytest.importorskip("ray", reason="no ray: the extra ray has it")


@pytest.mark.slow  # a cluster starts a dozen processes
def test_a_study_on_a_cluster(tmp_path: Path) -> None:
    """A worker is killed in the middle, too."""
    from deltune.studies.jobs.pool import RayPool

    jobs = [planned.job for planned in study(tmp_path).cells()]
    with ResultStore(tmp_path / "here.jsonl") as file:
        drive(jobs, file, Here(file.runs))
        whole = {row.name: scores(row) for row in file.records()}
    with ResultStore(tmp_path / "ray.jsonl") as file:
        cluster = RayPool(2, file.runs)
        killed: list[int] = []
        submit, pids = cluster.submit, cluster.pids()

        def submit_and_kill(worker: int, job: object) -> None:
            submit(worker, job)  # type: ignore[arg-type]
            if not killed:
                killed.append(pids[worker])
                time.sleep(0.2)
                os.kill(pids[worker], signal.SIGKILL)

        cluster.submit = submit_and_kill  # type: ignore[method-assign, assignment]
        made = Scheduler(lambda rows: jobs, file, cluster)
        with ProgressDisplay(False) as bar:
            made.run(bar)
        assert killed and made.done == 6 and not made.failed
        assert {row.name: scores(row) for row in file.records()} == whole
