"""What all studies share: where their models and data are, what "small" means, and cells that are no full grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DeltuneError, error_from_problems, unknown_name
from ..methods.registry import parse
from ..methods.spec import MaskedMethod, Method, NamedMethod
from ..tasks.registry import TASKS
from .engine.outcomes import Cell
from .engine.sweep import Sweep
from .study import Rows, Want, of_sweep

Values = Mapping[str, Any]
Wanted = Callable[[Rows], Sequence[Want]]

SEEDS = (0, 1, 2)
PACKAGED = "minilm"

SERIES = ("minilm-d128", "minilm-d192", "minilm-d256", PACKAGED)
"""Encoders of one series in order of size, 4.4, 7.3, 11.2 and 22.7 million parameters."""

SMALL: Values = {
    "max_train_rows": 1000, "validation_rows": 300, "test_rows": 500, "max_length": 48, "batch_size": 16, "epochs": 3,
}  # fmt: skip
"""A run of a few seconds on one core: 189 steps."""

SMALL_TASKS: Mapping[str, Values] = {
    "cb": {"epochs": 12},
    "conll04": {"epochs": 4},
    "samsum": {"max_length": 96},
    "g2p_us_to_gb": {
        "max_train_rows": 1200,
        "validation_rows": 200,
        "max_length": 32,
        "target_length": 32,
        "batch_size": 32,
    },
}
"""What some tasks have besides: CB has 200 rows for 156 steps; words of g2p are 32 characters at most."""

RATES: Mapping[str, float] = {
    "full": 1e-3, "head": 1e-2, "layernorm": 3e-2, "bitfit": 3e-2, "three_vectors": 3e-2, "prompt": 3e-2,
    "prefix": 3e-2, "prefix_layernorm": 3e-2, "mam": 1e-2, "lora": 1e-2, "adapter": 1e-2, "parallel_adapter": 1e-2,
    "scaled_parallel_adapter": 1e-2, "multi_head_parallel_adapter": 1e-2,
}  # fmt: skip
"""Learning rates at small scale, by named method.

Chosen on validation rows of SICK and SST-2 with minilm-d128 and seed 99 (1,500 rows, 4 epochs of batches of 16) among
two or three rates a factor of 3 apart; on g2p the same are best or next to it. They are 3 to 10 times the papers': few
steps, and small models bear it. Accuracy in %, SICK / SST-2, at the rate taken, and at the nearest that was not:

    full 1e-3: 64.0 / 73.8; 3e-3: 56.4 / 68.6         layernorm 3e-2: 60.2 / 76.0; 1e-2: 56.6 / 75.8
    scaled parallel adapter 1e-2: 60.6 / 74.8; 3e-2: 60.6 / 74.2
    lora 1e-2: 61.0 / 75.8; 3e-2: 60.8 / 65.4         bitfit 3e-2: 60.2 / 73.2; 1e-2: 56.4 / 74.4
    prefix 3e-2: 56.6 / 74.4; 1e-1: 56.4 / 73.2       prefix_layernorm 3e-2: 60.6 / 73.8; 1e-2: 56.8 / 76.6
    mam 1e-2: 59.4 / 75.0; 3e-2: 56.4 / 70.8          three_vectors 3e-2: 56.6 / 70.2; 1e-2: 56.6 / 70.4
    prompt 3e-2: 60.2 / 75.2; 1e-1: 60.2 / 70.4

