"""Choosing a method and a learning rate for one model, one data set and some limits, by successive halving.

Candidates are expressions of one budget, each at several rates. What breaks a limit is dropped before it trains. The
others train on part of the training rows and are judged on the rest; Optuna's pruner stops those that fall behind. The
best two train on all training rows under several seeds and are judged by validation. The test split is scored once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import random
import shlex
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState
from scipy.stats import t as student_t

from ..compat import running_trial
from ..errors import DeltuneError, DivergedError, check_booleans, counted, error_from_problems, excerpt
from ..files import file_lock, read_json_object, write_json, write_text
from ..methods.budget import budget_scalars, check_open, solve
from ..methods.counting import count, format_bytes
from ..methods.memory import parse_bytes
from ..methods.registry import parse
from ..models import load_config
from ..train import (
    Line,
    ModelCache,
    RunConfig,
    RunFolder,
    RunMetrics,
    StepCost,
    TaskData,
    evaluate,
    format_duration,
    line_chart,
    load_task_data,
    log_data,
    measure_steps,
    render,
    signed_score,
    train,
)

if TYPE_CHECKING:
    import pandas

EIGHTHS = 8
"""A run is validated after each eighth of its steps."""
FIRST_RUNG = 20
"""A run that falls behind may be stopped from an eighth of its steps on, but after that many at least: a few steps say
little."""
ETA = 2
"""Of the candidates that reach a rung, the best half goes on to the next, at twice the steps."""
HELD_OUT = 0.2, 800
"""The share of the training rows that candidates are judged on, and the most of them."""
FINALISTS, SEEDS = 2, 3
"""How many candidates are trained on all training rows, and under how many seeds."""
SEARCH_SHARE = 0.5
"""The search may take that share of the minutes; the rest is for the finalists and for full tuning."""

ALL_DIVERGED = "every candidate diverged: give --set warmup=0.1, or another --space"

LORA = ("lora(rank=?)", "lora(rank=?, at=('query', 'key', 'value', 'output', 'ffn'))")
"""LoRA at queries and values, and at all linears."""
ALL = (
    *LORA, "lora(rank=?, layers='upper half')", "dora(rank=?)", "loha(rank=?)", "hra(rank=?)", "vera",
    "adapter(style='pfeiffer', rank=?)", "scaled_parallel_adapter(rank=?)", "prefix(length=?)",
    "prefix(length=?) + layernorm", "layernorm", "bitfit", "ia3",
)  # fmt: skip
SPACES: Mapping[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "lora": (LORA, (0.1, 0.3, 1.0, 3.0)),
    "all": (ALL, (0.3, 1.0, 3.0)),
}
"""Name of a space -> its expressions and its rates, as multiples of each method's default."""

logger = logging.getLogger("deltune.choose")


@dataclass(frozen=True)
class Slice:
    """The training rows that a search uses.

    Attributes:
        rows: How many rows the candidates train on.
        held_out: How many other rows the candidates are compared on.
        seed: Draws both.
    """

    rows: int
    held_out: int
    seed: int

    def __call__(self, data: TaskData) -> TaskData:
        """Return the data set of the candidates: the held-out rows take the place of validation."""
        train = data.splits["train"]
        order = random.Random(self.seed).sample(range(len(train)), self.held_out + self.rows)
        parts = {"train": order[self.held_out :], "validation": order[: self.held_out]}
        splits = {split: train.select(sorted(indices)) for split, indices in parts.items()}
        return replace(data, splits=splits, fingerprint=f"{data.fingerprint} {self}")


@dataclass
class Candidate:
    """A method at a learning rate.

    Attributes:
        method: The expression, with its sizes solved.
        rate: The learning rate; the one of method that is tried first is its default.
        scalars: How many numbers the method trains, without the head.
        cost: What a few steps of it took.
        dropped: Why it is not trained; "" if it is.
        rungs: Step -> quality on the rows that are held out, for each validation.
        finals: The validation scores of its runs on all training rows, one for each seed.
    """

    method: str
    rate: float
    scalars: int
    cost: StepCost | None = None
    dropped: str = ""
    rungs: dict[int, float] = field(default_factory=dict)
    finals: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its folder and in the table."""
        return f"{self.method} at {self.rate:g}"

    @property
    def has_default_rate(self) -> bool:
        """Whether it has the rate of a run that gives none."""
        return self.cost is not None and self.rate == self.cost.rate

    @property
    def best(self) -> float:
        """Its best quality on the rows that are held out."""
        return max(self.rungs.values(), default=-math.inf)


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        method: The expression of the winner, with its sizes solved.
        learning_rate: Its rate.
        table: A row for each candidate, and for the floor and full tuning: what it scored, cost and why it was dropped.
        decided: Whether the winner's interval lies above the other finalist's.
        advice: One sentence about what decided.
        command: The command that trains the winner again.
        test: The winner's scores on the test split, which nothing chose by.
        seconds: How long it took.
        run: The folder; `best` in it is the winner's run under the first seed.
    """

    method: str
    learning_rate: float
    table: pandas.DataFrame
    decided: bool
    advice: str
    command: str
    test: Mapping[str, float]
    seconds: float
    run: Path

    def as_json(self) -> dict[str, Any]:
        """Return what choice.json has."""
        values = {name: getattr(self, name) for name in JSON_FIELDS}
        return {**values, "test": dict(self.test), "table": json.loads(self.table.to_json(orient="records"))}


