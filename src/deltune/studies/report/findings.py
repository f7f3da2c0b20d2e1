"""Findings as tables of words: what the paper says and prints, and beside it what was seen in runs of small scale.

A table about the paper has the paper's sentences. A table about runs of small scale has the comparisons that were made
there, and no sentence that could be taken for the paper's.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..claims.decisions import ComparisonResult, Finding, PrintedFinding, Verdict
from ..claims.selectors import describe_cell
from ..engine.jobs import Outcome
from .tables import csv_cell, csv_number

KINDS: Mapping[Verdict, str] = {"holds": "holds", "does not hold": "fails", "undecided": "undecided"}
"""Verdict -> its class in the style sheet."""

SEEN: Mapping[Verdict, str] = {
    "holds": "seen here", "does not hold": "otherwise here", "undecided": "undecided here",
}  # fmt: skip
"""Verdict -> its words at small scale."""

PAPER_INTRO = "The paper's sentences, and whether the numbers that it prints agree with them."
UNTESTED = "Nothing here was run at the paper's scale, so that nothing is said about whether they are true."
INTERVALS = (
    "An interval is of the level at which its claim is tested by Holm's procedure, 95 % for all claims of the study "
    "together; that of a single setting is of 95 % for itself."
)
CSV_COLUMNS = (
    "claim", "source", "comparison", "setting", "effect", "unit", "low", "high", "interval", "true above", "true below",
    "decides", "verdict", "p", "adjusted p",
)  # fmt: skip
"""Columns of `findings_csv`."""


@dataclass(frozen=True)
class FindingRow:
    """A claim or a comparison as text.

    Attributes:
        cells: A text for each column.
        kind: The class of the verdict in the style sheet; empty if there is no verdict.
        details: What else there is to say, a line each: single comparisons, settings.
        p: The adjusted p value.
    """

    cells: tuple[str, ...]
    kind: str = ""
    details: tuple[str, ...] = ()
    p: float | None = None


@dataclass(frozen=True)
class FindingTable:
    """A table of findings.

    Attributes:
        title: Its title.
        intro: What it is about, in sentences.
        columns: The headings.
        rows: The rows.
        verdict_column: The index of the column with the verdict.
    """

    title: str
    intro: str
    columns: tuple[str, ...]
    rows: tuple[FindingRow, ...]
    verdict_column: int


def finding_tables(
    findings: Sequence[Finding],
    printed: Sequence[PrintedFinding],
    outcomes: Iterable[Outcome],
    names: Mapping[str, str],
    small: bool,
) -> list[FindingTable]:
    """Return the tables of a study's findings; none without claims.

    Args:
        findings: What the study says of each claim.
        printed: What the paper's printed numbers say of each; may be empty.
        outcomes: The study's outcomes.
        names: How labels are shown.
        small: Whether the study is of small scale, whose findings are not about the paper.
    """
    if not findings:
        return []
    printed = printed or [PrintedFinding(finding.claim, None) for finding in findings]
    intro = f"{PAPER_INTRO} {UNTESTED}" if small else PAPER_INTRO
    claims = ("claim", "source", "the paper's number", "do its numbers agree?")
    if not small:
        columns = (*claims, "our number", "interval", "verdict", "p", "note")
        rows = tuple(_tested_row(*pair) for pair in zip(findings, printed, strict=True))
        return [FindingTable("About the paper", f"{intro} {INTERVALS}", columns, rows, len(claims) + 2)]
    paper_rows = tuple(_printed_row(one) for one in printed)
    seen_columns = ("comparison", "difference or number", "interval", "result", "p", "claim", "note")
    return [
        FindingTable("About the paper", intro, (*claims, "note"), paper_rows, len(claims) - 1),
        FindingTable(
            "In this miniature",
            f"Comparisons on {_place(outcomes, names)}. They are about these models and these rows alone. {INTERVALS}",
            seen_columns,
            tuple(_seen_row(finding) for finding in findings),
            3,
        ),
    ]


def findings_csv(findings: Sequence[Finding]) -> str:
    """Write findings as CSV: a row for each comparison and each setting of it, with numbers in full.

    A number is in the row's unit, and the interval says of which level it is; what is empty is not known. The claim is
    true of effects between "true above" and "true below". Only the row that decides has a verdict and p values.

    Args:
        findings: What a study says of each claim.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for finding in findings:
        claim = {"claim": finding.claim.text, "source": finding.claim.source}
        if finding.deciding is None:
            writer.writerow({**claim, "verdict": finding.verdict})
        for result in finding.comparisons:
            decides = result == finding.deciding
            low, high = map(csv_number, result.region)
            row = {
                **claim, "comparison": csv_cell(_compared(result)), "unit": result.unit,
                "true above": low, "true below": high,
            }  # fmt: skip
            verdict = {
                "decides": "yes", "verdict": finding.verdict,
                "p": csv_number(finding.p), "adjusted p": csv_number(finding.p_adjusted),
            }  # fmt: skip
            pooled = {"setting": "all", **_effect_cells(result.effect, result.interval, "all claims together")}
            writer.writerow({**row, **pooled, **(verdict if decides else {})})
            for one in result.by_setting:
                alone = _effect_cells(one.effect, one.interval, "this setting alone")
                writer.writerow({**row, "setting": csv_cell(one.setting), **alone})
    return file.getvalue()


