"""Studies that run: once each, whatever dies; the file of results; sweeps."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from deltune.errors import DeltuneError, DivergedError, StorageError
from deltune.files import explain_write_errors, write_error
from deltune.studies.jobs.job import RUNNERS, Job, Outcome, Roots
from deltune.studies.jobs.pool import Answer, LocalPool, Scheduler, execute_safely
from deltune.studies.jobs.store import JobRecord, ResultStore
from deltune.studies.study import Sweep
from deltune.train.progress import ProgressDisplay
from deltune.train.setup import ModelCache


def row(name: str, value: float = 1.0, error: str | None = None) -> JobRecord:
    result = None if error else {"value": value}
    return JobRecord(name, "run", {"a": name}, result, error, 0.5, "error" if error else None)


class Here:
    """A pool of this very process: a worker answers when it is asked."""

    def __init__(self, runs: Path, workers: int = 2, hook: Callable[[Job], None] = lambda job: None) -> None:
        self.runs, self.hook, self.parts = runs, hook, ModelCache()
        self.at: list[Job | None] = [None] * workers
        self.given: list[str] = []

    def idle(self) -> list[int]:
        return [i for i, job in enumerate(self.at) if job is None]

    def submit(self, worker: int, job: Job) -> None:
        self.at[worker] = job
        self.given.append(job.name)

    def poll(self, timeout: float) -> list[tuple[int, Answer]]:
        answered = []
        for i, job in enumerate(self.at):
            if job is not None:
                self.at[i] = None
                self.hook(job)
                answered.append((i, execute_safely(job, self.runs, self.parts)))
        return answered

    def close(self) -> None:
        pass


ERRORS: dict[int, type[Exception]] = {-20: DivergedError, -21: DeltuneError}


def double(values: Mapping[str, Any], roots: Roots, runs: Path, parts: ModelCache) -> dict[str, Any]:
    if values["x"] < 0:
        raise ERRORS.get(values["x"], ValueError)(f"x is {values['x']}")
    return {"value": 2 * values["x"]}


@pytest.fixture(autouse=True)
def a_kind_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RUNNERS, "double", double)


def of(*numbers: int) -> list[Job]:
    return [Job("double", {"x": number}) for number in numbers]


def drive(jobs: Sequence[Job], results: ResultStore, pool: Any = None, **options: Any) -> Scheduler:
    made = Scheduler(lambda rows: jobs, results, pool or Here(results.runs), **options)
    with ProgressDisplay(False) as bar:
        made.run(bar)
    return made


# -- the file


def test_no_space_left(tmp_path: Path) -> None:
    """Half a line is there, which the next one overwrites."""
    with ResultStore(tmp_path / "r.jsonl") as file:
        file.put(row("a"))
        size, limit = file.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limit[1]))
        try:
            with pytest.raises(DeltuneError, match="no space left"):
                file.put(row("b"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert file.get("a") == row("a") and file.get("b") is None and file.path.stat().st_size > size
        file.put(row("c"))
    with ResultStore(file.path, read_only=True) as again:
        assert again.records() == [row("a"), row("c")]


# -- driving


def test_everything_is_done_once(tmp_path: Path) -> None:
    with ResultStore(tmp_path / "r.jsonl") as file:
        pool = Here(file.runs)
        first = drive([*of(1, 2, 3), *of(2)], file, pool)
        assert first.done == 3 and len(pool.given) == 3 and not first.failed
        assert [file.get(job.name).result["value"] for job in of(1, 2, 3)] == [2, 4, 6]  # type: ignore[union-attr]
        again = drive(of(1, 2, 3, 4), file, pool)
        assert (again.done, again.reused) == (1, 3)


def test_a_failure_is_kept_and_does_not_stop_the_rest(tmp_path: Path) -> None:
    with ResultStore(tmp_path / "r.jsonl") as file:
        needs = Job("double", {"x": 5}, tuple(of(-1)))
        made = drive([*of(-1), needs, *of(2)], file)
        assert made.failed == [of(-1)[0].name, needs.name] and made.done == 3
        assert "x is -1" in str(file.get(of(-1)[0].name).error)  # type: ignore[union-attr]
        assert "it needs" in str(file.get(needs.name).error)  # type: ignore[union-attr]
        pool = Here(file.runs)
        assert drive(of(-1, 2), file, pool).failed and not pool.given, "not tried again unasked"
        drive(of(-1, 2), file, pool, retry=True)
        assert pool.given == [of(-1)[0].name]


def test_the_kind_of_a_failure_is_recorded(tmp_path: Path) -> None:
    """As the worker saw it, whatever the message says; what needs a diverged job has not diverged itself."""
    needs = Job("double", {"x": 5}, tuple(of(-20)))
    with ResultStore(tmp_path / "r.jsonl") as file:
        drive([*of(-20, -21, -1), needs, *of(2)], file)
        kinds = [file.get(job.name).error_kind for job in [*of(-20, -21, -1), needs, *of(2)]]  # type: ignore[union-attr]
    assert kinds == ["diverged", "error", "exception", "requirement", None]


def test_all_that_failed_is_tried_again(tmp_path: Path) -> None:
    with ResultStore(tmp_path / "r.jsonl") as file:
        drive(of(-1, -2, -3, -4), file)
        pool = Here(file.runs, 1)
        made = drive(of(-1, -2, -3, -4), file, pool, retry=True)
        assert len(pool.given) == 4 and made.done == 4 and made.reused == 0


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), FileNotFoundError(2, "No such file"), PermissionError(13, "Denied")],
    ids=repr,
)
def test_what_the_file_system_refuses_is_no_failure_of_the_work(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the drive, instead of a failure of every job; the same command then does what is left."""

    def full(values: Mapping[str, Any], roots: Roots, runs: Path, parts: ModelCache) -> dict[str, Any]:
        raise write_error("there", error)

    with ResultStore(tmp_path / "r.jsonl") as file:
        with monkeypatch.context() as patch, pytest.raises(StorageError, match="there"):
            patch.setitem(RUNNERS, "double", full)
            drive(of(1, 2), file)
        assert not file.records() and drive(of(1, 2), file).done == 2