JSON_FIELDS = ("method", "learning_rate", "decided", "advice", "command", "seconds")


@check_booleans
def choose(
    model: str,
    data: str | None = None,
    *,
    output: str | Path = "runs/chosen",
    budget: int | str = "0.5%",
    memory: int | str | None = None,
    minutes: float | None = None,
    mergeable: bool = False,
    space: str | Sequence[str] = "lora",
    **options: Any,
) -> Choice:
    """Choose a method and a learning rate within limits, and train the winner.

    The same call goes on where it was interrupted, shares the work with processes that were given it at the same time,
    and returns what was chosen once it is finished.

    Args:
        model: The model, as in `deltune train`.
        data: The data set, as in `deltune train`; or give a known task as an option.
        output: The folder of the search; `best` in it is the winner's run.
        budget: How many scalars a method may train, as a number or a share of the model such as "0.5%".
        memory: The most bytes in use beyond the loaded model, as a number or as in "2GiB". Default: no limit.
        minutes: How long it may take. Default: no limit.
        mergeable: Keep only methods that can be folded into the weights.
        space: "lora" (LoRA at queries and values and at all linears, each at four rates), "all" (methods of every kind
            at three rates), or expressions with ? for each size that the budget solves, at three rates.
        options: Further options of `deltune train` for every run, such as epochs=3 or max_length=64.

    Returns:
        An object with `method`, `learning_rate`, `table` (a pandas.DataFrame), `decided`, `advice`, `command`, the
        `test` scores and the folder `run`.

    Raises:
        DeltuneError: No candidate keeps the limits, the data cannot decide, or the folder has another search.
    """
    search = _Search(model, data, Path(output), budget, memory, minutes, mergeable, space, options)
    is_new = not search.folder.exists()
    search.folder.mkdir(parents=True, exist_ok=True)
    try:
        return search.run()
    except DeltuneError:
        if is_new and not (search.folder / "candidates.json").exists():  # refused before anything was kept
            shutil.rmtree(search.folder)
        raise


