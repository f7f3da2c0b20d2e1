"""What a spec asks for: the kind of task, its data, its metrics and what a model is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import data as reading
from .choosing import CHOICE
from .classifying import CLASSIFICATION
from .data import Data
from .errors import DeltuneError, unknown
from .generating import CAUSAL, LANGUAGE, SEQ2SEQ
from .kinds import Kind
from .metrics import METRICS
from .models import load_config
from .specs import RunSpec
from .tagging import TAGGING
from .tasks import find

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Assignment:
    """A spec's data as read, with the kind of task on this kind of model, its metrics and its template."""

    data: Data
    kind: Kind
    metrics: tuple[str, ...]
    template: str


def assignment(
    spec: RunSpec,
    training: bool = True,
    labels: tuple[str, ...] | None = None,
    read: Callable[..., Data] = reading.load,
) -> Assignment:
    """Read what a spec asks for; labels: the run's own, where it has them; read: data.load, or one that remembers.

    Errors: whatever is wrong with the data; a model that cannot do this kind of task.
    """
    config = load_config(spec.model)  # an unknown family is told as that, not as a missing tokenizer
    task, columns, kind, where = None, spec.columns, spec.task, spec.data
    if spec.data is None:
        assert spec.task is not None
        task, where = find(spec.task, spec.data_root)
        kind, columns = task.kind, spec.columns or dict(task.columns)
    assert where is not None
    asked = {"train": spec.max_train_rows, "validation": spec.validation_rows} if training else {}
    samples = {split: rows for split, rows in asked.items() if rows is not None}
    found = read(where, columns, labels or spec.labels, samples, spec.seed, training, kind)
    chosen = kind_of(found.kind, config)
    metrics = spec.metrics or (task.metrics if task else chosen.metrics)
    if len(found.labels) != 2:
        if "f1" in spec.metrics or spec.metric == "f1":
            raise DeltuneError(f"metric f1 is for two labels, here are {len(found.labels)}; use f1_macro")
        metrics = tuple(name for name in metrics if name != "f1")
    if spec.metric not in (None, "loss", *metrics):
        metrics = (*metrics, str(spec.metric))
    check_fits(chosen, metrics)
    return Assignment(found, chosen, metrics, task.template if task else "")


def kind_of(name: str, config: PreTrainedConfig) -> Kind:
    """The kind of task on a model of this configuration: generation differs by whether there is an encoder."""
    return SEQ2SEQ if name == SEQ2SEQ.name and config.is_encoder_decoder else by_name(name)


def by_name(name: str) -> Kind:
    """The kind of task where its model does not matter."""
    return {kind.name: kind for kind in (CLASSIFICATION, TAGGING, CHOICE, CAUSAL, LANGUAGE)}[name]


def check_fits(kind: Kind, metrics: Sequence[str]) -> None:
    """Error for metrics that are unknown or compare something else than this kind of task gives."""
    if wrong := [unknown("metric", name, METRICS) for name in metrics if name not in METRICS]:
        raise DeltuneError(" ".join(wrong))
    if foreign := [name for name in metrics if METRICS[name].kind not in kind.compares]:
        fitting = [name for name, metric in METRICS.items() if metric.kind in kind.compares]
        raise DeltuneError(f"{kind.name} cannot be measured by {', '.join(foreign)}; it can by {', '.join(fitting)}")