def _effect_cells(effect: float, interval: tuple[float, float] | None, scope: str) -> dict[str, str]:
    if interval is None:
        return {"effect": csv_number(effect)}
    low, high = map(csv_number, interval)
    return {"effect": csv_number(effect), "low": low, "high": high, "interval": f"95 % for {scope}"}


def number_text(value: float, result: ComparisonResult, unit: bool = True) -> str:
    """Return a number of a comparison with its unit: "+1.25 points", "0.46 times as many".

    Args:
        value: The number.
        result: The comparison.
        unit: Whether to say the unit.
    """
    text = f"{value:+.3g}" if result.is_difference and value else f"{value:.3g}"
    space = "" if result.unit.startswith("%") and not unit else " "
    return text.replace("-", "−") + (f"{space}{result.unit}" if unit and result.unit else "")


def interval_text(interval: tuple[float, float] | None, result: ComparisonResult) -> str:
    """Return an interval without its unit; a dash if the number is exact."""
    if interval is None:
        return "–"
    if not all(map(math.isfinite, interval)):
        return "unknown"
    return " … ".join(number_text(end, result, unit=False) for end in interval)


def p_text(p: float | None) -> str:
    """Return a p value as it is shown; a dash if there is none."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _compared(result: ComparisonResult) -> str:
    return f"{result.text}: {result.subject}" if result.subject else result.text


def _printed_cells(printed: PrintedFinding) -> tuple[str, ...]:
    claim, result = printed.claim, printed.deciding
    if result is None:
        return claim.text, claim.source, "–", "not printed"
    words = "agree" if printed.agrees else "disagree"
    return (
        claim.text,
        claim.source,
        f"{number_text(result.effect, result)} ({_compared(result)}; {printed.source})",
        words,
    )


def _printed_row(printed: PrintedFinding) -> FindingRow:
    kind = "" if printed.agrees is None else "holds" if printed.agrees else "fails"
    return FindingRow((*_printed_cells(printed), printed.claim.contradiction), kind, _details(printed.comparisons))


def _tested_row(finding: Finding, printed: PrintedFinding) -> FindingRow:
    number, interval = _numbers(finding)
    cells = (
        *_printed_cells(printed),
        " ".join((number, f"({_compared(finding.deciding)})")) if finding.deciding else number,
        interval,
        finding.verdict,
        p_text(finding.p_adjusted),
        " ".join(text for text in (_note(finding, {}), printed.claim.contradiction) if text),
    )
    return FindingRow(cells, KINDS[finding.verdict], _details(finding.comparisons), finding.p_adjusted)


def _seen_row(finding: Finding) -> FindingRow:
    cells = (
        "–" if finding.deciding is None else _compared(finding.deciding),
        *_numbers(finding),
        SEEN[finding.verdict],
        p_text(finding.p_adjusted),
        f"“{finding.claim.text}”",
        _note(finding, SEEN),
    )
    return FindingRow(cells, KINDS[finding.verdict], _details(finding.comparisons), finding.p_adjusted)


def _numbers(finding: Finding) -> tuple[str, str]:
    result = finding.deciding
    if result is None:
        return "–", "–"
    return number_text(result.effect, result), interval_text(result.interval, result)


def _note(finding: Finding, words: Mapping[Verdict, str]) -> str:
    sentences = [finding.note]
    for part, name in zip(finding.parts, ("score", "parameters"), strict=False):
        number = "" if part.result is None else f" ({number_text(part.result.effect, part.result)})"
        sentences.append(f"{name}: {words.get(part.verdict, part.verdict)}{number}")
    settings = finding.deciding.by_setting if finding.deciding else ()
    others = [one.setting for one in settings if finding.deciding and one.agrees != finding.deciding.agrees]
    if others:
        sentences.append(f"the other way in {len(others)} of {len(settings)} settings: {', '.join(others)}")
    if finding.resolution is not None:
        sentences.append(finding.resolution.text)
    return "; ".join(sentence for sentence in sentences if sentence)


def _details(comparisons: Sequence[ComparisonResult]) -> tuple[str, ...]:
    """Return a line for each comparison, if there are several, and one for each setting of it."""
    lines: list[str] = []
    for result in comparisons:
        interval = "" if result.interval is None else f" ({interval_text(result.interval, result)})"
        if len(comparisons) > 1 or result.by_setting:
            lines.append(f"{_compared(result)}: {number_text(result.effect, result)}{interval}")
        for one in result.by_setting:
            alone = replace(result, unit="")
            spread = "" if one.interval[0] == one.interval[1] else f" ({interval_text(one.interval, alone)})"
            lines.append(f"– {one.setting}: {number_text(one.effect, alone)}{spread}")
    return tuple(lines)


def _place(outcomes: Iterable[Outcome], names: Mapping[str, str]) -> str:
    """Say of which models and tasks outcomes are: "MiniLM d128, on SST-2 and CB"."""
    labels: dict[str, dict[str, None]] = {"model": {}, "task": {}}
    for outcome in outcomes:
        for axis, seen in labels.items():
            if axis in outcome.cell:
                seen[str(outcome.cell[axis])] = None
    models = describe_cell({"method": tuple(labels["model"])}, names) if labels["model"] else "models of small scale"
    return models + (f", {describe_cell({'task': tuple(labels['task'])}, names)}" if labels["task"] else "")
