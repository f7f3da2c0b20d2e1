"""Tables, and the description page of a method, that commands print on a terminal."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from ..methods.compositions import Composition
from ..methods.forms.base import (
    FORM_METHOD_EXAMPLES,
    FactorForm,
    Form,
    MatrixForm,
    Place,
    Routed,
    TensorSpec,
    WeightForm,
    Widths,
)
from ..methods.parser import signature_text
from ..methods.registry import GROUPS, LONG_STEPS, REGISTRY, SHORT_STEPS, VOCABULARY
from ..methods.schedules import Schedule
from ..methods.spec import AREAS, ROLES, SITES

if TYPE_CHECKING:
    from ..train.report.advice import FinishedRun
    from ..train.report.page import Comparison

LETTERS = "d width, m inner width of the FFN, r rank, l length, b bottleneck, L layers, N_h heads"

PAPERS = "LN: LN-tuning · UV: Towards a Unified View of Parameter-Efficient Transfer Learning · AP: APET"


def method_facts() -> dict[str, dict[str, Any]]:
    """Return formula, usage, default rates, paper and example of every named method, by name."""
    return {
        name: {
            **_facts(name, entry.make),
            "group": next(group.partition(":")[0] for group, names in GROUPS.items() if name in names),
            "formula": entry.formula,
            "rate": entry.rate,
            "short_rate": entry.short_rate,
            "scalars": entry.scalars,
            "paper": entry.paper,
            "example": entry.example,
            "point": [repr(part) for part in entry.plain.parts],
        }
        for name, entry in REGISTRY.items()
    }


def term_facts() -> dict[str, dict[str, Any]]:
    """Return name, formula, text and usage of every term of the algebra that is no named method, by name."""
    facts = {name: _facts(name, make) for name, make in VOCABULARY.items() if name not in REGISTRY}
    facts["Modification"]["choices"] = {"site": dict(SITES)}
    facts["Selection"]["choices"] = {"roles": dict.fromkeys(ROLES, ""), "areas": dict.fromkeys(AREAS, "")}
    return facts


def base_facts() -> dict[str, dict[str, Any]]:
    """Return the same of the classes that parts of the user's own derive from, and of what they get."""
    bases = {
        Form: "", FactorForm: "factors", MatrixForm: "matrix", WeightForm: "weight", Routed: "weights",
        Composition: "", Schedule: "",
    }  # fmt: skip
    usages: dict[type, str] = {
        base: f"class Mine(deltune.{base.__name__})" + (f":\n    {FORM_METHOD_EXAMPLES[writes]}" if writes else "")
        for base, writes in bases.items()
    }
    usages |= {kind: f"{kind.__name__}{signature_text(kind)}" for kind in (Widths, TensorSpec)}
    usages[Place] = "at: deltune.Place"
    facts = {kind.__name__: {**_facts(kind.__name__, kind), "usage": usage} for kind, usage in usages.items()}
    for kind in (Place, Schedule):
        members = {n: inspect.getdoc(m) or "" for n, m in vars(kind).items() if n == "__call__" or n[0] != "_"}
        facts[kind.__name__]["text"] += "\n" + "".join(f"\n{n}: {text.splitlines()[0]}" for n, text in members.items())
    return facts


def _facts(name: str, make: Callable[..., Any]) -> dict[str, Any]:
    text = inspect.getdoc(make) or ""
    formula = " ".join(text.split("\n\n")[0].split())
    return {"name": name, "formula": formula, "text": text, "usage": f"{name}{signature_text(make)}"}


def term_page(fact: Mapping[str, Any]) -> str:
    """Return the page of one term of the algebra."""
    page = f"{fact['usage']}\n\n{fact['text']}"
    for argument, values in fact.get("choices", {}).items():
        listed = "\n".join(f"  {value:<14} {meaning}".rstrip() for value, meaning in values.items())
        page += f"\n\n{argument}:\n{listed}"
    return page


def method_table(facts: Mapping[str, Mapping[str, Any]], terms: Mapping[str, Any]) -> RenderableType:
    """Return a table of the kinds of methods, with one line a method, and the names of the terms they are made of."""
    table = _table("method", "formula", "scalars a layer", "paper")
    table.columns[0].min_width = max(map(len, facts))
    for group, names in GROUPS.items():
        kind, _, meaning = group.partition(": ")
        table.add_section()
        table.add_row(kind.upper(), meaning, style="bold")
        for fact in (facts[name] for name in names):
            table.add_row(fact["name"], fact["formula"], fact["scalars"], fact["paper"])
    made_of = f"Methods are sums of these terms, which are explained in the same way: {', '.join(terms)}"
    made_of += "\nParts of your own derive from Form or Composition: deltune methods Form"
    return Group(table, f"{LETTERS}\n{PAPERS}\nOne in full: deltune methods NAME\n{made_of}")