class _Search:
    """One search under way."""

    def __init__(
        self, model: str, data: str | None, folder: Path, budget: int | str, memory: int | str | None,
        minutes: float | None, mergeable: bool, space: str | Sequence[str], options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.start, self.folder, self.cache = time.monotonic(), folder, ModelCache()
        self.lock, self.finished = folder / "choose.lock", folder / "choice.json"
        self.setup = 0.0  # seconds of what is around the steps of a run
        self.predicted = self.measured = 0.0  # seconds of the runs so far
        self.minutes, self.mergeable, self.budget = minutes, mergeable, budget
        self.memory = parse_bytes(memory, "memory") if isinstance(memory, str) else memory
        if not space or (isinstance(space, str) and space not in SPACES):
            raise DeltuneError(
                f"space={space!r}: give {' or '.join(SPACES)}, a list of expressions or, on the command line, "
                "a file of them"
            )
        self.expressions, self.factors = SPACES[space] if isinstance(space, str) else (space, SPACES["all"][1])
        if wrong := [expression for expression in self.expressions if not isinstance(expression, str)]:
            raise DeltuneError(f"space={excerpt(wrong)}: expressions are texts, such as 'lora(rank=?)'")
        problems: list[str] = []
        for expression in self.expressions:
            try:
                check_open(expression)
            except DeltuneError as error:
                problems.append(str(error))
        if problems:
            raise error_from_problems("space", problems)
        if wrong := [name for name in ("method", "lr", "seeds", "search", "validate_every") if name in options]:
            raise DeltuneError(f"{', '.join(wrong)}: choose sets them itself; give the others of deltune train")
        self.options = {"model": model, **({} if data is None else {"data": data}), **options}
        self.base = RunConfig.from_flat(method="head", **self.options)
        self.seeds = [self.base.runtime.seed + i for i in range(SEEDS)]
        self.record = {
            "options": {name: str(value) for name, value in self.base.flat(exclude_defaults=True).items()},
            "budget": str(budget), "memory": self.memory, "minutes": minutes, "mergeable": mergeable,
            "space": list(self.expressions),
        }  # fmt: skip
        if self.base.data.split_seed is None:  # the other seeds too train on the rows of the first
            self.base = self.base.replace(split_seed=self.seeds[0])

    @property
    def seconds(self) -> float:
        """Seconds that the search took so far, those of interrupted processes included."""
        return self.before + time.monotonic() - self.start

    def run(self) -> Choice:
        """Search, go on, or read what was chosen; other processes may be at work on the same search."""
        with file_lock(self.lock):
            self.study, self.finals = self._open("choose"), self._open("finals")
            self._check_asked()
            self.before = float(self.study.user_attrs.get("seconds", 0.0))
            if self.finished.is_file():
                logger.info("%s is finished; nothing to do", self.folder)
                return _read_choice(self.folder, read_json_object(self.finished))
            self.rows = self._split()
            with _quiet_runs():
                candidates = self._candidates()
            kept = {one.name: one for one in candidates if not one.dropped}
            _enqueue(
                self.study,
                [{"candidate": name} for name in sorted(kept, key=lambda name: not kept[name].has_default_rate)],
            )
        with _quiet_runs():
            self._halve(kept)
            finalists = self._finals(kept)
            with file_lock(self.lock):
                if self.finished.is_file():  # by another process
                    return _read_choice(self.folder, read_json_object(self.finished))
                return self._finish(candidates, finalists)

    def _open(self, name: str) -> optuna.Study:
        """Open a study of the folder, or begin it; its journal is for several processes at once."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        return optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(self.folder / "optuna.log"))), study_name=name,
            direction="maximize", load_if_exists=True, sampler=optuna.samplers.RandomSampler(seed=0),
        )  # fmt: skip

    def _check_asked(self) -> None:
        """Refuse the folder of another search."""
        before = self.study.user_attrs.get("asked")
        if before is not None and before != self.record:
            differences = [name for name in self.record if before.get(name) != self.record[name]]
            raise DeltuneError(
                f"{self.folder} has a search with other values of {', '.join(differences)}: give another --output, or "
                "remove the folder"
            )
        self.study.set_user_attr("asked", self.record)

    def _split(self) -> Slice:
        """Return which training rows candidates train on, and which judge them; refuse data that cannot decide."""
        data = load_task_data(self.base.data, self.base.runtime.seed, read=self.cache.data)[1]
        rows = len(data.splits["train"])
        held_out = min(int(HELD_OUT[0] * rows), HELD_OUT[1])
        if held_out < self.base.optim.batch_size or "validation" not in data.splits:
            what = "no validation split" if "validation" not in data.splits else counted(rows, "training row")
            raise DeltuneError(
                f"data {data.source} has {what}: choosing needs a validation split and "
                f"{math.ceil(self.base.optim.batch_size / HELD_OUT[0])} training rows or more, a fifth of which judges "
                "the candidates; with fewer, deltune train --method lora --search lr=0.003 --search lr=0.01 tries rates"
            )
        if column := {"classification": "label", "tagging": "tags"}.get(data.kind):
            values = data.splits["train"][column]
            labels = {tag for tags in values for tag in tags} if column == "tags" else set(values)
        if column and len(labels) < 2:
            raise DeltuneError(f"data {data.source}: all {rows:,} training rows have one label; nothing can be chosen")
        log_data(self.base.data, data, data.kind)
        self.data = data
        self.growth = 1.0 if self.base.optim.steps else rows / (rows - held_out)
        self.relative = {split: len(rows_of) / held_out for split, rows_of in data.splits.items()}
        return Slice(rows - held_out, held_out, self.base.runtime.seed)

    def _candidates(self) -> list[Candidate]:
        """Solve the sizes, measure each method, and say which candidates are dropped and why."""
        configuration = load_config(self.base.model.name)
        limit = budget_scalars(configuration, self.budget, "model")
        path = self.folder / "candidates.json"
        if path.is_file():
            return [_read_candidate(values) for values in read_json_object(path)["candidates"]]
        candidates: list[Candidate] = []
        for expression in self.expressions:
            try:
                if "?" in expression:
                    solved = solve(configuration, expression, self.budget)
                    method, scalars = repr(solved.method), solved.count
                else:
                    method = repr(parse(expression))
                    scalars = count(configuration, method).method
            except DeltuneError as error:
                candidates.append(Candidate(expression, math.nan, 0, dropped=str(error)))
                continue
            if all(method != one.method for one in candidates):
                candidates += self._measured(method, scalars, limit)
        dropped = [f"{one.method}: {one.dropped}" for one in candidates if one.dropped]
        if len(dropped) == len(candidates):
            raise DeltuneError(f"no candidate keeps the limits: {'; '.join(dropped)}")
        for line in dropped:
            logger.info("left out: %s", line)
        write_json(path, {"candidates": [_as_json(one) for one in candidates]})
        return candidates

    def _measured(self, method: str, scalars: int, limit: int) -> list[Candidate]:
        """Return a method at each of its rates, with what it costs, or why it is left out."""
        if scalars > limit:
            return [Candidate(method, math.nan, scalars, dropped=f"{scalars:,} scalars of {limit:,}")]
        try:
            cost = self._cost(self.base.replace(method=method))
        except DeltuneError as error:
            return [Candidate(method, math.nan, scalars, dropped=str(error))]
        seconds = self._predicted(cost, final=True)
        facts = f"{counted(scalars, 'scalar')}, {format_duration(seconds)} a run, {format_bytes(cost.peak_bytes)}"
        logger.info("measured %s: %s", method, facts)
        needed = max(FINALISTS * seconds / (1 - SEARCH_SHARE), FINALISTS * seconds + self.seconds) / 60
        why = self._over_memory(cost)
        if not why and self.mergeable and cost.why_unmerged:
            why = f"it cannot be merged ({cost.why_unmerged})"
        if not why and self.minutes is not None and needed > self.minutes:
            enough = counted(math.ceil(needed), "minute")
            why = f"a run takes {format_duration(seconds)}; give {enough}, or fewer epochs or rows"
        if why:
            return [Candidate(method, math.nan, scalars, cost, why)]
        rates = [cost.rate, *(float(f"{cost.rate * factor:.2g}") for factor in self.factors if factor != 1)]
        return [Candidate(method, rate, scalars, cost) for rate in rates]

    def _over_memory(self, cost: StepCost) -> str:
        """Return by how much a run exceeds the limit of memory, or ""."""
        if self.memory is None or cost.peak_bytes <= self.memory:
            return ""
        return f"{format_bytes(cost.peak_bytes)} of memory, {format_bytes(self.memory)} are allowed"

    def _cost(self, config: RunConfig) -> StepCost:
        """Return what a candidate costs, its peak in a step of the longest of all training rows."""

        def all_train(data: TaskData) -> TaskData:
            splits = {**self.rows(data).splits, "train": data.splits["train"]}
            return replace(data, splits=splits, fingerprint=f"{data.fingerprint} measured {self.rows}")

        cost = measure_steps(config, all_train, self.cache)
        return replace(cost, steps=math.ceil(cost.steps / self.growth))

    def _config(self, candidate: Candidate, **values: Any) -> RunConfig:
        assert candidate.cost is not None
        return self.base.replace(
            method=candidate.method, lr=candidate.rate, validate_every=_eighth(candidate.cost.steps), **values
        )

    def _predicted(self, cost: StepCost, *, final: bool, validations: int | None = None) -> float:
        """Return how long a run takes, or its first validations, by what its first steps took; a final has all rows."""
        between = _eighth(cost.steps)
        number = cost.steps * (self.growth if final else 1) / between if validations is None else validations
        share = self.relative["validation"] if final else 1
        return self.setup + number * (between * cost.step_seconds + share * cost.validation_seconds)

    def _fits(self, *costs: StepCost) -> bool:
        """Return whether final runs of these costs and scoring the test split would end within the minutes."""
        if self.minutes is None:
            return True
        tested = self.relative.get("test", 0) * costs[0].validation_seconds
        pace = self.measured / self.predicted if self.predicted else 1.0
        needed = pace * (tested + sum(self._predicted(cost, final=True) for cost in costs))
        return needed <= 60 * self.minutes - self.seconds

    def _time_is_up(self) -> bool:
        """Return whether the search must end, so that enough of the minutes is left for the final runs."""
        if self.minutes is None or not any(trial.intermediate_values for trial in self.study.trials):
            return False
        return self.seconds > SEARCH_SHARE * 60 * self.minutes or not self._fits(*self.longest)

    def _timed(self, config: RunConfig, path: Path, cost: StepCost, *, final: bool, **options: Any) -> RunMetrics:
        """Train, and note how long it took beside what its cost predicts."""
        before, validations = time.monotonic(), 0
        stop_if = options.pop("stop_if", None)
        options["rows"] = _all_but_test if final else self.rows

        def count_validations(step: int, quality: float) -> bool:
            nonlocal validations
            validations += 1
            return stop_if is not None and stop_if(step, quality)

        try:
            return train(config, path, progress=False, cache=self.cache, stop_if=count_validations, **options)
        finally:
            self.measured += time.monotonic() - before
            self.predicted += self._predicted(cost, final=final, validations=validations)
            self.study.set_user_attr("seconds", self.seconds)

    def _share(self, study: optuna.Study, work: Callable[[Trial, str], None], is_over: Callable[[], bool]) -> None:
        """Do what waits in a study, beside other processes, until that is over; then wait for the others.

        What a process left that was ended is taken over and goes on from its checkpoint.
        """
        while True:
            with contextlib.ExitStack() as mine:
                with file_lock(self.lock):
                    begun = study.get_trials(states=(TrialState.RUNNING,))
                    left = (one for one in begun if mine.enter_context(self._claim(study, one.number, wait=False)))
                    new = next((running_trial(study, one.number) for one in left), None)
                    if new is None and study.get_trials(states=(TrialState.WAITING,)) and not is_over():
                        new = study.ask()
                        mine.enter_context(self._claim(study, new.number))
                if new is not None:
                    work(new, new.user_attrs["candidate"])
                    continue
            if not begun:
                return
            time.sleep(1)

    def _claim(self, study: optuna.Study, number: int, *, wait: bool = True) -> AbstractContextManager[bool]:
        return file_lock(self.folder / "claims" / f"{study.study_name}-{number}", wait=wait)

    def _halve(self, kept: Mapping[str, Candidate]) -> None:
        """Train the candidates, the defaults first; the pruner stops those that fall behind."""
        costs = sorted((one.cost for one in kept.values() if one.cost), key=run_seconds)
        self.longest, self.setup = costs[-FINALISTS:], min(cost.setup_seconds for cost in costs)
        longest = format_duration(run_seconds(costs[-1]))
        logger.info("%s; a whole run takes %s at most", counted(len(kept), "candidate"), longest)
        self._share(self.study, lambda trial, name: self._train(trial, kept[name]), self._time_is_up)
        if untried := [one.user_attrs["candidate"] for one in self.study.get_trials(states=(TrialState.WAITING,))]:
            logger.info("the time of the search is up; not tried: %s", ", ".join(untried))
        for trial in self.study.trials:
            one = kept[trial.user_attrs["candidate"]]
            if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
                one.rungs = dict(trial.intermediate_values)
            else:
                one.rungs, one.dropped = {}, trial.user_attrs.get("diverged", "the time of the search was up")

    def _train(self, trial: Trial, candidate: Candidate) -> None:
        """Train one candidate until its end, or until the pruner or the time stops it."""
        assert candidate.cost is not None
        self.study.pruner = halving(candidate.cost.steps)
        stopped = ""
        candidate.rungs = dict(self.study.trials[trial.number].intermediate_values)  # before it was interrupted

        def stop_if(step: int, quality: float) -> bool:
            nonlocal stopped
            if step not in candidate.rungs:
                trial.report(quality, step)
            self.study.set_user_attr("seconds", self.seconds)
            candidate.rungs[step] = quality
            if trial.should_prune():
                stopped = "falls behind"
            elif self._time_is_up():
                stopped = "the time is up"
            return bool(stopped)

        try:
            metrics = self._timed(
                self._config(candidate, probe="off"), self.folder / "runs" / _folder_name(candidate), candidate.cost,
                final=False, report=False, stop_if=stop_if,
            )  # fmt: skip
        except DivergedError as error:
            self._diverged(self.study, trial, error)  # worse than any other
            return
        value = candidate.best
        done = counted(max(candidate.rungs, default=0), "step")
        logger.info(
            "%s: %s %.4f on the rows held out, after %s%s%s", candidate.name, metrics.best.metric,
            signed_score(str(metrics.best.metric), value), done, f"; {stopped}" if stopped else "", self._left(),
        )  # fmt: skip
        self.study.tell(trial, None if stopped else value, TrialState.PRUNED if stopped else TrialState.COMPLETE)

    def _diverged(self, study: optuna.Study, trial: Trial, error: DivergedError) -> None:
        trial.set_user_attr("diverged", str(error))
        study.tell(trial, state=TrialState.FAIL)
        logger.info("%s: %s", trial.user_attrs["candidate"], error)

    def _left(self) -> str:
        waiting = sum(trial.state == TrialState.WAITING for trial in self.study.trials)
        done = sum(trial.state.is_finished() for trial in self.study.trials) + 1
        limit = math.inf if self.minutes is None else max(0.0, SEARCH_SHARE * 60 * self.minutes - self.seconds)
        left = min(waiting * self.seconds / done, limit)
        return f" ({counted(waiting, 'candidate')} left, about {format_duration(left)})" if waiting else ""

    def _finals(self, kept: Mapping[str, Candidate]) -> list[Candidate]:
        """Train the best two on all rows, under each seed that the time allows, and return them."""
        ranked = sorted((one for one in kept.values() if one.rungs), key=lambda one: (-max(one.rungs), -one.best))
        with file_lock(self.lock):
            _enqueue(
                self.finals,
                [{"candidate": one.name, "seed": seed} for seed in self.seeds for one in ranked[:FINALISTS]],
            )
        finalists = list(dict.fromkeys(trial.user_attrs["candidate"] for trial in self.finals.trials))
        if not finalists:
            raise DivergedError(ALL_DIVERGED)
        costs = [cost for name in finalists if (cost := kept[name].cost)]

        def is_over() -> bool:
            begun = len(self.finals.trials) - len(self.finals.get_trials(states=(TrialState.WAITING,)))
            seeds, rest = divmod(begun, len(costs))
            if seeds and rest:  # a seed under which one of them alone was trained compares nothing
                return False
            return begun > 0 and not self._fits(*costs[rest:])

        def train_final(trial: Trial, name: str) -> None:
            one, seed = kept[name], trial.user_attrs["seed"]
            assert one.cost is not None
            path = self._final_folder(one, seed)
            once = {} if seed == self.seeds[0] else {"probe": "off"}
            config, limit = self._config(one, seed=seed, **once), 60 * (self.minutes or math.inf)
            try:
                best = self._timed(
                    config, path, one.cost, final=True, stop_if=lambda step, quality: self.seconds > limit
                ).best
            except DivergedError as error:
                self._diverged(self.finals, trial, error)
                return
            if self.seconds > limit:
                logger.warning("%s, seed %d: its training was cut short, since the time is up", name, seed)
            self.finals.tell(trial, float(best.value or 0.0))
            logger.info("%s, seed %d: validation %s %.4f", name, seed, best.metric, best.value or 0.0)

        self._share(self.finals, train_final, is_over)
        scores: dict[int, dict[str, float]] = {seed: {} for seed in self.seeds}
        for trial in self.finals.trials:
            if trial.state == TrialState.COMPLETE:
                scores[trial.user_attrs["seed"]][trial.user_attrs["candidate"]] = trial.values[0]
            elif trial.state == TrialState.FAIL:
                kept[trial.user_attrs["candidate"]].dropped = trial.user_attrs["diverged"]
        compared = [name for name in scores[self.seeds[0]] if not kept[name].dropped]
        for of_seed in scores.values():
            if all(name in of_seed for name in compared):  # means are of the same seeds
                for name in compared:
                    kept[name].finals.append(of_seed[name])
        if not compared:
            raise DivergedError(ALL_DIVERGED)
        return [kept[name] for name in compared]

    def _finish(self, candidates: Sequence[Candidate], finalists: Sequence[Candidate]) -> Choice:
        """Choose by validation, score the test split once, and write the report."""
        first = RunFolder(self._final_folder(finalists[0], self.seeds[0])).metrics
        metric, probe = str(first.best.metric), first.probe
        winner, decided = _winner(finalists, signed_score(metric, 1.0) > 0)
        folder = self._final_folder(winner, self.seeds[0])
        RunFolder(self.folder).link("best", folder.relative_to(self.folder))
        floor = None if probe is None else probe.scores.get("validation", {}).get(metric)
        full = self._full_tuning()
        test = evaluate(folder, splits=("test",))["test"] if "test" in self.data.splits else {}
        choice = Choice(
            winner.method, winner.rate, _table(candidates, metric, floor, full), decided,
            _advice(candidates, finalists, metric, decided) + _beside(winner, metric, floor, full),
            f"deltune train {shlex.quote(str(self.folder / 'best' / 'spec.yaml'))} --output RUN", test,
            round(self.seconds, 1), self.folder,
        )  # fmt: skip
        self._write(choice, candidates, metric)
        return choice

    def _final_folder(self, candidate: Candidate, seed: int) -> Path:
        return self.folder / "finals" / f"{_folder_name(candidate)}-seed{seed}"

    def _full_tuning(self) -> Candidate:
        """Return full tuning at its default rate, with its validation score or why it breaks the limits."""
        config, full = self.base.replace(method="full"), Candidate("full tuning", math.nan, 0)
        try:
            if not self._fits(self.longest[-1]):
                raise DeltuneError("no time is left")  # not even for what trains less
            full.cost = cost = self._cost(config)
            full.rate, full.scalars = cost.rate, count(load_config(config.model.name), "full").method
            if why := self._over_memory(cost):
                raise DeltuneError(why)
            if not self._fits(cost):
                raise DeltuneError(f"no time is left for {format_duration(self._predicted(cost, final=True))}")
            config = config.replace(validate_every=_eighth(cost.steps))
            metrics = self._timed(config, self.folder / "finals" / "full", cost, final=True, report=False)
            full.finals = [float(metrics.best.value or 0.0)]
        except DeltuneError as error:
            full.dropped = str(error)
            logger.info("full tuning is left out: %s", error)
        return full

    def _write(self, choice: Choice, candidates: Sequence[Candidate], metric: str) -> None:
        """Write choice.json, and report.html with the curve of every candidate."""
        values = choice.as_json()
        lines = [
            Line(one.name, [(s, signed_score(metric, v)) for s, v in one.rungs.items()], dots=True)
            for one in candidates
            if one.rungs
        ]
        chart = line_chart(f"{metric} on the rows held out", lines, "step")
        template = Path(__file__).parent / "report" / "choose.html"
        page = render(template, title="Choosing a method", choice=choice, rows=values["table"], chart=chart)
        write_text(self.folder / "report.html", page)
        write_json(self.finished, values)  # last: the search is finished by it


def _enqueue(study: optuna.Study, trials: Sequence[dict[str, Any]]) -> None:
    """Let a study have these trials, those that it has not got yet from a process that was killed."""
    there = [trial.user_attrs.items() for trial in study.trials]
    for attributes in trials:
        if not any(attributes.items() <= items for items in there):
            study.enqueue_trial({}, user_attrs=attributes)


def _all_but_test(data: TaskData) -> TaskData:
    return replace(data, splits={split: rows for split, rows in data.splits.items() if split != "test"})


@contextlib.contextmanager
def _quiet_runs() -> Iterator[None]:
    """Leave what each run says of itself to the run's own folder; warnings are shown, each once."""
    runs = logging.getLogger("deltune")
    level, mine, shown = runs.level, logger.level, set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        text, known = record.getMessage(), len(shown)
        shown.add(text)
        return len(shown) > known

    logger.setLevel(runs.getEffectiveLevel())
    runs.setLevel(logging.WARNING)
    runs.addFilter(is_new)
    try:
        yield
    finally:
        runs.removeFilter(is_new)
        runs.setLevel(level)
        logger.setLevel(mine)


def _eighth(steps: int) -> int:
    return math.ceil(steps / EIGHTHS)


def _first_rung(steps: int) -> int:
    """Return the first validation by which candidates that train for a number of steps may be stopped."""
    return min(steps, _eighth(steps) * math.ceil(FIRST_RUNG / _eighth(steps)))


def halving(steps: int) -> optuna.pruners.BasePruner:
    """Return the pruner of candidates that train for a number of steps."""
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=_first_rung(steps), reduction_factor=ETA)