56.4 is SICK's largest class: there prefix and three_vectors learn nothing at any rate that was tried.
"""


@dataclass(frozen=True)
class StudySetup:
    """Where a study is run.

    scale: "paper" (models and data by their hub ids, the paper's protocol) or "small" (what two cores can do, from
    folders). data_root: the folder with those of tasks; at paper scale tasks that it lacks come from the hub.
    model_root: the folder with the small models; default: `models` beside data_root.
    """

    scale: str = "paper"
    data_root: str | None = None
    model_root: str | None = None

    def __post_init__(self) -> None:
        if self.scale not in ("paper", "small"):
            raise DeltuneError(unknown_name("scale", self.scale, ("paper", "small")))

    @property
    def small(self) -> bool:
        return self.scale == "small"

    @property
    def models(self) -> Path | None:
        """The folder with the small models; None where nothing says which."""
        if self.model_root is not None:
            return Path(self.model_root).expanduser().resolve()
        return None if self.data_root is None else Path(self.data_root).expanduser().absolute().parent / "models"

    def model(self, name: str) -> str:
        """A model as a spec names it: a hub id, or at small scale a folder."""
        return name if not self.small or name == PACKAGED else str((self.models or Path("models")) / name)

    def task(self, name: str) -> dict[str, Any]:
        """A task's fields of a spec."""
        found: dict[str, Any] = {"task": name}
        folder = None if self.data_root is None else Path(self.data_root).expanduser() / TASKS[name].folder
        if folder is not None and (self.small or folder.is_dir()):
            found["data_root"] = str(folder.resolve().parent)
        return {**found, **(SMALL_TASKS.get(name, {}) if self.small else {})}

    def check(self, models: Iterable[str], tasks: Iterable[str]) -> None:
        """Raises DeltuneError with everything that is missing here at small scale, and what to give."""
        if not self.small:
            return
        problems = []
        if self.data_root is None:
            problems.append("no data: give --data-root, the folder with those of tasks")
        else:
            root = Path(self.data_root).expanduser()
            lacking = [TASKS[task].folder for task in dict.fromkeys(tasks) if not (root / TASKS[task].folder).is_dir()]
            if lacking:
                problems.append(f"{root} has no folder {', '.join(lacking)}: give another --data-root")
        wanted = [model for model in dict.fromkeys(models) if model != PACKAGED]
        if self.models is None and wanted:
            problems.append(f"no models {', '.join(wanted)}: give --model-root, the folder with theirs")
        elif self.models is not None:
            absent = [model for model in wanted if not (self.models / model / "config.json").is_file()]
            if absent:
                problems.append(f"{self.models} has no model {', '.join(absent)}: give --model-root")
        if problems:
            raise error_from_problems("the study cannot be run at small scale", problems)


def small_scale_rate(method: str | Method) -> float:
    """A method's learning rate at small scale: the smallest of its terms, so that none of them diverges."""
    return min(_rate(term) for term in parse(method).terms)


def _rate(term: Method) -> float:
    if isinstance(term, MaskedMethod):
        return small_scale_rate(term.method)
    return RATES.get(term.name, 1e-2) if isinstance(term, NamedMethod) else 1e-2


@dataclass(frozen=True)
class Choice:
    """One choice of what a study varies: its labels on the study's axes, and its fields of a run."""

    labels: Cell
    values: Values


def choices(methods: Mapping[str, str], axis: str = "method", **more: Any) -> list[Choice]:
    """A choice for each expression, labelled on one axis. more: labels of all of them on other axes."""
    return [Choice({axis: label, **more}, {"method": method}) for label, method in methods.items()]


def crossed(
    place: StudySetup,
    name: str,
    models: Mapping[str, str],
    tasks: Sequence[str],
    chosen: Sequence[Choice],
    options: Values | None = None,
    seeds: tuple[int, ...] = SEEDS,
    off: Callable[[Cell], bool] = lambda cell: False,
    labels: Cell | None = None,
    by_task: Mapping[str, Values] | None = None,
) -> Wanted:
    """Models × tasks × choices × seeds as what a study wants.

    models: label -> hub id, or folder at small scale. options: of every run, over what the scale says. off: cells that
    are left out. labels: of every cell, on axes besides. by_task: options of single tasks.
    """
    place.check(models.values(), tasks)
    given = {**(SMALL if place.small else {}), **(options or {})}
    methods = {}
    for i, choice in enumerate(chosen):
        own = {"lr": small_scale_rate(choice.values["method"])} if place.small and "lr" not in given else {}
        methods[str(i)] = {**own, **choice.values}
    wanted = of_sweep(
        Sweep(
            name=name,
            models={label: {"model": place.model(model)} for label, model in models.items()},
            tasks={task: {**place.task(task), **(by_task or {}).get(task, {})} for task in tasks},
            methods=methods,
            seeds=seeds,
            options=given,
        )
    )

    def cell(found: Cell) -> Cell:
        plain = {axis: label for axis, label in found.items() if axis not in ("method", "seed")}
        return {**(labels or {}), **plain, **chosen[int(found["method"])].labels, "seed": found["seed"]}

    def named(rows: Rows) -> list[Want]:
        return [Want(cell(w.cell), w.work) for w in wanted(rows) if not off(cell(w.cell))]

    return named


def joined(*parts: Wanted) -> Wanted:
    """Several grids as one."""
    return lambda rows: [want for part in parts for want in part(rows)]