def known_tasks() -> dict[str, dict[str, Any]]:
    """Return every known task: name, kind, folder, hub id, columns by role, metrics and version."""
    from ..train.tasks.registry import TASKS

    return {
        name: {
            "name": name,
            "kind": task.kind,
            "folder": task.folder,
            "hub": task.hub.source if task.hub else None,
            "columns": dict(task.columns),
            "metrics": list(task.metrics),
            "version": task.version,
        }
        for name, task in TASKS.items()
    }


def task_table(facts: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    """Return a table with one line a task."""
    table = _table("task", "kind", "folder", "metrics")
    table.columns[0].min_width = max(map(len, facts))
    for fact in facts.values():
        table.add_row(fact["name"], fact["kind"], fact["folder"], ", ".join(fact["metrics"]))
    return Group(table, "With --data-root ROOT a task is read from ROOT/folder, without it from the hub.")


def method_page(fact: Mapping[str, Any]) -> str:
    """Return the page of one method."""
    rates = f"{fact['short_rate']:g} for {SHORT_STEPS} steps, {fact['rate']:g} for {LONG_STEPS:,}"
    page = f"{fact['usage']}\n\n{fact['text']}\n\ndefault learning rate: {rates}\npaper: {fact['paper']}"
    page += f"\nscalars a layer: {fact['scalars']}   [{LETTERS}]"
    point = "\n  ".join(fact["point"]) or "no modification and no selection: the head alone"
    return f'{page}\nexample: deltune count minilm "{fact["example"]}"\nin the design space:\n  {point}'


def score_table(
    scores: Mapping[str, Mapping[str, float]], std: Mapping[str, Mapping[str, float]] | None = None
) -> RenderableType:
    """Return a table with one line a split and one column a metric."""
    names = list(dict.fromkeys(name for metrics in scores.values() for name in metrics))
    table = _table("split", *names, right=len(names))
    for split, metrics in scores.items():
        deviations = {name: f" ± {value:.4f}" for name, value in (std or {}).get(split, {}).items()}
        table.add_row(split, *(f"{metrics[name]:z.4f}{deviations.get(name, '')}" for name in names))
    return table


def run_table(finished: FinishedRun, folder: str) -> RenderableType:
    """Return the outcome of a run: what was trained, which epoch is kept, and the scores."""
    from ..train.report.advice import against_probe, training_losses
    from ..train.series import value_text, verdict

    config, kept, metrics = finished.config, finished.best_config, finished.metrics
    count, best, search = metrics.count, metrics.best, config.runtime.search
    trained = f"{count['trained']:,} trained scalars ({count['method']:,} of the method, {count['percent']:.4f} %)"
    steps, epochs = config.optim.steps, config.optim.epochs
    outcome = f"epoch {best.epoch} of {epochs} kept" if steps is None else f"step {best.step} kept"
    if config.is_series:
        chosen = sum(run.chosen for run in metrics.runs)
        values = "".join(f", {field} {value_text(config, field, best.as_json()[field])}" for field in search)
        outcome = f"{metrics.aggregate} of {chosen} seeds" if metrics.aggregate else "one seed"
        outcome += f"{values}: {verdict(metrics.runs)}" if search else ""
    rate = f" at {kept.optim.lr:g}" if isinstance(kept.optim.lr, float) else ""
    method = value_text(config, "method", kept.method.expression) if "method" in search else kept.method.expression
    lines = f"{method}{rate}: {trained}, {metrics.seconds:.0f} s, {outcome}\nin {folder}"
    if compared := against_probe(finished.best_metrics, finished.split):
        name, of_probe, tuned = compared
        lines += f"\n{name} on {finished.split}: a linear probe of the frozen model {of_probe:.3f}, tuned {tuned:.3f}"
        lines += f" by {best.run}" if config.is_series else ""
    if not metrics.scores and (losses := training_losses(finished.log))[1:]:
        lines += f"\nno split is held out; the training loss went from {losses[0]:.4g} to {losses[1]:.4g}"
    return Group(lines, score_table(metrics.scores, metrics.std)) if metrics.scores else lines


FOLDED_WIDTH = 20
"""The least width of a column whose cells are folded on a terminal."""


def comparison_table(comparison: Comparison, fold: bool) -> RenderableType:
    """Return a table with one line a run: its options, size and time, its main score, and its difference from the best.

    Nothing is cut: cells that do not fit are folded, or the lines are as long as they need to be.
    """
    main, several = comparison.main, len(comparison.runs) > 1
    titles = [] if main is None else [f"{comparison.split} {main}", "95 % interval"]
    titles += ["Δ best", "its interval"] if main is not None and several else []
    fields = [(name, values) for name, values in comparison.fields if name != "method"]
    texts = ["run", "method", *(["options that differ"] if fields else [])]
    table = _table(*texts, "trained", "seconds", *titles, right=len(titles) + 2)
    for i, run in enumerate(comparison.runs):
        cells = [run.trained.text, run.seconds.text]
        if main is not None:
            score = run.scores[comparison.metrics.index(main)]
            cells += [score.text, score.spread, run.difference.text, run.difference.spread]
        options = [", ".join(f"{name}={values[i]}" for name, values in fields)] if fields else []
        table.add_row(run.name, run.method, *options, *cells[: len(titles) + 2])
    for i, column in enumerate(table.columns):
        column.min_width = max(len(text) for text in (str(column.header), *map(str, column.cells)))
        if fold and 0 < i < len(texts):
            column.min_width, column.overflow = min(column.min_width, FOLDED_WIDTH), "fold"
    return Group(table, *comparison.notes)


def choice_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one line a candidate of `deltune choose`, without the reason why one was left out."""
    columns = [name for name in rows[0] if name not in ("method", "merges", "±", "seeds", "left out")]
    table = _table("method", *columns, right=len(columns))

    def cell(row: Mapping[str, Any], name: str) -> str:
        value, spread = row[name], row["±"] if name == "validation" else None
        if isinstance(value, str):
            return value
        shown = [number for number in (value, spread) if isinstance(number, int | float) and number == number]
        return " ± ".join(f"{number:,}" if isinstance(number, int) else f"{number:.4g}" for number in shown)

    for row in rows:
        table.add_row(row["method"], *(cell(row, name) for name in columns))
    return table


LONGEST_INPUT = 500
"""Characters of an input that a table of predictions shows; --output and --json have all."""


def prediction_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one line an input: what is predicted, its score where it has one, the input."""
    if rows and all(_is_tagged(row) for row in rows):
        table = _table("prediction")
        for row in rows:
            table.add_row(_tagged_text(row["input"], row["prediction"]))
        return table
    table = _table("prediction", "score", "input")
    for row in rows:
        text = _plain(row["input"])
        shown = text if len(text) <= LONGEST_INPUT else f"{text[: LONGEST_INPUT - 1]}…"
        table.add_row(_plain(row["prediction"]), _score(row["prediction"], row["scores"]), shown)
    return table


def _is_tagged(row: Mapping[str, Any]) -> bool:
    """Return whether a prediction is a list of tags, one for each token of the input."""
    tags, tokens = row["prediction"], row["input"]
    return isinstance(tags, list) and isinstance(tokens, list) and len(tags) == len(tokens)


def _tagged_text(tokens: Sequence[str], tags: Sequence[str]) -> str:
    """Return tokens in one line, each behind which a tag other than O stands: "Ada/B-PER lives in London/B-LOC"."""
    return " ".join(token if tag == "O" else f"{token}/{tag}" for token, tag in zip(tokens, tags, strict=True))


def _plain(value: Any) -> str:
    """Return an input or an answer in one line."""
    if isinstance(value, Mapping):
        return " | ".join(map(_plain, value.values()))
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value) if isinstance(value, str | int) else " | ".join(map(str, value))


def _score(prediction: Any, scores: Any) -> str:
    """Return the score of the prediction, by its name or its number, or the only score."""
    if isinstance(scores, Mapping) or (isinstance(scores, Sequence) and isinstance(prediction, int)):
        if isinstance(prediction, list):  # of several labels
            return " | ".join(f"{scores[name]:.3f}" for name in prediction)
        scores = scores[prediction]
    return f"{scores:.3f}" if isinstance(scores, float) else ""


def _table(*columns: str, right: int = 0) -> Table:
    """Return a plain table whose last `right` columns are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i >= len(columns) - right else "left")
    return table