def run_seconds(cost: StepCost) -> float:
    """Return how long a run takes, validations included, by what its first steps took."""
    return cost.steps * cost.step_seconds + EIGHTHS * cost.validation_seconds


def _folder_name(candidate: Candidate) -> str:
    """Return the name of a candidate's folder, which no other expression and rate has."""
    return f"{hashlib.sha256(candidate.method.encode()).hexdigest()[:8]}-{candidate.rate:g}"


def _as_json(candidate: Candidate) -> dict[str, Any]:
    values = asdict(candidate)
    return {name: None if value != value else value for name, value in values.items()}


def _read_candidate(values: Mapping[str, Any]) -> Candidate:
    cost = None if values["cost"] is None else StepCost(**values["cost"])
    return Candidate(
        values["method"], math.nan if values["rate"] is None else values["rate"], values["scalars"], cost,
        values["dropped"],
    )  # fmt: skip


def _read_choice(folder: Path, values: Mapping[str, Any]) -> Choice:
    import pandas

    return Choice(**{**values, "table": pandas.DataFrame(values["table"]).convert_dtypes()}, run=folder)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean over seeds, by Student's t; of one value it is without bounds."""
    if len(values) < 2:
        return -math.inf, math.inf
    spread = student_t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - spread, statistics.fmean(values) + spread


