"""`deltune study`: run the studies of the papers or of a file, show their progress, and report on them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DeltuneError, error_from_problems, error_summary, unknown_name
from ..filesystem import user_path
from .output import Json, Quiet, console, log_to_stderr

if TYPE_CHECKING:
    from ..studies.engine.store import JobRecord
    from ..studies.study import Study

app = typer.Typer(help="Run the studies of the papers, or one's own, and report.", no_args_is_help=True)

Names = Annotated[list[str], typer.Argument(metavar="STUDY...", help="ln/nlu, uv/insertion, …, or a STUDY.yaml.")]
Scale = Annotated[str, typer.Option(help="paper: its models, data and protocol; small: two cores suffice.")]
DataRoot = Annotated[Path | None, typer.Option(help="Folder with the folders of known tasks.")]
ModelRoot = Annotated[Path | None, typer.Option(help="Folder of small models [models beside the data root].")]
Store = Annotated[Path, typer.Option(help="File of results; the runs are in a folder beside it.")]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Repeatable AXIS=LABEL: only such cells (* as a wild card); of one axis, any of its labels."),
]


def studies(
    names: list[str], scale: str, data_root: Path | None, model_root: Path | None, only: list[str] | None = None
) -> list[Study]:
    """Make the studies of names or files.

    Args:
        names: Names of studies, or YAML files.
        scale: "paper" or "small".
        data_root: The folder with the folders of known tasks.
        model_root: The folder of small models.
        only: AXIS=LABEL each; only such cells are kept.

    Raises:
        DeltuneError: A folder or a study does not exist, or a file is wrong.
    """
    from ..studies.papers.registry import STUDIES
    from ..studies.scales import StudySetup
    from ..studies.study import select_cells, study_from_file

    for root in (data_root, model_root):
        if root is not None and not user_path(root, "folder").is_dir():
            raise DeltuneError(f"there is no folder {root}")
    setup = StudySetup(scale, *(None if root is None else str(root) for root in (data_root, model_root)))
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    problems = [unknown_name("study", name, STUDIES) for name in names if name not in STUDIES and name not in files]
    if problems:
        raise error_from_problems("these studies do not exist", problems)
    requested = [study_from_file(name, data_root) if name in files else STUDIES[name](setup) for name in names]
    selected = [select_cells(study, only or []) for study in requested]
    if not any(study.plan_cells({}) for study in selected):
        raise DeltuneError(
            f"no cell has {' and '.join(only or [])} at once, so there is nothing to run; leave one of them out, or "
            "see the cells that there are: deltune study status"
        )
    return selected


def _rows(store: Path) -> dict[str, JobRecord]:
    """Return the results of a store, by the names of the jobs.

    Raises:
        DeltuneError: There is no such store; none is made.
    """
    from ..studies.engine.store import ResultStore

    if not user_path(store, "--store").exists():
        raise DeltuneError(f"there are no results {str(store)!r}; `deltune study run … --store {store}` makes them")
    with ResultStore(store, read_only=True) as results:
        return {row.name: row for row in results.records()}


@app.command("list")
def listed(as_json: Json = False) -> None:
    """List the papers' studies, and what each of them asks."""
    from ..studies.papers.registry import STUDIES
    from ..studies.scales import StudySetup

    facts = {name: make(StudySetup("paper")).question for name, make in STUDIES.items()}
    console.print_json(data=facts) if as_json else console.print(
        "\n".join(f"{n:18s} {text}" for n, text in facts.items())
    )


