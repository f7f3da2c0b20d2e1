"""One run: a method tuned on labelled text, on transformers' Trainer; only the delta is checkpointed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from . import checkpoints
from . import data as reading
from .attaching import attach, load
from .catalogue import rate
from .encoding import ByLength, Encoded, check_length, collate, encode
from .errors import DeltuneError
from .evaluate import SPLITS, Scored, lines, logits, scored
from .handle import Tuned
from .models import fit_padding, load_config, load_model, load_tokenizer
from .progress import Bar
from .runs import Run, environment, room
from .specs import RunSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SCHEDULES = {"constant": "constant_with_warmup"}
"""Names of the Trainer that differ from ours."""
LINES = 20  # of the log, an epoch

told = logging.getLogger("deltune")


def train(spec: RunSpec, output: str | Path, resume: bool = True, progress: bool = True) -> dict[str, Any]:
    """Tune spec.method on spec.data, keep the best delta, score it; returns what metrics.json holds.

    The folder `output` becomes the RUN. A finished run of the same spec is not repeated, an unfinished one goes on
    where it was, with the same numbers in the end; resume=False starts afresh. progress: a bar, on a terminal.
    The best epoch is that of the best validation spec.metric, of equal ones that of the lower validation loss, then
    the first; without a validation split it is the last.
    Errors (DeltuneError): whatever is wrong with spec, data, model, method or folder, before anything is written; a
    loss that is no number; no space left.
    """
    run = Run(output)
    if resume:
        run.check(spec)
        if run.finished:
            told.info("%s is finished; nothing to do", run.folder)
            return run.metrics
    elif not run.exists:
        run.check(spec)
    with room(run.folder), run.locked():
        return _train(spec, run, resume, progress)


@dataclass
class _Job:
    """All that one run works with."""

    spec: RunSpec
    run: Run
    tuned: Tuned
    tokenizer: PreTrainedTokenizerBase
    data: reading.Data
    encoded: dict[str, Encoded]
    best: dict[str, Any] = field(default_factory=dict)
    stale: int = 0  # epochs since the best
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

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of this."""
        return {"best": self.best, "stale": self.stale, "seconds": self.seconds}

    def scored(self, split: str, bar: Bar | None = None) -> Scored:
        advance = bar.advance if bar else None
        size = self.spec.batch_size
        found = logits(self.model, self.tokenizer, self.encoded[split], size, self.spec.precision, advance)
        result = scored(found, self.encoded[split])
        if not math.isfinite(result.metrics["loss"]):
            raise _diverged(self, f"the {split} loss is {result.metrics['loss']}")
        return result

    def judge(self, metrics: dict[str, float], epoch: int) -> bool:
        """Keep the delta if these validation metrics are the best so far; returns whether they are."""
        value = metrics[self.spec.metric]
        rank = [-value if self.spec.metric == "loss" else value, -metrics["loss"]]
        if self.best and rank <= self.best["rank"]:
            self.stale += 1
            return False
        self.tuned.save(self.run.delta)
        self.best = {"epoch": epoch, "metric": self.spec.metric, "value": value, "rank": rank}
        self.stale = 0
        return True


def _train(spec: RunSpec, run: Run, resume: bool, progress: bool) -> dict[str, Any]:
    load_config(spec.model)  # an unknown family is told as that, not as a missing tokenizer
    found = reading.load(spec.data, spec.columns, spec.labels, spec.max_train_rows, spec.seed)
    if "validation" not in found.splits and (spec.patience is not None or spec.metric != "accuracy"):
        raise DeltuneError(f"data {spec.data} has no validation split, so neither patience nor metric can be used")
    if spec.metric == "f1" and len(found.labels) != 2:
        raise DeltuneError(f"metric f1 is for two labels, here are {len(found.labels)}; use f1_macro")
    tokenizer = load_tokenizer(spec.model)
    model = load_model(spec.model, "classification", found.labels, "float32", spec.seed)
    fit_padding(model, tokenizer)
    set_seed(spec.seed)
    tuned = attach(model, spec.method, head=spec.head)
    if not any(True for _ in tuned.trained()):
        raise DeltuneError(f"{spec.method!r} with head={spec.head!r} trains nothing")
    check_length(model, spec.max_length)
    columns = {s: {name: list(d[name]) for name in d.column_names} for s, d in found.splits.items()}
    encoded = {split: encode(tokenizer, model, rows, spec.max_length) for split, rows in columns.items()}
    arguments = _arguments(spec, run, len(encoded["train"]), "validation" in encoded)
    if not resume:
        run.clear()
    source = {
        "source": found.source,
        "fingerprint": found.fingerprint,
        "columns": found.columns,
        "rows": {split: len(rows) for split, rows in encoded.items()},
    }
    run.begin(spec, environment(str(arguments.device), source))
    job = _Job(spec, run, tuned, tokenizer, found, encoded)
    with Bar(progress) as bar:
        _fit(job, arguments, bar)
        return _finish(job, columns, bar)