def _winner(finalists: Sequence[Candidate], higher_is_better: bool) -> tuple[Candidate, bool]:
    """Return the finalist with the best mean, and whether its interval is apart from the other's.

    Where the intervals overlap, a finalist that can be merged goes first, then the smaller, then the better mean. One
    seed has no interval, and the better score is taken.
    """
    sign = 1 if higher_is_better else -1
    ranked = sorted(finalists, key=lambda one: -sign * statistics.fmean(one.finals))
    if len(ranked) == 1 or len(ranked[0].finals) == 1:
        return ranked[0], False
    (low, high), (other_low, other_high) = (interval(one.finals) for one in ranked[:2])
    if low > other_high or high < other_low:
        return ranked[0], True
    return min(ranked, key=lambda one: (bool(one.cost and one.cost.why_unmerged), one.scalars)), False


def _advice(candidates: Sequence[Candidate], finalists: Sequence[Candidate], metric: str, decided: bool) -> str:
    """Say how much the rate and the method decided at the first rung, which all candidates reach."""
    first: dict[str, list[float]] = {}
    for one in candidates:
        if one.cost and (rung := _first_rung(one.cost.steps)) in one.rungs:
            first.setdefault(one.method, []).append(one.rungs[rung])
    by_rate = [max(values) - min(values) for values in first.values() if len(values) > 1]
    by_method = [max(values) for values in first.values()]
    shares = [("rate", statistics.fmean(by_rate))] if by_rate else []
    shares += [("method", max(by_method) - min(by_method))] if len(by_method) > 1 else []
    parts = [f"the {name} decided {value:.3f} of {metric}" for name, value in shares]
    text = f"at the first rung {' and '.join(parts)}; " if parts else ""
    if decided:
        text += "decided: the winner's interval over the seeds is apart from the other finalist's"
    elif len(finalists) == 1:
        text += "undecided: no other candidate finished its training on all rows"
    elif len(finalists[0].finals) == 1:
        text += "undecided: there was time for one seed alone; what validated better is taken"
    else:
        text += (
            "undecided: the finalists' intervals over the seeds overlap; one that can be merged goes first, then the "
            "smaller one"
        )
    return text[0].upper() + text[1:]


