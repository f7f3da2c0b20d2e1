"""One HTML page of a report: findings, sortable tables, figures, every run, what is missing; it needs no network."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import yaml
from markupsafe import Markup

from ..._version import __version__
from ...errors import DeltuneError
from ..engine.outcomes import Outcome
from .aggregate import SEED
from .plots import Picture, rendered
from .table_formats import csv, label_at, latex, legend_of, mark, markdown
from .tables import Entry, Grid

LARGE = 100_000  # characters of SVG from which a PNG may be the smaller
READABLE = 0.75  # the least share of its own width a figure is shrunk to: letters of 7 points; below, its box scrolls


def inline(picture: Picture, prefix: str) -> dict[str, Any]:
    """What the page needs of a picture. prefix: of its ids, which are to be unlike those of other pictures."""
    width, height = (96 * inches for inches in picture.figure.get_size_inches())
    style = f"min-width:{READABLE * width:.0f}px;max-width:{1.25 * width:.0f}px"
    svg = _trimmed(picture.svg(), prefix)
    image = Markup('<svg {} style="{}"><title>{}</title>{}').format(_head(svg), style, picture.title, _body(svg))
    if len(svg) > LARGE:
        data = base64.b64encode(rendered(picture.figure, "png")).decode()
        if len(data) < len(svg):
            image = Markup(
                '<img src="data:image/png;base64,{}" alt="{}" style="{}" width="{:.0f}" height="{:.0f}">'
            ).format(data, picture.text, style, width, height)
    return {
        "title": picture.title,
        "text": picture.text,
        "notes": picture.notes,
        "image": image,
        "wide": width > 560,
    }


def _trimmed(svg: str, prefix: str) -> str:
    """One <svg> element as HTML takes it: no prolog, comments, metadata or name spaces; ids in use get the prefix."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"\s+xmlns(:\w+)?=\"[^\"]*\"", "", svg).replace("xlink:href", "href")
    used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", svg))
    svg = re.sub(r"\s+id=\"([^\"]*)\"", lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r"\bhref=\"#", f'href="#{prefix}', svg).replace("url(#", f"url(#{prefix}")
    return re.sub(r">\s+<", "><", svg)


def _head(svg: str) -> Markup:
    """The view box, which alone is kept of the element's own attributes, and its role."""
    found = re.search(r'viewBox="([^"]*)"', svg)
    return Markup('viewBox="{}" role="img"').format(found.group(1) if found else "")


def _body(svg: str) -> Markup:
    """What stands inside the element: matplotlib's own marks, in which every word is escaped or drawn."""
    return Markup(svg[svg.index(">") + 1 :])


SCORES = 5  # columns; a run's other scores stand with its spec
POINTS = 40  # of a small curve: one for every 2.4 of its pixels
WIDE, HIGH = 192, 48  # units of its view box


def runs(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the page needs: axes, names of scores, what all specs share (as YAML), and the rows."""
    axes = list(dict.fromkeys(axis for outcome in outcomes for axis in outcome.cell))
    axes = [axis for axis in axes if axis != SEED] + [SEED] * (SEED in axes)
    axes.sort(key=lambda axis: axis != "method")  # what a reader looks for stands first, and stays in sight
    scores = list(dict.fromkeys(name for outcome in outcomes for name in outcome.scores))[:SCORES]
    specs = [_from_here(_plain(outcome.spec)) for outcome in outcomes if outcome.spec]
    shared = {
        key: value
        for key, value in (specs[0] if len(specs) > 1 else {}).items()
        if all(key in spec and spec[key] == value for spec in specs)
    }
    return {
        "axes": axes,
        "scores": scores,
        "shared": _yaml(shared) if shared else "",
        "runs": [_run(outcome, axes, scores, shared) for outcome in outcomes],
    }


def _run(outcome: Outcome, axes: Sequence[str], scores: Sequence[str], shared: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in _from_here(_plain(outcome.spec)).items() if key not in shared}
    more = {name: value for name, value in outcome.scores.items() if name not in scores}
    parts = {"spec": own, "count": _plain(outcome.count), "scores": _plain(more)}
    values = [outcome.scores.get(name) for name in scores]
    return {
        "labels": [str(outcome.cell.get(axis, "–")) for axis in axes],
        "scores": [("" if value is None else repr(float(value)), _short(value)) for value in values],
        "spark": spark(outcome.curve),
        "seconds": f"{outcome.seconds:.1f}" if outcome.seconds else "",
        "spec": _yaml({name: part for name, part in parts.items() if part}) if any(parts.values()) else "nothing",
        "error": outcome.error or "",
    }


def spark(curve: Sequence[Mapping[str, Any]], name: str = "loss") -> Markup | str:
    """The curve of a number as a line without axes, its ends in words; "–" for fewer than two points."""
    points = [
        (float(line["step"]), float(line[name]))
        for line in curve
        if isinstance(line.get(name), (int, float)) and "step" in line and math.isfinite(line[name])
    ]
    if len(points) < 2:
        return "–"
    told = f"{name} from {points[0][1]:.3g} to {points[-1][1]:.3g}, steps {points[0][0]:.0f} to {points[-1][0]:.0f}"
    kept = (
        [points[round(i * (len(points) - 1) / (POINTS - 1))] for i in range(POINTS)] if len(points) > POINTS else points
    )
    left, right = kept[0][0], kept[-1][0]
    low, high = min(y for _, y in kept), max(y for _, y in kept)
    xy = " ".join(
        f"{round((x - left) / (right - left or 1) * WIDE)},{round((high - y) / (high - low or 1) * (HIGH - 4)) + 2}"
        for x, y in kept
    )
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<title>{}</title><polyline points="{}"/></svg>'
    ).format(WIDE, HIGH, told, told, xy)


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values, whatever a spec was made of."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(value), default=str))
    return plain


def _from_here(value: Any) -> Any:
    """A spec with its folders as they are called from here: whoever reads a page has other places."""
    if isinstance(value, dict):
        return {key: _from_here(held) for key, held in value.items()}
    if isinstance(value, str) and os.path.isabs(value) and os.path.exists(value):
        return os.path.relpath(value)
    return value


def _yaml(value: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=100).rstrip()


try:
    import jinja2
except ImportError as error:
    raise DeltuneError("a page needs Jinja2: pip install deltune[report]") from error


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
    loader = jinja2.PackageLoader("deltune.studies.report", "pages")
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