def _arguments(spec: RunSpec, run: Run, rows: int, validated: bool) -> TrainingArguments:
    steps = math.ceil(math.ceil(rows / spec.batch_size) / spec.gradient_accumulation)
    arguments = TrainingArguments(
        output_dir=str(run.folder),
        num_train_epochs=spec.epochs,
        per_device_train_batch_size=spec.batch_size,
        gradient_accumulation_steps=spec.gradient_accumulation,
        learning_rate=spec.rate,
        lr_scheduler_type=SCHEDULES.get(spec.schedule, spec.schedule),
        warmup_steps=spec.warmup,
        weight_decay=spec.weight_decay,
        max_grad_norm=spec.clip,
        bf16=spec.precision == "bf16",
        use_cpu=not torch.accelerator.is_available(),
        seed=spec.seed,
        eval_strategy="epoch" if validated else "no",
        save_strategy="epoch",
        logging_steps=max(1, steps // LINES),
        logging_nan_inf_filter=False,  # a loss that is no number is an error here
        disable_tqdm=True,
        report_to=list(spec.report_to) or "none",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # DataParallel would copy the model, and hooks stay with the first
    return arguments


def _fit(job: _Job, arguments: TrainingArguments, bar: Bar) -> None:
    """Train from the newest checkpoint, or from the start, to the last epoch or the end of patience."""
    checkpoint = checkpoints.latest(job.run.checkpoint)
    if checkpoint is None:
        job.run.rewind(-1)
        for split, rows in job.encoded.items():
            if rows.truncated:
                told.info(
                    "%d of %d %s rows are cut to %d tokens", rows.truncated, len(rows), split, job.spec.max_length
                )
        job.run.log({"step": 0, "event": "start", "truncated": {s: e.truncated for s, e in job.encoded.items()}})
    else:
        kept = checkpoints.facts(checkpoint)
        job.best, job.stale, job.before = kept["best"], kept["stale"], kept["seconds"]
        job.run.rewind(int(checkpoint.name))
        told.info("resuming %s after step %s", job.run.folder, checkpoint.name)
    if job.stopped:
        return
    trainer = DeltaTrainer(job, arguments)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Reports(job, bar))
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.accelerator.unwrap_model(job.model, keep_fp32_wrapper=False)


def _finish(job: _Job, columns: Mapping[str, Mapping[str, Sequence[Any]]], bar: Bar) -> dict[str, Any]:
    """Score the kept delta as it is on the disk, and write predictions and metrics."""
    seconds = job.seconds
    count = job.tuned.count().as_dict()
    model = job.tuned.detach()
    job.tuned = load(model, job.run.delta)
    results: dict[str, Any] = {}
    signatures: dict[str, str] = {}
    splits = [split for split in SPLITS if split in job.encoded]
    bar.start("evaluate", sum(len(job.encoded[split]) for split in splits))
    for split in splits:
        result = job.scored(split, bar)
        results[split], signatures = result.metrics, result.signatures
        job.run.predicted(split, lines(columns[split], result, job.data.labels))
    best = {key: value for key, value in job.best.items() if key != "rank"}
    truncated = {split: rows.truncated for split, rows in job.encoded.items()}
    metrics = {**results, "seconds": round(seconds, 3), "count": count, "best": best, "truncated": truncated}
    metrics["signatures"] = signatures
    job.run.finish(metrics)
    return metrics


class DeltaTrainer(Trainer):
    """A Trainer whose checkpoints hold the delta alone, and whose batches are of similar length."""

    def __init__(self, job: _Job, arguments: TrainingArguments) -> None:
        self.job = job
        super().__init__(
            model=job.model,
            args=arguments,
            train_dataset=job.encoded["train"],
            eval_dataset=job.encoded.get("validation"),
            data_collator=lambda rows: collate(job.tokenizer, rows),
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> ByLength:
        rows = self.job.encoded["train"]
        return ByLength(rows.lengths, self.args.train_batch_size, self.args.seed)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One step. Error: its loss is no number."""
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            raise _diverged(self.job, f"the training loss is {loss.item()} at step {self.state.global_step + 1}")
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Score the validation split, and keep the delta if it is the best so far."""
        job = self.job
        result = job.scored("validation").metrics
        better = job.judge(result, round(self.state.epoch or 0))
        metrics = {f"eval_{name}": value for name, value in result.items()}
        self.log(metrics | {"eval_best": better})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.control.should_training_stop |= job.stopped
        return metrics

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the Trainer would walk over all modules at every step."""
        return 0

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if "validation" not in self.job.encoded:
            self.job.tuned.save(self.job.run.delta)
            self.job.best = {"epoch": round(self.state.epoch or 0)}
        checkpoints.save(
            self.job.run.checkpoint,
            self.state.global_step,
            dict(self.job.tuned.trained()),
            self.optimizer,
            self.lr_scheduler,
            self.job.facts(),
            self.state.save_to_json,
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoints.restore_trained(Path(resume_from_checkpoint), dict(self.job.tuned.trained()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.restore_optimizer(Path(checkpoint), self.optimizer, self.lr_scheduler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.restore_random(Path(checkpoint))


class _Reports(TrainerCallback):
    """The bar and log.jsonl."""

    def __init__(self, job: _Job, bar: Bar) -> None:
        self.job, self.bar = job, bar
        self.loss = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.start("train", state.max_steps, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.advance()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = True  # so that the losses of the log do not depend on where a run was resumed

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "train_runtime" in logs:
            return
        self.job.run.log({"step": state.global_step, **logs, "seconds": round(self.job.seconds, 2)})
        if "loss" in logs:
            self.loss = f"loss {logs['loss']:.3f}"
            self.bar.note(self.loss)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        name = self.job.spec.metric
        self.bar.note(f"{self.loss} · epoch {round(state.epoch)}: validation {name} {metrics[f'eval_{name}']:.4f}")


def _diverged(job: _Job, what: str) -> DeltuneError:
    """The error for a loss that is no number; a run without any checkpoint leaves nothing behind."""
    kept = "the run stays as it was after its last good epoch"
    if checkpoints.latest(job.run.checkpoint) is None:
        job.run.clear()
        kept = "nothing is kept"
    return DeltuneError(
        f"{what}: training diverged at a learning rate of {job.spec.rate:g}; {kept}. "
        f"Try a lower rate, such as --lr {min(job.spec.rate / 10, rate(job.spec.method)):g}, or a warm-up"
    )
