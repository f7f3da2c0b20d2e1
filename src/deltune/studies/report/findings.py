"""Claims as rows of text: what the paper says and prints, and beside it what our runs show.

At small scale the words of a verdict differ from a verdict about the paper, so that neither is taken for the
other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ...errors import check_booleans
from ..claims.comparisons import NOT_RUN
from ..claims.decisions import CAPPED, ComparisonResult, Finding, PrintedFinding, Verdict
from .tables import csv_cell

KINDS: Mapping[Verdict, str] = {
    "holds": "holds", "does not hold": "fails", "undecided": "undecided", "not testable": "untestable",
}  # fmt: skip
"""Verdict -> its class in the style sheet."""

SEEN: Mapping[Verdict, str] = {
    "holds": "seen here", "does not hold": "otherwise here", "undecided": "undecided here",
    "not testable": "not testable here",
}  # fmt: skip
"""Verdict -> its words at small scale."""

NO_RESULT = "no result yet"
"""The verdict of a claim whose runs are not done."""

COVERED: Mapping[str, str] = {"all": "", "some": "test rows covered in part", "none": "test rows not covered"}
"""What an interval covers of the chance of test rows -> the words below it."""

CLAIM_COLUMNS = ("claim", "in the paper", "here", "floor", "full tuning", "interval", "verdict", "why")
"""Headings of a table of claims."""

CSV_COLUMNS = (
    "claim", "source", "comparison", "setting", "effect", "unit", "low", "high", "interval", "true above", "true below",
    "decides", "verdict", "p", "adjusted p", "floor", "full tuning", "why",
)  # fmt: skip
"""Columns of `findings_csv`."""


@dataclass(frozen=True)
class ClaimRow:
    """A claim, the paper's number and ours, as text.

    What a field ending in `_of` says stands below the field of that name; `kind` is the verdict's class in the style
    sheet; `why` is one sentence about the verdict, and `notes` are what else is to be known.
    """

    claim: str
    source: str
    printed: str
    printed_of: str
    number: str
    number_of: str
    floor: str
    full: str
    interval: str
    interval_of: str
    verdict: str
    verdict_of: str
    kind: str
    why: str
    notes: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[str, ...]:
        """A text for each of `CLAIM_COLUMNS`."""
        pairs = (
            (self.claim, self.source), (self.printed, self.printed_of), (self.number, self.number_of), (self.floor, ""),
            (self.full, ""), (self.interval, self.interval_of), (self.verdict, self.verdict_of),
        )  # fmt: skip
        cells = [f"{text} ({more})" if more else text for text, more in pairs]
        return (*cells, " ".join((self.why, *self.notes)))


@check_booleans
def claim_rows(findings: Sequence[Finding], printed: Sequence[PrintedFinding], *, small: bool) -> list[ClaimRow]:
    """Return the rows of a study's claims."""
    printed = printed or [PrintedFinding(finding.claim, None) for finding in findings]
    return [_claim_row(*pair, small) for pair in zip(findings, printed, strict=True)]


def has_no_result(finding: Finding) -> bool:
    """Return whether a claim waits for runs, as opposed to being undecided by those that are done."""
    return finding.verdict == "undecided" and finding.deciding is None and finding.note.startswith(NOT_RUN)


def _claim_row(finding: Finding, printed: PrintedFinding, small: bool) -> ClaimRow:
    claim, ours, theirs = finding.claim, finding.deciding, printed.deciding
    words = SEEN if small else {verdict: verdict for verdict in KINDS}
    notes = [
        claim.miniature if small else "",
        f"This is the sentence of a claim of {claim.repeats}, tested on other runs." if claim.repeats else "",
        "The paper's own numbers disagree with this sentence."
        if printed.agrees is False and not claim.contradiction
        else "",
        claim.contradiction,
    ]
    parts = [
        f"{name}: {words[part.verdict]}"
        + ("" if part.result is None else f", {number_text(part.result.effect, part.result)}")
        for part, name in zip(finding.parts, ("score", "parameters"), strict=False)
    ]
    covered = [finding.settings, "" if ours is None else _covered(ours)]
    return ClaimRow(
        claim=claim.text,
        source=claim.source,
        printed=claim.printed_range or "not printed" if theirs is None else number_text(theirs.effect, theirs),
        printed_of="" if theirs is None else f"{_compared(theirs)}; {printed.source}",
        number="–" if ours is None else number_text(ours.effect, ours),
        number_of="" if ours is None else _compared(ours),
        floor=_score_text(finding.floor, ours),
        full=_score_text(finding.full, ours),
        interval="–" if ours is None else interval_text(ours.interval, ours),
        interval_of="; ".join(text for text in covered if text),
        verdict=NO_RESULT if has_no_result(finding) else words[finding.verdict],
        verdict_of="; ".join(parts),
        kind=KINDS[finding.verdict],
        why=_why(finding),
        notes=tuple(note for note in notes if note),
        details=_details(finding.comparisons),
    )


def _score_text(score: float | None, result: ComparisonResult | None) -> str:
    """Return a score beside differences of scores; of other numbers there is no floor."""
    if result is None or result.unit != "points":
        return "–"
    return "not run" if score is None else f"{score:.1f}"


