"""`deltune study`: run the studies of the papers or of a file, show their progress, and report on them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DeltuneError, counted, error_from_problems, error_summary, unknown_name
from ..files import user_path
from .output import Json, Quiet, Seed, console, log_to_stderr, resumable

if TYPE_CHECKING:
    from ..studies.jobs.pool import Scheduler
    from ..studies.jobs.store import JobRecord, ResultStore
    from ..studies.jobs.verification import Verification
    from ..studies.study import Study
    from ..train.progress import ProgressDisplay

app = typer.Typer(help="Run the studies of the papers, or one's own, and report.", no_args_is_help=True)

Names = Annotated[
    list[str], typer.Argument(metavar="STUDY...", help="ln/nlu, uv/insertion, …, all of these, or a STUDY.yaml.")
]
Scale = Annotated[str, typer.Option(help="paper: its models, data and protocol; small: two cores suffice.")]
DataRoot = Annotated[Path | None, typer.Option(help="Folder that holds the folders of known tasks.")]
ModelRoot = Annotated[Path | None, typer.Option(help="Folder of models [small scale: models beside the data root].")]
Store = Annotated[Path, typer.Option(help="File of results [the runs are in a folder beside it].")]
Stored = Annotated[Path, typer.Option(help="File of results [or a folder of exported ones].")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that do a job each.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each process; with another number results differ.")]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Only cells with this AXIS=LABEL; repeatable, * matches anything."),
]


def load_studies(
    names: list[str],
    scale: str,
    data_root: Path | None,
    model_root: Path | None,
    only: list[str] | None = None,
    runs: bool = False,
    precision: str | None = None,
    device_batch_size: int | None = None,
    launch: int = 1,
    sharding: str = "none",
) -> list[Study]:
    """Make the studies of names or files."""
    from ..studies.papers.registry import ALL_STUDIES, FIRST, STUDIES
    from ..studies.scales import StudySetup
    from ..studies.study import select_cells, study_from_file

    for root in (data_root, model_root):
        if root is not None and not user_path(root, "folder").is_dir():
            raise DeltuneError(f"there is no folder {root}")
    data, models = (None if root is None else str(root) for root in (data_root, model_root))
    setup = StudySetup(scale, data, models, runs, precision, device_batch_size, launch, sharding)
    names = list(dict.fromkeys(one for name in names for one in ((*FIRST, *STUDIES) if name == "all" else (name,))))
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    problems = [
        unknown_name("study", name, (*ALL_STUDIES, "all"))
        for name in names
        if name not in ALL_STUDIES and name not in files
    ]
    if problems:
        raise error_from_problems("these studies do not exist", problems)
    requested = [study_from_file(name, data_root) if name in files else ALL_STUDIES[name](setup) for name in names]
    selected = select_cells(requested, only or [])
    if not selected:
        raise DeltuneError(
            f"no cell has {' and '.join(only or [])} at once, so there is nothing to run; leave one of them out "
            "(`deltune study show STUDY` lists the axes and their labels)"
        )
    return selected


def _rows(store: Path) -> dict[str, JobRecord]:
    """Return the results of a store or of a folder of exported results, by the names of the jobs."""
    from ..studies.jobs.store import ResultStore, read_results

    path = user_path(store, "--store")
    if not path.exists():
        raise DeltuneError(f"there are no results {str(store)!r}; `deltune study run … --store {store}` makes them")
    if path.is_dir():
        return {row.name: row for row in read_results(path)}
    with ResultStore(store, read_only=True) as results:
        return {row.name: row for row in results.records()}


@app.command("list")
def listed(as_json: Json = False) -> None:
    """List the studies, and what each of them asks."""
    from ..studies.own import OWN_QUESTIONS
    from ..studies.papers.questions import QUESTIONS

    questions = {**QUESTIONS, **OWN_QUESTIONS}
    if as_json:
        console.print_json(data=questions)
    else:
        console.print("\n".join(f"{name:18s} {text}" for name, text in questions.items()))


@app.command()
def show(
    names: Names,
    scale: Scale = "small",
    data_root: DataRoot = None,
    model_root: ModelRoot = None,
    only: Only = None,
    as_json: Json = False,
) -> None:
    """Show what studies consist of: their axes with the labels for --only, and their tables, figures and claims."""
    from ..studies.papers.registry import ALL_CLAIMS
    from ..studies.report.figure_spec import TableSpec, as_tuple

    requested = load_studies(names, scale, data_root, model_root, only)
    facts = [
        {
            "study": study.name,
            "question": study.question,
            "scale": scale,
            "axes": study.axes(),
            "cells": len(study.plan_cells({})),
            "jobs": len(study.jobs({})),
            "scores": list(as_tuple(study.metric)),
            "tables": [view.title for view in study.views if isinstance(view, TableSpec)],
            "figures": [view.title for view in study.views if not isinstance(view, TableSpec)],
            "claims": [claim.text for claim in ALL_CLAIMS.get(study.name, ())],
            "notes": study.notes,
        }
        for study in requested
    ]
    if as_json:
        console.print_json(data=facts)
    else:
        console.print("\n\n".join(map(_study_text, facts)))


def _study_text(facts: Mapping[str, Any]) -> str:
    """Describe a study in lines."""
    width = max(map(len, facts["axes"]), default=0)
    lines = [f"{facts['study']}, {facts['scale']} scale: {facts['question']}"]
    lines += ["axes and their labels, for --only AXIS=LABEL:"]
    lines += [f"  {axis:{width}s}  {', '.join(labels)}" for axis, labels in facts["axes"].items()]
    lines += [f"{counted(facts['cells'], 'cell')}, {counted(facts['jobs'], 'job')}"]
    if facts["jobs"] < facts["cells"]:
        lines[-1] += "; what the other cells run follows from the results of these"
    lines += [f"scores: {', '.join(facts['scores'])}" + " (the first that a task has)" * (len(facts["scores"]) > 1)]
    for part in ("tables", "figures", "claims"):
        lines += [f"{part}:", *(f"  {text}" for text in facts[part])] if facts[part] else []
    return "\n".join([*lines, *([facts["notes"]] if facts["notes"] else [])])


@app.command()
def run(
    names: Names,
    store: Store = Path("results.jsonl"),
    scale: Scale = "small",
    data_root: DataRoot = None,
    model_root: ModelRoot = None,
    workers: Workers = 1,
    threads: Threads = 1,
    devices: Annotated[int, typer.Option(min=0, help="Accelerators, divided among runs; sets --workers.")] = 0,
    device_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows at a time on a device; gradients accumulate up to batch_size [all].")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, or bf16 by autocast, with fp32 weights [as the study says].")
    ] = None,
    launch: Annotated[
        int | None, typer.Option(min=1, help="Train in that many processes, a device each [each run; 1].")
    ] = None,
    sharding: Annotated[
        str | None, typer.Option(metavar="none|fsdp", help="fsdp: each process has a share of the model.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Run on a Ray cluster.")] = False,
    only: Only = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run jobs again that failed before.")] = False,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder of exported results, a file for each study [--dry-run reads times from it]."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run and for how long; run nothing.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run what is not done yet, one study after the other; interrupted or killed, the same command goes on.

    The exit code is 1 if something failed.
    """
    from ..studies.jobs.store import ResultStore, write_results
    from ..train.progress import ProgressDisplay

    if precision not in (None, "fp32", "bf16"):
        raise DeltuneError(unknown_name("precision", str(precision), ("fp32", "bf16")))
    processes = launch or 1
    if sharding not in (None, "none", "fsdp"):
        raise DeltuneError(unknown_name("sharding", str(sharding), ("none", "fsdp")))
    if sharding == "fsdp" and processes == 1:
        raise DeltuneError("--sharding fsdp divides a model among processes: give --launch 2 or more")
    if devices % processes:
        raise DeltuneError(f"--devices {devices} is no multiple of --launch {processes}, the processes of each run")
    workers = devices // processes or workers
    requested = load_studies(
        names, scale, data_root, model_root, only, not dry_run, precision, device_batch_size, processes,
        sharding or "none",
    )  # fmt: skip
    if dry_run:
        rows = _rows(store) if user_path(store, "--store").exists() else {}
        timed = {**({} if results is None else _rows(results)), **rows}
        console.print(_outlook(requested, rows, timed, workers, scale))
        return
    if user_path(store, "--store").is_dir():
        raise DeltuneError(
            f"{store} is a folder; runs need a file. Exported results become one by "
            f"`deltune study import {store} --store results.jsonl`"
        )
    results = None if results is None else user_path(results, "--results")
    done, reused, failed = 0, 0, dict[str, None]()
    with log_to_stderr(quiet), ResultStore(store) as stored, ProgressDisplay(not quiet) as bar:
        for study in requested:
            with resumable("it"):
                scheduler = run_jobs(study.jobs, stored, workers, threads, ray, retry, bar, processes if devices else 0)
            done, reused = done + scheduler.done, reused + scheduler.reused
            failed |= dict.fromkeys(scheduler.failed)
            if results is not None:
                dated = {record.name: record for record in stored.records()}  # a record just made has no day yet
                write_results(results, study.name, _records_of(study, dated))
    note = f"; {len(failed)} of them failed (deltune study status tells which and why)" if failed else ""
    console.print(f"{done} run, {reused} were there{note}; results in {store}")
    if failed:
        raise typer.Exit(1)


