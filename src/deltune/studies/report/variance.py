"""How much of the variance of scores goes back to each factor of a study: a mixed model, fitted by statsmodels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...errors import counted
from ...train import Best
from ..jobs.job import Outcome
from .aggregate import SEED, NumberFormat, select_outcomes
from .figure_spec import VarianceSpec, as_tuple
from .tables import Column, Row, Table, TableCell

if TYPE_CHECKING:
    import pandas

REST, TUNED = "the rest", "method, each at its best rate"
SHOWN = NumberFormat(100.0, 1)


def variance_components_table(view: VarianceSpec, outcomes: Iterable[Outcome]) -> Table:
    """Lay out the parts of the variance of each task whose runs have all ended, and of all these tasks together."""
    import pandas

    selected = select_outcomes(outcomes, view.where)
    waiting = {(one.cell["model"], one.cell["task"]) for one in selected if one.waiting}
    ended = [one for one in selected if (one.cell["model"], one.cell["task"]) not in waiting]
    rows = [
        {
            **one.cell,
            "score": next(one.scores[name] for name in as_tuple(view.metric) if name in one.scores),
            "quality": Best(**one.extra["best"]).quality,
        }
        for one in ended
        if one.error is None
    ]
    tasks = list(dict.fromkeys(str(row["task"]) for row in rows))
    frames = {task: pandas.DataFrame([row for row in rows if row["task"] == task]) for task in tasks}
    if len(tasks) > 1:
        frames["all tasks"] = pandas.DataFrame(rows)
    parts = [_parts(frame, view.factors) for frame in frames.values()]
    names = list(dict.fromkeys(name for one in parts for name in one))
    deviations = {name: [math.sqrt(one[name]) if name in one else None for one in parts] for name in names}
    totals = [sum(one.values()) - one[TUNED] for one in parts]
    shares = {
        name: [one[name] / total if name in one else None for one, total in zip(parts, totals, strict=True)]
        for name in names
        if name != TUNED
    }
    return Table(
        view.title,
        "factor",
        tuple(Column((label,), "score", SHOWN) for label in frames),
        tuple(
            Row(group, name, tuple(TableCell(value, state="missing" if value is None else "shown") for value in values))
            for group, of_group in (("% of the variance", shares), ("standard deviation, points", deviations))
            for name, values in of_group.items()
        ),
        excluded=(f"{counted(len(ended) - len(rows), 'run')} without a score",) if len(ended) > len(rows) else (),
    )


def _parts(frame: pandas.DataFrame, factors: Sequence[str]) -> dict[str, float]:
    """Return the parts of the variance, and the variance of methods at the rates at which they validate best."""
    best = frame.loc[frame.groupby(["model", "task", "method", SEED])["quality"].idxmax()]
    return {**variance_parts(frame, factors), TUNED: variance_parts(best, ["method"])["method"]}


def variance_parts(frame: pandas.DataFrame, factors: Sequence[str]) -> dict[str, float]:
    """Return the variance of scores by factor, by each pair of factors, by seed, and the rest, by REML.

    Each task has a mean of its own and is a group: within it the effects of a factor's labels are drawn from a normal
    distribution, and its variance is the factor's. Models are a factor where a task has several.
    """
    import statsmodels.formula.api as formulas

    models = ["model"] if frame.groupby("task")["model"].nunique().max() > 1 else []
    pairs = [f"{one} × {other}" for i, one in enumerate(factors) for other in factors[i + 1 :]]
    terms = {name: "0 + " + ":".join(f"C({one})" for one in name.split(" × ")) for name in
             (*models, *factors, *pairs, SEED)}  # fmt: skip
    mean = "score ~ C(task)" if frame["task"].nunique() > 1 else "score ~ 1"
    model = formulas.mixedlm(mean, frame, groups=frame["task"], vc_formula=terms)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a part that is zero lies at the boundary of what is possible
        fitted = model.fit(reml=True)
    variances = dict(zip(model.exog_vc.names, map(float, fitted.vcomp), strict=True))
    return {**{name: variances[name] for name in terms}, REST: float(fitted.scale)}
