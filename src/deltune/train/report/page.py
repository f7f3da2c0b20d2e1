"""report.html: a finished run, or several side by side, as one page that loads nothing from elsewhere."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from ...errors import DeltuneError, counted, error_from_problems
from ...files import explain_write_errors, write_text
from ...methods.counting import format_bytes
from ...methods.forms.base import Form
from ...methods.registry import parse
from ...methods.spec import Modification, expressions_apart
from ...models import portable_name
from ...runtime.serialization import read_metadata
from ...runtime.step_memory import StepMemory
from ..config import RunConfig
from ..inference import rescore_with_statistics
from ..metrics.base import Score
from ..metrics.intervals import difference_interval
from ..metrics.registry import METRICS
from ..presets import DEFAULT
from ..records import DataFacts, RunMetrics, SeriesRun, command_line, signed_score
from ..run_folder import RunFolder
from ..series import value_text, verdict
from .advice import FinishedRun, advice, against_probe, metric_without_say, read_finished
from .charts import Line, line_chart
from .rendering import render

MAX_CURVES = 6
"""Of how many runs the curves are drawn."""
TEXT_KINDS = ("classification", "multilabel", "regression", "tagging", "generation", "language")
"""The kinds of task whose input is a text that a command line can hold."""
TO = "\u00a0…\u00a0"
"""Stands between the ends of an interval, which do not part at the end of a line."""
ENVIRONMENT = (
    "command", "deltune", "commit", "project_commit", "python", "packages", "platform", "device", "precision", "cpus",
    "threads", "linear_backend", "processes", "reward",
)  # fmt: skip
"""The facts of environment.json that are shown, in order."""


@dataclass(frozen=True)
class ScoreCell:
    """A score as it is shown, with its interval or deviation; `value` orders the rows of a table."""

    text: str
    spread: str = ""
    value: str = ""


@dataclass(frozen=True)
class SeriesRow:
    """One run of a series: its name, what was tried, its scores and what became of it."""

    name: str
    tried: str
    scores: tuple[ScoreCell, ...]
    outcome: str


def write_report(run: RunFolder) -> Path:
    """Write report.html into the folder of a finished run, and return its path."""
    page = render_report(read_all([run]))
    path = run.report_file
    with explain_write_errors(path):
        write_text(path, page)
    return path


def render_report(finished: Sequence[FinishedRun]) -> str:
    """Return the page about some finished runs; of several they are compared first."""
    reports = [_report_values(one, f"r{i}") for i, one in enumerate(finished)]
    comparison = compare(finished) if len(finished) > 1 else None
    title = reports[0]["title"] if len(finished) == 1 else f"{len(finished)} runs"
    return render(Path(__file__).with_name("run.html"), title=title, reports=reports, comparison=comparison)


def read_all(runs: Sequence[RunFolder]) -> list[FinishedRun]:
    """Read finished runs."""
    finished, problems = [], []
    for run in runs:
        try:
            finished.append(read_finished(run))
        except DeltuneError as error:
            problems.append(str(error))
    if problems:
        raise error_from_problems("these runs cannot be reported on", problems)
    return finished


def _report_values(finished: FinishedRun, key: str) -> dict[str, Any]:
    """Return what the page shows of a run; `key` tells the ids of its sections from the ids of other runs."""
    metrics, config = finished.metrics, finished.config
    names = tuple(dict.fromkeys(name for scores in metrics.scores.values() for name in scores))
    return {
        "key": key,
        "title": " · ".join((*reversed(_model_and_data(finished)), finished.best_config.method.expression)),
        "subtitle": f"Kind of task: {finished.data.kind}",
        "advice": tuple(advice(finished)),
        "facts": tuple(_facts(finished)),
        "metrics": names,
        "scores": tuple(_score_rows(metrics, names, finished.data)),
        "has_intervals": any(metrics.intervals.values()),
        "charts": tuple(_series_charts(finished) if config.is_series else _charts(finished)),
        "series": tuple(_series_row(one, names, config) for one in metrics.runs),
        "analysis": finished.analysis,
        "split": finished.split,
        "loading": loading_recipe(finished),
        "commands": _commands(finished),
        "config": _yaml(config.canonical()),
        "full_config": config.yaml().rstrip(),
        "environment": tuple(_environment(finished)),
        "signatures": tuple(sorted(metrics.signatures.items())) + tuple(sorted(metrics.omitted.items())),
    }


def main_metric(metrics: RunMetrics) -> str | None:
    """Return the metric by which a run is compared: that which chose its epoch, else its first one."""
    scores = metrics.test or metrics.validation
    names = [name for name in (metrics.best.metric, *scores) if name in scores and name != "loss"]
    return names[0] if names else "loss" if "loss" in scores else None


def _model_and_data(finished: FinishedRun) -> tuple[str, str]:
    """Return the names of model and data, paths by their last part."""
    config = finished.best_config
    source = config.data.task if config.data.source is None else Path(config.data.source).name
    model = Path(config.model.name).name if Path(config.model.name).is_absolute() else config.model.name
    return model, str(source)


def _about(finished: FinishedRun) -> str:
    """Return model, data and kind of task in a line."""
    return " · ".join((*_model_and_data(finished), finished.data.kind))


def _facts(finished: FinishedRun) -> list[tuple[str, str]]:
    """Return what was trained, which validation is kept, how long it took, and how many texts were cut."""
    metrics, best = finished.metrics, finished.best_metrics.best
    count, optim = metrics.count, finished.best_config.optim
    length = counted(optim.epochs, "epoch") if optim.steps is None else counted(optim.steps, "step")
    kept = f"epoch {best.epoch}" if optim.steps is None else f"step {best.step}"
    why = f" (best validation {best.metric})" if best.metric else " (the last)"
    if undecided := metric_without_say(finished.best_metrics, finished.log):
        why = f" (lowest validation loss; {undecided})"
    batch = f"{optim.batch_tokens} tokens" if optim.batch_tokens else f"{optim.batch_size} rows"
    section = finished.best_config.objective
    facts = [
        *([("objective", section.kind)] if section.kind != "sft" else []),
        ("trained", f"{count['trained']:,} scalars: {count['method']:,} of the method, {count['head']:,} of the head"),
        ("share", f"{percent_text(count['percent'])} of {count['denominator_size']:,}"),
        ("kept", f"{kept} of {length}{why}"),
        *([("search", verdict(metrics.runs))] if finished.config.runtime.search else []),
        ("learning rate", f"{optim.rate:g}{_rate_source(finished)}, {optim.schedule}, steps of {batch}"),
        ("time", f"{metrics.seconds:,.0f} s"),
    ]
    if compared := against_probe(finished.best_metrics, finished.split):
        name, of_probe, tuned = compared
        which = f" by {metrics.best.run}" if finished.config.is_series else ""
        facts.append(
            ("linear probe", f"{short_number(of_probe)} {name} on {finished.split}, tuned {short_number(tuned)}{which}")
        )
    if of_step := next((line["memory"] for line in finished.log if line.get("event") == "memory"), None):
        memory = StepMemory(**{field.name: of_step[field.name] for field in fields(StepMemory)})
        parts = "; ".join(f"{format_bytes(size)} {name}" for name, size in memory.lines())
        facts.append(("memory", f"{format_bytes(memory.total)} at the peak of the first step: {parts}"))
    cut = [f"{n:,} {split} inputs" for split, n in metrics.truncated.items() if n]
    cut += [f"{n:,} {split} targets" for split, n in metrics.truncated_targets.items() if n]
    return [*facts, ("cut", ", ".join(cut))] if cut else facts


def _rate_source(finished: FinishedRun) -> str:
    """Return where the learning rate comes from that nobody gave: the method."""
    return " (the method's default)" if finished.best_config.optim.lr_source == DEFAULT else ""


def percent_text(percent: float) -> str:
    """Return a share with enough digits to tell small ones apart: 0.0123 %, 1.23 %, 100 %."""
    return f"{percent:.3g} %" if percent < 99.95 else "100 %"


def _score_rows(
    metrics: RunMetrics, names: Sequence[str], data: DataFacts
) -> list[tuple[str, str, tuple[ScoreCell, ...]]]:
    rows = data.rows
    return [
        (
            split,
            f"{rows[split]:,}" if split in rows else "",
            tuple(_cell(metrics, split, name) for name in names),
        )
        for split in metrics.scores
    ]


def _cell(metrics: RunMetrics, split: str, name: str) -> ScoreCell:
    """Return a score of a run."""
    return score_cell(
        metrics.scores[split].get(name), metrics.intervals.get(split, {}).get(name),
        metrics.std.get(split, {}).get(name),
    )  # fmt: skip


def score_cell(
    score: float | None, interval: Sequence[float] | None = None, deviation: float | None = None
) -> ScoreCell:
    """Return a score with its interval, or else its standard deviation over seeds."""
    if score is None:
        return ScoreCell("–")
    spread = f"± {short_number(deviation)} over seeds" if deviation is not None else ""
    if interval is not None and deviation is None:
        spread = f"{short_number(interval[0])}{TO}{short_number(interval[1])}"
    return ScoreCell(short_number(score), spread, repr(float(score)))


def short_number(value: float) -> str:
    """Return a score with four digits behind the point, or fewer where it is 10 or more."""
    return f"{value:z.4f}" if abs(value) < 10 else f"{value:.2f}"


def _series_row(run: SeriesRun, names: Sequence[str], config: RunConfig) -> SeriesRow:
    tried = [name for name in config.runtime.search if name in run.tried]
    values = ", ".join(f"{name} {value_text(config, name, run.tried[name])}" for name in tried)
    scores = run.test or run.validation
    outcome = f"diverged: {run.error}" if run.error else "chosen" if run.chosen else ""
    return SeriesRow(run.run, values, tuple(score_cell(scores.get(name)) for name in names), outcome)


def _charts(finished: FinishedRun) -> list[Markup]:
    """Draw the losses, the validation metric and the learning rate of a single run."""
    log, best = finished.log, finished.metrics.best
    name = best.metric or "loss"
    if finished.config.objective.kind != "sft":
        name = next((one for one in ("reward", "accuracy") if any(one in line for line in log)), name)
    loss = [Line("training", _curve(log, "loss"))]
    if validation := _curve(log, "eval_loss"):
        loss.append(Line("validation", validation, dots=True, marked=best.step))
    # the loss of grpo is 0 but for rounding where each answer is trained once and held to no reference
    charts = [line_chart("Loss", loss, "step")] if any(abs(y) > 1e-6 for line in loss for _, y in line.points) else []
    if name != "loss":
        points, training = _curve(log, f"eval_{name}"), _curve(log, name)
        lines = [Line("validation" if training else name, points, dots=True, marked=best.step)]
        if training:
            lines.insert(0, Line("training", training))
        probe = finished.metrics.probe
        if points and probe is not None and name in probe.validation:
            level = float(probe.validation[name])
            lines.append(Line("linear probe", [(0, level), (points[-1][0], level)]))
        charts.append(line_chart(name.capitalize() if training else f"Validation {name}", lines, "step"))
    charts.append(line_chart("Learning rate", [Line("learning rate", _curve(log, "learning_rate"))], "step"))
    return [chart for chart in charts if chart]


def _series_charts(finished: FinishedRun) -> list[Markup]:
    """Draw the curves of the single runs of a series over one another."""
    logs = {}
    for one in finished.metrics.runs[:MAX_CURVES]:
        run = RunFolder(finished.run.runs / one.run)
        tried = ", ".join(f"{name} {value}" for name, value in one.tried.items())
        if run.log_file.is_file():
            logs[" · ".join(part for part in (one.run, tried) if part)] = run.read_log()
    return comparison_charts(logs, finished.best_metrics.best.metric)


def comparison_charts(logs: Mapping[str, Sequence[Mapping[str, Any]]], metric: str | None) -> list[Markup]:
    """Draw the validation metric and the losses of several runs over one another."""
    titles = {} if metric in (None, "loss") else {f"eval_{metric}": f"Validation {metric}"}
    titles |= {"eval_loss": "Validation loss", "loss": "Training loss"}
    charts = []
    for key, title in titles.items():
        curves = {name: points for name, log in logs.items() if (points := _curve(log, key))}
        charts.append(line_chart(title, [Line(n, points, dots=key != "loss") for n, points in curves.items()], "step"))
    return [chart for chart in charts if chart]


def _curve(log: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [
        (float(line["step"]), float(line[key]))
        for line in log
        if isinstance(line.get(key), int | float) and math.isfinite(line[key])
    ]


def loading_recipe(finished: FinishedRun) -> str:
    """Return Python that loads the base model of a run and its delta."""
    metadata = read_metadata(finished.best.delta)
    labels = f", num_labels={len(metadata.labels.pairs)}" if metadata.labels and finished.data.labels else ""
    base = portable_name(metadata.base.name) or finished.best_config.model.name
    packaged = base == "minilm"
    note = (
        "  # the folder of the base model; it may be elsewhere on another machine" if Path(base).is_absolute() else ""
    )
    return "\n".join(
        (
            "import deltune",
            *(["from deltune.models import packaged_minilm"] if packaged else []),
            f"from transformers import {metadata.base.model}",
            "",
            f"model = {metadata.base.model}.from_pretrained("
            f"{'packaged_minilm()' if packaged else repr(base)}{labels}){note}",
            f"tuned = deltune.load(model, {_shown_path(finished.run.folder)!r})  # the folder of this page",
        )
    )


def _shown_path(folder: Path) -> str:
    """Return a folder as it is named from the working directory, or its name alone where it lies elsewhere."""
    relative = os.path.relpath(folder)
    return folder.name if relative.startswith("..") else relative


def _commands(finished: FinishedRun) -> tuple[str, ...]:
    """Return what may be done next on the command line."""
    folder = command_line([str(finished.run.folder)])
    text = [f'deltune predict {folder} --text "…"'] if finished.data.kind in TEXT_KINDS else []
    objective = finished.best_config.objective.kind
    if finished.data.kind in ("chat", "preference") and objective != "reward":
        trained = finished.best.trained
        talks = trained is not None and trained.chat_template is not None
        text = [f"deltune chat {folder}" if talks else f'deltune generate {folder} --prompt "…"']
    parts = parse(finished.best_config.method.expression).parts
    forms = [part.form for part in parts if isinstance(part, Modification)]
    may_merge = all(type(form).affine is not Form.affine for form in forms)  # whether it can be, merging itself says
    merge = [f"deltune merge {folder} --output DIR"] if may_merge else []
    return (*text, *([] if objective == "reward" else [f"deltune evaluate {folder} --data OTHER"]), *merge)


def _has_predictions(finished: FinishedRun) -> bool:
    """Return whether a single run answered rows, which an objective of TRL measures otherwise."""
    return not finished.config.is_series and finished.config.objective.kind == "sft"


def _environment(finished: FinishedRun) -> list[tuple[str, str]]:
    """Return what is known of machine, versions, code and data; older runs know less."""
    facts, data = finished.best.environment, finished.data
    values = {name: facts.get(name) for name in ENVIRONMENT}
    if values["project_commit"] == values["commit"]:  # a project inside of the library's own checkout
        del values["project_commit"]
    values["packages"] = ", ".join(f"{name} {version}" for name, version in facts.get("packages", {}).items())
    values |= {
        "data": data.source,
        "columns": ", ".join(f"{role}={name}" for role, name in data.columns.items()),
        "rows": ", ".join(f"{split} {n:,} (digest {data.digests.get(split, '–')})" for split, n in data.rows.items()),
    }
    return [(name, str(value)) for name, value in values.items() if value not in (None, "", {})]


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=100).rstrip()


@dataclass(frozen=True)
class ComparedRun:
    """A row of the comparison of several runs."""

    name: str
    method: str
    model: str
    trained: ScoreCell
    seconds: ScoreCell
    scores: tuple[ScoreCell, ...]
    difference: ScoreCell


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side.

    Attributes:
        split: The split that is compared.
        main: The metric by which the runs are set against the best one, if they share one.
        fields: The fields of the configs that differ, each with a value for every run.
    """

    split: str
    models: tuple[str, ...]
    metrics: tuple[str, ...]
    main: str | None
    runs: tuple[ComparedRun, ...]
    fields: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]
    charts: tuple[Markup, ...]


