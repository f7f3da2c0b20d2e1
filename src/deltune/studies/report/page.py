"""The report of studies as one HTML page with findings, sortable tables, figures and all runs; it loads nothing."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from ...errors import counted
from ...train import render as render_template
from ..claims.decisions import Finding, Paper, PrintedFinding
from ..jobs.job import Outcome
from ..jobs.store import JobRecord
from .aggregate import SEED
from .charts import DrawnFigure, render
from .findings import ClaimRow, claim_rows, has_no_result
from .method_labels import method_labels
from .provenance import CITATION, StudyRuns, commits, provenance, setup
from .tables import Row, Table, TableCell, format_percent, header_label, note_mark, table_legend
from .training_facts import training_facts

LARGE_SVG = 100_000  # characters of SVG from which a PNG may be the smaller
MIN_SHRINK = 0.75  # a figure is shrunk to no less of its own width (letters of 7 points); below that its box scrolls


def _figure_context(figure: DrawnFigure, prefix: str) -> dict[str, Any]:
    """Return what the template needs of a figure. `prefix` makes its ids differ from other figures'."""
    width, height = (96 * inches for inches in figure.figure.get_size_inches())
    style = f"min-width:{MIN_SHRINK * width:.0f}px;max-width:{1.25 * width:.0f}px"
    svg = _trim_svg(figure.svg(), prefix)
    image = Markup('<svg {} style="{}"><title>{}</title>{}').format(_view_box(svg), style, figure.title, _svg_body(svg))
    if len(svg) > LARGE_SVG:
        data = base64.b64encode(render(figure.figure, "png")).decode()
        if len(data) < len(svg):
            image = Markup(
                '<img src="data:image/png;base64,{}" alt="{}" style="{}" width="{:.0f}" height="{:.0f}">'
            ).format(data, figure.text, style, width, height)
    return {
        "title": figure.title,
        "text": figure.text,
        "notes": figure.notes,
        "caption": figure.caption,
        "image": image,
        "wide": width > 560,
    }


def _trim_svg(svg: str, prefix: str) -> str:
    """Return one <svg> element for HTML: no prolog, comments, metadata or name spaces; ids in use get the prefix."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"\s+xmlns(:\w+)?=\"[^\"]*\"", "", svg).replace("xlink:href", "href")
    used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", svg))
    svg = re.sub(r"\s+id=\"([^\"]*)\"", lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r"\bhref=\"#", f'href="#{prefix}', svg).replace("url(#", f"url(#{prefix}")
    return re.sub(r">\s+<", "><", svg)


def _view_box(svg: str) -> Markup:
    """Return the view box, the only attribute of the element that is kept, and its role."""
    view_box = re.search(r'viewBox="([^"]*)"', svg)
    return Markup('viewBox="{}" role="img"').format(view_box.group(1) if view_box else "")


def _svg_body(svg: str) -> Markup:
    """Return the contents of the element: matplotlib's own marks, in which every word is escaped or drawn."""
    return Markup(svg[svg.index(">") + 1 :])


MAX_SCORES = 5  # columns; a run's other scores are shown with its spec
SPARKLINE_POINTS = 40  # one for every 2.4 pixels
SPARKLINE_WIDTH, SPARKLINE_HEIGHT = 192, 48  # units of the view box


def _runs_context(outcomes: Sequence[Outcome], names: Mapping[str, str], repetition: str) -> dict[str, Any]:
    """Return what the template needs of the runs: axes, names of scores, what all specs share as YAML, and rows."""
    axes = list(dict.fromkeys(axis for outcome in outcomes for axis in outcome.cell))
    axes = [axis for axis in axes if axis != SEED] + [SEED] * (SEED in axes)
    axes.sort(key=lambda axis: axis != "method")  # what a reader looks for comes first, and stays in sight
    scores = list(dict.fromkeys(name for outcome in outcomes for name in outcome.scores))[:MAX_SCORES]
    specs = [_relative_paths(_to_json_values(outcome.spec)) for outcome in outcomes if outcome.spec]
    shared = {
        key: value
        for key, value in (specs[0] if len(specs) > 1 else {}).items()
        if all(key in spec and spec[key] == value for spec in specs)
    }
    return {
        "axes": [repetition if axis == SEED else axis for axis in axes],
        "scores": [names.get(name, name).replace("_", " ") for name in scores],
        "shared": _yaml(shared) if shared else "",
        "runs": [_run_context(outcome, axes, scores, shared, names) for outcome in outcomes],
        "any_failed": any(outcome.error for outcome in outcomes),
    }


