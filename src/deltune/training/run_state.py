"""The state of a run under way: what it works with, the best delta so far, patience and time."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..data.loading import TaskData
from ..errors import DivergedError
from ..methods.registry import default_learning_rate
from ..metrics.registry import METRICS
from ..runtime.frozen_layers import FrozenLayers
from ..runtime.handle import Tuned
from ..runtime.serialization import read_metadata
from ..tasks.base import Columns, InferenceContext, TaskKind, TaskOptions
from ..tasks.encoding import EncodedRows, LengthGroupedBatches
from . import checkpoints, distributed
from .config import RunConfig
from .inference import EvalResult, prediction_lines, score_split
from .progress import ProgressBar
from .run_dir import RunDir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class RunState:
    """Everything that one single run works with.

    Attributes:
        config: The config of the run.
        run: Its folder.
        tuned: The handle on its model with the delta attached.
        tokenizer: The model's tokenizer.
        data: Its data as read.
        kind: The kind of task.
        metrics: The names of the metrics.
        limits: Lengths in tokens, label words and options of generation.
        columns: The columns of every split, by role.
        encoded: The token ids of every split.
        batches: The training rows, step by step.
        precision: "fp32" or "bf16".
        frozen_layers: The layers below everything that is trained, where they run without dropout.
        best: What is known of the best validation so far; empty before the first one.
        stale: How many validations there were since the best one.
        seconds_before: Seconds that earlier processes worked on this run.
        start: When this process began, by `time.monotonic`.
    """

    config: RunConfig
    run: RunDir
    tuned: Tuned
    tokenizer: PreTrainedTokenizerBase
    data: TaskData
    kind: TaskKind
    metrics: tuple[str, ...]
    limits: TaskOptions
    columns: Mapping[str, Columns]
    encoded: dict[str, EncodedRows]
    batches: LengthGroupedBatches
    precision: str
    frozen_layers: FrozenLayers | None = None
    best: dict[str, Any] = field(default_factory=dict)
    stale: int = 0
    seconds_before: float = 0.0
    start: float = field(default_factory=time.monotonic)

    @property
    def model(self) -> PreTrainedModel:
        """The model with the delta attached."""
        return self.tuned.model

    @property
    def seconds(self) -> float:
        """Seconds of work on this run, in all processes one after the other."""
        return self.seconds_before + time.monotonic() - self.start

    @property
    def out_of_patience(self) -> bool:
        """Whether training stops because validation has not improved for long enough."""
        patience = self.config.evaluation.patience
        return patience is not None and self.stale >= patience

    @property
    def truncated(self) -> dict[str, dict[str, int]]:
        """How many inputs and how many targets of every split were cut."""
        names = ("truncated", "truncated_targets")
        return {name: {split: getattr(rows, name) for split, rows in self.encoded.items()} for name in names}

    @property
    def metric(self) -> str:
        """The metric that chooses the best epoch."""
        return self.config.evaluation.metric or self.metrics[0]

    def progress(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this state."""
        return {"best": self.best, "stale": self.stale, "seconds": self.seconds}

    def score(self, split: str, bar: ProgressBar | None = None, loss_only: bool = False) -> EvalResult:
        """Return the model's answers to a split, and their metrics.

        Each of several processes answers every row: where a model is sharded all must run together, through as many
        passes, and the number of passes of generation is not known before. So none waits for another either.

        Raises:
            DivergedError: The loss is not finite.
        """
        context = self.inference_context(bar, loss_only)
        options = self.config.evaluation.metric_options
        result = score_split(self.kind, context, self.encoded[split], self.columns[split], self.metrics, options)
        metrics = distributed.broadcast_from_main(lambda: result.metrics)  # rounding must not split the processes
        result = replace(result, metrics=metrics)
        if not math.isfinite(result.metrics["loss"]):
            raise diverged_error(self, f"the {split} loss is {result.metrics['loss']}")
        return result

    def inference_context(self, bar: ProgressBar | None = None, loss_only: bool = False) -> InferenceContext:
        """Return the model and what else a pass over a split needs."""
        rows = self.config.optim.rows_per_device(distributed.world_size())
        return InferenceContext(
            self.model, self.tokenizer, self.data.labels, self.limits, rows, self.precision,
            bar.advance if bar else None, loss_only=loss_only,
        )  # fmt: skip

    def write_predictions(self, split: str, result: EvalResult) -> dict[str, Any]:
        """Write a split's predictions, and return its metrics, signatures, omitted metrics and the file's digest."""

        def write() -> str:
            lines = prediction_lines(self.kind, self.columns[split], result, self.data.labels)
            self.run.write_predictions(split, lines)
            return checkpoints.file_sha256(self.run.predictions / f"{split}.jsonl")

        facts = {"metrics": result.metrics, "signatures": result.signatures, "omitted": result.omitted}
        return {**facts, "sha256": distributed.broadcast_from_main(write)}

    def reusable_predictions(self) -> dict[str, dict[str, Any]]:
        """Return what `write_predictions` returned for the validation of the best epoch, by split.

        It is empty unless the file is whole and was predicted by the delta on disk: a kill between a delta and its
        checkpoint leaves a later delta there, which need not be reached again bit for bit.
        """
        if "answered" not in self.best:
            return {}
        answered, file = self.best["answered"], self.run.predictions / "validation.jsonl"

        def fits() -> bool:
            whole = file.is_file() and checkpoints.file_sha256(file) == answered["sha256"]
            return bool(whole and answered["delta"] == read_metadata(self.run.delta).sha256)

        return {"validation": answered} if distributed.broadcast_from_main(fits) else {}

    def save_delta(self) -> str:
        """Save the delta as it is, and return the digest of its numbers."""
        with distributed.unsharded(self.tuned):
            return distributed.broadcast_from_main(lambda: read_metadata(self.tuned.save(self.run.delta)).sha256)

    def save_if_best(self, result: EvalResult, epoch: float, step: int) -> bool:
        """Save the delta and its predictions if this validation is the best so far; return whether it is."""
        metrics = result.metrics
        value = metrics[self.metric]
        lower = self.metric == "loss" or METRICS[self.metric].better == "lower"
        rank = [-value if lower else value, -metrics["loss"]]
        if self.best and rank <= self.best["rank"]:
            self.stale += 1
            return False
        digest = self.save_delta()
        self.best = {"epoch": epochs_done(epoch), "step": step, "metric": self.metric, "value": value, "rank": rank}
        # shared modules are folded in bf16 here and in fp32 when the file is loaded, so answers may differ
        folded = self.precision != "fp32" and len(self.tuned.delta().shared)
        if result.predictions and not folded:
            self.best["answered"] = {"delta": digest, **self.write_predictions("validation", result)}
        self.stale = 0
        return True


def epochs_done(epoch: float) -> float:
    """Round passes over the rows to a hundredth; a whole number of them becomes an integer."""
    return round(epoch) if abs(epoch - round(epoch)) < 1e-6 else round(epoch, 2)


def diverged_error(state: RunState, reason: str) -> DivergedError:
    """Return the error for a loss that is not finite; a run without any checkpoint leaves no files behind."""
    outcome = "the run stays as it was after its last good epoch"
    if checkpoints.latest_checkpoint(state.run.checkpoint) is None:
        state.run.clear()
        outcome = "nothing is kept"
    rate = state.config.optim.rate
    lower = min(rate / 10, default_learning_rate(state.config.method.expression))
    return DivergedError(
        f"{reason}: training diverged at a learning rate of {rate:g}; {outcome}. "
        f"Try a lower rate, such as --lr {lower:g}, or a warm-up"
    )
