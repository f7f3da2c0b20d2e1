"""transformers' Trainer, taught that the delta alone is checkpointed, what a step's loss is and how a run reports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..tasks.encoding import IGNORED, Row, collate
from . import checkpoints, distributed, interrupts
from .progress import ProgressBar
from .run_state import RunState, diverged_error, epochs_done


class DeltaTrainer(Trainer):
    """A Trainer whose checkpoints hold the delta alone, and whose batches are of similar length."""

    def __init__(self, job: RunState, arguments: TrainingArguments) -> None:
        self.job = job
        # each token is predicted from those before it; the Trainer goes by the class's name, and misses some
        self.shifted = job.kind.loads == "causal-lm"
        super().__init__(
            model=job.model,
            args=arguments,
            train_dataset=job.encoded["train"],
            eval_dataset=job.encoded.get("validation"),
            data_collator=self._batch,
        )
        # whether a model divides by the number of items that it is given can only be told by trying (BERT's
        # classifiers take it and do not), so none is given one: compute_loss weighs the means
        self.model_accepts_loss_kwargs, self.loss_is_scaled_for_ga = False, True
        if distributed.is_sharded(job.model):  # placed and averaged already: no DDP around it
            self.is_distributed_loading_by_transformers = True
        elif distributed.is_distributed():
            self.accelerator.ddp_handler.find_unused_parameters = self._some_unused()

    def _some_unused(self) -> bool:
        """Whether something that is trained has no part in the loss, which DDP would wait for; found out by trying."""
        with torch.random.fork_rng():
            model = self.job.model.train()
            model(**self._prepare_inputs(self._batch([self.job.encoded["train"][0]]))).loss.backward()
        unused = any(parameter.grad is None for _, parameter in self.job.tuned.named_trainable_parameters())
        model.zero_grad()
        return unused

    def _batch(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """One batch; of no rows, where a step has fewer than there are devices: any row, that counts as nothing."""
        if rows:
            return collate(self.job.tokenizer, rows)
        batch = collate(self.job.tokenizer, [self.job.encoded["train"][0]])
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}

    def get_train_dataloader(self) -> DataLoader[Row]:
        """The steps' batches, dealt to the processes by accelerate."""
        rows, pinned = self.job.encoded["train"], self.args.dataloader_pin_memory
        loader = DataLoader(rows, batch_sampler=self.job.batches, collate_fn=self._batch, pin_memory=pinned)
        prepared: DataLoader[Row] = self.accelerator.prepare(loader)
        return prepared

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """The batches of a step on this device, and how many items all devices' batches have."""
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        own = torch.stack([self._items(batch).to(device) for batch in batches]).sum()
        return batches, distributed.all_reduce_sum(own)

    def _items(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the loss of a batch is the mean of: rows, or the tokens that are predicted."""
        labels = batch["labels"][..., 1:] if self.shifted else batch["labels"]
        return (labels != IGNORED).sum()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """A batch's part in the step's loss, which is the mean over the items of all its batches on all devices.

        Devices' gradients are averaged, so each part counts as often as there are devices.
        """
        outputs, items = model(**inputs), self._items(inputs)
        if not items:  # its own mean is 0 / 0; the pass is for the other devices, which wait for its gradient
            return outputs.logits.sum() * 0
        loss = outputs.loss
        if self.label_smoother is not None:
            loss = self.label_smoother(outputs, inputs["labels"], shift_labels=self.shifted)
        return loss * (self.args.world_size * items / num_items_in_batch)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One step. Error: its loss is no number."""
        loss = super().training_step(*args, **kwargs)
        all_parts = distributed.all_reduce_sum(loss)
        if not torch.isfinite(all_parts):
            raise diverged_error(
                self.job, f"the training loss is {all_parts.item()} at step {self.state.global_step + 1}"
            )
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Score the validation split, and keep the delta if it is the best so far."""
        job = self.job
        result = job.scored("validation", loss_only=job.metric == "loss")
        better = job.judge(result, self.state.epoch or 0, self.state.global_step)
        metrics = {f"eval_{name}": value for name, value in result.metrics.items()}
        self.log(metrics | {"eval_best": better})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.control.should_training_stop |= job.stopped
        return metrics

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Batches before a step's last; the Trainer's own would ask how it loaded the model. A layer's gradient is
        reduced after every batch: kept whole up to the step it would take the room that sharding saves."""
        yield

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the Trainer would walk over all modules at every step."""
        return 0

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if "validation" not in self.job.encoded:
            self.job.keep()
            self.job.best = {"epoch": epochs_done(self.state.epoch), "step": self.state.global_step}
        self.job.run.sync()
        checkpoints.save_checkpoint(
            self.job.run.checkpoint,
            self.state.global_step,
            dict(self.job.tuned.named_trainable_parameters()),
            self.optimizer,
            self.lr_scheduler,
            self.job.facts(),
            self.state.save_to_json,
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with distributed.unsharded(self.job.tuned, write=True):
            checkpoints.restore_trained(Path(resume_from_checkpoint), dict(self.job.tuned.named_trainable_parameters()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.restore_optimizer(Path(checkpoint), self.optimizer, self.lr_scheduler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.restore_random(Path(checkpoint))


class ReportCallback(TrainerCallback):
    """The bar and log.jsonl."""

    def __init__(self, job: RunState, bar: ProgressBar) -> None:
        self.job, self.bar = job, bar
        self.loss = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.start("train", state.max_steps, state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.job.batches.set_epoch(int(state.epoch or 0))  # the Trainer does not reach it where a loader skips batches

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        interrupts.raise_if_interrupted()
        gated = any(True for _ in self.job.tuned.delta().all_gates())  # they may be fixed now, which takes all of them
        with distributed.unsharded(self.job.tuned, write=True) if gated else contextlib.nullcontext():
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
        self.bar.note(
            f"{self.loss} · epoch {epochs_done(state.epoch)}: validation {name} {metrics[f'eval_{name}']:.4f}"
        )
