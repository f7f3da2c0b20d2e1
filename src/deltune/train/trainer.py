"""transformers' Trainer with checkpoints of the delta alone, exact step losses, and the run's log and progress bar.

`RunState` is the state of the run under way: what it works with, the best delta so far, patience and time. An interrupt
(Ctrl-C) that a library's callback catches is raised again at the next step.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..errors import DIVERGED, DeltuneError, DivergedError
from ..files import file_sha256
from ..methods.registry import default_learning_rate
from ..models import LANGUAGE_MODEL_HEADS
from ..runtime import sharding
from ..runtime.causal_loss import causal_loss
from ..runtime.handle import Tuned
from ..runtime.padding import eval_mode
from ..runtime.serialization import read_metadata
from ..runtime.step_memory import StepTracker
from . import checkpoints, distributed
from .config import OptimSection, RunConfig
from .data.loading import TaskData
from .data.packing import Packing, best_fit
from .frozen_layers import FrozenLayers
from .inference import EvalResult, continue_prompt, log_omitted, prediction_lines, score_split, with_tag_scheme
from .progress import ProgressDisplay, format_duration
from .records import ProbeRecord, signed_score
from .run_folder import RunFolder
from .tasks.base import Columns, InferenceContext, TaskKind, TaskOptions, condition_of_rows, task_ids
from .tasks.chat import CHAT, last_answer
from .tasks.encoding import (
    IGNORE_INDEX,
    EncodedRows,
    LengthGroupedBatches,
    Row,
    collate,
    count_tokens,
    longest_length,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


TASK_IDS = "task_ids"
"""The key of a batch with the number of each row's task, of which a pass is told beside its inputs."""
PASSES_OF_A_STEP = 3
"""A row of a training step takes as long as that many rows that are only scored: forward, and twice that backward."""
SHOWN_ANSWERS = 4
"""Conversations of a split that a model answers for its report."""

logger = logging.getLogger("deltune")

_interrupted = threading.Event()


def watch_interrupts() -> None:
    """Install a signal handler that remembers interrupts.

    Nothing is done outside of the main thread, or where another handler than Python's own is installed.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is (
        signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _report_unraisable


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if an interrupt came since the last call."""
    if _interrupted.is_set():
        _interrupted.clear()
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupted.set()
    raise KeyboardInterrupt


def _report_unraisable(args: sys.UnraisableHookArgs) -> None:
    # An interrupt that comes in a weak reference's callback or in __del__ cannot leave it. The next step raises it
    # again, so its traceback would only frighten.
    if not (args.exc_type is KeyboardInterrupt and _interrupted.is_set()):
        sys.__unraisablehook__(args)