def compare(runs: Sequence[FinishedRun]) -> Comparison:
    """Compare finished runs by the scores of the test split, or of validation where one has no test split."""
    metrics = [one.metrics for one in runs]
    methods = expressions_apart([parse(one.best_config.method.expression) for one in runs])
    models = [_about(one) for one in runs]
    folders = _short_names([one.run for one in runs])
    split = "test" if all(one.test for one in metrics) else "validation"
    scores = [one.scores.get(split, {}) for one in metrics]
    shared = [name for name in scores[0] if all(name in one for one in scores)]
    preferred = [m for one in metrics if (m := main_metric(one)) in shared]
    ordered = [*dict.fromkeys([*preferred, *(name for name in shared if name != "loss"), *shared])]
    deciding = [name for name in ordered if len({one[name] for one in scores}) > 1]
    main = next(iter(deciding or ordered), None)
    same_data = len({one.data.digests.get(split) for one in runs}) == 1
    best, differences = None, [ScoreCell("")] * len(runs)
    if main is not None:
        best = best_index([one[main] for one in scores], main)
        if same_data:
            differences = _differences(runs, [one[main] for one in scores], main, split, best)
    rows = tuple(
        ComparedRun(
            folders[i],
            methods[i],
            models[i],
            ScoreCell(
                f"{one.count['trained']:,}", percent_text(one.count["percent"]), repr(float(one.count["trained"]))
            ),
            ScoreCell(f"{one.seconds:,.0f}", "", repr(float(one.seconds))),
            tuple(_cell(one, split, name) for name in shared),
            differences[i],
        )
        for i, one in enumerate(metrics)
    )
    notes = (
        [] if same_data else [f"The {split} rows differ between the runs, so their scores are not of the same data."]
    )
    if len(runs) > 1 and ordered and ordered[0] != main:
        notes.append(f"{ordered[0]} is the same for every run and decides nothing, so they are compared by {main}.")
    logs = {f"{folders[i]}: {methods[i]}": one.log for i, one in enumerate(runs[:MAX_CURVES])}
    charts = comparison_charts(logs, next((m for one in runs if (m := one.best_metrics.best.metric)), None))
    return Comparison(
        split=split,
        models=tuple(dict.fromkeys(models)),
        metrics=tuple(shared),
        main=main,
        runs=rows,
        fields=_differing_fields(runs),
        notes=tuple(notes),
        charts=tuple(charts),
    )