def _beside(winner: Candidate, metric: str, probe: float | None, full: Candidate) -> str:
    """Say so where a linear probe on frozen features, or full tuning, is as good as the winner or better."""
    mean = statistics.fmean(winner.finals)

    def is_as_good(score: float) -> bool:
        return signed_score(metric, score) >= signed_score(metric, mean)

    text = ""
    if probe is not None and is_as_good(probe):
        text = (
            f". A linear probe on frozen features reaches {probe:.3f} on validation, the winner {mean:.3f}: give it "
            "more steps (--set epochs=…), or take the probe"
        )
    if full.finals and is_as_good(full.finals[0]):
        text += (
            f". Full tuning, under one seed, reaches {full.finals[0]:.3f} on validation, the winner {mean:.3f}: try a "
            "larger --budget, more steps, or full tuning itself (deltune train --method full)"
        )
    return text


def _table(candidates: Sequence[Candidate], metric: str, probe: float | None, full: Candidate) -> pandas.DataFrame:
    """Return a row for each candidate, the best first, and for what stands beside them."""
    import pandas

    ranked = sorted(candidates, key=lambda one: (-len(one.finals), -one.best))
    rows: list[dict[str, Any]] = [_row(one, metric) for one in ranked]
    rows += [] if probe is None else [{"method": "linear probe", "validation": probe}]
    return pandas.DataFrame([*rows, _row(full, metric)]).convert_dtypes()


def _row(one: Candidate, metric: str) -> dict[str, Any]:
    return {
        "method": one.method,
        "learning_rate": None if math.isnan(one.rate) else one.rate,
        "scalars": one.scalars or None,
        "minutes": one.cost and round(run_seconds(one.cost) / 60, 2),
        "memory": one.cost and format_bytes(one.cost.peak_bytes),
        "merges": one.cost and not one.cost.why_unmerged,
        "steps": max(one.rungs, default=0),
        "held out": signed_score(metric, one.best) if one.rungs else None,
        "validation": statistics.fmean(one.finals) if one.finals else None,
        "±": interval(one.finals)[1] - statistics.fmean(one.finals) if len(one.finals) > 1 else None,
        "seeds": len(one.finals),
        "left out": one.dropped,
    }
