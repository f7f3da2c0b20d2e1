"""The report of studies: the section of each, as Markdown and as files, and all as one HTML page that loads nothing."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from ...errors import check_booleans, counted, error_summary, number_range
from ...files import explain_write_errors, write_text
from ...train import render as render_template
from ..claims.claims import Claim
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
from ..claims.floors import FLOORS, floor_outcomes
from ..claims.selectors import FLOOR, describe_cell
from ..claims.statistics import Estimate
from ..jobs.job import Outcome
from ..jobs.store import JobRecord
from ..scales import SMALL_TRAIN_ROWS
from ..study import Records, Study
from .aggregate import SEED
from .figure_spec import DISPLAY_NAMES, FigureSpec, Numbers, TableSpec, VarianceSpec, as_tuple
from .figures import DrawnFigure, draw, save
from .findings import CLAIM_COLUMNS, NO_RESULT, SEEN, ClaimRow, claim_rows, findings_csv, has_no_result
from .provenance import CITATION, method_labels, provenance, training_facts
from .tables import (
    Table,
    build_table,
    csv_cell,
    escape_markdown,
    header_label,
    markdown_row,
    note_mark,
    table_legend,
    to_csv,
    to_latex,
    to_markdown,
)
from .variance import variance_components_table

MIN_SHRINK = 0.75  # a figure is shrunk to no less of its own width (letters of 7 points); below that its box scrolls
FONT = re.compile(r"font-family: [^;\"]*; ")
"""A figure's font, which matplotlib writes at each of its words."""
FIRST_CLAIMS = 10
"""The claims of the table on top: those whose verdicts are the least likely to be chance."""


def _figure_context(figure: DrawnFigure, prefix: str) -> dict[str, Any]:
    """Return what the template needs of a figure. `prefix` makes its ids differ from other figures'."""
    width = 96 * figure.figure.get_figwidth()
    style = f"min-width:{MIN_SHRINK * width:.0f}px;max-width:{1.25 * width:.0f}px"
    svg = _trim_svg(figure.svg(), prefix)
    font = FONT.search(svg)
    style, svg = f"{font[0] if font else ''}{style}", FONT.sub("", svg)
    view_box = re.search(r'viewBox="([^"]*)"', svg)
    body = Markup(svg[svg.index(">") + 1 :])  # matplotlib's own marks, in which every word is escaped
    image = Markup('<svg viewBox="{}" role="img" style="{}"><title>{}</title>{}').format(
        view_box.group(1) if view_box else "", style, figure.title, body
    )
    return {"figure": figure, "image": image, "wide": width > 560}


def _trim_svg(svg: str, prefix: str) -> str:
    """Return one <svg> element for HTML: no prolog, comments, metadata or name spaces; ids in use get the prefix.

    Coordinates are cut to hundredths of a point.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"\s+xmlns(:\w+)?=\"[^\"]*\"", "", svg).replace("xlink:href", "href")
    used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", svg))
    svg = re.sub(r"\s+id=\"([^\"]*)\"", lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r"\bhref=\"#", f'href="#{prefix}', svg).replace("url(#", f"url(#{prefix}")
    svg = re.sub(r'"[^"<>]*"', lambda value: re.sub(r"(\.\d\d)\d+", r"\1", value[0]), svg)
    return re.sub(r">\s+<", "><", svg)


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
        compared = [outcome for outcome in self.outcomes if FLOOR not in outcome.cell]
        return training_facts(compared, self.names, self.train_rows)

    @property
    def claim_rows(self) -> list[ClaimRow]:
        """The claims in words, each with the paper's number and ours."""
        return claim_rows(self.findings, self.printed, small=self.small)


def render_page(sections: Sequence[Section], title: str = "") -> str:
    """Render the page."""
    papers: dict[Paper | None, list[dict[str, Any]]] = {}
    for i, section in enumerate(sections):
        papers.setdefault(section.paper, []).append(_study_context(section, i))
    parts: list[dict[str, Any]] = [
        {"id": f"p{i}", "paper": paper, "studies": studies, "claims": [s for s in studies if s["section"].findings]}
        for i, (paper, studies) in enumerate(papers.items())
    ]
    small = any(section.small for section in sections)
    return render_template(
        Path(__file__).with_name("study.html"),
        title=title or _title(sections, list(papers), small), parts=parts, small=small, glyphs=GLYPHS, zip=zip,
        note_mark=note_mark, table_legend=table_legend,
        first=_first_claims([study for part in parts for study in part["claims"]]),
        lead=_lead([study for part in parts for study in part["studies"]]),
        summary=_runs_in_words(sections), in_words=findings_in_words(sections), n_studies=len(sections),
        about_papers=printed_in_words(sections),
        disagree=[
            (one.claim, study)
            for part in parts for study in part["studies"] for one in study["section"].printed if one.agrees is False
        ],
        unfinished=sum(outcome.error is not None for section in sections for outcome in section.outcomes),
        citation=CITATION,
        histories=list(dict.fromkeys(section.rerun for section in sections if section.rerun)),
        setup=_setup(sections),
        provenance=provenance(record for section in sections for record in section.records),
    )  # fmt: skip


