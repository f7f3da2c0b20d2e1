"""A study's outcomes as a section of a report: its findings, tables, figures, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import error_summary
from ..filesystem import explain_write_errors, write_text
from .claims.claims import Claim
from .claims.verdicts import Finding, findings
from .engine.outcomes import Outcome
from .engine.store import JobRecord
from .report.figure_spec import Figure, Table, names
from .report.page import Section
from .report.plots import Picture, draw, save
from .report.table_formats import csv, latex, markdown, plain
from .report.tables import Grid, grid
from .study import Study


@dataclass(frozen=True)
class Said:
    """A finding as a page shows it."""

    claim: str
    source: str
    verdict: str
    effect: float | None
    low: float | None
    high: float | None
    p: float | None
    note: str


def section(study: Study, rows: dict[str, JobRecord], claims: Sequence[Claim] = (), paper: bool = False) -> Section:
    """A study with what is done of it. paper: the paper's own numbers stand beside ours."""
    outcomes = study.outcomes(rows)
    tables = [view if paper else replace(view, paper={}) for view in study.views if isinstance(view, Table)]
    figures = [view for view in study.views if isinstance(view, Figure)]
    found = findings(claims, outcomes, _metric(study, outcomes), study.lower) if claims else []
    return Section(
        study.name,
        "\n\n".join(text for text in (study.asks, study.notes) if text),
        tuple(grid(view, outcomes) for view in tables),
        tuple(draw(view, outcomes) for view in figures),
        tuple(said(finding) for finding in found),
        tuple(outcomes),
        tuple(_missing(outcomes)),
    )


def said(finding: Finding) -> Said:
    """A finding in plain fields."""
    low, high = finding.interval or (None, None)
    note = "; ".join(text for text in (finding.note, finding.unit and f"in {finding.unit}") if text)
    claim = finding.claim
    return Said(claim.text, claim.source, finding.verdict, finding.effect, low, high, finding.p_adjusted, note)


def _metric(study: Study, outcomes: Sequence[Outcome]) -> str | dict[str, str]:
    """The score that counts; of several that of each task, the first that its outcomes have."""
    wanted = names(study.metric)
    if len(wanted) == 1:
        return wanted[0]
    found: dict[str, str] = {}
    for outcome in outcomes:
        task = str(outcome.cell.get("target", outcome.cell.get("task")))
        for name in wanted:
            if name in outcome.scores:
                found.setdefault(task, name)
                break
    return found


def _missing(outcomes: Sequence[Outcome]) -> list[str]:
    """What was planned and is not there, by its reason."""
    reasons: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            reasons.setdefault(error_summary(outcome.error), []).append(outcome)
    return [
        f"{len(several)} of {len(outcomes)}: {reason} (such as "
        f"{', '.join(f'{axis} {label}' for axis, label in several[0].cell.items())})"
        for reason, several in reasons.items()
    ]


def as_markdown(part: Section) -> str:
    """Findings, tables and what is missing, as Markdown."""
    lines = [f"## {plain(part.title)}", "", *(plain(text) + "\n" for text in part.text.split("\n\n"))]
    for table in part.grids:
        lines += [markdown(table), ""]
    if part.findings:
        lines += ["| claim | verdict | effect | interval | p |", "|---|---|---|---|---|"]
        lines += [_line(finding) for finding in part.findings] + [""]
    lines += [f"- not there: {plain(text)}" for text in part.missing]
    return "\n".join(lines).rstrip() + "\n"


def _line(finding: object) -> str:
    assert isinstance(finding, Said)
    effect = "" if finding.effect is None else f"{finding.effect:+.2f}"
    interval = "" if finding.low is None or finding.high is None else f"{finding.low:+.2f} … {finding.high:+.2f}"
    p = "" if finding.p is None else f"{finding.p:.3f}"
    verdict = f"**{finding.verdict}**" + (f" ({plain(finding.note)})" if finding.note else "")
    return f"| {plain(finding.claim)} ({plain(finding.source)}) | {verdict} | {effect} | {interval} | {p} |"


def files(part: Section, folder: Path) -> list[Path]:
    """Write a section's tables (Markdown, LaTeX, CSV) and figures (PNG, SVG, PDF) into a folder."""
    stem = part.title.replace("/", "-")
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        found = [folder / f"{stem}.md"]
        write_text(found[0], as_markdown(part))
        for i, table in enumerate(part.grids, 1):
            found += _table(table, folder / f"{stem}-table{i}")
        for i, picture in enumerate(part.figures, 1):
            found += _figure(picture, folder / f"{stem}-figure{i}")
    return found


def _table(table: Grid, stem: Path) -> list[Path]:
    ways = {".tex": latex, ".csv": csv}
    for ending, way in ways.items():
        write_text(stem.with_name(stem.name + ending), way(table))
    return [stem.with_name(stem.name + ending) for ending in ways]


def _figure(picture: Picture, stem: Path) -> list[Path]:
    return save(picture.figure, stem)