@dataclass
class RunState:
    """Everything that one single run works with.

    Attributes:
        frozen_layers: The layers below everything that is trained, where they run without dropout.
        probe: What a linear probe scores, once that is known.
        measure: measure(split) returns the scores of a split by the trainer of an objective; None where answers are
            measured.
        names: TRL's name of a measure -> its name in the log, of a run with an objective.
        is_fresh: Whether the delta begins untrained, so that the base is the reference of an objective.
        why_pooling: Where the pooling of the delta comes from; "" where the head reads no pooler.
        packing: How several texts in one row are kept apart, where rows are packed.
        best: What is known of the best validation so far; empty before the first one.
        stale: How many validations there were since the best one.
        seconds_before: Seconds that earlier processes worked on this run.
        cpu_seconds_before: Processor seconds of earlier processes; None where they did not count them.
        tokens: How many tokens, padding excluded, this process made training batches of.
        stop_if: stop_if(step, quality) is asked after each validation whether training ends there.
    """

    config: RunConfig
    run: RunFolder
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
    why_pooling: str = ""
    probe: ProbeRecord | None = None
    packing: Packing | None = None
    measure: Callable[[str], dict[str, float]] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    is_fresh: bool = True
    best: dict[str, Any] = field(default_factory=dict)
    stale: int = 0
    seconds_before: float = 0.0
    start: float = field(default_factory=time.monotonic)
    cpu_seconds_before: float | None = 0.0
    cpu_start: float = field(default_factory=time.process_time)
    tokens: int = 0
    stop_if: Callable[[int, float], bool] | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The model with the delta attached."""
        return self.tuned.model

    @property
    def total_steps(self) -> int:
        """The number of steps of the run, unless patience ends it."""
        return total_steps(self.config.optim, self.batches)

    @property
    def seconds(self) -> float:
        """Seconds of work on this run, in all processes one after the other."""
        return self.seconds_before + time.monotonic() - self.start

    @property
    def cpu_seconds(self) -> float | None:
        """Processor seconds of work on this run; None where it went on from a checkpoint without them."""
        before = self.cpu_seconds_before
        return None if before is None else before + time.process_time() - self.cpu_start

    @property
    def out_of_patience(self) -> bool:
        """True if training stops because validation has not improved for long enough."""
        patience = self.config.evaluation.patience
        return patience is not None and self.stale >= patience

    @property
    def truncated(self) -> dict[str, dict[str, int]]:
        """The numbers of inputs and of targets that were cut, by split."""
        names = ("truncated", "truncated_targets")
        return {name: {split: getattr(rows, name) for split, rows in self.encoded.items()} for name in names}

    def deciding_metric(self, measured: Container[str], omitted: Mapping[str, str] | None = None) -> str:
        """Return the metric that chooses the best epoch: the requested one, else the first that was measured."""
        chosen = self.config.evaluation.metric
        if chosen is not None and chosen not in measured:
            reason = (omitted or {}).get(chosen, "it was not computed")
            raise DeltuneError(f"--metric {chosen} cannot choose the best epoch: {reason}")
        return chosen or next((name for name in self.metrics if name in measured), "loss")

    def progress(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this state."""
        return {"best": self.best, "stale": self.stale, "seconds": self.seconds, "cpu_seconds": self.cpu_seconds}

    def score(self, split: str, bar: ProgressDisplay | None = None, loss_only: bool = False) -> EvalResult:
        """Return the model's answers to a split, and their metrics.

        Each of several processes answers every row: where a model is sharded all must run together, through as many
        passes, and the number of passes of generation is not known before. So none waits for another either.
        """
        context = self.inference_context(bar, loss_only)
        options = with_tag_scheme(self.config.evaluation.metric_options, self.data.tag_scheme)
        if self.measure is not None:
            return EvalResult(self.measure(split), {}, {}, [], [], [])
        result = score_split(self.kind, context, self.encoded[split], self.columns[split], self.metrics, options)
        metrics = sharding.broadcast_from_main(lambda: result.metrics)  # rounding must not split the processes
        result = replace(result, metrics=metrics)
        if not math.isfinite(result.metrics["loss"]):
            raise diverged_error(self, f"the {split} loss is {result.metrics['loss']}")
        return result

    def inference_context(self, bar: ProgressDisplay | None = None, loss_only: bool = False) -> InferenceContext:
        """Return the model and what else a pass over a split needs."""
        rows = self.config.optim.rows_per_device(distributed.world_size())
        return InferenceContext(
            self.model, self.tokenizer, self.data.labels, self.limits, rows, self.precision,
            bar.advance if bar else None, loss_only=loss_only,
        )  # fmt: skip

    def write_predictions(self, split: str, result: EvalResult) -> dict[str, Any]:
        """Write a split's predictions, and return its metrics with what is known of them, and the file's digest."""
        if self.measure is not None:  # there are none
            return {"metrics": result.metrics, "signatures": {}, "omitted": {}, "intervals": {}}

        def write() -> str:
            lines = prediction_lines(self.kind, self.columns[split], result, self.data.labels)
            for line, answer in zip(lines, self.answers(split), strict=False):
                line.update(answer)
            self.run.write_predictions(split, lines)
            return file_sha256(self.run.predictions / f"{split}.jsonl")

        facts = {
            "metrics": result.metrics, "signatures": result.signatures, "omitted": result.omitted,
            "intervals": result.intervals(),
        }  # fmt: skip
        return {**facts, "sha256": sharding.broadcast_from_main(write)}

    @torch.no_grad()
    def answers(self, split: str) -> Iterator[dict[str, str]]:
        """Yield for the first conversations what the model answers to the prompt of the last answer, and that answer.

        Nothing is drawn in several processes, of which one alone writes, and without the layers that are cached.
        """
        if self.kind is not CHAT or sharding.is_distributed() or self.frozen_layers is not None:
            return
        rows = {row["text_index"]: row for row in self.encoded[split].rows[: 2 * SHOWN_ANSWERS]}
        for i in range(SHOWN_ANSWERS):
            prompt, reference = last_answer(rows[i]) if i in rows else ([], [])
            room = longest_length(self.model, len(prompt) + self.limits.max_target_length) - len(prompt)
            if not prompt or not reference or room < 1:
                yield {}
                continue
            with eval_mode(self.model):
                answer = continue_prompt(self.model, self.tokenizer, prompt, min(room, self.limits.max_target_length))
            texts = {"asked": prompt, "answered": answer, "expected": reference}
            yield {name: str(self.tokenizer.decode(ids, skip_special_tokens=True)) for name, ids in texts.items()}

    def reusable_predictions(self) -> dict[str, dict[str, Any]]:
        """Return what `write_predictions` returned for the validation of the best epoch, by split.

        It is empty unless the file is whole and was predicted by the delta on disk: a kill between a delta and its
        checkpoint leaves a later delta there, which need not be reached again bit for bit.
        """
        if "answered" not in self.best:
            return {}
        answered, file = self.best["answered"], self.run.predictions / "validation.jsonl"

        def fits() -> bool:
            whole = file.is_file() and file_sha256(file) == answered["sha256"]
            return bool(whole and answered["delta"] == read_metadata(self.run.delta).sha256)

        return {"validation": answered} if sharding.broadcast_from_main(fits) else {}

    def save_delta(self) -> str:
        """Save the delta as it is, and return the digest of its numbers."""
        if sharding.is_sharded(self.model):
            self.tuned.save(self.run.delta)  # every process gathers, and the first one writes
        elif distributed.is_main():
            self.tuned.save(self.run.delta)
        return sharding.broadcast_from_main(lambda: read_metadata(self.run.delta).sha256)

    def save_if_best(self, result: EvalResult, epoch: float, step: int) -> bool:
        """Save the delta and its predictions if this validation is the best so far; return whether it is."""
        metrics = result.metrics
        name = self.deciding_metric(metrics, result.omitted)
        value = metrics[name]
        rank = [signed_score(name, value), -metrics["loss"]]
        if self.best and rank <= self.best["rank"]:
            self.stale += 1
            return False
        digest = self.save_delta()
        self.best = {"epoch": rounded_epochs(epoch), "step": step, "metric": name, "value": value, "rank": rank}
        # a reparameterisation is folded in bf16 here and in fp32 when the file is loaded, so answers may differ
        folded = self.precision != "fp32" and any(edit.is_reparameterised for edit in self.tuned.delta().planned.edits)
        if result.predictions and not folded:
            self.best["answered"] = {"delta": digest, **self.write_predictions("validation", result)}
        self.stale = 0
        return True