def run_jobs(
    plan: Any, stored: ResultStore, workers: int, threads: int, ray: bool, retry: bool, bar: ProgressDisplay,
    devices: int = 0,
) -> Scheduler:  # fmt: skip
    """Do the jobs of a plan that are not done yet."""
    from ..studies.jobs import pool as pools
    from ..studies.jobs.pool import Scheduler

    pool = pools.RayPool if ray else pools.LocalPool
    scheduler = Scheduler(plan, stored, pool(workers, stored.runs, threads, devices), retry)
    scheduler.run(bar)
    return scheduler


def _records_of(study: Study, rows: Mapping[str, JobRecord]) -> list[JobRecord]:
    """Return the records of all jobs of a study that are done, those included that other jobs require."""
    from ..studies.jobs.job import topological_order

    return [rows[job.name] for job in topological_order(study.jobs(rows)) if job.name in rows]


def _outlook(
    studies: list[Study],
    rows: Mapping[str, JobRecord],
    timed: Mapping[str, JobRecord],
    workers: int,
    scale: str = "small",
) -> str:
    """Describe what would run, how long it would take judging by jobs of the same kind, model and task, and its power.

    At the papers' scale it also says, by computation, what the hub is asked for and what devices need. A job
    of several studies counts for the first of them. Cells whose jobs follow from results are counted apart.
    """
    from ..studies.jobs.job import Job, topological_order
    from ..studies.papers.paper_scale import describe_needs
    from ..studies.papers.registry import ALL_CLAIMS, CLAIMS
    from ..studies.report.page import power_lines

    seconds_of: dict[tuple[Any, ...], list[float]] = {}
    for row in timed.values():
        seconds_of.setdefault(_similarity_key(row.kind, row.spec), []).append(row.seconds)
    lines, known, jobs_in_all = [], set(rows), dict[Job, None]()

    def estimate(jobs: Iterable[Job], left: list[Job]) -> str:
        similar = [seconds_of[key] for job in left if (key := _similarity_key(job.kind, job.spec)) in seconds_of]
        hours, unknown = sum(map(fmean, similar)) / 3600 / workers, len(left) - len(similar)
        time = f"about {hours:.1f} hours" if hours >= 1 else f"about {60 * hours:.1f} minutes"
        parts = [time] if unknown < len(left) or not left else []
        if unknown:
            where = "nothing like them is in the store or in --results FOLDER"
            parts.append(f"how long {unknown} of them take is not known: {where}")
        names = [job.name for job in jobs]
        done = sum(name in rows for name in names)
        return f"{len(names)} jobs, {done} done; {len(left)} left, {' and '.join(parts)}"

    for study in studies:
        jobs = topological_order(study.jobs(rows))
        left = [job for job in jobs if job.name not in known]
        known |= {job.name for job in left}
        jobs_in_all |= dict.fromkeys(jobs)
        shared = sum(job.name not in rows for job in jobs) - len(left)
        above = f"; {shared} more are counted above" if shared else ""
        later = sum(planned.job is None and not planned.lost for planned in study.plan_cells(rows))
        follow = f"; jobs of {counted(later, 'more cell')} follow from the results of these" if later else ""
        lines.append(f"{study.name}: {estimate(jobs, left)}{above}{follow}")
        lines += describe_needs(study) if scale == "paper" and study.name in CLAIMS else []
        lines += power_lines(study, timed, ALL_CLAIMS.get(study.name, ()))
    if len(studies) > 1:
        lines.append(f"in all: {estimate(jobs_in_all, [job for job in jobs_in_all if job.name not in rows])}")
    return "\n".join(lines)


