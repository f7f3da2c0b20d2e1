"""A callback for transformers' Trainer, whose checkpoints then hold the deltas alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .attach import tuned


class SaveDeltaCallback(TrainerCallback):
    """Make the checkpoints of a Trainer hold the deltas alone, without the frozen model.

    `deltune.load(model, "checkpoint-18")` loads the delta that was in use. `model.safetensors` beside it has the
    tensors of all attached deltas and nothing else, so that the Trainer resumes from the checkpoint and loads the best
    one; transformers' Auto classes refuse the folder, which has no configuration. Into any other folder, and after
    training, `save_pretrained` writes what it always writes.

        Trainer(model=model, …, callbacks=[deltune.SaveDeltaCallback()])
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let `save_pretrained` of the model write its deltas alone into the checkpoints of this training."""
        tuned(kwargs["model"])._passes.saves_deltas_alone_below = Path(args.output_dir or ".").resolve()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let `save_pretrained` write the base model everywhere again."""
        tuned(kwargs["model"])._passes.saves_deltas_alone_below = None
