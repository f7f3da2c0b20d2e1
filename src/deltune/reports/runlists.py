"""Every run of a study in a row: where in the grid, scores, its curve in small, its spec, its error."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from markupsafe import Markup

from ..engine.outcomes import Outcome
from .facts import SEED

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