def _why(finding: Finding) -> str:
    """Say in a sentence what a verdict rests on, or what it lacks."""
    result = finding.deciding
    at_edge = f"{finding.at_edge:.0%} of the runs have a rate at the edge of those tried" if finding.at_edge else ""
    caveats = [
        f"{finding.at_chance} of {finding.n_runs} runs are no better than chance" if finding.at_chance else "",
        f"{finding.capped:.0%} of the runs are at their best when they end" if finding.capped >= CAPPED else "",
        at_edge,
        _dissent(result),
    ]
    more = "; ".join(text for text in caveats if text)
    if finding.verdict == "not testable":
        return _sentence("; ".join(filter(None, (finding.reason, at_edge))))
    if finding.verdict == "undecided":
        return f"{finding.resolution or _sentence(finding.note)} {_sentence(more)}".strip()
    if result is None or result.interval is None:
        return _sentence("the number is exact" + (f"; {more}" if more else ""))
    where = "where the claim is true" if finding.verdict == "holds" else "where the claim is false"
    if any(part.verdict == "undecided" for part in finding.parts):
        return _sentence("; ".join(filter(None, ("the number of parameters refutes it, its score is undecided", more))))
    return _sentence(f"the whole interval lies {where}" + (f"; {more}" if more else ""))


def _side(interval: tuple[float, float] | None, region: tuple[float, float]) -> bool | None:
    """Return True if an interval lies where a claim is true, False if where it is false, None if it does neither."""
    if interval is None:
        return None
    if region[0] < interval[0] and interval[1] < region[1]:
        return True
    return False if interval[1] <= region[0] or region[1] <= interval[0] else None


def _dissent(result: ComparisonResult | None) -> str:
    """Say which settings contradict a claim that the average supports, or the reverse; if it does neither, both."""
    if result is None:
        return ""
    average, parts = _side(result.interval, result.region), []
    for side, verb in ((True, "support"), (False, "contradict")):
        settings = [one.setting for one in result.by_setting if _side(one.interval, result.region) is side]
        if settings and side is not average:
            number = f"{len(settings)} of {len(result.by_setting)} settings {verb}{'s' * (len(settings) == 1)} it"
            parts.append(f"{number}: {', '.join(settings)}")
    return "; ".join(parts)


def _covered(result: ComparisonResult) -> str:
    has_rows = result.interval is not None and result.unit == "points"
    return COVERED[result.rows_covered] if has_rows else ""


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "." if text else ""


def findings_csv(findings: Sequence[Finding]) -> str:
    """Write findings as CSV: a row for each comparison and each setting of it, with numbers in full.

    A number is in the row's unit, and the interval says of which level it is; what is empty is not known. The claim is
    true of effects between "true above" and "true below". Only the row that decides has a verdict and p values.
    """
    rows: list[dict[str, object]] = []
    for finding in findings:
        claim = {"claim": csv_cell(finding.claim.text), "source": csv_cell(finding.claim.source)}
        verdict = {
            "verdict": finding.verdict, "p": finding.p, "adjusted p": finding.p_adjusted, "floor": finding.floor,
            "full tuning": finding.full, "why": csv_cell(_why(finding)),
        }  # fmt: skip
        if finding.deciding is None:
            rows.append({**claim, **verdict})
        for result in finding.comparisons:
            low, high = result.region
            row = {
                **claim, "comparison": csv_cell(_compared(result)), "unit": result.unit, "true above": low,
                "true below": high,
            }  # fmt: skip
            pooled = {"setting": "all", **_effect_cells(result.effect, result.interval, "all claims together")}
            rows.append({**row, **pooled, **({"decides": "yes", **verdict} if result == finding.deciding else {})})
            rows += [
                {**row, "setting": csv_cell(one.setting)}
                | _effect_cells(one.effect, one.interval, "this setting alone")
                for one in result.by_setting
            ]
    return str(pd.DataFrame(rows, columns=list(CSV_COLUMNS), dtype=object).to_csv(index=False))


def _effect_cells(effect: float, interval: tuple[float, float] | None, scope: str) -> dict[str, object]:
    if interval is None:
        return {"effect": effect}
    return {"effect": effect, "low": interval[0], "high": interval[1], "interval": f"95 % for {scope}"}


@check_booleans
def number_text(value: float, result: ComparisonResult, *, unit: bool = True) -> str:
    """Return a number of a comparison with its unit: "+1.25 points", "0.46 times as many"."""
    size = abs(value)
    text = f"{value:.3g}" if size < 1000 else f"{value:.0f}"
    if result.is_difference and value:
        text = f"{value:+.0f}" if size >= 100 else f"{value:+.2f}" if size >= 0.1 else f"{value:+.2g}"
    space = "" if result.unit.startswith("%") and not unit else " "
    return text.replace("-", "−") + (f"{space}{result.unit}" if unit and result.unit else "")


def interval_text(interval: tuple[float, float] | None, result: ComparisonResult) -> str:
    """Return an interval without its unit; a dash if the number is exact."""
    if interval is None:
        return "–"
    if not all(map(math.isfinite, interval)):
        return "unknown"
    return " … ".join(number_text(end, result, unit=False) for end in interval)


def _compared(result: ComparisonResult) -> str:
    return f"{result.text}: {result.subject}" if result.subject else result.text


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