def run_facts(finished: FinishedRun) -> dict[str, Any]:
    """Return a run as JSON values: its folder, method and data, counts, scores with intervals, and advice."""
    metrics = finished.metrics
    return {
        "run": str(finished.run.folder),
        "method": finished.best_config.method.expression,
        "about": _about(finished),
        "count": metrics.count,
        "seconds": metrics.seconds,
        "scores": metrics.scores,
        "intervals": metrics.intervals,
        "std": metrics.std,
        "advice": advice(finished),
    }


def best_index(values: Sequence[float], metric: str) -> int:
    """Return the place of the best value of a metric, the first of equal ones."""
    return max(range(len(values)), key=lambda i: signed_score(metric, values[i]))


def _differences(
    runs: Sequence[FinishedRun], values: Sequence[float], metric: str, split: str, best: int
) -> list[ScoreCell]:
    """Return each run's difference from the best one, with the interval of the paired predictions of single runs."""
    statistics: list[Score | None] = [None] * len(runs)
    if metric in METRICS and METRICS[metric].extra == "train" and all(map(_has_predictions, runs)):
        scores = [rescore_with_statistics(one.run.folder, [metric]) for one in runs]
        statistics = [one[split].get(metric) if split in one else None for one in scores]
    cells = []
    for i, value in enumerate(values):
        mine, other, ends = statistics[i], statistics[best], None
        if i != best and mine is not None and other is not None:
            ends = difference_interval(mine, other)
        spread = "" if ends is None else f"{ends[0]:+.4f}{TO}{ends[1]:+.4f}"
        text = f"{value - values[best]:+.4f}"
        if value == values[best]:
            text = "best" if len(set(values)) > 1 or len(values) == 1 else "equal"
        cells.append(ScoreCell(text, spread, repr(value)))
    return cells


def _differing_fields(runs: Sequence[FinishedRun]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the fields of which the runs have different values."""
    values = [one.config.flat(mode="json") for one in runs]
    canonical = [one.config.canonical() for one in runs]
    fields = [name for name in values[0] if len({str(one.get(name)) for one in canonical}) > 1]
    return tuple((name, tuple(_value_text(one[name]) for one in values)) for name in fields)


def _value_text(value: Any) -> str:
    """Return a value of a config in one line; an empty one is a dash."""
    return (
        "–"
        if value in (None, [], {})
        else yaml.safe_dump(value, default_flow_style=True, width=1000).split("\n...")[0].strip()
    )


def _short_names(runs: Sequence[RunFolder]) -> list[str]:
    """Return the shortest ends of the folders' paths that tell them apart."""
    paths = [run.folder.absolute().parts for run in runs]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{i + 1}: {'/'.join(parts[-1:])}" for i, parts in enumerate(paths)]
