"""The report of studies: the section of each, as Markdown and as files, and all as one HTML page that loads nothing."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from ...errors import check_booleans, counted, error_summary
from ...files import explain_write_errors, write_text
from ...train import render as render_template
from ..claims.claims import Claim
from ..claims.comparisons import MetricChoice, can_be_at_chance, is_at_chance
from ..claims.decisions import (
    POWER,
    Finding,
    Paper,
    PaperStatements,
    PrintedFinding,
    check_printed,
    decidable_effects,
    decide_claims,
)
from ..claims.selectors import describe_cell
from ..claims.statistics import Estimate
from ..jobs.job import Outcome
from ..jobs.store import JobRecord
from ..scales import SMALL_TRAIN_ROWS
from ..study import Records, Study
from .aggregate import SEED
from .figure_spec import DISPLAY_NAMES, FigureSpec, TableSpec, as_tuple
from .figures import DrawnFigure, draw, render, save
from .findings import CLAIM_COLUMNS, ClaimRow, claim_rows, findings_csv, has_no_result
from .provenance import (
    CITATION,
    commits,
    method_labels,
    provenance,
    setup,
    still_rising,
    training_facts,
)
from .tables import (
    Row,
    Table,
    TableCell,
    build_table,
    escape_markdown,
    format_percent,
    header_label,
    note_mark,
    table_legend,
    to_csv,
    to_latex,
    to_markdown,
)

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
    small: bool = field(default=False, kw_only=True)
    names: Mapping[str, str] = field(default_factory=dict)
    records: tuple[JobRecord, ...] = ()
    paper: Paper | None = None
    train_rows: Mapping[str, int] = field(default_factory=dict)
    repetition: str = "seed"
    rerun: str = ""

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
        setup=setup(sections),
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
        "setup": setup([section], rows_too=not section.training),
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


@check_booleans
def build_section(
    study: Study,
    records: Records,
    statements: PaperStatements | None = None,
    *,
    paper: bool = False,
    small: bool = False,
) -> Section:
    """Build the section of a study from what is done of it.

    If `paper`, the paper's own numbers stand beside ours; findings of `small` scale are not about the paper.
    """
    statements = statements or PaperStatements()
    outcomes = study.outcomes(records)
    views = [replace(view, repetition=study.repetition) for view in study.views]
    views = views if any(not outcome.waiting for outcome in outcomes) else []
    tables = [view if paper else replace(view, published={}) for view in views if isinstance(view, TableSpec)]
    figures = [view for view in views if isinstance(view, FigureSpec)]
    names = dict(DISPLAY_NAMES)
    for view in study.views:
        names |= view.display_names
    printed = [check_printed(claim, statements.tables, names) for claim in statements.claims]
    metric = _metric(study, outcomes)
    findings = decide_claims(
        statements.claims,
        outcomes,
        metric,
        lower=study.lower,
        names=names,
        printed=printed,
        small=small,
        repetition=study.repetition,
    )
    rising = still_rising(outcomes, MetricChoice(metric, study.lower), names)
    paragraphs = (study.question, study.notes, rising, _at_chance(outcomes, names))
    return Section(
        study.name,
        "\n\n".join(text for text in paragraphs if text),
        tables=tuple(build_table(view, outcomes) for view in tables),
        figures=tuple(draw(view, outcomes) for view in figures),
        findings=tuple(findings),
        outcomes=tuple(outcomes),
        missing=tuple(_missing(outcomes, names)),
        printed=tuple(printed),
        choices=statements.choices,
        small=small,
        names=names,
        records=tuple(record for job in study.jobs(records) if (record := records.get(job.name)) is not None),
        paper=statements.paper,
        train_rows=SMALL_TRAIN_ROWS if small else {},
        repetition=study.repetition,
        rerun=statements.rerun if small else "",
    )


ASSUMED_SPREAD = 1.0
"""Points by which scores are taken to spread over seeds as long as nothing was run."""


def power_lines(study: Study, records: Records, claims: Sequence[Claim]) -> list[str]:
    """Say what effects a study will decide with the seeds that it is planned with, before it is run.

    The spread is judged by the seeds that are complete.
    """
    outcomes = study.outcomes(records)
    seeds = {outcome.cell.get(SEED) for outcome in outcomes}
    if not claims or len(seeds) < 2:
        return []
    complete = seeds - {outcome.cell.get(SEED) for outcome in outcomes if outcome.error is not None}
    head = f"  power, each claim at the strictest level of Holm's procedure and in {100 * POWER:.0f} % of cases:"
    if len(complete) < 2:
        settings = {tuple((axis, outcome.cell.get(axis)) for axis in ("model", "task")) for outcome in outcomes}
        one, all_of_them = (
            Estimate(0.0, ((2 * ASSUMED_SPREAD**2 / (len(seeds) * n), n * (len(seeds) - 1)),)).smallest_decidable(
                0.05 / len(claims), POWER
            )
            for n in (1, len(settings))
        )
        mean = f" and of {all_of_them:.2g} points in the mean over {len(settings)} settings"
        return [
            f"{head} nothing was run yet; if scores spread by {ASSUMED_SPREAD:g} point over seeds, and test rows by "
            f"nothing, {len(seeds)} seeds decide a difference of {one:.2g} points on one task of one model"
            + mean
            * (len(settings) > 1)
        ]
    done = [outcome for outcome in outcomes if outcome.cell.get(SEED) in complete]
    effects = decidable_effects(claims, done, _metric(study, done), len(seeds), lower=study.lower)
    lines = [f"{head} {len(seeds)} seeds, with the spread of {len(complete)} that were run"]
    for claim, effect in zip(claims, effects, strict=True):
        size = "not known" if effect is None else f"{effect[0]:.2g} {effect[1]}"
        lines.append(f"    {size}: {claim.text}")
    return lines


def _metric(study: Study, outcomes: Sequence[Outcome]) -> str | dict[str, str]:
    """The score that counts; if the study names several, for each task the first that its outcomes have."""
    metrics = as_tuple(study.metric)
    if len(metrics) == 1:
        return metrics[0]
    by_task: dict[str, str] = {}
    for outcome in outcomes:
        task = str(outcome.cell.get("target", outcome.cell.get("task")))
        for name in metrics:
            if name in outcome.scores:
                by_task.setdefault(task, name)
                break
    return by_task


def _at_chance(outcomes: Sequence[Outcome], names: Mapping[str, str]) -> str:
    """Say which runs have learned nothing, so that a comparison with them says nothing of a method."""
    at_chance = [outcome for outcome in outcomes if is_at_chance(outcome)]
    if not at_chance:
        return ""
    cells: dict[str, list[str]] = {}
    axes = _varied(outcomes) - {SEED}
    for outcome in at_chance:
        label = describe_cell({axis: value for axis, value in outcome.cell.items() if axis in axes}, names)
        cells.setdefault(label, []).append(str(outcome.cell.get(SEED, "")))
    listed = [
        f"{label} (seed{'s' * (len(seeds) > 1)} {', '.join(seeds)})" if any(seeds) else label
        for label, seeds in cells.items()
    ]
    more = f"; and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    are, they_have, their, them, these_are = (
        ("is", "it has", "its", "it", "It is")
        if len(at_chance) == 1
        else ("are", "they have", "their", "them", "These are")
    )
    judged = sum(map(can_be_at_chance, outcomes))
    rest = " (others are tested on another task, or belong to a search that begins at chance)"
    return (
        f"{len(at_chance)} of {judged} runs {are} no better than chance on the test split"
        f"{rest if judged < len(outcomes) else ''}: {they_have} learned "
        f"little or nothing at {their} learning rate, and a comparison with {them} says little about the method. "
        f"{these_are}: {'; '.join(listed[:MAX_LISTED])}{more}."
    )


MAX_LISTED = 12
"""Cells that are listed, of which runs have learned nothing."""


def _missing(outcomes: Sequence[Outcome], names: Mapping[str, str]) -> list[str]:
    """Say which runs have no result, by reason."""
    reasons: dict[str, list[Outcome]] = {}
    axes = _varied(outcomes)
    for outcome in outcomes:
        if outcome.error is not None:
            reasons.setdefault(error_summary(outcome.error), []).append(outcome)
    return [
        f"{len(missing)} of {len(outcomes)} runs: {reason} (such as "
        f"{describe_cell({axis: label for axis, label in missing[0].cell.items() if axis in axes}, names)})"
        for reason, missing in reasons.items()
    ]


def _varied(outcomes: Sequence[Outcome]) -> set[str]:
    """Return the axes on which cells differ; what all of them share need not be said of one."""
    labels: dict[str, set[str]] = {}
    for outcome in outcomes:
        for axis, label in outcome.cell.items():
            labels.setdefault(axis, set()).add(str(label))
    return {axis for axis, of_axis in labels.items() if len(of_axis) > 1}


NOT_THE_PAPER = (
    "Nothing here was run at the paper's scale: what is *seen here* is no proof of the paper's sentence, and what is "
    "*otherwise here* does not refute it."
)


def section_markdown(section: Section) -> str:
    """Return the tables, the findings and what is missing as Markdown."""
    paragraphs = section.text.split("\n\n")
    paragraphs.insert(1, section.training)
    lines = [f"## {escape_markdown(section.title)}", "", *(escape_markdown(t) + "\n" for t in paragraphs if t)]
    for table in section.tables:
        lines += [to_markdown(table), ""]
    if section.findings:
        rows = [_markdown_row(row.cells) for row in section.claim_rows]
        lines += ["### Claims of the paper", "", *([NOT_THE_PAPER, ""] if section.small else [])]
        lines += [_markdown_row(CLAIM_COLUMNS), "|" + "---|" * len(CLAIM_COLUMNS), *rows, ""]
    if section.choices:
        lines += [
            "### What the paper leaves open, and what was chosen",
            "",
            *(f"- {escape_markdown(c)}" for c in section.choices),
            "",
        ]
    lines += [f"- missing: {escape_markdown(text)}" for text in section.missing]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escape_markdown, cells)) + " |"


def write_section(section: Section, folder: Path) -> list[Path]:
    """Write a section as Markdown, its tables as LaTeX and CSV, its findings as CSV, and its figures as images."""
    stem = section.title.replace("/", "-")
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{stem}.md"]
        write_text(files[0], section_markdown(section))
        for i, table in enumerate(section.tables, 1):
            for suffix, text in ((".tex", to_latex(table)), (".csv", to_csv(table))):
                files.append(folder / f"{stem}-table{i}{suffix}")
                write_text(files[-1], text)
        if section.findings:
            files.append(folder / f"{stem}-findings.csv")
            write_text(files[-1], findings_csv(section.findings))
        for i, figure in enumerate(section.figures, 1):
            files += save(figure.figure, folder / f"{stem}-figure{i}")
    return files
