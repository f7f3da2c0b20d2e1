"""The state of a run under way: its parts, the best delta so far, patience and time."""

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
from .config import RunSpec
from .inference import ScoredSplit, prediction_lines, score_split
from .progress import ProgressBar
from .run_dir import RunDir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class RunState:
    """All that one run works with."""

    spec: RunSpec
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
    trunk: FrozenLayers | None = None
    best: dict[str, Any] = field(default_factory=dict)
    stale: int = 0  # validations since the best
    before: float = 0.0  # seconds of earlier processes
    began: float = field(default_factory=time.monotonic)

    @property
    def model(self) -> PreTrainedModel:
        return self.tuned.model

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.began

    @property
    def stopped(self) -> bool:
        """Patience is at its end."""
        return self.spec.patience is not None and self.stale >= self.spec.patience

    @property
    def truncated(self) -> dict[str, dict[str, int]]:
        """How many inputs of every split were cut, and how many targets."""
        names = ("truncated", "truncated_targets")
        return {name: {split: getattr(rows, name) for split, rows in self.encoded.items()} for name in names}

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of this."""
        return {"best": self.best, "stale": self.stale, "seconds": self.seconds}

    @property
    def metric(self) -> str:
        """What chooses the best epoch."""
        return self.spec.metric or self.metrics[0]

    def scored(self, split: str, bar: ProgressBar | None = None, loss_only: bool = False) -> ScoredSplit:
        """The model's answers to a split, and their metrics.

        Each of several processes answers every row: where a model is shared out all must run together, through as
        many passes, and the passes of generation are not known before. So none waits for another either.
        """
        use = self.use(bar, loss_only)
        options = self.spec.metric_options
        result = score_split(self.kind, use, self.encoded[split], self.columns[split], self.metrics, options)
        metrics = distributed.broadcast_from_main(
            lambda: result.metrics
        )  # rounding must not let processes decide differently
        result = replace(result, metrics=metrics)
        if not math.isfinite(result.metrics["loss"]):
            raise diverged_error(self, f"the {split} loss is {result.metrics['loss']}")
        return result

    def use(self, bar: ProgressBar | None = None, loss_only: bool = False) -> InferenceContext:
        """Its model, for a pass over a split."""
        advance = bar.advance if bar else None
        return InferenceContext(
            self.model, self.tokenizer, self.data.labels, self.limits, self.spec.rows(distributed.world_size()),
            self.precision, advance, loss_only=loss_only,
        )  # fmt: skip

    def answered(self, split: str, result: ScoredSplit) -> dict[str, Any]:
        """Write a split's predictions; returns what is to be known of them besides."""

        def write() -> str:
            self.run.predicted(split, prediction_lines(self.kind, self.columns[split], result, self.data.labels))
            return checkpoints.digest(self.run.predictions / f"{split}.jsonl")

        facts = {"metrics": result.metrics, "signatures": result.signatures, "omitted": result.omitted}
        return {**facts, "sha256": distributed.broadcast_from_main(write)}

    def kept_answers(self) -> dict[str, dict[str, Any]]:
        """What the best epoch answered to the validation split, if it is whole and of the delta on the disk; else
        nothing.

        A kill between a delta and its checkpoint leaves a later one there, which need not be made again bit for bit.
        """
        if "answered" not in self.best:
            return {}
        found, file = self.best["answered"], self.run.predictions / "validation.jsonl"

        def of_it() -> bool:
            whole = file.is_file() and checkpoints.digest(file) == found["sha256"]
            return bool(whole and found["delta"] == read_metadata(self.run.delta).sha256)

        return {"validation": found} if distributed.broadcast_from_main(of_it) else {}

    def keep(self) -> str:
        """Save the delta as it is; returns the digest of its numbers."""
        with distributed.unsharded(self.tuned):
            return distributed.broadcast_from_main(lambda: read_metadata(self.tuned.save(self.run.delta)).sha256)

    def judge(self, result: ScoredSplit, epoch: float, step: int) -> bool:
        """Keep the delta, and its answers, if this validation is the best so far; returns whether it is."""
        metrics = result.metrics
        value = metrics[self.metric]
        lower = self.metric == "loss" or METRICS[self.metric].better == "lower"
        rank = [-value if lower else value, -metrics["loss"]]
        if self.best and rank <= self.best["rank"]:
            self.stale += 1
            return False
        digest = self.keep()
        self.best = {"epoch": epochs_done(epoch), "step": step, "metric": self.metric, "value": value, "rank": rank}
        folding = self.precision != "fp32" and len(self.tuned.delta().shared)  # in bf16 here, in fp32 for the file
        if result.predictions and not folding:
            self.best["answered"] = {"delta": digest, **self.answered("validation", result)}
        self.stale = 0
        return True


def epochs_done(epoch: float) -> float:
    """Passes over the rows, to a hundredth; a whole number of them as such."""
    return round(epoch) if abs(epoch - round(epoch)) < 1e-6 else round(epoch, 2)


def diverged_error(job: RunState, what: str) -> DivergedError:
    """The error for a loss that is no number; a run without any checkpoint leaves nothing behind."""
    kept = "the run stays as it was after its last good epoch"
    if checkpoints.latest_checkpoint(job.run.checkpoint) is None:
        job.run.clear()
        kept = "nothing is kept"
    return DivergedError(
        f"{what}: training diverged at a learning rate of {job.spec.rate:g}; {kept}. "
        f"Try a lower rate, such as --lr {min(job.spec.rate / 10, default_learning_rate(job.spec.method)):g}, "
        "or a warm-up"
    )
