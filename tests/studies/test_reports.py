"""One's own study from the command line: run, interrupted by nothing, seen, reported as text, files and a page."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import tiny
from conftest import MadeOnce
from deltune.cli import app
from deltune.errors import DeltuneError
from deltune.studies.jobs.job import config_of, run_folder
from deltune.studies.jobs.pool import job_progress
from deltune.studies.jobs.store import DIRTY, ResultStore, folder_of_runs
from deltune.studies.papers.registry import ALL_STUDIES
from deltune.studies.study import PlannedCell, select_cells, study_from_file
from deltune.train.run_folder import RunFolder
from studies.test_engine import study


class Printed(NamedTuple):
    stdout: str
    stderr: str


def deltune(*words: object, code: int = 0) -> Printed:
    """Run `deltune study` with these words in this process; `code` is the exit status that it must have."""
    status: Any = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", ["deltune", "study", *map(str, words)])
        with redirect_stderr(io.StringIO()) as err:
            try:
                app.main()
            except SystemExit as stop:
                status = stop.code
    assert int(status or 0) == code, err.getvalue()
    assert "Traceback" not in err.getvalue()
    return Printed(out.getvalue(), err.getvalue())


def lines_of(path: Path) -> list[bytes]:
    return gzip.decompress(path.read_bytes()).splitlines()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, made_once: MadeOnce) -> Path:
    """A study of two methods, one of which cannot be had on this model, and its results: a copy to work with."""
    return shutil.copytree(made_once("reports", run_study), tmp_path_factory.mktemp("reports"), dirs_exist_ok=True)


def run_study(root: Path) -> None:
    made = study(
        root, methods={"norms": "layernorm", "low rank": "lora(rank=2)", "impossible": "layernorm(stack='decoder')"}
    )
    (root / "mine.yaml").write_text(yaml.safe_dump(made.model_dump(mode="json"), sort_keys=False))
    dry = deltune("run", root / "mine.yaml", "--store", root / "r.jsonl", "--dry-run").stdout
    assert "6 jobs, 0 done; 6 left" in dry and not list(root.glob("r.*")), "what is only asked for makes nothing"
    printed = deltune(
        "run", root / "mine.yaml", "--store", root / "r.jsonl", "--workers", 2, "--results", root / "first", code=1
    )
    assert "6 run, 0 were there; 2 of them failed" in printed.stdout
    assert re.search(r"study \d/6 jobs, job .*(norms|low rank).* took \d+ s, .* left", printed.stderr)
    as_if_committed(root / "r.jsonl")
    deltune("export", root / "mine.yaml", "--store", root / "r.jsonl", "--results", root / "first")


def as_if_committed(store: Path) -> None:
    """Take "-dirty" from the commits of results, so that they are exported wherever the tests run."""
    with ResultStore(store) as stored:
        for record in stored.records():
            if record.result is not None:
                environment = dict(record.result["environment"])
                environment["commit"] = str(environment["commit"]).removesuffix(DIRTY)
                stored.put(replace(record, result={**record.result, "environment": environment}))


def test_it_is_not_run_again(place: Path) -> None:
    output = deltune("run", place / "mine.yaml", "--store", place / "r.jsonl", "--quiet", code=1).stdout
    assert "0 run, 6 were there; 2 of them failed" in output
    dry = deltune("run", place / "mine.yaml", "--store", place / "r.jsonl", "--dry-run").stdout
    assert "6 jobs, 6 done; 0 left" in dry


def test_a_study_of_the_papers_says_before_it_is_run_what_it_needs_and_decides(place: Path) -> None:
    store = place / "nothing.jsonl"
    lines = deltune("run", "uv/insertion", "--scale", "paper", "--store", store, "--dry-run").stdout.splitlines()
    (data,) = (line for line in lines if "data from the hub" in line)
    assert "facebook/bart-large (1.63 GB in float32)" in lines[1] and "wmt/wmt16:ro-en" in data
    assert any("operations at most" in line and "on one A100 in bf16" in line for line in lines)
    assert "nothing was run yet" in lines[-1] and "3 seeds decide a difference of" in lines[-1]
    committed = Path(__file__).parents[2] / "results"
    lines = deltune("run", "uv/insertion", "--store", store, "--results", committed, "--dry-run").stdout.splitlines()
    assert "8 seeds, with the spread of 8 that were run" in lines[1]
    assert re.fullmatch(r" +[\d.]+ points: parallel beats sequential insertion .*", lines[2]) and len(lines) == 5
    assert not store.exists()


def test_status(place: Path) -> None:
    facts = json.loads(deltune("status", place / "mine.yaml", "--store", place / "r.jsonl", "--json").stdout)["tiny"]
    assert (facts["jobs"], facts["done"], facts["begun"], facts["waiting"], len(facts["failed"])) == (6, 4, {}, 0, 2)
    assert all("decoder" in error for error in facts["failed"].values())
    output = deltune("status", place / "mine.yaml", "--store", place / "r.jsonl").stdout
    for seed in (0, 1):
        assert f"impossible · seed {seed}: " in output, "a cell's name, not the hash of its content"


def test_results_as_text_are_the_results(place: Path) -> None:
    """Exported, read as they are and imported again: the same report, the same bytes, and nothing left to run."""
    mine, folder = place / "mine.yaml", place / "results"
    assert (
        "1 of 1 studies have results"
        in deltune("export", mine, "--store", place / "r.jsonl", "--results", folder).stdout
    )
    expected = deltune("report", mine, "--store", place / "r.jsonl").stdout
    assert deltune("report", mine, "--store", folder).stdout == expected
    assert "6 jobs are new" in deltune("import", folder, "--store", place / "again.jsonl").stdout
    assert "0 jobs are new in" in deltune("import", folder, "--store", place / "again.jsonl").stdout
    assert "6 jobs, 6 done; 0 left" in deltune("run", mine, "--store", place / "again.jsonl", "--dry-run").stdout
    run = deltune("run", mine, "--store", place / "again.jsonl", "--results", place / "twice", code=1)
    assert "0 run, 6 were there" in run.stdout
    for file, other in itertools.product(("tiny.jsonl.gz", "environments.json"), ("first", "twice")):
        assert (place / other / file).read_bytes() == (folder / file).read_bytes()
    assert all(json.loads(line)["date"] for line in lines_of(folder / "tiny.jsonl.gz"))
    (environment,) = json.loads((folder / "environments.json").read_text()).values()
    assert {"commit", "packages", "processor", "python"} <= environment.keys()
    assert (environment["threads"], environment["linear_backend"]) == (1, "torch"), "whatever the machine has"
    message = deltune("run", mine, "--store", folder, code=2).stderr
    assert "is a folder; runs need a file" in message


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_results_are_verified(every: bool, place: Path) -> None:
    """On this machine a job repeats to the last digit; a score that was edited is noticed."""
    mine, folder = place / "mine.yaml", place / f"verified {every}"
    deltune("export", mine, "--store", place / "r.jsonl", "--results", folder)
    size = 9 if every else 1
    words = ("verify", mine, "--store", folder, "--sample", size, "--quiet")
    assert f"{min(size, 4)} of {min(size, 4)} equal" in deltune(*words).stdout
    lines = [json.loads(line) for line in lines_of(folder / "tiny.jsonl.gz")]
    (edited,) = [
        one for one in lines if "error" not in one and one["spec"]["method"] == "layernorm" and "seed" in one["spec"]
    ]
    edited["result"]["scores"]["accuracy"] += 9
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "tiny.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    words = ("verify", mine, "--store", folder, "--only", "method=norms", "--only", "seed=1", "--quiet")
    printed = deltune(*words, code=1).stdout
    for part in ("differs: bert · words · norms · seed 1", "accuracy: 9.", "1 of 1 differs"):
        assert part in printed
    (fact,) = json.loads(deltune(*words, "--json", code=1).stdout)
    assert fact["verdict"] == "differs" and fact["scores"]["accuracy"]["now"] < 1


def test_a_report_in_words(place: Path) -> None:
    output = deltune("report", place / "mine.yaml", "--store", place / "r.jsonl").stdout
    assert "norms" in output and "±" in output and "2 of 6 runs: " in output


def test_a_report_as_files(place: Path) -> None:
    deltune("report", place / "mine.yaml", "--store", place / "r.jsonl", "--to", place / "out")
    endings = {path.suffix for path in (place / "out").iterdir()}
    assert endings == {".md", ".tex", ".csv", ".png", ".svg", ".pdf"}


def test_a_report_as_a_page(place: Path) -> None:
    deltune("report", place / "mine.yaml", "--store", place / "r.jsonl", "--html", place / "page.html")
    text = (place / "page.html").read_text()
    HTMLParser().feed(text)
    assert "layernorm" in text and "decoder" in text, "every method, and why one failed"
    assert not re.search(rf"[\s>]{place}", text), "a page is read elsewhere: folders are called from here"


def test_what_was_not_run_yet_did_not_fail(place: Path) -> None:
    """A third seed of the same study, of which nothing was run: told apart from what failed, on every way out."""
    store = place / "r.jsonl"
    text = (place / "mine.yaml").read_text()
    more = place / "more.yaml"
    more.write_text(text.replace("- 1\n", "- 1\n- 2\n") if "- 1\n" in text else text.replace("[0, 1]", "[0, 1, 2]"))
    output = deltune("report", more, "--store", store).stdout
    assert "3 of 9 runs: not run yet" in output and "2 of 9 runs: " in output
    deltune("report", more, "--store", store, "--html", place / "more.html")
    assert "9 runs, 2 failed, 3 not run yet" in (place / "more.html").read_text()


def test_what_has_begun(place: Path) -> None:
    """A third seed, of which one run was interrupted: its share is shown."""
    store = place / "r.jsonl"
    more = place / "begun.yaml"
    more.write_text((place / "mine.yaml").read_text().replace("name: tiny", "name: more").replace("- 1\n", "- 7\n"))
    runs = folder_of_runs(store)
    jobs = study_from_file(more).jobs({})
    job = next(job for job in jobs if job.spec["method"] == "layernorm" and "seed" in job.spec)
    run = RunFolder(run_folder(runs, config_of(job)))
    assert job_progress(job, runs) is None
    run.folder.mkdir()
    run.write_config(config_of(job))
    assert job_progress(job, runs) == 0.0
    tiny.lines(
        run.log_file, [{"step": 3, "seconds": 20, "seconds_left": 60}, {"step": 6, "seconds": 30, "seconds_left": 10}]
    )
    with open(run.log_file, "a") as file:
        file.write('{"step": 7, "sec')
    assert job_progress(job, runs) == 0.75
    facts = json.loads(deltune("status", more, "--store", store, "--json").stdout)["more"]
    assert facts["begun"] == {job.name: 0.75}
    assert facts["jobs"] == facts["done"] + 1 + facts["waiting"] + len(facts["failed"])
    assert "begun, 75% done: " in deltune("status", more, "--store", store).stdout
    shutil.rmtree(run.folder)


def test_only_some_cells(place: Path) -> None:
    whole = study_from_file(place / "mine.yaml")
    (some,) = select_cells([whole], ["method=low*", "seed=1"])
    assert [planned.cell["method"] for planned in some.plan_cells({})] == ["low rank"]
    assert len(whole.plan_cells({})) == 6
    (either,) = select_cells([whole], ["method=low*", "method=norms", "seed=1"])
    assert [planned.cell["method"] for planned in either.plan_cells({})] == ["norms", "low rank"]
    with pytest.raises(DeltuneError, match="Did you mean 'method'"):
        select_cells([whole], ["methods=x"])
    with pytest.raises(DeltuneError, match="Did you mean 'norms'"):
        select_cells([whole], ["method=nroms"])
    assert "no folder" in deltune("run", place / "mine.yaml", "--data-root", place / "nowhere", code=2).stderr
    assert "unknown axis" in deltune("run", place / "mine.yaml", "--only", "methods=x", code=2).stderr


def test_rows_of_several_studies(place: Path) -> None:
    """Each pattern is one of any study; studies without such a cell are left out, as those without floors are."""
    whole = study_from_file(place / "mine.yaml")
    floors = replace(whole, name="floors", plan_cells=lambda _: [PlannedCell({"floor": "head", "seed": 0}, None)])
    (kept,) = select_cells([whole, floors], ["floor=head", "floor=h*"])
    assert kept.name == "floors" and len(kept.plan_cells({})) == 1
    assert [one.name for one in select_cells([whole, floors], ["seed=0"])] == ["tiny", "floors"]
    with pytest.raises(DeltuneError, match="unknown floor 'probe' in these studies"):
        select_cells([whole, floors], ["floor=head", "floor=probe"])


def test_a_report_on_some_cells(place: Path) -> None:
    words = ("mine.yaml", "--store", place / "r.jsonl", "--only", "method=norms", "--only", "method=low*")
    output = deltune("report", place / words[0], *words[1:]).stdout
    assert "norms" in output and "low rank" in output and "impossible" not in output
    facts = json.loads(deltune("status", place / words[0], *words[1:], "--json").stdout)["tiny"]
    assert facts["jobs"] == 4 and not facts["failed"]


def test_nothing_to_run_is_an_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each axis has the label, but no cell has both: a study whose grid is not full."""
    assert "unknown seed" in deltune("run", place / "mine.yaml", "--only", "seed=7", code=2).stderr
    whole = study_from_file(place / "mine.yaml")
    planned = [p for p in whole.plan_cells({}) if (p.cell["method"] == "norms") == (str(p.cell["seed"]) == "0")]
    monkeypatch.setitem(ALL_STUDIES, "partial", lambda setup: replace(whole, plan_cells=lambda records: planned))
    words = ("run", "partial", "--only", "method=norms", "--only", "seed=1")
    assert "no cell has method=norms and seed=1 at once" in deltune(*words, code=2).stderr


def test_what_is_not_there_is_told(place: Path, tmp_path: Path) -> None:
    assert "Did you mean 'ln/nlu'" in deltune("run", "ln/nlo", code=2).stderr
    (tmp_path / "x.yaml").write_text("name: x\nmodels: minilm\n")
    assert "tasks is missing" in deltune("run", tmp_path / "x.yaml", code=2).stderr
    for command in ("status", "report"):
        message = deltune(command, place / "mine.yaml", "--store", tmp_path / "mistyped.jsonl", code=2).stderr
        assert "there are no results" in message and not list(tmp_path.glob("mistyped*"))
    tiny.lines(tmp_path / "no.jsonl", [{"a": 1}] * 100)
    assert "damaged" in deltune("status", place / "mine.yaml", "--store", tmp_path / "no.jsonl", code=2).stderr