def _setup(sections: Iterable[Section], *, rows_too: bool = True) -> str:
    """Return a sentence about the models, the data and the seeds of runs that are done; empty if there are none."""
    models: dict[str, int] = {}
    tasks: dict[str, None] = {}
    rows: set[int] = set()
    repeats: dict[str, set[int]] = {}
    for section in sections:
        names = section.names
        done = [outcome for outcome in section.outcomes if outcome.error is None]
        for outcome in done:
            labels = {axis: names.get(str(label), str(label)) for axis, label in outcome.cell.items()}
            if model := labels.get("model"):
                models[model] = max(models.get(model, 0), int(outcome.count.get("denominator_size", 0)))
            tasks |= dict.fromkeys(labels[axis] for axis in ("task", "target") if axis in labels)
            if limit := outcome.spec.get("max_train_rows"):
                rows.add(min(int(limit), section.train_rows.get(str(outcome.cell.get("task")), int(limit))))
        if seeds := {outcome.cell[SEED] for outcome in done if SEED in outcome.cell}:
            repeats.setdefault(section.repetition, set()).add(len(seeds))
    sizes = [
        f"{name} ({size / 1e6:.2g} million parameters)" if size else name
        for name, size in sorted(models.items(), key=lambda item: item[1])
    ]
    parts = [f"models: {', '.join(sizes)}"] if sizes else []
    parts += [f"tasks: {', '.join(tasks)}"] if tasks else []
    parts += [f"{number_range(rows)} training rows at most"] if rows and rows_too else []
    numbers = [f"{number_range(n)} {word}{'s' if n != {1} else ''}" for word, n in repeats.items()]
    parts += [", or ".join(numbers)] if numbers else []
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _first_claims(studies: Sequence[dict[str, Any]]) -> list[tuple[ClaimRow, dict[str, Any]]]:
    """Return the decided claims with the smallest adjusted p values: those of scores, then of other numbers."""
    decided = [
        ((finding.p_adjusted is None, finding.unit != "points", finding.p_adjusted or 0.0), row, study)
        for study in studies
        for finding, row in zip(study["section"].findings, study["rows"], strict=True)
        if finding.verdict in ("holds", "does not hold")
    ]
    decided.sort(key=lambda one: one[0])
    return [(row, study) for _, row, study in decided[:FIRST_CLAIMS]]


