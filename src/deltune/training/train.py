"""One run: a method tuned on labelled text, on transformers' Trainer; only the delta is checkpointed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from transformers import TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from ..data.loading import Data
from ..errors import DeltuneError, unknown_name
from ..filesystem import clear_write_errors
from ..models import fit_padding
from ..runtime.attaching import attach, load
from ..runtime.frozen_layers import FrozenLayers
from ..runtime.serialization import open_delta as read_delta
from ..tasks import token_cache
from ..tasks.base import TaskKind
from ..tasks.encoding import EncodedRows, LengthGroupedBatches, check_causal, check_length
from . import activation_cache, checkpoints, distributed, hardware
from .config import RunSpec
from .inference import SPLITS
from .model_cache import ModelCache
from .progress import ProgressBar
from .run_dir import RunDir, environment
from .run_state import RunState
from .search import run_series
from .task_setup import length_limits, load_task_data, set_up_task
from .trainer import DeltaTrainer, ReportCallback

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHARDED = ("none", "fsdp")
SCHEDULES = {"constant": "constant_with_warmup"}
"""Names of the Trainer that differ from ours."""
LINES = 20  # of the log, an epoch

told = logging.getLogger("deltune")


def train(
    spec: RunSpec,
    output: str | Path,
    resume: bool = True,
    progress: bool = True,
    devices: str = "auto",
    sharded: str = "none",
    parts: ModelCache | None = None,
) -> dict[str, Any]:
    """Tune spec.method on spec.data, keep the best delta, score it; returns what metrics.json holds.

    The folder `output` becomes the RUN. A finished run of the same spec is not repeated, an unfinished one goes on
    where it was, with the same numbers in the end; resume=False starts afresh. progress: a bar, on a terminal.
    devices: auto (the accelerator where there is one), cpu, cuda, cuda:1 or mps. In several processes (torchrun,
    accelerate launch, `deltune train --launch N`) each comes here; the first of them writes. sharded: none, each has
    the model (DDP); fsdp, each has a share of it. parts: what several runs of one process share.
    The best epoch is that of the best validation spec.metric, of equal ones that of the lower validation loss, then
    the first; without a validation split it is the last.
    Errors (DeltuneError): whatever is wrong with spec, data, model, method or folder, before anything is written; a
    loss that is no number; no space left.
    A spec of several runs (seeds, search) makes a folder of these, and their aggregate (series.together).
    """
    device = hardware.resolve_device(devices)
    distributed.init_processes(device)
    run = RunDir(output, writer=distributed.is_main())
    shared = parts or ModelCache()
    found = distributed.broadcast_from_main(lambda: _finished(spec, run, resume, shared))
    if found is not None:
        told.info("%s is finished; nothing to do", run.folder)
        return found
    with contextlib.ExitStack() as held:
        held.enter_context(clear_write_errors(run.folder))
        distributed.broadcast_from_main(lambda: held.enter_context(run.locked()))
        if spec.several:
            if not resume:
                run.clear()
            return run_series(spec, run, lambda one, at: train(one, at, True, progress, devices, sharded, shared))
        try:
            return _train(spec, run, resume, progress, device, sharded, shared)
        except BaseException:
            shared.drop()
            raise


def _finished(spec: RunSpec, run: RunDir, resume: bool, parts: ModelCache) -> dict[str, Any] | None:
    """The metrics of a run that needs no training. Errors: the folder holds something else; its data changed."""
    if resume or not run.exists:
        run.check(spec)
    if not resume or not run.finished:
        return None
    try:
        now = load_task_data(run.kept.spec, read=parts.data)[1].facts
    except DeltuneError as error:
        told.info("the data of %s cannot be compared with what it was: %s", run.folder, error)
    else:
        run.kept.check_data(now)
    return run.metrics


def _train(
    spec: RunSpec, run: RunDir, resume: bool, progress: bool, device: torch.device, sharded: str, parts: ModelCache
) -> dict[str, Any]:
    job, source = distributed.run_on_all(lambda: _job(spec, run, device, sharded, parts))
    arguments = _arguments(job, device)
    facts = {"device": str(arguments.device), "precision": job.precision, "processes": distributed.world_size()}
    checkpoint = distributed.broadcast_from_main(lambda: _resumable(run)) if resume else None
    with ProgressBar(progress and distributed.is_main()) as bar, _trunk(job, arguments.device, bar):
        if not resume:  # only now is nothing left that may be refused
            run.clear()
        distributed.broadcast_from_main(
            lambda: run.begin(spec, environment({**facts, "sharded": sharded, "data": source}))
        )
        _fit(job, arguments, bar, checkpoint)
        return _finish(job, bar)


def _job(
    spec: RunSpec, run: RunDir, device: torch.device, sharded: str, parts: ModelCache
) -> tuple[RunState, dict[str, Any]]:
    """All that the run works with, and what is to be known of its data."""
    precision = hardware.resolve_precision(spec.precision, device)
    rows = spec.rows(distributed.world_size())
    if sharded not in SHARDED:
        raise DeltuneError(unknown_name("sharding", sharded, SHARDED))
    asked = set_up_task(spec, read=parts.data)
    found, kind = asked.data, asked.kind
    if "validation" not in found.splits and (spec.patience is not None or spec.metric is not None):
        raise DeltuneError(f"data {found.source} has no validation split, so neither patience nor metric can be used")
    limits = length_limits(spec, kind, found.labels)
    tokenizer = parts.tokenizer(spec)
    model = _base(spec, kind, found, tokenizer, parts)
    if kind.loads == "causal-lm":
        check_causal(model)
    set_seed(spec.seed)
    tuned = attach(model, spec.method, head=spec.head)
    if not any(True for _ in tuned.named_trainable_parameters()):
        raise DeltuneError(f"{spec.method!r} with head={spec.head!r} trains nothing")
    trunk = None if spec.trunk_dropout == "on" else FrozenLayers(tuned)
    check_length(model, kind.positions(limits))
    columns = {s: {name: list(d[name]) for name in d.column_names} for s, d in found.splits.items()}
    encoded = {
        split: token_cache.encode_cached(
            kind, tokenizer, model, rows, limits, split == "train", f"{found.fingerprint} {split}"
        )
        for split, rows in columns.items()
    }
    if sharded == "fsdp":
        distributed.shard_model(tuned, device)
        parts.drop()  # its weights are shared out now
    batches = _batches(spec, encoded["train"], rows)
    held = (found, kind, asked.metrics, limits, columns, encoded, batches, precision, trunk)
    return RunState(spec, run, tuned, tokenizer, *held), found.facts


def _base(
    spec: RunSpec, kind: TaskKind, data: Data, tokenizer: PreTrainedTokenizerBase, parts: ModelCache
) -> PreTrainedModel:
    """The model that a spec names, as it is before any tuning."""
    model = parts.model(spec.model, kind.loads, data.labels or None, spec.seed)
    fit_padding(model, tokenizer)
    return model


def _batches(spec: RunSpec, train: EncodedRows, rows: int) -> LengthGroupedBatches:
    """The training rows, step by step, each step cut for the devices into batches of so many rows."""
    if spec.batch_tokens is not None:
        return LengthGroupedBatches(train.sizes, 0, spec.seed, distributed.world_size(), spec.batch_tokens)
    return LengthGroupedBatches(train.lengths, spec.batch_size, spec.seed, spec.batch_size // rows)


def _arguments(job: RunState, device: torch.device) -> TrainingArguments:
    spec, batches = job.spec, job.batches
    moments = "epoch" if spec.validate_every is None else "steps"
    arguments = TrainingArguments(
        output_dir=str(job.run.folder),
        num_train_epochs=spec.epochs,
        max_steps=spec.steps or -1,
        per_device_train_batch_size=spec.rows(distributed.world_size()),
        gradient_accumulation_steps=batches.chunks // distributed.world_size(),
        learning_rate=spec.rate,
        lr_scheduler_type=SCHEDULES.get(spec.schedule, spec.schedule),
        warmup_steps=spec.warmup,
        weight_decay=spec.weight_decay,
        max_grad_norm=spec.clip,
        adam_beta1=spec.adam_betas[0],
        adam_beta2=spec.adam_betas[1],
        adam_epsilon=spec.adam_epsilon,
        label_smoothing_factor=spec.label_smoothing,
        bf16=job.precision == "bf16",
        use_cpu=device.type == "cpu",
        seed=spec.seed,
        eval_strategy=moments if "validation" in job.encoded else "no",
        eval_steps=spec.validate_every,
        save_strategy=moments,
        save_steps=spec.validate_every or 500,
        logging_steps=max(1, batches.per_epoch // LINES),
        logging_nan_inf_filter=False,  # a loss that is no number is an error here
        disable_tqdm=True,
        report_to=list(spec.report_to) or "none",
        remove_unused_columns=False,
        accelerator_config={"even_batches": False},  # steps are cut evenly already, no row is repeated
        dataloader_pin_memory=device.type != "cpu",
    )
    if device.index is not None:  # the Trainer takes the first one
        torch.accelerator.set_device_index(device.index)
        arguments.__dict__["_setup_devices"] = PartialState().device = device
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # DataParallel would copy the model, and hooks stay with the first
    return arguments


@contextlib.contextmanager
def _trunk(job: RunState, device: torch.device, bar: ProgressBar) -> Iterator[None]:
    """Inside, a frozen trunk that runs without dropout is run once for each row; in the end the model is free of it."""
    if job.trunk is None:
        yield
        return
    if distributed.is_sharded(job.model):
        told.info("the frozen trunk is run in every pass: sharding=fsdp shares its layers out")
    else:
        job.model.to(device)  # type: ignore[arg-type]
        bar.start("trunk", sum(map(len, job.encoded.values())))
        job.encoded = activation_cache.with_cached_activations(
            job.trunk, job.use(bar), job.encoded, job.spec.trunk_cache
        )
    try:
        yield
    finally:
        job.trunk.remove()


def _resumable(run: RunDir) -> Path | None:
    """The checkpoint that a run goes on from, None for a run from its start.

    Error: the checkpoint, or the best delta so far, is damaged; nothing is written before.
    """
    checkpoint = checkpoints.find_resumable(run.checkpoint)
    if checkpoint is not None and checkpoints.read_progress(checkpoint)["best"]:
        run.recover()
        try:
            read_delta(run.delta).numbers()
        except DeltuneError as error:
            raise DeltuneError(f"the best delta so far is damaged ({error}); {checkpoints.TODO}") from error
    return checkpoint


def _fit(job: RunState, arguments: TrainingArguments, bar: ProgressBar, checkpoint: Path | None) -> None:
    """Train from a checkpoint, or from the start, to the last epoch or the end of patience."""
    if checkpoint is None:
        job.run.rewind(-1)
        if job.spec.columns is None and job.spec.data is not None:
            told.info("columns: %s", ", ".join(f"{role}={name}" for role, name in job.data.columns.items()))
        for split, rows in job.encoded.items():
            for cut, what, length in (
                (rows.truncated, "inputs", job.limits.max_length),
                (rows.truncated_targets, "targets", job.limits.target_length),
            ):
                if cut:
                    told.info("%d of %d %s %s are cut to %d tokens", cut, len(rows), split, what, length)
        job.run.log({"step": 0, "event": "start", **job.truncated})
    else:
        kept = checkpoints.read_progress(checkpoint)
        job.best, job.stale, job.before = kept["best"], kept["stale"], kept["seconds"]
        job.run.rewind(int(checkpoint.name))
        told.info("resuming %s after step %s", job.run.folder, checkpoint.name)
    if job.stopped:
        return
    trainer = DeltaTrainer(job, arguments)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ReportCallback(job, bar))
    distributed.seed_by_rank(job.spec.seed)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.accelerator.unwrap_model(job.model, keep_fp32_wrapper=False)


def _finish(job: RunState, bar: ProgressBar) -> dict[str, Any]:
    """Score the kept delta as it is on the disk, where its answers are not there yet, and write the metrics."""
    seconds = job.seconds
    count = job.tuned.count().as_dict()
    sharded, device = distributed.is_sharded(job.model), job.model.device
    model = _base(job.spec, job.kind, job.data, job.tokenizer, ModelCache()) if sharded else job.tuned.detach()
    job.tuned = load(model, job.run.delta)
    if sharded:
        distributed.shard_model(job.tuned, device)
    splits = [split for split in SPLITS if split in job.encoded]
    found = job.kept_answers()
    rest = [split for split in splits if split not in found]
    bar.start("evaluate", sum(len(job.encoded[split]) for split in rest))
    found |= {split: job.answered(split, job.scored(split, bar)) for split in rest}
    results = {split: found[split]["metrics"] for split in splits}
    last = found[splits[-1]] if splits else {"signatures": {}, "omitted": {}}
    best = {key: value for key, value in job.best.items() if key not in ("rank", "answered")}
    metrics = {**results, "seconds": round(seconds, 3), "count": count, "best": best, **job.truncated}
    metrics |= {"signatures": last["signatures"], "omitted": last["omitted"]}
    job.tuned.detach()
    job.run.finish(metrics)
    return metrics
