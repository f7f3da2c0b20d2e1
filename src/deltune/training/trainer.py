"""transformers' Trainer with checkpoints of the delta alone, exact step losses, and the run's log and progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..tasks.encoding import IGNORE_INDEX, Row, collate
from . import checkpoints, distributed, interrupts
from .progress import ProgressBar
from .run_state import RunState, diverged_error, epochs_done


class DeltaTrainer(Trainer):
    """A Trainer whose checkpoints hold the delta alone, and whose batches have rows of similar length."""

    def __init__(self, state: RunState, arguments: TrainingArguments) -> None:
        """Prepare training.

        Args:
            state: What the run works with.
            arguments: The Trainer's own options.
        """
        self.run_state = state
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
        # classifiers take it and do not), so none is given one: compute_loss weighs the means
        self.model_accepts_loss_kwargs, self.loss_is_scaled_for_ga = False, True
        if distributed.is_sharded(state.model):  # placed and averaged already: no DDP around it
            self.is_distributed_loading_by_transformers = True
        elif distributed.is_distributed():
            self.accelerator.ddp_handler.find_unused_parameters = self._some_unused()

    def _some_unused(self) -> bool:
        """Whether a trained parameter has no part in the loss, which DDP would wait for; one pass shows it."""
        with torch.random.fork_rng():
            model = self.run_state.model.train()
            model(**self._prepare_inputs(self._batch([self.run_state.encoded["train"][0]]))).loss.backward()
        unused = any(parameter.grad is None for _, parameter in self.run_state.tuned.named_trainable_parameters())
        model.zero_grad()
        return unused

    def _batch(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Collate rows; a device without rows in this step gets one whose labels are ignored."""
        if rows:
            return collate(self.run_state.tokenizer, rows)
        batch = collate(self.run_state.tokenizer, [self.run_state.encoded["train"][0]])
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)}

    def get_train_dataloader(self) -> DataLoader[Row]:
        """Return the batches of all steps, dealt to the processes by accelerate."""
        rows, pinned = self.run_state.encoded["train"], self.args.dataloader_pin_memory
        loader = DataLoader(rows, batch_sampler=self.run_state.batches, collate_fn=self._batch, pin_memory=pinned)
        prepared: DataLoader[Row] = self.accelerator.prepare(loader)
        return prepared

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Return the batches of a step on this device, and how many items the batches of all devices have."""
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        items = torch.stack([self._items(batch).to(device) for batch in batches]).sum()
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
        outputs, items = model(**inputs), self._items(inputs)
        if not items:  # its own mean is 0 / 0; the pass is for the other devices, which wait for its gradient
            return outputs.logits.sum() * 0
        loss = outputs.loss
        if self.label_smoother is not None:
            loss = self.label_smoother(outputs, inputs["labels"], shift_labels=self.shifted)
        return loss * (self.args.world_size * items / num_items_in_batch)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Do one step.

        Raises:
            DivergedError: Its loss is not finite.
        """
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
        result = run.score("validation", loss_only=run.metric == "loss")
        better = run.save_if_best(result, self.state.epoch or 0, self.state.global_step)
        metrics = {f"eval_{name}": value for name, value in result.metrics.items()}
        self.log(metrics | {"eval_best": better})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.control.should_training_stop |= run.out_of_patience
        return metrics

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Reduce gradients after every batch of a step; the Trainer's own would ask how it loaded the model.

        Unreduced gradients, kept up to the end of the step, would take the memory that sharding saves.
        """
        yield

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: counting would walk over all modules at every step."""
        return 0

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if "validation" not in self.run_state.encoded:
            self.run_state.save_delta()
            self.run_state.best = {"epoch": epochs_done(self.state.epoch), "step": self.state.global_step}
        self.run_state.run.sync_log()
        checkpoints.save_checkpoint(
            self.run_state.run.checkpoint,
            self.state.global_step,
            dict(self.run_state.tuned.named_trainable_parameters()),
            self.optimizer,
            self.lr_scheduler,
            self.run_state.progress(),
            self.state.save_to_json,
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with distributed.unsharded(self.run_state.tuned, write=True):
            checkpoints.restore_trained(
                Path(resume_from_checkpoint), dict(self.run_state.tuned.named_trainable_parameters())
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.restore_optimizer(Path(checkpoint), self.optimizer, self.lr_scheduler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.restore_random(Path(checkpoint))


class ReportCallback(TrainerCallback):
    """Writes the progress bar and log.jsonl."""

    def __init__(self, state: RunState, bar: ProgressBar) -> None:
        """Report on a run.

        Args:
            state: What the run works with.
            bar: The progress bar.
        """
        self.run_state, self.bar = state, bar
        self.loss = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.start("train", state.max_steps, state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run_state.batches.set_epoch(int(state.epoch or 0))  # the Trainer does not when it skips

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        interrupts.raise_if_interrupted()
        # gates may be fixed in this step, which needs all of their values
        gated = any(True for _ in self.run_state.tuned.delta().all_gates())
        with distributed.unsharded(self.run_state.tuned, write=True) if gated else contextlib.nullcontext():
            self.run_state.tuned.advance(state.global_step / state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.advance()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = True  # so that the losses of the log do not depend on where a run was resumed

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "train_runtime" in logs:
            return
        self.run_state.run.log({"step": state.global_step, **logs, "seconds": round(self.run_state.seconds, 2)})
        if "loss" in logs:
            self.loss = f"loss {logs['loss']:.3f}"
            self.bar.note(self.loss)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        name = self.run_state.metric
        self.bar.note(
            f"{self.loss} · epoch {epochs_done(state.epoch)}: validation {name} {metrics[f'eval_{name}']:.4f}"
        )