def _run_context(
    outcome: Outcome, axes: Sequence[str], scores: Sequence[str], shared: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    own_spec = {
        key: value for key, value in _relative_paths(_to_json_values(outcome.spec)).items() if key not in shared
    }
    more = {name: value for name, value in outcome.scores.items() if name not in scores}
    details = {**own_spec, **({"scores": _to_json_values(more)} if more else {})}
    size, percent = outcome.count.get("method"), outcome.count.get("percent")
    values = [outcome.scores.get(name) for name in scores]
    return {
        "labels": [names.get(label, label) for label in (str(outcome.cell.get(axis, "–")) for axis in axes)],
        "scores": [("" if value is None else repr(float(value)), _short_number(value)) for value in values],
        "spark": sparkline(outcome.curve),
        "parameters": ("", "–") if size is None else (str(size), f"{size:,} ({format_percent(float(percent or 0))} %)"),
        "seconds": f"{outcome.seconds:.1f}" if outcome.seconds else "",
        "spec": _yaml(details) if details else "",
        "error": outcome.error or "",
    }


def sparkline(curve: Sequence[Mapping[str, Any]], name: str = "loss") -> Markup | str:
    """Draw the curve of a number as a line without axes, with its ends in words; "–" for fewer than two points."""
    points = [
        (float(line["step"]), float(line[name]))
        for line in curve
        if isinstance(line.get(name), (int, float)) and "step" in line and math.isfinite(line[name])
    ]
    if len(points) < 2:
        return "–"
    description = (
        f"{name} from {points[0][1]:.3g} to {points[-1][1]:.3g}, steps {points[0][0]:.0f} to {points[-1][0]:.0f}"
    )
    sampled = (
        [points[round(i * (len(points) - 1) / (SPARKLINE_POINTS - 1))] for i in range(SPARKLINE_POINTS)]
        if len(points) > SPARKLINE_POINTS
        else points
    )
    left, right = sampled[0][0], sampled[-1][0]
    low, high = min(y for _, y in sampled), max(y for _, y in sampled)
    x_scale, y_scale = SPARKLINE_WIDTH / (right - left or 1), (SPARKLINE_HEIGHT - 4) / (high - low or 1)
    xy = " ".join(f"{round((x - left) * x_scale)},{round((high - y) * y_scale) + 2}" for x, y in sampled)
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<title>{}</title><polyline points="{}"/></svg>'
    ).format(SPARKLINE_WIDTH, SPARKLINE_HEIGHT, description, description, xy)