@app.command()
def run(
    names: Names,
    store: Store = Path("results.sqlite"),
    scale: Scale = "small",
    data_root: DataRoot = None,
    model_root: ModelRoot = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with its share of the cores.")] = 1,
    engine: Annotated[str, typer.Option(help="local, or ray: a cluster.")] = "local",
    only: Only = None,
    retry: Annotated[bool, typer.Option("--retry", help="What failed before is tried again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would run and how long.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run what is not done yet; interrupted or killed, the same command goes on where it was.

    The exit code is 1 if something failed.
    """
    from ..studies.engine import scheduler as engines
    from ..studies.engine.store import ResultStore
    from ..training.progress import ProgressDisplay

    if engine not in ("local", "ray"):
        raise DeltuneError(unknown_name("engine", engine, ("local", "ray")))
    requested = studies(names, scale, data_root, model_root, only)
    if dry_run:
        console.print(_outlook(requested, _rows(store) if user_path(store, "--store").exists() else {}, workers))
        return
    with log_to_stderr(quiet), ResultStore(store) as results:
        pool = _worker_pool(engine, workers, results.runs)
        scheduler = engines.Scheduler(
            lambda rows: [w for study in requested for w in study.jobs(rows)], results, pool, retry
        )
        try:
            with ProgressDisplay(not quiet) as bar:
                scheduler.run(bar)
        except KeyboardInterrupt:
            print("stopped; run the same command again and it goes on where it was", file=sys.stderr)
            raise typer.Exit(130) from None
    failed = (
        f"; {len(scheduler.failed)} of them failed (deltune study status tells which and why)"
        if scheduler.failed
        else ""
    )
    console.print(f"{scheduler.done} run, {scheduler.reused} were there{failed}; results in {store}")
    if scheduler.failed:
        raise typer.Exit(1)


def _worker_pool(engine: str, workers: int, runs: Path) -> Any:
    if engine == "ray":
        from ..studies.engine.workers import RayPool

        return RayPool(workers, runs)
    from ..studies.engine.workers import LocalPool

    return LocalPool(workers, runs)


def _outlook(studies: list[Study], rows: dict[str, JobRecord], workers: int) -> str:
    """Describe what would run, and how long it would take judging by jobs of the same kind, model and task."""
    from ..studies.engine.jobs import topological_order

    lines = []
    for study in studies:
        jobs = topological_order(study.jobs(rows))
        left = [job for job in jobs if job.name not in rows]
        seconds_of: dict[tuple[Any, ...], list[float]] = {}
        for row in rows.values():
            seconds_of.setdefault(_similarity_key(row.kind, row.spec), []).append(row.seconds)
        similar = [
            seconds_of[_similarity_key(w.kind, w.spec)] for w in left if _similarity_key(w.kind, w.spec) in seconds_of
        ]
        minutes = sum(sum(seconds) / len(seconds) for seconds in similar) / 60 / workers
        rest = len(left) - len(similar)
        estimate = [f"about {minutes:.1f} minutes"] if similar or not rest else []
        estimate += [f"how long {rest} of them take is not known: nothing like them was run yet"] if rest else []
        done = len(jobs) - len(left)
        lines.append(f"{study.name}: {len(jobs)} jobs, {done} done; {len(left)} left, {' and '.join(estimate)}")
    return "\n".join(lines)


def _similarity_key(kind: str, spec: Any) -> tuple[Any, ...]:
    return (kind, *(str(spec.get(field)) for field in ("model", "task", "data", "max_train_rows", "epochs")))


@app.command()
def status(
    names: Names,
    store: Store = Path("results.sqlite"),
    scale: Scale = "small",
    data_root: DataRoot = None,
    model_root: ModelRoot = None,
    only: Only = None,
    as_json: Json = False,
) -> None:
    """Show how far studies are: what is done, what failed and why, what is left."""
    from ..studies.engine.jobs import topological_order
    from ..studies.report.aggregate import cell_label

    requested = studies(names, scale, data_root, model_root, only)
    rows = _rows(store)
    facts: dict[str, dict[str, Any]] = {}
    cells: dict[str, dict[str, str]] = {}
    for study in requested:
        jobs = topological_order(study.jobs(rows))
        failed = {j.name: str(rows[j.name].error) for j in jobs if j.name in rows and rows[j.name].error is not None}
        cells[study.name] = {
            want.job.name: cell_label(want.cell) for want in study.plan_cells(rows) if want.job is not None
        }
        left = sum(job.name not in rows for job in jobs)
        facts[study.name] = {"jobs": len(jobs), "left": left, "failed": failed}
    if as_json:
        console.print_json(data=facts)
        return
    for name, fact in facts.items():
        console.print(f"{name}: {fact['jobs']} jobs, {fact['left']} left, {len(fact['failed'])} failed")
        for job, error in fact["failed"].items():
            console.print(f"  {cells[name].get(job, job)}: {error_summary(error)}")


@app.command()
def report(
    names: Names,
    store: Store = Path("results.sqlite"),
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
    from ..filesystem import explain_write_errors, write_text
    from ..studies import sections
    from ..studies.papers.registry import paper_statements
    from ..studies.report import page

    to = None if to is None else user_path(to, "--to")
    requested = studies(names, scale, data_root, model_root, only)
    rows = _rows(store)
    parts = [
        sections.build_section(study, rows, paper_statements(study.name), paper, scale == "small")
        for study in requested
    ]
    if html is not None:
        html = user_path(html, "--html")
        with explain_write_errors(html):
            html.parent.mkdir(parents=True, exist_ok=True)
            write_text(html, page.render_page(parts))
        print(f"{len(parts)} stud{'y' if len(parts) == 1 else 'ies'} in {html}", file=sys.stderr)
    if to is not None:
        written = [path for part in parts for path in sections.write_section(part, to)]
        print(f"{len(written)} files in {to}", file=sys.stderr)
    if html is None and to is None:
        console.print("\n".join(sections.section_markdown(part) for part in parts))
