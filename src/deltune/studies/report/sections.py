"""A study's outcomes as a section of a report, and that section as Markdown and as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import check_booleans, error_summary
from ...files import explain_write_errors, write_text
from ..claims.claims import Claim
from ..claims.comparisons import MetricChoice, can_be_at_chance, is_at_chance
from ..claims.decisions import POWER, PaperStatements, check_printed, decidable_effects, decide_claims
from ..claims.selectors import describe_cell
from ..claims.statistics import Estimate
from ..jobs.job import Outcome
from ..scales import SMALL_TRAIN_ROWS
from ..study import Records, Study
from .aggregate import SEED
from .charts import draw, save
from .figure_spec import DISPLAY_NAMES, FigureSpec, TableSpec, as_tuple
from .findings import CLAIM_COLUMNS, findings_csv
from .page import Section
from .tables import build_table, escape_markdown, to_csv, to_latex, to_markdown
from .training_facts import still_rising


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
    train_rows = SMALL_TRAIN_ROWS if small else {}
    return Section(
        study.name,
        "\n\n".join(text for text in (study.question, study.notes, rising, _at_chance(outcomes, names)) if text),
        tuple(build_table(view, outcomes) for view in tables),
        tuple(draw(view, outcomes) for view in figures),
        tuple(findings),
        tuple(outcomes),
        tuple(_missing(outcomes, names)),
        tuple(printed),
        statements.choices,
        small,
        names,
        tuple(record for job in study.jobs(records) if (record := records.get(job.name)) is not None),
        statements.paper,
        train_rows,
        study.repetition,
        statements.rerun if small else "",
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
