"""The report of studies as one HTML page with findings, sortable tables, figures and all runs; it loads nothing."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import yaml
from markupsafe import Markup

from ...errors import counted
from ...pages.rendering import render as render_template
from ..claims.decisions import Finding, PrintedFinding
from ..engine.jobs import Outcome
from ..engine.store import JobRecord
from .aggregate import SEED
from .charts import DrawnFigure, render
from .findings import FindingRow, FindingTable, finding_tables
from .provenance import provenance
from .tables import Row, Table, TableCell, header_label, note_mark, table_legend, to_csv, to_latex, to_markdown

LARGE_SVG = 100_000  # characters of SVG from which a PNG may be the smaller
MIN_SHRINK = 0.75  # a figure is shrunk to no less of its own width (letters of 7 points); below that its box scrolls


def _figure_context(figure: DrawnFigure, prefix: str) -> dict[str, Any]:
    """Return what the template needs of a figure. `prefix` makes its ids differ from those of other figures."""
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


def _runs_context(outcomes: Sequence[Outcome]) -> dict[str, Any]:
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
        "axes": axes,
        "scores": scores,
        "shared": _yaml(shared) if shared else "",
        "runs": [_run_context(outcome, axes, scores, shared) for outcome in outcomes],
    }


def _run_context(
    outcome: Outcome, axes: Sequence[str], scores: Sequence[str], shared: Mapping[str, Any]
) -> dict[str, Any]:
    own_spec = {
        key: value for key, value in _relative_paths(_to_json_values(outcome.spec)).items() if key not in shared
    }
    more = {name: value for name, value in outcome.scores.items() if name not in scores}
    details = {"spec": own_spec, "count": _to_json_values(outcome.count), "scores": _to_json_values(more)}
    values = [outcome.scores.get(name) for name in scores]
    return {
        "labels": [str(outcome.cell.get(axis, "–")) for axis in axes],
        "scores": [("" if value is None else repr(float(value)), _short_number(value)) for value in values],
        "spark": sparkline(outcome.curve),
        "seconds": f"{outcome.seconds:.1f}" if outcome.seconds else "",
        "spec": _yaml({name: part for name, part in details.items() if part}) if any(details.values()) else "nothing",
        "error": outcome.error or "",
    }


def sparkline(curve: Sequence[Mapping[str, Any]], name: str = "loss") -> Markup | str:
    """Draw the curve of a number as a line without axes, with its ends in words; "–" for fewer than two points.

    Args:
        curve: Lines of a log.
        name: The number.
    """
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


GLYPHS = {"holds": "✓", "fails": "≠", "undecided": "?"}
"""Class of a verdict -> a sign, so that it does not depend on colour alone."""


@dataclass(frozen=True)
class Section:
    """One study of a report.

    Attributes:
        title: The study's name.
        text: What it asks, in paragraphs.
        tables: Its tables.
        figures: Its figures.
        findings: The claims it decides.
        outcomes: The outcomes of all its jobs.
        missing: What was planned and has no result, in words.
        printed: What the paper's printed numbers say of the claims.
        choices: Where the paper disagrees with itself or is silent, and what was chosen.
        small: Whether the study is of small scale, whose findings are not about the paper.
        names: How labels are shown.
        records: What was run for it.
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

    @property
    def finding_tables(self) -> list[FindingTable]:
        """The findings in words: about the paper, and about runs of small scale."""
        return finding_tables(self.findings, self.printed, self.outcomes, self.names, self.small)


def render_page(sections: Sequence[Section], title: str = "deltune report") -> str:
    """Render the page.

    Args:
        sections: The studies.
        title: The title of the page.

    Returns:
        HTML in which every word is escaped and nothing is loaded from elsewhere.
    """
    studies = [_study_context(section, i) for i, section in enumerate(sections)]
    summary = _summary([o for s in sections for o in s.outcomes], [f for s in sections for f in s.findings])
    n_studies = f"{len(sections)} studies · " if len(sections) != 1 else ""
    in_words, claims = findings_in_words(sections)
    study_of = {id(finding): study for study in studies for finding in study["section"].findings}
    linked = [(head, [(finding.claim.text, study_of[id(finding)]) for finding in of_head]) for head, of_head in claims]
    return render_template(
        "study.html", title=title, summary=n_studies + summary, in_words=in_words, claims=linked, studies=studies,
        provenance=provenance(record for section in sections for record in section.records),
    )  # fmt: skip