def _short_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def _to_json_values(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON values, whatever a spec was made of."""
    json_values: dict[str, Any] = json.loads(json.dumps(dict(value), default=str))
    return json_values


def _relative_paths(value: Any) -> Any:
    """Make the paths of a spec relative to the current folder, since the page is read on other machines."""
    if isinstance(value, dict):
        return {key: _relative_paths(item) for key, item in value.items()}
    if isinstance(value, str) and os.path.isabs(value) and os.path.exists(value):
        return os.path.relpath(value)
    return value


def _yaml(value: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=100).rstrip()


GLYPHS = {"holds": "✓", "fails": "≠", "undecided": "?", "untestable": "–"}
"""Class of a verdict -> a sign, so that it does not depend on colour alone."""


@dataclass(frozen=True)
class Section:
    """One study of a report.

    `missing` is what was planned and has no result, in words; `rerun` says which runs were repeated after results had
    been seen.
    """

    title: str
    text: str = ""
    tables: tuple[Table, ...] = ()
    figures: tuple[DrawnFigure, ...] = ()
    findings: tuple[Finding, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    missing: tuple[str, ...] = ()
    printed: tuple[PrintedFinding, ...] = ()
    choices: tuple[str, ...] = ()
    small: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    records: tuple[JobRecord, ...] = ()
    paper: Paper | None = None
    train_rows: Mapping[str, int] = field(default_factory=dict)
    repetition: str = "seed"
    rerun: str = ""

    @property
    def runs(self) -> StudyRuns:
        """Its runs, for sentences about their models, data and seeds."""
        return StudyRuns(self.outcomes, self.names, self.train_rows, self.repetition)

    @property
    def training(self) -> str:
        """Training rows and steps of its runs, in sentences."""
        return training_facts(self.outcomes, self.names, self.train_rows)

    @property
    def claim_rows(self) -> list[ClaimRow]:
        """The claims in words, each with the paper's number and ours."""
        return claim_rows(self.findings, self.printed, small=self.small)


def render_page(sections: Sequence[Section], title: str = "") -> str:
    """Render the page."""
    papers: dict[Paper | None, list[dict[str, Any]]] = {}
    for i, section in enumerate(sections):
        papers.setdefault(section.paper, []).append(_study_context(section, i))
    parts = [_paper_context(paper, studies, i) for i, (paper, studies) in enumerate(papers.items())]
    small = any(section.small for section in sections)
    return render_template(
        Path(__file__).with_name("study.html"),
        title=title or _title(sections, list(papers), small), parts=parts, small=small,
        summary=_runs_in_words(sections), in_words=findings_in_words(sections), n_studies=len(sections),
        about_papers=printed_in_words(sections),
        disagree=[
            (one.claim, study)
            for part in parts for study in part["studies"] for one in study["section"].printed if one.agrees is False
        ],
        unfinished=sum(outcome.error is not None for section in sections for outcome in section.outcomes),
        citation=CITATION,
        histories=list(dict.fromkeys(section.rerun for section in sections if section.rerun)),
        setup=setup(section.runs for section in sections),
        provenance=provenance(record for section in sections for record in section.records),
        commits=commits(record for section in sections for record in section.records),
    )  # fmt: skip


NUMBERS = {1: "a paper", 2: "two papers", 3: "three papers"}


def _title(sections: Sequence[Section], papers: Sequence[Paper | None], small: bool) -> str:
    if len(sections) == 1:
        return f"{sections[0].title}, at small scale" if small else sections[0].title
    if None in papers or len(papers) not in NUMBERS:
        return "deltune report"
    scale = "a reproduction in miniature" if small else "a reproduction at the papers' scale"
    return f"Parameter-efficient fine-tuning: {scale} of {NUMBERS[len(papers)]}"


def findings_in_words(sections: Sequence[Section]) -> str:
    """Return how many claims have which verdict, in sentences; empty without claims."""
    findings = [finding for section in sections for finding in section.findings]
    if not findings:
        return ""
    waiting = sum(has_no_result(finding) for finding in findings)
    held, not_held, undecided, not_testable = (
        sum(finding.verdict == verdict for finding in findings)
        for verdict in ("holds", "does not hold", "undecided", "not testable")
    )
    repeated = sum(bool(finding.claim.repeats) for finding in findings)
    small = any(section.small for section in sections)
    sized = sum(finding.resolution is not None and finding.verdict == "undecided" for finding in findings)
    text = (
        f"Of {counted(len(findings), 'claim')}"
        + (f", {repeated} of which test{'s' * (repeated == 1)} a sentence of another on other runs" if repeated else "")
        + f", {held} {_was(held)} seen{' in these small runs' if small else ''}, "
        f"{not_held} came out otherwise, "
        + (
            f"{not_testable} {'is' if not_testable == 1 else 'are'} about models far larger than these, which small "
            "runs cannot test, "
            if not_testable
            else ""
        )
        + f"and {undecided - waiting} {_is(undecided - waiting)} undecided"
        + (f"; for {_of_them(sized, undecided - waiting)} the smallest detectable effect is given." if sized else ".")
    )
    return text + (f" {waiting} more wait{'s' * (waiting == 1)} for runs that are not done yet." if waiting else "")


def _of_them(number: int, whole: int) -> str:
    return "each of them" if number == whole else f"{number} of them"


def printed_in_words(sections: Sequence[Section]) -> str:
    """Return how many claims the papers' own printed numbers agree with, in sentences; empty without such numbers."""
    printed = [one for section in sections for one in section.printed]
    agree, disagree = (sum(one.agrees is verdict for one in printed) for verdict in (True, False))
    if not agree + disagree:
        return ""
    verbs = ["agrees" if agree == 1 else "agree", "does" if disagree == 1 else "do"]
    return (
        f"Of {counted(len(printed), 'claim')}, {agree + disagree} can be checked against numbers that the papers "
        f"print: {agree} {verbs[0]} with what follows from them, and {disagree} {verbs[1]} not."
    )


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _paper_context(paper: Paper | None, studies: Sequence[dict[str, Any]], at: int) -> dict[str, Any]:
    """Return what the template needs of a paper: its studies, the rows of its claims, and those that were decided."""
    sections = [study["section"] for study in studies]
    small = any(section.small for section in sections)
    claims = [(study, study["section"].claim_rows) for study in studies if study["section"].findings]
    decided = {
        head: [(row.claim, row.caveat, study) for study, rows in claims for row in rows if row.kind == kind]
        for kind, head in (
            ("holds", "Same direction as the paper:" if small else "As the paper says:"),
            ("fails", "Opposite to the paper:" if small else "Not as the paper says:"),
        )
    }
    return {
        "id": f"p{at}",
        "paper": paper,
        "studies": studies,
        "in_words": findings_in_words(sections),
        "claims": claims,
        "decided": [(head, of_head) for head, of_head in decided.items() if of_head],
        "glyphs": GLYPHS,
    }


def _study_context(section: Section, at: int) -> dict[str, Any]:
    paragraphs = [part for part in re.split(r"\n\s*\n", section.text.strip()) if part]
    return {
        "id": f"s{at}-{re.sub(r'[^a-z0-9]+', '-', section.title.lower()).strip('-')}",
        "section": section,
        "question": paragraphs[0] if paragraphs else section.title,
        "paragraphs": paragraphs[1:],
        "summary": _runs_in_words([section]),
        "setup": setup([section.runs], rows_too=not section.training),
        "method_labels": method_labels(section.outcomes, section.names),
        "provenance": provenance(section.records),
        "tables": [_table_context(table) for table in section.tables],
        "figures": [_figure_context(figure, f"s{at}f{i}-") for i, figure in enumerate(section.figures)],
        **_runs_context([o for o in section.outcomes if not o.waiting], section.names, section.repetition),
    }


def _runs_in_words(sections: Sequence[Section]) -> str:
    """Say how far studies are: "216 runs, 3 failed, 2 not run yet"; a round of a timing is no run."""
    outcomes = [outcome for section in sections for outcome in section.outcomes]
    waiting = sum(outcome.waiting for outcome in outcomes)
    failed = sum(outcome.error is not None for outcome in outcomes) - waiting
    states = [f"{n:,} {word}" for n, word in ((failed, "failed"), (waiting, "not run yet")) if n]
    timings = sum("methods" in outcome.spec for outcome in outcomes)
    kinds = [counted(n, word) for n, word in ((len(outcomes) - timings, "run"), (timings, "timing")) if n]
    return ", ".join([" and ".join(kinds) or "0 runs", *states])


def _table_context(table: Table) -> dict[str, Any]:
    """Return what the template needs of a table: its cells as text, and the spans of the upper lines of its heading."""
    levels = [
        [
            (label, len(list(columns)))
            for label, columns in groupby(table.columns, key=lambda c: header_label(c, level, table.header_levels))
        ]
        for level in range(table.header_levels - 1)
    ]
    groups = [(group, [_row_context(table, row) for row in rows]) for group, rows in table.groups]
    return {
        "table": table,
        "levels": levels,
        "groups": groups,
        "legend": table_legend(table, published_legend="Small: the paper's number."),
        "notes": [(note_mark(i), note) for i, note in enumerate(table.notes)],
    }


def _row_context(table: Table, row: Row) -> dict[str, Any]:
    return {"label": row.label, "cells": [_cell_context(table, i, cell) for i, cell in enumerate(row.cells)]}


def _cell_context(table: Table, at: int, cell: TableCell) -> dict[str, Any]:
    column = table.columns[at]
    return {
        "value": "" if cell.mean is None else repr(float(cell.mean)),
        "text": table.text(cell, column),
        "std": table.std(cell, column),
        "paper": table.published(cell, column),
        "flag": "best" if cell.best else "second" if cell.second else "gap" if cell.mean is None else "",
        "marks": ", ".join(map(note_mark, cell.notes)),
    }
