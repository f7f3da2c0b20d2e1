"""Results in files: nothing is lost and lines stay in order; which results of a job are the same; what is committed."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from deltune.errors import DeltuneError
from deltune.studies.jobs.job import Job, Roots, execute, topological_order
from deltune.studies.jobs.pool import LocalPool, Scheduler
from deltune.studies.jobs.store import (
    JobRecord,
    ResultStore,
    exported_studies,
    read_results,
    results_file,
    write_results,
)
from deltune.studies.jobs.verification import Verification, compare, repeats, sample_jobs
from deltune.studies.papers.registry import ALL_STUDIES
from deltune.studies.scales import StudySetup
from deltune.train.progress import ProgressDisplay
from deltune.train.setup import ModelCache

HERE = {"commit": "a" * 40, "threads": 1, "processor": "p", "packages": {"torch": "2.13"}}


def job(method: str, seed: int, task: str = "sick") -> Job:
    spec = {"model": "m", "task": task, "method": method, **({"seed": seed} if seed else {})}
    return Job("run", spec)


def record(one: Job, accuracy: float, environment: Any = HERE, **more: Any) -> JobRecord:
    examples = {"accuracy": [float(i < 400 * accuracy) for i in range(400)], "rouge1": [0.25, 1.0, 0.333333]}
    curve = [{"step": 1, "loss": 0.1 + 0.2}, {"step": 3, "loss": 1e-9}, {"step": 3, "eval_loss": 0.5, "eval_f1": 1 / 3}]
    result = {
        "scores": {"accuracy": accuracy, "loss": 2 / 3}, "examples": examples, "curve": curve, "best": {"step": 3},
        "environment": environment, "data": "d", **more,
    }  # fmt: skip
    return JobRecord(one.name, one.kind, dict(one.spec), result, None, 1.25)


RECORDS = [
    *(record(job(method, seed), 0.5 + seed / 100) for method in ("lora", "layernorm") for seed in range(3)),
    record(job("lora", 0, "cb"), 0.7, {**HERE, "threads": 2}),
    JobRecord("0123456789abcdef", "run", {"model": "m", "data": "/x", "method": "é\u2028"}, None, "it broke", 0.5,
              "exception"),
    JobRecord("fedcba9876543210", "terms", {"run": {"model": "m"}}, {"changes": [{"value": 0.1}]}, None, 2.0),
    JobRecord("00000000000000aa", "time", {"model": "m"}, {"turns": {"full": {"turns": {"step": [0.1]}}}}, None, 2.0),
]  # fmt: skip


def read_lines(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().split("\n")[:-1]


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))


def by_name(records: list[JobRecord]) -> list[JobRecord]:
    return sorted(records, key=lambda record: record.name)


def test_nothing_is_lost(tmp_path: Path) -> None:
    path = write_results(tmp_path, "ln/nlu", RECORDS)
    assert path == results_file(tmp_path, "ln/nlu") == tmp_path / "ln" / "nlu.jsonl.gz"
    assert by_name(read_results(tmp_path)) == by_name(read_results(tmp_path, ["ln/nlu"])) == by_name(RECORDS)
    assert not read_results(tmp_path, ["uv/full"]) and exported_studies(tmp_path) == ["ln/nlu"]


def test_runs_of_changed_files_are_not_exported(tmp_path: Path) -> None:
    clean, dirty = record(job("lora", 0), 0.5), record(job("lora", 1), 0.6, {**HERE, "commit": "a" * 40 + "-dirty"})
    with pytest.warns(UserWarning, match="s: 1 of 2 results are not exported"):
        write_results(tmp_path, "s", [clean, dirty])
    assert read_results(tmp_path) == [clean]


def test_the_day_of_a_job_goes_with_it(tmp_path: Path) -> None:
    """Through the store, a file and another store; where nobody knows the day, nobody invents one."""
    days = {"known": "2026-11-20", "unknown": "", "now": None}
    with ResultStore(tmp_path / "a.jsonl") as stored:
        for name, date in days.items():
            stored.put(replace(RECORDS[0], name=name, date=date))
        write_results(tmp_path / "out", "s", stored.records())
    with ResultStore(tmp_path / "b.jsonl") as other:
        for one in read_results(tmp_path / "out"):
            other.put(one)
        dates = {one.name: one.date for one in other.records()}
    today = datetime.now(UTC).date()
    assert dates.pop("now") in {str(today), str(today - timedelta(days=1))} and dates == {
        "known": "2026-11-20",
        "unknown": "",
    }


def test_an_error_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    line = {"job": "a", "kind": "run", "spec": {}, "seconds": 1.0, "error": "it broke", "error_kind": "other"}
    write_lines(tmp_path / "s.jsonl.gz", [json.dumps(line)])
    with pytest.raises(DeltuneError, match="error_kind 'other' is not one of diverged, error"):
        read_results(tmp_path)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 401])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_examples_of_any_number_are_kept(count: int, share: float, tmp_path: Path) -> None:
    chance = random.Random(count)
    values = [float(chance.random() < share) for _ in range(count)]
    write_results(tmp_path, "s", [record(job("lora", 0), 0.5, examples={"accuracy": values})])
    (again,) = read_results(tmp_path)
    assert again.result is not None and again.result["examples"] == {"accuracy": values}


def test_the_order_of_records_does_not_matter_and_a_change_is_a_line(tmp_path: Path) -> None:
    before = read_lines(write_results(tmp_path / "a", "s", RECORDS))
    shuffled = random.Random(0).sample(RECORDS, len(RECORDS))
    assert read_lines(write_results(tmp_path / "b", "s", shuffled)) == before
    changed = [replace(one, seconds=9.0) if one is RECORDS[2] else one for one in RECORDS]
    after = read_lines(write_results(tmp_path / "a", "s", [*changed, record(job("full", 1), 0.9)]))
    assert len(after) == len(before) + 1 and len(set(before) - set(after)) == 1


def test_environments_are_there_once_and_only_those_that_are_used(tmp_path: Path) -> None:
    write_results(tmp_path, "one", RECORDS)
    write_results(tmp_path, "other/two", [record(job("full", 0), 0.5)])
    file = tmp_path / "environments.json"
    assert sorted(one["threads"] for one in json.loads(file.read_text()).values()) == [1, 2]
    write_results(tmp_path, "one", RECORDS[:1])
    assert [one["threads"] for one in json.loads(file.read_text()).values()] == [1]
    assert exported_studies(tmp_path) == ["one", "other/two"] and len(read_results(tmp_path)) == 2


@pytest.mark.parametrize(
    "line",
    ['{"job": 1}', "[]", '{"job":"a","kind":"run","spec":{},"seconds":1,"result":{},"environment":"absent"}',
     '{"job":"a","kind":"run","spec":{},"seconds":1,"result":{"examples":{"accuracy":"4:zz"}}}'],
)  # fmt: skip
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    path = write_results(tmp_path, "s", RECORDS[:1])
    write_lines(path, [*read_lines(path), line])
    with pytest.raises(DeltuneError, match=r"(?s)s\.jsonl.*line 2"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{}", gzip.compress(b"{}" * 100, mtime=0)[:-9], gzip.compress(b"\xff\n", mtime=0)]
)
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    """Cut off, not compressed, or no text; an empty file holds no job."""
    (tmp_path / "s.jsonl.gz").write_bytes(content)
    if not content:
        assert read_results(tmp_path) == []
        return
    with pytest.raises(DeltuneError, match=r"s\.jsonl\.gz cannot be read"):
        read_results(tmp_path)


@pytest.mark.parametrize("failed", ["a", "b"])
def test_a_result_counts_before_an_error_in_another_file(failed: str, tmp_path: Path) -> None:
    """Two studies share a job, and one of them was exported before it was tried again."""
    done = RECORDS[0]
    error = replace(done, result=None, error="it broke")
    for study in ("a", "b"):
        write_results(tmp_path, study, [error if study == failed else done])
    assert read_results(tmp_path) == [done]


def test_a_spec_names_models_and_tasks_and_the_machine_has_them(tmp_path: Path) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "models" / "small" / "config.json").write_text("{}")
    (tmp_path / "data" / "sick").mkdir(parents=True)
    roots = Roots(str(tmp_path / "models"), str(tmp_path / "data"))
    spec = {"model": "small", "task": "sick", "method": "lora"}
    located = {**spec, "model": str(tmp_path / "models" / "small"), "data_root": str(tmp_path / "data")}
    assert roots.locate(spec) == located and roots.relative(located) == spec
    assert roots.locate({"run": spec, "other": {"task": "cb"}}) == {"run": located, "other": {"task": "cb"}}
    hub = {"model": "google-bert/bert-base-uncased", "task": "snli"}
    assert roots.locate(hub) == roots.relative(hub) == Roots().locate(hub) == hub
    assert Job("run", spec, roots=roots).name == Job("run", spec).name


# -- when two results are the same

LORA = [job("lora", seed) for seed in range(3)]
STORED = {one.name: one for one in RECORDS}


@pytest.mark.parametrize(("accuracy", "environment", "verdict"), [
    (0.5, HERE, "equal"), (0.50001, HERE, "differs"), (0.50001, {**HERE, "threads": 2}, "equal but for rounding"),
    (0.5001, {**HERE, "threads": 2}, "begins alike"),
])  # fmt: skip
def test_verdicts(accuracy: float, environment: Any, verdict: str) -> None:
    """Elsewhere a score may differ by rounding; by more, if the run began as it did."""
    (one,) = compare(LORA[:1], STORED, {LORA[0].name: record(LORA[0], accuracy, environment)})
    assert one.verdict == verdict
    (score,) = [c for c in one.comparisons if c.name == "accuracy"]
    assert score.allowed == pytest.approx(3e-5)


def on_another_machine(first_loss: float = 0.3, accuracy: float = 0.7) -> Verification:
    """The first job, run on another machine: its first loss, which was 0.3, and its accuracy, which was 0.5."""
    curve = [{"step": 2, "loss": first_loss}, {"step": 9, "loss": 0.1}, {"step": 9, "eval_loss": 0.5}]
    again = record(LORA[0], accuracy, {**HERE, "processor": "q"}, curve=curve)
    stored = record(LORA[0], 0.5, curve=[{**curve[0], "loss": 0.3}, *curve[1:]])
    (one,) = compare(LORA[:1], {LORA[0].name: stored}, {LORA[0].name: again})
    return one


def test_training_that_makes_rounding_larger_begins_alike() -> None:
    """Its first loss is what it was, and half of a sample may end elsewhere; what begins elsewhere differs."""
    alike, rounding, other = (
        on_another_machine(0.30001),
        on_another_machine(accuracy=0.50001),
        on_another_machine(0.3001, accuracy=0.50001),
    )
    assert [one.verdict for one in (alike, rounding, other)] == ["begins alike", "equal but for rounding", "differs"]
    assert repeats([alike, rounding]) and repeats([rounding, rounding])
    assert not repeats([alike, alike, rounding]), "training itself is another one"
    assert not repeats([rounding, rounding, other])


def test_an_altered_seed_differs_on_any_machine() -> None:
    """Of committed results each seed is compared with the next of its cell, as if two machines had run them."""
    cells: dict[str, list[JobRecord]] = {}
    for row in read_results(RESULTS):
        if row.kind == "run" and row.result is not None:
            cells.setdefault(json.dumps({**row.spec, "seed": 0}, sort_keys=True), []).append(row)
    pairs = [pair for rows in cells.values() for pair in pairwise(rows)]
    verdicts = []
    for one, other in pairs:
        assert other.result is not None
        result = {**other.result, "environment": HERE}
        repeated = {one.name: replace(other, name=one.name, result=result)}
        verdicts += compare([Job(one.kind, one.spec)], {one.name: one}, repeated)
    assert len(verdicts) > 1500 and all(one.verdict == "differs" for one in verdicts)


def test_other_data_and_failures_differ() -> None:
    now = {LORA[0].name: record(LORA[0], 0.5, HERE, data="other"), LORA[1].name: replace(RECORDS[7], name=LORA[1].name)}
    moved, failed, absent = compare(LORA, STORED, now)
    assert moved.verdict == "equal" and moved.data_changed, "equal scores are equal"
    assert (failed.verdict, failed.error) == ("differs", "it broke") and absent.error == "it was not run"


def test_a_sample_is_of_jobs_with_scores() -> None:
    jobs = [Job(one.kind, one.spec) for one in RECORDS]
    sample = sample_jobs(jobs, STORED, 3, seed=1)
    assert len(sample) == 3 and sample == sample_jobs(reversed(jobs), STORED, 3, seed=1)
    assert len(sample_jobs(jobs, STORED, 99)) == 7


# -- what is committed

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
SHARED = ROOT.parent / "shared"


def test_committed_results_are_those_of_studies_as_they_are() -> None:
    """Every file is of a study, every line of it of a job that the study has, and none of this machine or failed."""
    rows = {row.name: row for row in read_results(RESULTS)}
    for name in exported_studies(RESULTS):
        text = "".join(read_lines(results_file(RESULTS, name)))
        assert "/home/" not in text and f"{ROOT.parent}/" not in text and '"error":' not in text, name
        stored = {row.name for row in read_results(RESULTS, [name])}
        jobs = topological_order(ALL_STUDIES[name](StudySetup("small", runs=False)).jobs(rows))
        assert stored == stored & {job.name for job in jobs}, f"{name} has jobs of another version of the study"


@pytest.mark.slow
def test_on_other_threads_a_committed_job_is_repeated_and_an_altered_seed_is_not(shared: Path, tmp_path: Path) -> None:
    """The committed run with the fewest seconds is trained again by two threads, with its seed and with the next."""
    runs = [row for row in read_results(RESULTS, ["ln/nlu"]) if row.kind == "run" and row.result is not None]
    stored = min(runs, key=lambda row: (row.seconds, row.name))
    roots, threads = Roots(str(shared / "models"), str(shared / "data")), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seed = stored.spec.get("seed", 0)
        jobs = [Job("run", {**stored.spec, "seed": one}, roots=roots) for one in (seed, seed + 1)]
        results = [json.loads(json.dumps(execute(one, tmp_path, ModelCache()))) for one in jobs]
    finally:
        torch.set_num_threads(threads)
    job = Job(stored.kind, stored.spec)
    (again,), (other,) = (
        compare([job], {stored.name: stored}, {stored.name: replace(stored, result=result)}) for result in results
    )
    assert "threads" in again.changes and again.verdict != "differs", again
    assert other.verdict == "differs" and not repeats([other])


@pytest.mark.slow
def test_committed_results_can_be_repeated() -> None:
    """A sample of them is run again, where their models and data are at hand (else every line is checked above).

    On any processor: by the first losses, and by the scores of half of the jobs.
    """
    setup = StudySetup("small", str(SHARED / "data"), runs=False)
    rows = {row.name: row for row in read_results(RESULTS)}
    if rows and not (SHARED / "data").is_dir():
        pytest.skip(f"no small models and data: there is no folder {SHARED / 'data'}")
    jobs = sample_jobs(
        (job for name in exported_studies(RESULTS) for job in ALL_STUDIES[name](setup).jobs(rows)), rows, 10
    )
    with tempfile.TemporaryDirectory() as folder, ResultStore(Path(folder) / "r.jsonl") as stored:
        scheduler = Scheduler(lambda _: jobs, stored, LocalPool(1, stored.runs))
        with ProgressDisplay(False) as bar:
            scheduler.run(bar)
    assert repeats(compare(jobs, rows, scheduler.records))