def test_a_program_that_is_missing_fails_its_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_java(values: Mapping[str, Any], roots: Roots, runs: Path, parts: ModelCache) -> dict[str, Any]:
        with explain_write_errors(runs / "one"):
            raise FileNotFoundError(2, "No such file or directory", "java" if values["x"] == 1 else str(runs / "two"))

    monkeypatch.setitem(RUNNERS, "double", with_java)
    with ResultStore(tmp_path / "r.jsonl") as file:
        assert len(drive(of(1), file).failed) == 1
        with pytest.raises(StorageError, match="two"):
            drive(of(1, 2), file)


@pytest.mark.parametrize("there", range(7))
def test_a_plan_in_stages_goes_on_from_any_of_them(there: int, tmp_path: Path) -> None:
    """Each work is asked for after the one before: what a killed drive left in the file is no reason to stop."""

    def plan(rows: Mapping[str, JobRecord]) -> list[Job]:
        jobs = of(*range(6))
        return jobs[: 1 + next((i for i, job in enumerate(jobs) if job.name not in rows), 5)]

    with ResultStore(tmp_path / "r.jsonl") as file:
        drive(of(*range(6))[:there], file, Here(file.runs))
        made = Scheduler(plan, file, Here(file.runs))
        with ProgressDisplay(False) as bar:
            made.run(bar)
        assert (made.reused, made.done) == (there, 6 - there) and len(file.records()) == 6


def test_a_worker_keeps_to_its_kin(tmp_path: Path) -> None:
    jobs = [Job("double", {"x": i, "model": f"m{i % 3}"}) for i in range(12)]
    with ResultStore(tmp_path / "r.jsonl") as file:
        order: list[str] = []
        drive(jobs, file, Here(file.runs, 1, lambda job: order.append(job.spec["model"])))
    assert order == sorted(order)


# -- processes


def study(root: Path, **changes: Any) -> Sweep:
    for name in ("model", "data"):
        if not (root / name).exists():
            getattr(tiny, name)(root / name)
    values: dict[str, Any] = {
        "name": "tiny", "models": {"bert": {"model": str(root / "model")}},
        "tasks": {"words": {"data": str(root / "data")}}, "methods": ["layernorm", "lora(rank=2)", "head"],
        "seeds": (0, 1), "options": {"epochs": 2, "batch_size": 8, "max_length": 16},
    }  # fmt: skip
    return Sweep(**{**values, **changes})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def whole(root: Path) -> dict[str, Any]:
    """The scores of a study that nothing disturbed, run in this process."""
    with ResultStore(root / "whole.jsonl") as file:
        jobs = [planned.job for planned in study(root).cells()]
        made = drive(jobs, file)
        assert made.done == 6 and not made.failed
        return {r.name: scores(r) for r in file.records()}


def scores(record: JobRecord) -> Any:
    assert record.result is not None
    return record.result["scores"], record.result["examples"], record.result["curve"][-1]


def test_what_a_run_answers(root: Path, whole: dict[str, Any]) -> None:
    with ResultStore(root / "whole.jsonl") as file:
        for record in file.records():
            assert record.result is not None
            outcome = Outcome(
                {}, record.spec, record.result["scores"], record.result["count"], record.result["examples"]
            )
            examples = outcome.examples["accuracy"]
            assert len(examples) == 24 and sum(examples) / 24 == pytest.approx(outcome.scores["accuracy"])
            assert [line["step"] for line in record.result["curve"] if "eval_loss" in line] == [6, 12]


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from studies.test_engine import LocalPool, ProgressDisplay, ResultStore, Scheduler, study
with ResultStore({file!r}) as file, ProgressDisplay(False) as bar:
    jobs = [planned.job for planned in study(Path({root!r})).cells()]
    Scheduler(lambda rows: jobs, file, LocalPool({workers}, file.runs)).run(bar)
