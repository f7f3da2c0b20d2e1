"""transformers' Trainer, taught that the delta alone is checkpointed and how a run reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from . import checkpoints
from .encoding import ByLength, collate
from .jobs import Job, diverged, passes
from .progress import Bar


class DeltaTrainer(Trainer):
    """A Trainer whose checkpoints hold the delta alone, and whose batches are of similar length."""

    def __init__(self, job: Job, arguments: TrainingArguments) -> None:
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
            raise diverged(self.job, f"the training loss is {loss.item()} at step {self.state.global_step + 1}")
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Score the validation split, and keep the delta if it is the best so far."""
        job = self.job
        result = job.scored("validation", loss_only=job.metric == "loss").metrics
        better = job.judge(result, self.state.epoch or 0, self.state.global_step)
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
            self.job.best = {"epoch": passes(self.state.epoch), "step": self.state.global_step}
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


class Reports(TrainerCallback):
    """The bar and log.jsonl."""

    def __init__(self, job: Job, bar: Bar) -> None:
        self.job, self.bar = job, bar
        self.loss = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.start("train", state.max_steps, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.job.tuned.advance(state.global_step / state.max_steps)

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
        name = self.job.metric
        self.bar.note(f"{self.loss} · epoch {passes(state.epoch)}: validation {name} {metrics[f'eval_{name}']:.4f}")