def total_steps(optim: OptimSection, batches: LengthGroupedBatches) -> int:
    """Return how many steps the batches of an epoch make in all epochs, or the number that is given."""
    return optim.steps or optim.epochs * batches.steps_per_epoch


def rounded_epochs(epoch: float) -> float:
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
        f"{reason}: {DIVERGED} at a learning rate of {rate:g}; {outcome}. "
        f"Try a lower rate, such as --lr {lower:g}, or a warm-up"
    )


class DeltaCheckpointTrainer(Trainer):
    """A Trainer of a run: its checkpoints hold the delta alone, and validations decide which delta is kept."""

    run_state: RunState
    bar: ProgressDisplay

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        total = distributed.all_reduce_sum(loss)
        if not torch.isfinite(total):
            raise diverged_error(
                self.run_state, f"the training loss is {total.item()} at step {self.state.global_step + 1}"
            )
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Score the validation split, and keep the delta if it is the best so far."""
        run = self.run_state
        self.bar.show({"validation": "running"})
        result = run.score("validation", self.bar, loss_only=run.config.evaluation.metric == "loss")
        self.bar.show({"validation": ""})
        if not run.best and result.omitted:
            log_omitted(result.omitted)
            if run.config.evaluation.metric is None:
                logger.info("the best epoch is chosen by %s (--metric)", run.deciding_metric(result.metrics))
        better = run.save_if_best(result, self.state.epoch or 0, self.state.global_step)
        metrics = {f"eval_{name}": value for name, value in result.metrics.items()}
        self.log(metrics | {"eval_best": better})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.control.should_training_stop |= run.out_of_patience
        if run.stop_if is not None:
            name = run.deciding_metric(result.metrics, result.omitted)
            self.control.should_training_stop |= run.stop_if(
                self.state.global_step, signed_score(name, result.metrics[name])
            )
        return metrics

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: counting would walk over all modules at every step."""
        return 0

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if "validation" not in self.run_state.encoded:
            self.run_state.save_delta()
            self.run_state.best = {"epoch": rounded_epochs(self.state.epoch), "step": self.state.global_step}
        checkpoints.save_checkpoint(
            self.run_state.run.checkpoint,
            self.state.global_step,
            self._trained_tensors(),
            self.optimizer,
            self.lr_scheduler,
            self.run_state.progress(),
            self.state.save_to_json,
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with self.run_state.tuned.attached.whole(write=True):
            checkpoints.restore_trained(Path(resume_from_checkpoint), self._trained_tensors())

    def _trained_tensors(self) -> dict[str, torch.Tensor]:
        """The parameters that train, and the state of the method's schedules."""
        schedules = dict(self.run_state.tuned.delta().schedules.named_buffers(prefix="schedules"))
        return {**dict(self.run_state.tuned.named_trainable_parameters()), **schedules}

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.restore_optimizer(Path(checkpoint), self.optimizer, self.lr_scheduler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.restore_random(Path(checkpoint))


class DeltaTrainer(DeltaCheckpointTrainer):
    """A Trainer whose batches have rows of similar length, and whose loss is the mean over the items of a step."""

    def __init__(self, state: RunState, arguments: TrainingArguments, bar: ProgressDisplay) -> None:
        self.run_state, self.bar = state, bar
        self.collated: deque[int] = deque()  # tokens of each batch that no step has taken yet
        # each token is predicted from those before it; the Trainer goes by the class's name, and misses some
        self.shifted = state.kind.head == "causal-lm"
        super().__init__(
            model=state.model,
            args=arguments,
            train_dataset=state.encoded["train"],
            eval_dataset=state.encoded.get("validation"),
            data_collator=self._batch,
        )
        # whether a model divides by the number of items that it is given can only be told by trying (BERT's
        # classifiers take it and do not), so none is given one: compute_loss weighs the means. A Trainer that has a
        # loss function leaves them as they are; one of 5.17 has no other way to be told
        self.model_accepts_loss_kwargs, self.compute_loss_func = False, self._part_of_loss
        if sharding.is_sharded(state.model):  # placed and averaged already: no DDP around it
            self.is_distributed_loading_by_transformers = True
        elif sharding.is_distributed():
            self.accelerator.ddp_handler.find_unused_parameters = self._some_unused()

    def _some_unused(self) -> bool:
        """Return whether a trained parameter has no part in the loss, which DDP would wait for; one pass shows it."""
        with torch.random.fork_rng():
            model = self.run_state.model.train()
            batch = self._prepare_inputs(self._batch([self.run_state.encoded["train"][0]]))
            with condition_of_rows(model, batch.pop(TASK_IDS, None)):
                model(**batch).loss.backward()
        unused = any(parameter.grad is None for _, parameter in self.run_state.tuned.named_trainable_parameters())
        model.zero_grad()
        return unused

    def _batch(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Collate rows; a device without rows in this step gets one whose labels are ignored."""
        state = self.run_state
        self.collated.append(sum(count_tokens(row["input_ids"]) for row in rows))
        if rows and state.packing is not None:
            bins = best_fit([len(row["input_ids"]) for row in rows], state.kind.max_input_tokens(state.limits))
            return state.packing.batch([[rows[i] for i in one] for one in bins], state.model.dtype)
        if rows:
            return self._collate(rows)
        batch = self._collate([self.run_state.encoded["train"][0]])
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)}

    def _collate(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        batch, ids = collate(self.run_state.tokenizer, self.run_state.model, rows), task_ids(self.run_state.model, rows)
        return batch if ids is None else {**batch, TASK_IDS: torch.tensor(ids)}

    def get_train_dataloader(self) -> DataLoader[Row]:
        """Return the batches of all steps, dealt to the processes by accelerate."""
        self.collated.clear()
        rows, pinned = self.run_state.encoded["train"], self.args.dataloader_pin_memory
        loader = DataLoader(rows, batch_sampler=self.run_state.batches, collate_fn=self._batch, pin_memory=pinned)
        prepared: DataLoader[Row] = self.accelerator.prepare(loader)
        return prepared

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Return the batches of a step on this device, and how many items the batches of all devices have."""
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        items = torch.stack([self._items(batch).to(device) for batch in batches]).sum()
        self.run_state.tokens += sum(self.collated.popleft() for _ in batches)  # the next one may be there already
        return batches, distributed.all_reduce_sum(items)

    def _items(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Count what the loss of a batch is the mean of: rows, or the tokens that are predicted."""
        labels = batch["labels"][..., 1:] if self.shifted else batch["labels"]
        return (labels != IGNORE_INDEX).sum()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return a batch's part in the loss of the step.

        The loss of a step is the mean over the items of all its batches on all devices. The gradients of the devices
        are averaged, so each part is multiplied by the number of devices.
        """
        with condition_of_rows(self.run_state.model, inputs.pop(TASK_IDS, None)):
            return self._part_of_loss(model, inputs, num_items_in_batch)

    def _part_of_loss(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        items = self._items(inputs)
        if self.label_smoother is None and self.run_state.kind.head in LANGUAGE_MODEL_HEADS:
            loss = causal_loss(model, inputs)
        else:
            outputs = model(**inputs)
            if not items:  # its own mean is 0 / 0; the pass is for the other devices, which wait for its gradient
                return outputs.logits.sum() * 0
            loss = outputs.loss
            if self.label_smoother is not None:
                loss = self.label_smoother(outputs, inputs["labels"], shift_labels=self.shifted)
        return loss * (self.args.world_size * items / num_items_in_batch.clamp(min=1))  # no step has to train a token

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Reduce gradients after every batch of a step; the Trainer's own would ask how it loaded the model.

        Unreduced gradients, kept up to the end of the step, would take the memory that sharding saves.
        """
        yield


COLUMNS = ("step", "epoch", "loss", "validation", "validation loss", "rate", "tokens/s")
"""The columns of the progress of training, beside the time and the time left."""


class ReportCallback(TrainerCallback):
    """Shows the progress of a run, and writes log.jsonl."""

    def __init__(self, state: RunState, bar: ProgressDisplay) -> None:
        self.run_state, self.bar = state, bar
        self.step_start = self.step_seconds = 0.0
        self.tokens_before = 0
        self.best_value: float | None = None
        self.first_step = contextlib.ExitStack()
        self.tracker: StepTracker | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.run_state
        if run.config.runtime.activation_checkpointing != "off":
            run.model.disable_input_require_grads()  # layers below what is trained need no gradient, nor a second pass
        validated, tested = (len(run.encoded[s]) if s in run.encoded else 0 for s in ("validation", "test"))
        every = run.config.evaluation.validate_every or run.batches.steps_per_epoch
        self.rows_of_step = PASSES_OF_A_STEP * len(run.encoded["train"]) / run.batches.steps_per_epoch

        def rows_until(step: int) -> float:
            return step * self.rows_of_step + step // every * validated

        total, done = rows_until(state.max_steps) + tested, rows_until(state.global_step)
        self.bar.start("training", total, done, columns=COLUMNS, seconds=run.seconds)
        for line in run.run.read_log() if state.global_step and run.run.log_file.is_file() else ():
            self._show(line, state.max_steps, logged=False)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run_state.batches.set_epoch(int(state.epoch or 0))  # the Trainer does not when it skips

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise_if_interrupted()
        self.bar.advance(0)  # here and not after the step before, whose losses are logged later, as is its validation
        self.step_start = time.monotonic()
        # gates may be fixed in this step, which needs all of their values
        gates = [gates for _, gates in self.run_state.tuned.delta().learned_masks()]
        with self.run_state.tuned.attached.whole(write=True) if gates else contextlib.nullcontext():
            for one in gates:
                one.advance(state.global_step / state.max_steps)
        if not state.global_step and not sharding.is_sharded(self.run_state.model):
            self.tracker = StepTracker(self.run_state.model, self.run_state.tuned.anatomy)
            self.first_step.enter_context(self.tracker)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self.tracker is not None:
            self.first_step.close()
            memory = self.tracker.peak(optimizer).as_dict()
            self.run_state.run.log({"step": 1, "event": "memory", "memory": memory})
            self.tracker = None
        for schedule in self.run_state.tuned.delta().schedule_states():
            schedule.advance((state.global_step + 1) / state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_seconds += time.monotonic() - self.step_start
        epoch = rounded_epochs(state.epoch or 0)
        self.bar.show({"step": f"{state.global_step}/{state.max_steps}", "epoch": f"{epoch:g}"})
        self.bar.count(self.rows_of_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = True  # so that the losses of the log do not depend on where a run was resumed

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "train_runtime" in logs or "eval_runtime" in logs:  # the summaries of the Trainer itself
            return
        run = self.run_state
        logs = {run.names.get(name, name): value for name, value in logs.items()}
        times: dict[str, float] = {"seconds": round(run.seconds, 2)}
        if "loss" in logs:
            tokens, self.tokens_before = run.tokens - self.tokens_before, run.tokens
            if tokens and self.step_seconds:
                times["tokens_per_second"] = round(tokens * distributed.world_size() / self.step_seconds)
            self.step_seconds = 0.0
        if (left := self.bar.seconds_left) is not None:
            times["seconds_left"] = round(left, 1)
        line = {"step": state.global_step, **logs, **times}
        run.run.log(line)
        self._show(line, state.max_steps)

    def _show(self, line: Mapping[str, Any], steps: int, logged: bool = True) -> None:
        """Show a line of log.jsonl: a validation as a row that is kept."""
        if "loss" in line:
            rate = {"tokens/s": f"{line['tokens_per_second']:,}"} if line.get("tokens_per_second") else {}
            reward = f" (reward {line['reward']:.3f})" if "reward" in line else ""
            facts = {"loss": f"{line['loss']:z.4f}{reward}", "rate": f"{line.get('learning_rate', 0):.1e}"}
            self.bar.show({"step": f"{line['step']}/{steps}", **facts, **rate})
        if "eval_loss" in line:
            measured = {key.removeprefix("eval_"): value for key, value in line.items() if key.startswith("eval_")}
            name, best = self.run_state.deciding_metric(measured), " best" if line.get("eval_best") else ""
            tied, self.best_value = self.best_value == measured[name], measured[name] if best else self.best_value
            by_loss = best if name == "loss" or tied else ""
            facts = {"validation loss": f"{measured['loss']:z.4f}{by_loss}"}
            if name != "loss":
                facts = {"validation": f"{name} {measured[name]:.4f}{'' if by_loss else best}", **facts}
            where = {"step": f"{line['step']}/{steps}", "epoch": f"{rounded_epochs(line.get('epoch', 0)):g}"}
            self.bar.keep({**where, **facts, "time": format_duration(line.get("seconds"))}, logged)
