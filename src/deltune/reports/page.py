"""One HTML page of a report: findings, sortable tables, figures, every run, what is missing; it needs no network."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from ..errors import DeltuneError

try:
    import jinja2
except ImportError as error:
    raise DeltuneError("a page needs Jinja2: pip install deltune[report]") from error

from .. import __version__
from ..engine.outcomes import Outcome
from .grids import Entry, Grid
from .pictures import inline
from .plots import Picture
from .runlists import runs
from .tables import csv, label_at, latex, legend_of, mark, markdown

VERDICTS = {"holds": ("holds", "✓"), "does not hold": ("fails", "✗"), "undecided": ("undecided", "?")}
"""Verdict -> its class of the style sheet and a sign: never told by colour alone."""


class Finding(Protocol):
    """A claim of a paper put to the test; any object with these fields."""

    @property
    def claim(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    @property
    def effect(self) -> float | None: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...
    @property
    def p(self) -> float | None: ...
    @property
    def note(self) -> str: ...


@dataclass(frozen=True)
class Section:
    """One study. text: what it asks, in paragraphs. missing: what was planned and is not there, in words."""

    title: str
    text: str = ""
    grids: tuple[Grid, ...] = ()
    figures: tuple[Picture, ...] = ()
    findings: tuple[Finding, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    missing: tuple[str, ...] = ()


def page(sections: Sequence[Section], title: str = "deltune report") -> str:
    """The page as text. Every word of it is escaped; the figures are our own SVG."""
    loader = jinja2.PackageLoader("deltune.reports", "pages")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    studies = [_study(section, i) for i, section in enumerate(sections)]
    facts = _facts([o for s in sections for o in s.outcomes], [f for s in sections for f in s.findings])
    several = f"{len(sections)} studies · " if len(sections) != 1 else ""
    return environment.get_template("page.html").render(
        title=title, facts=several + facts, studies=studies, version=__version__
    )


def _study(section: Section, at: int) -> dict[str, Any]:
    return {
        "id": f"s{at}-{re.sub(r'[^a-z0-9]+', '-', section.title.lower()).strip('-')}",
        "section": section,
        "facts": _facts(section.outcomes, section.findings),
        "paragraphs": [part for part in re.split(r"\n\s*\n", section.text.strip()) if part],
        "findings": [_finding(finding) for finding in section.findings],
        "tables": [_table(grid) for grid in section.grids],
        "pictures": [inline(picture, f"s{at}f{i}-") for i, picture in enumerate(section.figures)],
        **runs(section.outcomes),
    }


def _facts(outcomes: Sequence[Outcome], findings: Iterable[Finding]) -> str:
    """ "216 runs, 3 failed, 2 not run yet · 2 hold, 1 does not, 1 undecided"."""
    waiting = sum(outcome.waiting for outcome in outcomes)
    failed = sum(outcome.error is not None for outcome in outcomes) - waiting
    runs = f"{len(outcomes):,} run{'s' * (len(outcomes) != 1)}"
    told = [f"{n:,} {word}" for n, word in ((failed, "failed"), (waiting, "not run yet")) if n]
    parts = [", ".join([runs, *told])]
    count = Counter(finding.verdict for finding in findings)
    if count:
        words = {
            "holds": "hold" if count["holds"] != 1 else "holds",
            "does not hold": "does not" if count["does not hold"] == 1 else "do not",
            "undecided": "undecided",
        }
        parts.append("findings: " + ", ".join(f"{count[v]} {word}" for v, word in words.items() if count[v]))
    return " · ".join(parts)


def _finding(finding: Finding) -> dict[str, Any]:
    kind, glyph = VERDICTS.get(finding.verdict, ("undecided", "?"))
    interval = "" if finding.low is None or finding.high is None else f"{finding.low:+.3g} … {finding.high:+.3g}"
    return {
        "claim": finding.claim,
        "source": finding.source,
        "verdict": finding.verdict,
        "kind": kind,
        "glyph": glyph,
        "rank": list(VERDICTS).index(finding.verdict) if finding.verdict in VERDICTS else len(VERDICTS),
        "effect": "" if finding.effect is None else repr(float(finding.effect)),
        "effect_text": "–" if finding.effect is None else f"{finding.effect:+.3g}".replace("-", "−"),
        "interval": interval.replace("-", "−") or "–",
        "p": "" if finding.p is None else repr(float(finding.p)),
        "p_text": "–" if finding.p is None else "< 0.001" if finding.p < 0.001 else f"{finding.p:.3f}",
        "note": finding.note,
    }


def _table(grid: Grid) -> dict[str, Any]:
    """A grid with its cells as words, and the spans of the upper lines of its heading."""
    levels = [
        [
            (label, len(list(columns)))
            for label, columns in groupby(grid.columns, key=lambda column: label_at(column, level, grid.levels))
        ]
        for level in range(grid.levels - 1)
    ]
    groups = [
        (group, [{"label": row.label, "cells": [_cell(grid, i, e) for i, e in enumerate(row.entries)]} for row in rows])
        for group, rows in grid.groups
    ]
    return {
        "grid": grid,
        "levels": levels,
        "groups": groups,
        "legend": legend_of(grid, comparison="Small: the paper's number."),
        "notes": [(mark(i), note) for i, note in enumerate(grid.notes)],
        "sources": [markdown(grid), latex(grid), csv(grid)],
    }


def _cell(grid: Grid, at: int, entry: Entry) -> dict[str, Any]:
    column = grid.columns[at]
    return {
        "value": "" if entry.mean is None else repr(float(entry.mean)),
        "text": grid.text(entry, column),
        "std": grid.std(entry, column),
        "paper": grid.paper(entry, column),
        "flag": "best" if entry.best else "second" if entry.second else "gap" if entry.mean is None else "",
        "marks": ", ".join(map(mark, entry.notes)),
    }