def findings_in_words(sections: Sequence[Section]) -> tuple[str, list[tuple[str, list[Finding]]]]:
    """Return what was found: sentences with the numbers of claims that were decided, and the claims of each verdict.

    Args:
        sections: The studies; those without claims say nothing.
    """
    findings = [finding for section in sections for finding in section.findings]
    if not findings:
        return "", []
    by_verdict = {
        verdict: [finding for finding in findings if finding.verdict == verdict]
        for verdict in ("holds", "does not hold", "undecided")
    }
    seen, unseen, undecided = map(len, by_verdict.values())
    models = " on these small models and few rows" if any(section.small for section in sections) else ""
    text = (
        f"Of {counted(len(findings), 'claim')} of the papers that these runs can speak of, {seen} {_was(seen)} "
        f"seen{models}, {unseen} came out otherwise, and {undecided} could not be decided; the tables say which effect "
        "these runs could have decided, and what a smaller one takes. Some claims of several studies rest on one run."
    )
    if models:
        text += " Nothing here was run at the papers' scale, so a claim that comes out otherwise is not refuted."
    heads = {"holds": "Seen here", "does not hold": "Otherwise here"}
    return text, [(head, by_verdict[verdict]) for verdict, head in heads.items() if by_verdict[verdict]]


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _study_context(section: Section, at: int) -> dict[str, Any]:
    return {
        "id": f"s{at}-{re.sub(r'[^a-z0-9]+', '-', section.title.lower()).strip('-')}",
        "section": section,
        "summary": _summary(section.outcomes, section.findings),
        "provenance": provenance(section.records),
        "paragraphs": [part for part in re.split(r"\n\s*\n", section.text.strip()) if part],
        "findings": [_finding_table_context(table) for table in section.finding_tables],
        "tables": [_table_context(table) for table in section.tables],
        "figures": [_figure_context(figure, f"s{at}f{i}-") for i, figure in enumerate(section.figures)],
        **_runs_context(section.outcomes),
    }


def _summary(outcomes: Sequence[Outcome], findings: Iterable[Finding]) -> str:
    """Summarise a study: "216 runs, 3 failed, 2 not run yet · claims: 2 as the paper says, 1 otherwise"."""
    waiting = sum(outcome.waiting for outcome in outcomes)
    failed = sum(outcome.error is not None for outcome in outcomes) - waiting
    runs = f"{len(outcomes):,} run{'s' * (len(outcomes) != 1)}"
    states = [f"{n:,} {word}" for n, word in ((failed, "failed"), (waiting, "not run yet")) if n]
    summaries = [", ".join([runs, *states])]
    count: Counter[str] = Counter(finding.verdict for finding in findings)
    if count:
        verdict_words = {"holds": "as the paper says", "does not hold": "otherwise", "undecided": "undecided"}
        summaries.append("claims: " + ", ".join(f"{count[v]} {word}" for v, word in verdict_words.items() if count[v]))
    return " · ".join(summaries)


def _finding_table_context(table: FindingTable) -> dict[str, Any]:
    rows = [_finding_row_context(table, row) for row in table.rows]
    return {"table": table, "rows": rows}


def _finding_row_context(table: FindingTable, row: FindingRow) -> dict[str, Any]:
    """Return what the template needs of a row; a verdict sorts by its kind, a p value by its number."""
    cells = []
    for at, (column, text) in enumerate(zip(table.columns, row.cells, strict=True)):
        value = str(list(GLYPHS).index(row.kind)) if at == table.verdict_column and row.kind else ""
        if column == "p" and row.p is not None:
            value = repr(float(row.p))
        cells.append({"column": column, "text": text, "value": value, "is_verdict": at == table.verdict_column})
    return {"cells": cells, "kind": row.kind, "glyph": GLYPHS.get(row.kind, ""), "details": row.details}


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
        "sources": [to_markdown(table), to_latex(table), to_csv(table)],
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