def _lead(studies: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the figure on top of a page of several studies, with its study."""
    leading = [
        {"picture": drawn, "study": study["id"], "name": study["section"].title}
        for study in studies for drawn in study["figures"] if drawn["figure"].leads
    ]  # fmt: skip
    return leading[0] if leading and len(studies) > 1 else None


NUMBERS = {1: "a paper", 2: "two papers", 3: "three papers"}


def _title(sections: Sequence[Section], papers: Sequence[Paper | None], small: bool) -> str:
    """Return the title of the page; studies of our own may stand beside those of papers."""
    if len(sections) == 1:
        return f"{sections[0].title}, at small scale" if small else sections[0].title
    number = len([paper for paper in papers if paper is not None])
    if number not in NUMBERS:
        return "deltune report"
    scale = "a reproduction in miniature" if small else "a reproduction at the papers' scale"
    return f"Parameter-efficient fine-tuning: {scale} of {NUMBERS[number]}"


def findings_in_words(sections: Sequence[Section]) -> str:
    """Return how many claims have which verdict, in a sentence; empty without claims."""
    findings = [finding for section in sections for finding in section.findings]
    waiting = sum(map(has_no_result, findings))
    counts = Counter(finding.verdict for finding in findings)
    words = SEEN if any(section.small for section in sections) else {verdict: verdict for verdict in SEEN}
    numbers = [f"{counts[verdict] - waiting * (verdict == 'undecided')} {text}" for verdict, text in words.items()]
    repeated = sum(bool(finding.claim.repeats) for finding in findings)
    again = f"; {repeated} test a sentence of another again" if repeated else ""
    waits = f"; {waiting} {NO_RESULT}" if waiting else ""
    return f"{counted(len(findings), 'claim')}: {', '.join(numbers)}{waits}{again}." if findings else ""


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


def _study_context(section: Section, at: int) -> dict[str, Any]:
    paragraphs = [part for part in re.split(r"\n\s*\n", section.text.strip()) if part]
    return {
        "id": f"s{at}-{re.sub(r'[^a-z0-9]+', '-', section.title.lower()).strip('-')}",
        "section": section,
        "question": paragraphs[0] if paragraphs else section.title,
        "paragraphs": paragraphs[1:],
        "summary": _runs_in_words([section]),
        "setup": _setup([section], rows_too=not section.training),
        "method_labels": method_labels(section.outcomes, section.names),
        "tables": [(table, _heading(table)) for table in section.tables],
        "figures": [_figure_context(figure, f"s{at}f{i}-") for i, figure in enumerate(section.figures)],
        "rows": section.claim_rows,
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


def _heading(table: Table) -> list[list[tuple[str, int]]]:
    """Return the upper lines of a table's heading: each label with the number of columns that it spans."""
    levels = table.header_levels
    return [
        [(label, len(list(of_label))) for label, of_label in groupby(header_label(c, i, levels) for c in table.columns)]
        for i in range(levels - 1)
    ]


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
    planned = study.outcomes(records)
    outcomes = [outcome for outcome in planned if FLOOR not in outcome.cell]
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
        planned,
        metric,
        lower=study.lower,
        names=names,
        printed=printed,
        small=small,
        repetition=study.repetition,
    )
    return Section(
        study.name,
        "\n\n".join(text for text in (study.question, study.notes) if text),
        tables=(
            *(build_table(view, outcomes) for view in tables),
            *(variance_components_table(view, outcomes) for view in views if isinstance(view, VarianceSpec)),
            *_floor_table(study.metric, planned, names),
        ),
        figures=tuple(draw(view, outcomes) for view in figures),
        findings=tuple(findings),
        outcomes=tuple(planned),
        missing=tuple(_missing(planned, names)),
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


def _floor_table(metric: Numbers, outcomes: Sequence[Outcome], names: Mapping[str, str]) -> list[Table]:
    """Return the table of floors and full tuning, if the study has floors and any run is done."""
    if all(outcome.waiting for outcome in outcomes) or not any(FLOOR in outcome.cell for outcome in outcomes):
        return []
    view = TableSpec(
        title="Floors and full tuning", groups="model", rows=FLOOR, metric=metric, percent=False, average=False,
        display_names={**names, **FLOORS, "full": "full tuning"},
    )  # fmt: skip
    return [build_table(view, floor_outcomes(outcomes))]


ASSUMED_SPREAD = 1.0
"""Points by which scores are taken to spread over seeds as long as nothing was run."""


def power_lines(study: Study, records: Records, claims: Sequence[Claim]) -> list[str]:
    """Say what effects a study will decide with the seeds that it is planned with, before it is run.

    The spread is judged by the seeds that are complete.
    """
    outcomes = [outcome for outcome in study.outcomes(records) if FLOOR not in outcome.cell]
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
        rows = [markdown_row(map(escape_markdown, row.cells)) for row in section.claim_rows]
        lines += ["### Claims of the paper" if section.paper else "### Claims", ""]
        lines += [NOT_THE_PAPER, ""] if section.paper and section.small else []
        lines += [markdown_row(CLAIM_COLUMNS), "|" + "---|" * len(CLAIM_COLUMNS), *rows, ""]
    if section.choices:
        lines += [
            "### What the paper leaves open, and what was chosen",
            "",
            *(f"- {escape_markdown(c)}" for c in section.choices),
            "",
        ]
    lines += [f"- missing: {escape_markdown(text)}" for text in section.missing]
    return "\n".join(lines).rstrip() + "\n"


def write_section(section: Section, folder: Path) -> list[Path]:
    """Write a section: Markdown, its tables as LaTeX and CSV, findings and runs as CSV, its figures as images."""
    stem = section.title.replace("/", "-")
    texts = {f"{stem}.md": section_markdown(section)}
    for i, table in enumerate(section.tables, 1):
        texts |= {f"{stem}-table{i}.tex": to_latex(table), f"{stem}-table{i}.csv": to_csv(table)}
    if section.findings:
        texts[f"{stem}-findings.csv"] = findings_csv(section.findings)
    if section.outcomes:
        texts[f"{stem}-runs.csv"] = runs_csv(section.outcomes)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(folder / name, text)
        files = [folder / name for name in texts]
        for i, figure in enumerate(section.figures, 1):
            files += save(figure.figure, folder / f"{stem}-figure{i}")
    return files


def runs_csv(outcomes: Sequence[Outcome]) -> str:
    """Write the runs of a study as CSV: the labels of each, its scores, parameters, seconds, error and spec."""
    rows = [
        {axis: csv_cell(str(label)) for axis, label in outcome.cell.items()}
        | dict(outcome.scores)
        | {"parameters": outcome.count.get("method"), "seconds": outcome.seconds or None}
        | {"error": csv_cell(outcome.error or ""), "spec": json.dumps(dict(outcome.spec), default=str)}
        for outcome in outcomes
    ]
    return str(pd.DataFrame(rows, dtype=object).to_csv(index=False))