def _similarity_key(kind: str, spec: Any) -> tuple[Any, ...]:
    return (kind, *(str(spec.get(field)) for field in ("model", "task", "data", "max_train_rows", "epochs")))


@app.command()
def export(
    names: Names,
    results: Annotated[Path, typer.Option(help="Folder of exported results, a file for each study.")] = Path("results"),
    store: Stored = Path("results.jsonl"),
    scale: Scale = "small",
) -> None:
    """Write the results of studies as text, a line for each job, to be kept in a repository."""
    from ..studies.jobs.store import write_results

    folder, rows, requested, written = (
        user_path(results, "--results"), _rows(store), load_studies(names, scale, None, None), 0
    )  # fmt: skip
    for study in requested:
        if records := _records_of(study, rows):
            path, written = write_results(folder, study.name, records), written + 1
            print(f"{len(records)} jobs in {path}", file=sys.stderr)
    console.print(f"{written} of {len(requested)} studies have results; they are in {folder}")


@app.command("import")
def import_results(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of exported results.")],
    store: Store = Path("results.jsonl"),
) -> None:
    """Read exported results into a file of results, so that `deltune study run` goes on from them."""
    from ..studies.jobs.store import ResultStore, read_results

    folder = user_path(folder, "FOLDER")
    if not folder.is_dir():
        raise DeltuneError(f"there is no folder {folder}; `deltune study export … --results {folder}` makes it")
    records = read_results(folder)
    with ResultStore(store) as stored:
        fresh = [record for record in records if record.replaces(stored.get(record.name))]
        for record in fresh:
            stored.put(record)
    console.print(f"{len(fresh)} jobs are new in {store}, {len(records) - len(fresh)} were there")


