"""A run by transformers' own Trainer, whichever library adapts the model: both sides of a comparison of libraries.

Of deltune only the reading, encoding and scoring of rows takes part. Its own trainer, which computes frozen layers once
and pads rows of similar length together, does not.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from ..errors import DeltuneError
from ..methods.memory import peak_bytes
from ..models import align_padding_token, load_model
from .config import RunConfig
from .data.rows import columns_of
from .inference import EvalResult, score_split, with_tag_scheme
from .setup import fit_lengths, length_limits, load_task_tokenizer, resolve_device, set_up_task
from .tasks import token_cache
from .tasks.base import Columns, InferenceContext
from .tasks.encoding import collate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class PlainRun:
    """The scores and the costs of a run by transformers' Trainer.

    Attributes:
        results: The answers to validation and test, and their scores.
        metric: The metric that judges it on validation.
        steps: How many steps were taken.
        trained: How many numbers were trained, those of the head among them.
        parameters: How many the adapted model has.
        seconds: Duration of training: of the processor on a CPU, else by the clock.
        peak_bytes: Bytes in use at once beside the adapted model, in a step of the longest rows without its optimizer.
        losses: Lines of the log, each with a step and a loss.
        fingerprint: The digest of the rows.
    """

    results: Mapping[str, EvalResult]
    metric: str
    steps: int
    trained: int
    parameters: int
    seconds: float
    peak_bytes: int
    losses: list[dict[str, Any]]
    fingerprint: str


def train_plainly(config: RunConfig, adapt: Callable[[PreTrainedModel], nn.Module]) -> PlainRun:
    """Train a model that `adapt` adapts, and score it.

    Args:
        config: Model, rows, rate, steps or epochs, batch size and seed; there is no validation while it trains.
        adapt: Returns the model that trains, those of its parameters that do require gradients.

    Raises:
        DeltuneError: The rows have no validation split.
    """
    name, seed, optim = config.model.name, config.runtime.seed, config.optim
    setup = set_up_task(name, config.data, config.generation.answer, config.evaluation, seed)
    kind, data = setup.kind, setup.data
    if "validation" not in data.splits:
        raise DeltuneError(f"data {data.source} has no validation split, by which learning rates are chosen")
    tokenizer, device = load_task_tokenizer(name, config.data), resolve_device()
    model = load_model(name, kind.head, data.labels, "float32", seed)
    align_padding_token(model, tokenizer)
    limits = fit_lengths(model, kind, length_limits(config.data, config.generation, kind, data.labels))
    columns: dict[str, Columns] = {split: columns_of(rows) for split, rows in data.splits.items()}
    encoded = token_cache.encode_splits(kind, tokenizer, model, columns, limits, ("train",), data.fingerprint)
    set_seed(seed)
    adapted = adapt(model)
    parameters = list(adapted.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=optim.steps or -1, num_train_epochs=optim.epochs, learning_rate=optim.rate,
            per_device_train_batch_size=optim.batch_size, lr_scheduler_type=optim.schedule, warmup_steps=optim.warmup,
            weight_decay=optim.weight_decay, max_grad_norm=optim.clip, seed=seed, use_cpu=device.type == "cpu",
            logging_first_step=True, logging_steps=10, save_strategy="no", report_to="none", disable_tqdm=True,
            remove_unused_columns=False, dataloader_pin_memory=device.type != "cpu",
        )  # fmt: skip
        batch_of: Any = partial(collate, tokenizer, model)
        trainer = Trainer(adapted, arguments, train_dataset=encoded["train"], data_collator=batch_of)
        trainer.remove_callback(PrinterCallback)
        clock = time.process_time if device.type == "cpu" else time.perf_counter
        start = clock()
        trainer.train()
        seconds = clock() - start
    losses = [{"step": one["step"], "loss": one["loss"]} for one in trainer.state.log_history if "loss" in one]
    context = InferenceContext(adapted, tokenizer, data.labels, limits, optim.batch_size)  # type: ignore[arg-type]
    options = with_tag_scheme(config.evaluation.metric_options, data.tag_scheme)
    results: dict[str, EvalResult] = {
        split: score_split(kind, context, encoded[split], columns[split], setup.metrics, options)
        for split in ("validation", "test")
        if split in encoded
    }
    longest = sorted(encoded["train"].rows, key=lambda row: len(row["input_ids"]))[-optim.batch_size :]
    batch = {role: tensor.to(device) for role, tensor in batch_of(longest).items()}
    adapted.train().zero_grad()
    peak = peak_bytes(lambda: adapted(**batch).loss.backward(), device)
    metric = config.evaluation.metric or setup.metrics[0]
    size, steps = sum(map(nn.Parameter.numel, parameters)), trainer.state.global_step
    return PlainRun(results, metric, steps, trained, size, seconds, peak, losses, data.fingerprint)