"""


def driver(root: Path, file: Path, workers: int) -> subprocess.Popen[str]:
    """A driver in a process of its own."""
    path = [str(Path(__file__).parents[1]), *sys.path]
    code = SCRIPT.format(path=path, file=str(file), root=str(root), workers=workers)
    text = f"if __name__ == '__main__':\n{''.join(f'    {line}' + chr(10) for line in code.splitlines())}"
    script = file.with_suffix(".py")
    script.write_text(text)
    return subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)


def finished(file: Path) -> int:
    return len(list(file.with_suffix(".runs").glob("*/metrics.json")))


@pytest.mark.slow
def test_two_drivers_at_once(root: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    """On one file: each run is done by one of them, and both end when all are there."""
    file = tmp_path / "r.jsonl"
    both = [driver(root, file, 1) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    with ResultStore(file) as results:
        assert {r.name: scores(r) for r in results.records()} == whole
    starts = [path.read_text().count('"event": "start"') for path in file.with_suffix(".runs").glob("*/log.jsonl")]
    assert starts == [1] * 6


def test_a_worker_is_killed(root: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    """kill -9 of a worker: another takes its place and its run."""
    with ResultStore(tmp_path / "r.jsonl") as file:
        pool = LocalPool(1, file.runs)
        jobs = [planned.job for planned in study(root).cells()][:2]
        killed: list[int] = []
        submit = pool.submit

        def submit_and_kill(worker: int, job: Job) -> None:
            submit(worker, job)
            if len(killed) < 2:
                time.sleep(0.1)
                killed.append(pool._processes[worker].pid)
                os.kill(killed[-1], signal.SIGKILL)

        pool.submit = submit_and_kill  # type: ignore[method-assign]
        made = drive(jobs, file, pool)
        assert len(set(killed)) == 2 and made.done == 2 and not made.failed
        assert {r.name: scores(r) for r in file.records()} == {job.name: whole[job.name] for job in jobs}


def test_what_kills_every_worker_fails(root: Path, tmp_path: Path) -> None:
    with ResultStore(tmp_path / "r.jsonl") as file:
        pool = LocalPool(1, file.runs)
        submit = pool.submit

        def submit_and_kill(worker: int, job: Job) -> None:
            submit(worker, job)
            os.kill(pool._processes[worker].pid, signal.SIGKILL)

        pool.submit = submit_and_kill  # type: ignore[method-assign]
        made = drive([study(root).cells()[0].job], file, pool)
        (only,) = file.records()
        assert made.failed == [only.name] and "signal 9" in str(only.error)
        assert only.error_kind == "worker_died"


# -- sweeps


def test_a_grid_is_every_combination(root: Path) -> None:
    axes = {"rate": {"low": {"lr": 1e-4}, "high": {"lr": 1e-2}}}
    cells = study(root, axes=axes).cells()
    assert len(cells) == 3 * 2 * 2 and len({planned.job.name for planned in cells}) == 12
    assert cells[0].cell == {"model": "bert", "task": "words", "rate": "low", "method": "layernorm", "seed": 0}
    assert {planned.spec.optim.lr for planned in cells} == {1e-4, 1e-2}


def test_a_grid_written_and_read(root: Path, tmp_path: Path) -> None:
    from deltune.studies.study import read_sweep

    made = study(root, axes={"rate": {"low": {"lr": 1e-4}}})
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(made.model_dump(mode="json"), sort_keys=False))
    again = read_sweep(tmp_path / "study.yaml")
    assert [p.job.name for p in again.cells()] == [p.job.name for p in made.cells()]


def test_equal_counts(root: Path) -> None:
    cells = study(root, methods=["lora(rank=?)", "parallel_adapter(rank=?)"], align="lora(rank=4)", seeds=(0,)).cells()
    assert cells[0].spec.method.expression == "lora(rank=4)" and "?" not in cells[1].spec.method.expression


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["lorra", "layernorm"], "tasks": {"x": {"task": "sikc"}}}, "Did you mean 'lora'"),
        ({"options": {"epoch": 3}}, "Did you mean 'epochs'"),
        ({"options": {"seed": 3}}, "is an axis of the study"),
        ({"budget": "1%", "align": "lora"}, "not both"),
        ({"model": ["x"]}, "Did you mean 'models'"),
        ({"seeds": ()}, "seeds"),
    ],
)
def test_what_is_wrong_with_a_grid(changes: dict[str, Any], message: str, root: Path) -> None:
    with pytest.raises(DeltuneError, match=message):
        study(root, **changes).cells()