@app.command()
def verify(
    names: Names,
    store: Stored = Path("results"),
    sample: Annotated[int, typer.Option(min=1, help="How many jobs are run again.")] = 10,
    seed: Seed = 0,
    scale: Scale = "small",
    data_root: DataRoot = None,
    model_root: ModelRoot = None,
    workers: Workers = 1,
    threads: Threads = 1,
    only: Only = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a sample of stored jobs again and compare the scores.

    On the same machine, versions and threads they must be equal. Elsewhere the loss of the first steps may differ
    by rounding alone, and so may the scores of at least half of the jobs. The exit code is 1 if they differ by more.
    """
    import tempfile

    from ..studies.jobs.store import ResultStore
    from ..studies.jobs.verification import compare, repeats, sample_jobs
    from ..train.progress import ProgressDisplay

    rows = _rows(store)
    load_studies(names, scale, data_root, model_root, only, runs=True)  # models and data are there
    requested = load_studies(names, scale, data_root, model_root, only)
    jobs = sample_jobs((job for study in requested for job in study.jobs(rows)), rows, sample, seed)
    if not jobs:
        raise DeltuneError(f"{store} has no scores of these studies; `deltune study status` says what was run")
    with (
        tempfile.TemporaryDirectory(prefix="deltune-") as folder,
        log_to_stderr(quiet),
        ResultStore(Path(folder) / "repeated.jsonl") as stored,
        ProgressDisplay(not quiet) as bar,
    ):
        repeated = run_jobs(lambda _: jobs, stored, workers, threads, False, False, bar).records
    verifications = compare(jobs, rows, repeated)
    if as_json:
        console.print_json(data=[_verification_facts(one) for one in verifications])
    else:
        console.print("\n".join(_verification_text(one) for one in verifications))
        counts = Counter(one.verdict for one in verifications)
        console.print("; ".join(f"{count} of {len(verifications)} {verdict}" for verdict, count in counts.items()))
    if not repeats(verifications):
        raise typer.Exit(1)


def _verification_facts(one: Verification) -> dict[str, Any]:
    """Return a verification as JSON values."""
    scores = {
        c.name: {"stored": c.stored, "now": c.now, "allowed": None if one.equal else c.allowed}
        for c in one.comparisons
    }  # fmt: skip
    facts = {"job": one.job.name, "label": one.job.label, "verdict": one.verdict, "scores": scores}
    return {**facts, "changes": {name: list(pair) for name, pair in one.changes.items()}, "error": one.error}


def _verification_text(one: Verification) -> str:
    """Describe a verification in a line, and below it what differs."""
    lines = [f"{one.verdict}: {one.job.label}"]
    if one.equal:
        return lines[0]
    if one.error is not None:
        return f"{lines[0]}\n  {error_summary(one.error)}"
    if one.data_changed:
        lines.append("  the data is not what it was")
    lines += [
        f"  {c.name}: {c.stored:.6g} stored, {c.now:.6g} now, a difference of {c.allowed:.3g} is allowed"
        for c in (*one.comparisons, *([one.first_loss] if one.first_loss is not None else []))
        if c.now is not None and c.now != c.stored
    ]
    if one.changes:
        lines.append(f"  other than it was: {', '.join(one.changes)}")
    elif not one.data_changed:
        lines.append("  although machine, versions and threads are the same")
    return "\n".join(lines)


@app.command()
def status(
    names: Names,
    store: Stored = Path("results.jsonl"),
    scale: Scale = "small",
    data_root: DataRoot = None,
    model_root: ModelRoot = None,
    only: Only = None,
    as_json: Json = False,
) -> None:
    """Show how far studies are: what is done, what has begun, what is waiting, what failed and why."""
    from ..studies.jobs.job import topological_order
    from ..studies.jobs.pool import job_progress
    from ..studies.jobs.store import ResultStore, folder_of_runs

    store = user_path(store, "--store")
    requested = load_studies(names, scale, data_root, model_root, only)
    rows, runs, claimed = _rows(store), folder_of_runs(store), set[str]()
    if not store.is_dir():
        with ResultStore(store, read_only=True) as results:
            claimed = results.claimed_jobs()
    facts: dict[str, dict[str, Any]] = {}
    labels: dict[str, str] = {}
    for study in requested:
        jobs = topological_order(study.jobs(rows))
        labels |= {job.name: job.label for job in jobs}
        recorded = [rows[job.name] for job in jobs if job.name in rows]
        failed = {record.name: record.error for record in recorded if record.error is not None}
        progress = {job.name: job_progress(job, runs) for job in jobs if job.name not in rows}
        begun = {name: round(one or 0.0, 3) for name, one in progress.items() if one is not None or name in claimed}
        facts[study.name] = {
            "jobs": len(jobs), "done": len(recorded) - len(failed), "begun": begun,
            "waiting": len(progress) - len(begun), "failed": failed,
        }  # fmt: skip
    if as_json:
        console.print_json(data=facts)
        return
    for name, fact in facts.items():
        console.print(
            f"{name}: {counted(fact['jobs'], 'job')}: {fact['done']} done, {len(fact['begun'])} begun, "
            f"{fact['waiting']} waiting, {len(fact['failed'])} failed"
        )
        for job, share in fact["begun"].items():
            console.print(f"  begun, {share:.0%} done: {labels[job]}")
        for job, error in fact["failed"].items():
            console.print(f"  failed: {labels[job]}: {error_summary(error)}")


@app.command()
def report(
    names: Names,
    store: Stored = Path("results.jsonl"),
    scale: Scale = "small",
    data_root: DataRoot = None,
    model_root: ModelRoot = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page there.")] = None,
    to: Annotated[
        Path | None, typer.Option(help="A folder for tables (md, tex, csv) and figures (png, svg, pdf).")
    ] = None,
    only: Only = None,
    paper: Annotated[bool, typer.Option("--paper", help="The papers' own numbers beside ours.")] = False,
) -> None:
    """Print tables, figures and findings of studies, or write them as files or as one page."""
    from ..files import explain_write_errors, write_text
    from ..studies.papers.registry import ALL_STUDIES, paper_statements
    from ..studies.report import page

    to = None if to is None else user_path(to, "--to")
    order = list(ALL_STUDIES)  # the papers' come first, files of studies last
    requested = load_studies(names, scale, data_root, model_root, only)
    requested.sort(key=lambda study: order.index(study.name) if study.name in order else len(order))
    rows = _rows(store)
    parts = [
        page.build_section(study, rows, paper_statements(study.name), paper=paper, small=scale == "small")
        for study in requested
    ]
    if html is not None:
        html = user_path(html, "--html")
        with explain_write_errors(html):
            html.parent.mkdir(parents=True, exist_ok=True)
            write_text(html, page.render_page(parts))
        print(f"{len(parts)} stud{'y' if len(parts) == 1 else 'ies'} in {html}", file=sys.stderr)
    if to is not None:
        written = [path for part in parts for path in page.write_section(part, to)]
        print(f"{len(written)} files in {to}", file=sys.stderr)
    if paper and not any(table.has_published for part in parts for table in part.tables):
        reason = "models and tasks of small scale are not the paper's" if scale == "small" else "it prints none of them"
        print(
            f"no table has the paper's numbers beside ours, because {reason}; the table of claims has what it prints",
            file=sys.stderr,
        )
    if html is None and to is None:
        console.print("\n".join(page.section_markdown(part) for part in parts))
