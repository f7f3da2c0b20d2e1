"""Training one run: a method tuned on a data set by transformers' Trainer; only the delta is checkpointed."""

from __future__ import annotations

import contextlib
import inspect
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from ..compat import checkpointing_name, set_training_device, use_one_gpu
from ..errors import DeltuneError, check_booleans, check_extra, counted, first_names
from ..files import explain_write_errors
from ..methods.memory import peak_bytes
from ..methods.registry import parse
from ..methods.schedules import RankSchedule
from ..models import (
    HEADS_WITH_LABELS,
    LANGUAGE_MODEL_HEADS,
    align_padding_token,
    fresh_tensors,
    load_config,
    load_model,
)
from ..runtime import sharding
from ..runtime.attach import attach, load, read_delta
from ..runtime.handle import Tuned
from ..runtime.linear import LinearBackend, optimize_linear
from ..runtime.modules import Delta
from ..runtime.padding import padding_side
from ..runtime.pooling import begin_with_head_of, choose_pooling, linear_head
from ..runtime.serialization import open_delta
from ..runtime.sharding import broadcast_from_main
from ..runtime.statistics import needed_statistics
from ..templates import end_tokens
from . import activation_cache, checkpoints, distributed
from . import setup as task_setup
from .config import DataSection, ModelSection, OptimSection, RunConfig
from .data.columns import INPUT_TYPES, TASK_COLUMNS
from .data.formats import COLUMN, as_conversations
from .data.loading import TaskData
from .data.packing import Packing, choose_packing
from .data.rows import columns_of
from .data.tag_schemes import PLAIN
from .frozen_layers import FrozenLayers
from .inference import SPLITS, with_tag_scheme
from .objectives import (
    RewardFunction,
    arguments_class,
    check_lm_head,
    check_objective,
    objective_line,
    objective_trainer,
    skips_lm_head,
    trl_arguments,
)
from .overview import (
    absent_labels,
    balance,
    cut_notes,
    data_notes,
    example_line,
    example_text,
    label_counts,
    token_facts,
    token_line,
    unread_notes,
)
from .presets import DEFAULT
from .probe import LinearProbe, score_probe
from .progress import ProgressDisplay
from .rates import with_default_rate
from .records import Best, ProbeRecord, RunMetrics, collect_environment
from .report.page import write_report
from .run_folder import DeltaFolder, RunFolder, open_run
from .series import run_series
from .setup import ModelCache, TaskSetup, fit_lengths, is_chat, length_limits, load_task_data, set_up_task
from .tasks import token_cache
from .tasks.base import Columns, TaskKind, TaskOptions, check_tasks
from .tasks.chat import CHAT, check_lengths, untrained_tokens, with_one_template
from .tasks.encoding import EncodedRows, LengthGroupedBatches, check_causal, check_decoder, collate
from .tasks.generation import CAUSAL_GENERATION, LANGUAGE_MODELING
from .trainer import DeltaCheckpointTrainer, DeltaTrainer, ReportCallback, RunState, total_steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TRAINER_SCHEDULES = {"constant": "constant_with_warmup"}
"""Schedules that transformers calls by another name."""
CHECKPOINTING: dict[str, dict[str, Any]] = {"half": {"every_n_layers": 2}, "cpu": {"offload": True}}
"""Which layers compute their activations again and where the rest is kept, as transformers takes it."""
OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
}
"""transformers' names of the optimizers."""
MIN_8BIT = 4096
"""Numbers of a tensor from which on bitsandbytes keeps its state in 8 bits (its `min_8bit_size`)."""
LOG_LINES_PER_EPOCH = 20
MEASURED_STEPS = 3
ROWS_OF_START = 256
"""How many rows of train initial values read that start from data."""

logger = logging.getLogger("deltune")


@dataclass(frozen=True)
class _Options:
    """What `train` is asked beside its config and folder; the arguments of `train` have these names."""

    resume: bool
    progress: bool
    device: torch.device
    sharding: str
    cache: ModelCache
    report: bool
    reward: RewardFunction | None
    rows: Callable[[TaskData], TaskData] | None
    stop_if: Callable[[int, float], bool] | None


@check_booleans
def train(
    config: RunConfig,
    output: str | Path,
    *,
    resume: bool = True,
    progress: bool = True,
    device: str = "auto",
    sharding: str = "none",
    cache: ModelCache | None = None,
    report: bool = True,
    reward: RewardFunction | None = None,
    rows: Callable[[TaskData], TaskData] | None = None,
    stop_if: Callable[[int, float], bool] | None = None,
) -> RunMetrics:
    """Tune the method of a config on its data, keep the best delta, and score it.

    The folder `output` becomes the RUN. A finished run of the same config is not repeated; an unfinished one goes on
    where it stopped and ends with the same numbers. The best epoch has the best validation score by
    `evaluation.metric`; of equal ones the lower validation loss decides, then the order. Without a validation
    split it is the last epoch. A config of several runs (seeds, search) makes a folder of these runs and their
    aggregate (`series.run_series`).

    In several processes (torchrun, accelerate launch, `deltune train --launch N`) each process calls this function;
    rank 0 writes.

    Args:
        config: What is trained, on what, and how.
        output: The folder of the run.
        resume: False discards the run in the folder and starts anew.
        progress: Show a live table on a terminal, and elsewhere log a line now and then.
        device: "auto" (the accelerator where there is one), "cpu", "cuda", "cuda:1" or "mps".
        sharding: "none" (each process has the whole model, DDP) or "fsdp" (each has a share of it).
        cache: What several runs in one process share.
        report: Write report.html, the page about the run, at the end.
        reward: Of the objective grpo: reward(prompts, completions, reference, …) returns a number for each completion,
            with TRL's arguments, of which it may take any.
        rows: rows(data) returns the data with the splits that are used, which may be others than the files say.
        stop_if: stop_if(step, quality) is asked after each validation whether training ends there; the quality is
            the deciding metric, higher is better.

    Returns:
        What metrics.json holds.

    Raises:
        DeltuneError: The config, the data, the model, the method or the folder is wrong (nothing is written then); the
            loss is not finite; no space is left on the disk.
    """
    resolved = task_setup.resolve_device(device)
    distributed.init_processes(resolved)
    options = _Options(resume, progress, resolved, sharding, cache or ModelCache(), report, reward, rows, stop_if)
    return _run(config, RunFolder(output, writer=distributed.is_main()), options)


def _run(config: RunConfig, run: RunFolder, options: _Options) -> RunMetrics:
    """Train what a config describes, a single run or several, unless it is finished."""
    finished = broadcast_from_main(lambda: _finished_metrics(config, run, options))
    if finished is not None:
        logger.info("%s is finished; nothing to do", run.folder)
        if options.report and not run.report_file.exists():  # the run was interrupted while it wrote the page
            broadcast_from_main(lambda: _write_missing_report(run))
        return finished
    with contextlib.ExitStack() as stack:
        stack.enter_context(explain_write_errors(run.folder))
        broadcast_from_main(lambda: stack.enter_context(run.locked()))
        if config.is_series:
            if not options.resume:
                _check_inputs(config, options)
                run.clear()
            of_each = replace(options, resume=True)
            metrics = run_series(config, run, lambda one, at: _run(one, RunFolder(at, writer=run.writer), of_each))
        else:
            try:
                metrics = _train(config, run, options)
            except BaseException:
                options.cache.drop()
                raise
        if options.report:
            broadcast_from_main(lambda: str(write_report(run)))
        return metrics


def _check_inputs(config: RunConfig, options: _Options) -> None:
    """Read the data and the model's configuration, so that a wrong path is refused before a folder is cleared."""
    load_task_data(config.data, config.runtime.seed, read=options.cache.data)
    load_config(config.model.name)


def _write_missing_report(run: RunFolder) -> None:
    """Write the page of a finished run, and remove what an interrupted attempt left."""
    with explain_write_errors(run.folder), run.locked():
        run.remove_leftovers()
        write_report(run)


def _finished_metrics(config: RunConfig, run: RunFolder, options: _Options) -> RunMetrics | None:
    """Return the metrics of a run that needs no training."""
    before = run.check_config(config) if options.resume or not run.exists else None
    if before is None or not run.finished or before.name != config.name:
        return None
    kept, trained = (run.best_run, run.best_run.config) if before.is_series else (run, before)
    try:
        data = load_task_data(trained.data, trained.runtime.seed, read=options.cache.data)[1]
        facts = (data if options.rows is None else options.rows(data)).summary
    except DeltuneError as error:
        logger.info("the data of %s cannot be compared with what it was: %s", run.folder, error)
    else:
        kept.check_data(facts)
    return run.metrics


def _train(config: RunConfig, run: RunFolder, options: _Options) -> RunMetrics:
    """Train a single run in its locked folder."""
    resume, reward, device, sharded = options.resume, options.reward, options.device, options.sharding
    check_objective(config, reward, sharded)
    if resume:
        config = broadcast_from_main(lambda: config.with_rate_of(run.config) if run.exists else config)
    state = sharding.run_on_all(
        lambda: _prepare(config, run, device, sharded, options.cache, options.rows, options.progress)
    )
    state.stop_if = options.stop_if
    arguments = _training_arguments(state, device)
    checkpoint = broadcast_from_main(lambda: _resumable_checkpoint(run)) if resume else None
    with (
        ProgressDisplay(options.progress and distributed.is_main()) as bar,
        _linear_optimized(state, device) as linear_backend,
        _frozen_layers_cached(state, arguments.device, bar),
    ):
        if not resume:  # only now can nothing be refused any more
            run.clear()
        facts = {
            "device": str(arguments.device),
            "precision": state.precision,
            "linear_backend": linear_backend,
            "threads": torch.get_num_threads(),
            "processes": distributed.world_size(),
            "sharded": sharded,
            "data": state.data.summary,
            **({} if reward is None else {"reward": f"{inspect.getsourcefile(reward)}:{reward.__name__}"}),
        }
        broadcast_from_main(lambda: run.begin(state.config, collect_environment(facts)))
        untrained = _untrained_line(state)
        if untrained:  # of a run that goes on, too: its answers will not end
            logger.warning("%s", untrained)
        if checkpoint is None:
            run.truncate_log(-1)
            _log_start(state, untrained)
        _fit(state, arguments, bar, checkpoint, reward)
        return _finish(state, bar)


@dataclass(frozen=True)
class StepCost:
    """What a run costs, as a few of its steps show.

    Attributes:
        steps: How many steps the whole run has.
        setup_seconds: Seconds of what is around its steps; of the first run, loading the model too.
        step_seconds: Seconds of a step.
        validation_seconds: Seconds of a validation; 0 without one.
        peak_bytes: The greatest number of bytes in use beyond the loaded model, in a step of the longest rows.
        rate: The learning rate of the run, its method's default where it gives none.
        why_unmerged: Why the delta cannot be folded into the weights; "" if it can.
    """

    steps: int
    setup_seconds: float
    step_seconds: float
    validation_seconds: float
    peak_bytes: int
    rate: float
    why_unmerged: str


class _StepClock(TrainerCallback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.monotonic())


def measure_steps(config: RunConfig, rows: Callable[[TaskData], TaskData], cache: ModelCache) -> StepCost:
    """Take three steps of a run and one validation, and two of its longest rows, and return what they cost."""
    device, clock, start = task_setup.resolve_device("auto"), _StepClock(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ProgressDisplay(False) as bar:
        try:
            state = _prepare(config, RunFolder(folder), device, "none", cache, rows)
            steps, every_row = state.total_steps, state.encoded["train"]
            delta = sum(parameter.nbytes for parameter in state.tuned.trainable_parameters())
            with _linear_optimized(state, device):
                # The optimizer keeps nothing until its first step ends.
                state.config = state.config.replace(steps=2, lr=state.config.optim.rate)
                longest = sorted(range(len(every_row)), key=every_row.lengths.__getitem__)[-config.optim.batch_size :]
                state.encoded["train"] = replace(every_row, rows=[every_row[i] for i in longest])
                shapes = (config.optim.rows_per_device(), config.runtime.seed, padding_side(state.model) is None)
                state.batches = _batches(config.optim, state.encoded["train"], *shapes)
                arguments = _training_arguments(state, device, validates=False)
                before = time.monotonic()
                peak = peak_bytes(lambda: _fit(state, arguments, bar, None), device)
                profiled = time.monotonic() - before
                state.encoded["train"], state.batches = every_row, _batches(config.optim, every_row, *shapes)
                state.config = state.config.replace(steps=1 + MEASURED_STEPS)
                _fit(state, _training_arguments(state, device, validates=False), bar, None, callbacks=[clock])
                before = time.monotonic()
                if "validation" in state.encoded:
                    state.score("validation")
                validated = time.monotonic() - before
            why_unmerged = state.tuned.attached.why_unmerged()
            _detach(state)
        except BaseException:
            cache.drop()
            raise
    stepping = clock.ends[-1] - clock.ends[0]
    setup = time.monotonic() - start - profiled - stepping - validated
    seconds = stepping / MEASURED_STEPS
    return StepCost(steps, setup, seconds, validated, peak + delta, state.config.optim.rate, why_unmerged)


@contextlib.contextmanager
def _linear_optimized(state: RunState, device: torch.device) -> Iterator[LinearBackend]:
    """Compute the model's linear layers as the config says, which concerns a CPU alone."""
    model = state.model  # which a run that has ended does not have any more
    backend = state.config.runtime.linear_backend if device.type == "cpu" else "torch"
    optimize_linear(model, enabled=backend == "onednn")
    try:
        yield backend
    finally:
        optimize_linear(model, enabled=False)


def _detach(state: RunState) -> None:
    """Leave the model of the cache as it was before a method was attached."""
    if not sharding.is_sharded(state.model):  # a sharded one was never the cache's
        state.tuned.detach()


def _prepare(
    config: RunConfig,
    run: RunFolder,
    device: torch.device,
    sharded: str,
    cache: ModelCache,
    part: Callable[[TaskData], TaskData] | None = None,
    progress: bool = False,
) -> RunState:
    """Read, check and encode everything, and attach the method; of the rows only a part, where one is given."""
    precision = task_setup.resolve_precision(config.runtime.precision, device)
    rows = config.optim.rows_per_device(distributed.world_size())
    seed = config.runtime.seed
    distributed.check_sharding(sharded, config.model.name, config.model.quantize)
    objective = config.objective.kind
    setup = set_up_task(
        config.model.name, config.data, config.generation.answer, config.evaluation, seed, read=cache.data,
        objective=objective,
    )  # fmt: skip
    data, kind = setup.data if part is None else part(setup.data), setup.kind
    needs_validation = config.evaluation.patience is not None or config.evaluation.metric is not None
    if "validation" not in data.splits and needs_validation:
        raise DeltuneError(f"data {data.source} has no validation split, so neither patience nor metric can be used")
    if kind.problem_type is not None and config.optim.label_smoothing:
        raise DeltuneError(f"label_smoothing is for one label of several, and this is {kind.name}: leave it out")
    limits = length_limits(config.data, config.generation, kind, data.labels)
    tokenizer = cache.tokenizer(config.model.name, config.data)

    def chats() -> Iterator[str]:
        return (one for text in data.splits["train"][COLUMN] for one in as_conversations(text))

    if is_chat(kind):  # before the model is loaded
        check_decoder(load_config(config.model.name))
        tokenizer = with_one_template(tokenizer, config.generation.template, chats)
    model = _base_model(config.model, setup, tokenizer, seed, cache)
    if objective != "sft" or config.runtime.use_liger_kernel == "on":
        cache.drop()  # TRL changes it: no dropout, and a pass that scores tokens; Liger its modules
    if kind.head == "causal-lm":
        check_causal(model)
    same_length = padding_side(model) is None
    set_seed(seed)
    start = None if config.method.init_from is None else open_run(config.method.init_from, config.model.name)
    if start is not None:
        _check_held_out(start, config.data, setup.data)
    chosen_pooling = config.method.pooling
    if chosen_pooling is None and start is not None and kind.head == "classification":
        chosen_pooling = "model" if start.is_foreign else open_delta(start.delta).facts.pooling
    pooling, why_pooling = choose_pooling(model, config.model.name, chosen_pooling)
    if why_pooling and config.method.pooling is None and start is not None:
        why_pooling = "as the delta of --init-from has it"
    needed = needed_statistics(parse(config.method.expression))
    data_of_start = original = None
    if needed - {"quantisation error"}:
        if sharded == "none" and not config.model.quantize:
            model.to(device)  # type: ignore[arg-type]
        data_of_start = _first_batches(model, tokenizer, kind, data, limits, rows, seed)
    if "quantisation error" in needed:
        original = load_model(config.model.name, kind.head, data.labels or None)
    tuned = attach(
        model, config.method.expression, head=config.method.head, pooling=pooling, data=data_of_start, original=original
    )
    check_lm_head(objective, tuned)
    if kind.head == "classification":
        begin_with_head_of(config.model.name, model, tuned.anatomy, pooling)
    has_fresh_head = start is None or not _begin_with_delta(tuned, start, data.labels)
    if has_fresh_head and kind.name == "regression" and config.method.head == "train":
        _begin_with_mean(model, tuned, data.splits["train"]["score"])
    if not any(True for _ in tuned.named_trainable_parameters()):
        raise DeltuneError(f"{config.method.expression!r} with head={config.method.head!r} trains nothing")
    frozen_layers = None if config.method.trunk_dropout == "on" else FrozenLayers(tuned)
    limits = fit_lengths(model, kind, limits)
    tuned.delta().trained = {"max_length": limits.max_length, "columns": data.columns}
    if kind.head in LANGUAGE_MODEL_HEADS and kind is not LANGUAGE_MODELING and not is_chat(kind):
        words = {kind.word_key(label): word for label, word in limits.label_words.items()} if kind.word_key else None
        answers = {"template": limits.template, "target_length": limits.max_target_length, "words": words}
        tuned.delta().trained |= answers
    _number_tasks(tuned.delta(), data, start)
    columns: dict[str, Columns] = {split: columns_of(rows) for split, rows in data.splits.items()}
    with ProgressDisplay(progress and distributed.is_main()) as bar:
        encoded = token_cache.encode_splits(
            kind, tokenizer, model, columns, limits, ("train",), data.fingerprint, bar.start_rows
        )
    if is_chat(kind):
        for split, rows_of in encoded.items():
            check_lengths(rows_of, split, limits.max_length, config.data.max_cut)
        tuned.delta().trained |= {
            "chat_template": tokenizer.get_chat_template() if any('"messages"' in text for text in chats()) else None,
            "end_tokens": list(end_tokens(tokenizer, model)),
        }
    if not len(encoded["train"]):
        raise DeltuneError(f"data {data.source}: no text of train has two tokens, so there is none to predict")
    if sharded == "fsdp":
        distributed.shard_model(tuned, device)
        cache.drop()  # its weights are sharded now
    batches = _batches(config.optim, encoded["train"], rows, seed, same_length)
    config = with_default_rate(config, total_steps(config.optim, batches))
    if config.optim.packing and "task" in data.columns:
        raise DeltuneError("packing has texts of several tasks in one row: leave packing or task=… of the columns out")
    packing = _packing(config, kind, model, tokenizer) if config.optim.packing else None
    state = RunState(
        config, run, tuned, tokenizer, data, kind, setup.metrics, limits, columns, encoded, batches, precision,
        frozen_layers, why_pooling, packing=packing, is_fresh=start is None,
    )  # fmt: skip
    if config.method.head_init == "probe":
        _begin_with_probe(state, device)
    return state


def _probe(state: RunState, bar: ProgressDisplay | None = None) -> tuple[LinearProbe, ProbeRecord]:
    """Fit a linear probe to the frozen model, and score it on the splits of a run."""
    options, pooling = (
        with_tag_scheme(state.config.evaluation.metric_options, state.data.tag_scheme),
        state.tuned.delta().pooling,
    )
    with state.tuned.disable():
        return score_probe(
            state.kind, state.inference_context(bar), state.encoded, state.columns, state.metrics, options, pooling,
            state.config.runtime.seed,
        )  # fmt: skip


def _begin_with_probe(state: RunState, device: torch.device) -> None:
    """Let the head begin with the weights of a linear probe of the frozen model."""
    problem = ""
    if state.kind.head not in HEADS_WITH_LABELS or "pair" in state.columns["train"]:
        problem = "it is for labels of single texts and of words"
    elif state.kind.head == "classification" and state.tuned.delta().pooling == "model":
        problem = "its head reads the class's own pooler: give --pooling mean, if this class has a pooler"
    elif sharding.is_sharded(state.model):
        problem = "the model is sharded"
    else:
        state.model.to(device)  # type: ignore[arg-type]
        probe, state.probe = _probe(state)
        head = linear_head(state.model, state.tuned.anatomy)
        fits = head is not None and head.weight.shape == probe.weight.shape
        problem = "" if fits else f"its head ({', '.join(state.tuned.anatomy.head)}) is not one linear over the labels"
        if head is not None and fits:
            with torch.no_grad():
                head.weight.copy_(torch.from_numpy(probe.weight))
                if head.bias is not None:
                    head.bias.copy_(torch.from_numpy(probe.bias))
    if problem:
        raise DeltuneError(f"head_init=probe cannot be used on {type(state.model).__name__}: {problem}")


def _check_held_out(start: RunFolder, section: DataSection, data: TaskData) -> None:
    """Check that a run did not train rows that are held out now: a single file is split by a seed."""
    source = section.source or ""
    if isinstance(start, DeltaFolder) or source != start.config.data.source or not Path(source).is_file():
        return
    runtime, seed = start.config.runtime, start.config.data.split_seed
    seed = (runtime.seeds or (runtime.seed,))[0] if seed is None else seed
    advice = "or give a folder with files for train, validation and test"
    _, before = load_task_data(start.config.data, seed)
    start.check_data(before.summary, advice)
    trained = {*before.splits["train"]["id"]}
    held_out = [name for split, rows in data.splits.items() if split != "train" for name in rows["id"]]
    if both := [name for name in held_out if name in trained]:
        raise DeltuneError(
            f"init_from: {len(both)} of {len(held_out)} rows of {source} that would be held out were trained by "
            f"{start.folder}, which drew them by another seed: give --split-seed {seed}, {advice}"
        )


@torch.no_grad()
def _begin_with_delta(tuned: Tuned, start: RunFolder, labels: Sequence[str]) -> bool:
    """Let a delta begin with the values of a saved one; return whether its head too, whose labels may be others."""
    attached, delta = tuned.attached, tuned.delta()
    saved, before = read_delta(attached, start.delta)
    if repr(saved.method) != repr(delta.method):
        cut = any(isinstance(state.schedule, RankSchedule) for state in delta.schedule_states())
        raise DeltuneError(
            f"init_from: {start.delta} is {saved.method!r}, and this run is {delta.method!r}"
            + (", whose ranks were cut in training" if cut else "")
            + ": give the former, or no method"
        )
    keeps_head = tuple(name for _, name in before.id2label) == tuple(labels) or not labels
    heads = {f"base.{name}" for name in delta.head}
    trained, numbers = (
        one.tensors_to_save()
        | {f"base.{name}": attached.state.delta_value(one, name) for name in one.owned_tensor_names}
        for one in (delta, saved)
    )
    begun = {name: tensor for name, tensor in trained.items() if keeps_head or name not in heads}
    if other := [name for name, tensor in begun.items() if name not in numbers or numbers[name].shape != tensor.shape]:
        raise DeltuneError(
            f"init_from: {start.delta} is saved without what training changes of it ({', '.join(other[:3])}): it can "
            "be used and not trained further"
        )
    for name, tensor in begun.items():
        tensor.copy_(numbers[name])
    if labels and keeps_head and start.is_foreign:
        named = ", ".join(f"{one} is {name}" for one, name in zip(start.labels, labels, strict=False))
        logger.info("the head goes on, with labels without names: %s (--labels gives another order)", named)
    if not keeps_head:
        logger.info("the head is fresh, since the labels are others than those of %s (--init-from)", start.delta)
    return keeps_head


def _number_tasks(delta: Delta, data: TaskData, start: RunFolder | None) -> None:
    """Number the tasks of the rows of train as the delta that training starts from does, or else in sorted order."""
    names = sorted({*data.splits["train"]["task"]}) if "task" in data.columns else None
    before = start.trained.tasks if start is not None and start.trained is not None else None
    if names is not None and delta.tasks and before is None and len(names) != len(delta.tasks):
        raise DeltuneError(
            f"{data.source} has {counted(len(names), 'task')} ({first_names(names, 5)}), and {delta.method!r} has "
            f"{len(delta.tasks)}: give tasks={len(names)}"
        )
    delta.trained |= {} if names is None else {"tasks": before or names}
    check_tasks(delta, data.tasks, data.source)


def _begin_with_mean(model: PreTrainedModel, tuned: Tuned, numbers: Sequence[float]) -> None:
    """Let a fresh head begin with the mean of the numbers to predict."""
    head = linear_head(model, tuned.anatomy)
    if (
        head is not None
        and head.bias is not None
        and not fresh_tensors(model).isdisjoint(f"{path}.bias" for path in tuned.anatomy.head)
    ):
        with torch.no_grad():
            head.bias.fill_(sum(numbers) / len(numbers))


def _packing(config: RunConfig, kind: TaskKind, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Packing:
    """Return how texts of one row are kept apart, or refuse to pack."""
    kinds = (CHAT, CAUSAL_GENERATION, LANGUAGE_MODELING)
    if kind not in kinds:
        raise DeltuneError(f"packing is for {', '.join(one.name for one in kinds)} by a decoder, not for {kind.name}")
    if config.method.trunk_dropout == "off":
        raise DeltuneError("packing and trunk_dropout=off exclude each other: the states of frozen layers are of rows")
    return choose_packing(model, tokenizer.pad_token_id)


def _base_model(
    section: ModelSection, setup: TaskSetup, tokenizer: PreTrainedTokenizerBase, seed: int, cache: ModelCache
) -> PreTrainedModel:
    """Load a model as it is before any tuning."""
    labels, attention = setup.data.labels or None, section.attn_implementation
    model = cache.model(section.name, setup.kind.head, labels, seed, section.quantize, attention)
    align_padding_token(model, tokenizer)
    if setup.kind.problem_type is not None:
        model.config.problem_type = setup.kind.problem_type
    return model


def _first_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kind: TaskKind, data: TaskData, limits: TaskOptions,
    rows: int, seed: int,
) -> Iterator[dict[str, torch.Tensor]]:  # fmt: skip
    """Yield batches of some rows of train, drawn by the seed, from which methods such as eva start."""
    train = data.splits["train"].shuffle(seed=seed)
    columns = train.select(range(min(len(train), ROWS_OF_START))).to_dict()
    encoded = kind.encode(tokenizer, model, columns, fit_lengths(model, kind, limits), True)
    for indices in LengthGroupedBatches(encoded.lengths, rows, seed, same_length=padding_side(model) is None):
        yield collate(tokenizer, model, [encoded[i] for i in indices])


def _batches(optim: OptimSection, train: EncodedRows, rows: int, seed: int, same_length: bool) -> LengthGroupedBatches:
    """Deal the training rows out to steps, each cut for the devices into batches of so many rows."""
    if optim.batch_tokens is not None:
        return LengthGroupedBatches(train.sizes, 0, seed, distributed.world_size(), optim.batch_tokens, same_length)
    return LengthGroupedBatches(train.lengths, optim.batch_size, seed, optim.batch_size // rows, None, same_length)


def _training_arguments(state: RunState, device: torch.device, validates: bool = True) -> TrainingArguments:
    """Translate the config for the Trainer; without validations nothing is saved either."""
    optim, batches, steps = state.config.optim, state.batches, state.config.evaluation.validate_every
    strategy = "no" if not validates else "epoch" if steps is None else "steps"
    checkpointing = state.config.runtime.activation_checkpointing
    if checkpointing == "cpu" and device.type == "cpu":
        raise DeltuneError("activation_checkpointing=cpu moves activations to the CPU, where they are: give on")
    if checkpointing != "off" and not state.model.supports_gradient_checkpointing:
        raise DeltuneError(
            f"activation_checkpointing={checkpointing}: {type(state.model).__name__} of transformers cannot compute "
            "its layers again; leave it off, and give a smaller device_batch_size"
        )
    if state.config.runtime.use_liger_kernel == "on":
        if device.type == "cpu":
            raise DeltuneError("use_liger_kernel: Liger's kernels run on a GPU, and this run is on a CPU; leave it out")
        check_extra("gpu", "use_liger_kernel needs")
    if optim.optimizer != "adamw" and sharding.is_sharded(state.model):
        raise DeltuneError(f"optimizer={optim.optimizer} takes no shards: give optimizer=adamw, or sharding=none")
    objective = state.config.objective.kind
    kind, options = (
        (TrainingArguments, {}) if objective == "sft" else (arguments_class(objective), trl_arguments(state))
    )
    values: dict[str, Any] = dict(
        optim=OPTIMIZERS[optim.optimizer],
        output_dir=str(state.run.folder),
        num_train_epochs=optim.epochs,
        max_steps=optim.steps or -1,
        per_device_train_batch_size=optim.rows_per_device(distributed.world_size()),
        gradient_accumulation_steps=batches.num_chunks // distributed.world_size(),
        learning_rate=optim.rate,
        lr_scheduler_type=TRAINER_SCHEDULES.get(optim.schedule, optim.schedule),
        warmup_steps=optim.warmup,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.clip,
        adam_beta1=optim.adam_betas[0],
        adam_beta2=optim.adam_betas[1],
        adam_epsilon=optim.adam_epsilon,
        label_smoothing_factor=optim.label_smoothing,
        bf16=state.precision == "bf16",
        use_liger_kernel=state.config.runtime.use_liger_kernel == "on",
        liger_kernel_config={"fused_linear_cross_entropy": False},  # which `causal_loss` is
        use_cpu=device.type == "cpu",
        seed=state.config.runtime.seed,
        eval_strategy=strategy if "validation" in state.encoded else "no",
        eval_steps=steps,
        save_strategy=strategy,
        save_steps=steps or 500,
        logging_steps=max(1, batches.steps_per_epoch // LOG_LINES_PER_EPOCH),
        logging_nan_inf_filter=False,  # a loss that is not finite is an error here
        disable_tqdm=True,
        report_to=list(state.config.runtime.report_to) or "none",
        remove_unused_columns=False,
        accelerator_config={"even_batches": False},  # steps are cut evenly already, and no row is repeated
        dataloader_pin_memory=device.type != "cpu",
    )
    name = checkpointing_name(kind)
    values |= {name: checkpointing != "off", f"{name}_kwargs": CHECKPOINTING.get(checkpointing)}
    arguments = kind(**{**values, **options})
    if device.index is not None:  # the Trainer takes the first one
        torch.accelerator.set_device_index(device.index)
        set_training_device(arguments, device)
    if arguments.n_gpu > 1:
        use_one_gpu(arguments)  # DataParallel would copy the model, and hooks stay with the first copy
    return arguments


@contextlib.contextmanager
def _frozen_layers_cached(state: RunState, device: torch.device, bar: ProgressDisplay) -> Iterator[None]:
    """Compute the frozen layers once for each row, where they run without dropout; restore the model at the end."""
    if state.frozen_layers is None:
        yield
        return
    if sharding.is_sharded(state.model):
        logger.info("the frozen layers run in every pass, because sharding=fsdp distributes them")
    else:
        state.model.to(device)  # type: ignore[arg-type]
        bar.start("frozen layers", sum(map(len, state.encoded.values())))
        state.encoded = activation_cache.with_cached_activations(
            state.frozen_layers, state.inference_context(bar), state.encoded, state.config.runtime.trunk_cache
        )
    try:
        yield
    finally:
        state.frozen_layers.remove()


def _resumable_checkpoint(run: RunFolder) -> Path | None:
    """Return the checkpoint that a run goes on from, or None for a run from its start."""
    checkpoint = checkpoints.latest_checkpoint(run.checkpoint)
    if checkpoint is None:
        return None
    checkpoints.verify_checksums(checkpoint)
    if checkpoints.read_progress(checkpoint)["best"]:
        run.recover_delta()
        try:
            open_delta(run.delta).numbers()
        except DeltuneError as error:
            raise DeltuneError(f"the best delta so far is damaged ({error}); {checkpoints.ADVICE}") from error
    return checkpoint


def _fit(
    state: RunState,
    arguments: TrainingArguments,
    bar: ProgressDisplay,
    checkpoint: Path | None,
    reward: RewardFunction | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> None:
    """Train from a checkpoint, or from the start, to the last epoch or until patience ends."""
    trainer: DeltaCheckpointTrainer | None = None
    if state.config.objective.kind != "sft":  # it also scores the other splits, at the end
        trainer = objective_trainer(state, arguments, bar, reward)
    if checkpoint is not None:
        progress = checkpoints.read_progress(checkpoint)
        state.best, state.stale, state.seconds_before = progress["best"], progress["stale"], progress["seconds"]
        state.cpu_seconds_before = progress.get("cpu_seconds")
        state.run.truncate_log(int(checkpoint.name))
        logger.info("resuming %s after step %s", state.run.folder, checkpoint.name)
        steps = state.config.optim.steps
        if steps is not None and int(checkpoint.name) >= steps:
            return  # the Trainer would take one more step, since it looks at their number only after a step
    if state.out_of_patience:
        return
    trainer = trainer or DeltaTrainer(state, arguments, bar)
    trainer.remove_callback(PrinterCallback)
    report = ReportCallback(state, bar)
    for callback in (report, *callbacks):
        trainer.add_callback(callback)
    distributed.seed_by_rank(state.config.runtime.seed)
    with report.first_step:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.accelerator.unwrap_model(state.model, keep_fp32_wrapper=False)


def _untrained_line(state: RunState) -> str:
    """Say which control tokens the base never trained and the method leaves as they are; "" if there are none."""
    sample = state.encoded["train"].rows[:200]
    tokens = untrained_tokens(state.tuned, state.tokenizer, sample) if is_chat(state.kind) else {}
    if not tokens:
        return ""
    objective, added = state.config.objective.kind, f"+ trainable_tokens(tokens={tuple(tokens)})"
    todo = f"add {added}"
    if skips_lm_head(objective):
        todo = f"train them first, by --objective sft and {added}, and give {objective} that run merged (deltune merge)"
    return (
        f"{', '.join(tokens.values())}: the base never trained the embeddings of these tokens, and "
        f"{state.config.method.expression} leaves them as they are; {todo}"
    )


def log_data(section: DataSection, data: TaskData, kind: str, metrics: Sequence[str] = ()) -> None:
    """Log what was assumed of the data, each with the option that changes it."""
    roles = data.format or " and ".join(role for role in data.columns if role in INPUT_TYPES)
    roles += f" ({data.shape})" if data.shape else ""
    labels = f" into {len(data.labels)} labels ({_listed(data.labels)})" if label_counts(data) else ""
    assumed = ""
    if section.source is not None and section.task is None:
        others = ", ".join(other for other in TASK_COLUMNS if other != kind)
        assumed = f", assumed from the columns; --task says another kind: {others}"
    elif section.source is None:
        assumed = f" (task {section.task})"
    logger.info("task: %s of %s%s%s", kind, roles, labels, assumed)
    if section.columns is None and section.source is not None:
        pairs = ",".join(f"{role}={name}" for role, name in data.columns.items())
        logger.info("columns: %s; --columns names others", pairs)
    for line in unread_notes(data):
        logger.warning("%s", line)
    for line in data_notes(data):
        logger.info("data: %s", line)
    for split, counts in label_counts(data).items():
        parts = (balance(counts), absent_labels(counts, split, metrics))
        logger.info("labels of %s: %s", split, "; ".join(filter(None, parts)))
    if data.tag_scheme is not None:
        logger.info("tags: %s", _tags_line(data, section.tag_scheme))


def _log_start(state: RunState, untrained: str) -> None:
    """Log what was assumed of the data and of training, each with the option that changes it, and what is cut."""
    optim = state.config.optim
    log_data(state.config.data, state.data, state.kind.name, state.metrics)
    if state.why_pooling:
        pooling = state.tuned.delta().pooling
        what = "the pooler of the model's class" if pooling == "model" else f"{pooling} of the last hidden states"
        logger.info("the head reads: %s, %s (--pooling)", what, state.why_pooling)
    source = f", the default of the method for {state.total_steps:,} steps" if optim.lr_source == DEFAULT else ""
    if source and state.config.method.init_from is not None:
        source += " from fresh weights: what goes on from trained ones usually needs less"
    steps = state.batches.steps_per_epoch
    length = f"{counted(optim.epochs, 'epoch')} of {counted(steps, 'step')}"
    length = length if optim.steps is None else counted(optim.steps, "step")
    logger.info(
        "training: %s rows, %s; rate %g%s (--epochs, --batch-size, --lr)",
        f"{len(state.encoded['train']):,}", length, optim.rate, source,
    )  # fmt: skip
    for split, rows in state.encoded.items():
        logger.info("%s: %s", split, token_line(token_facts(rows)))
        for line in cut_notes(state.kind, rows, split, state.limits):
            logger.info("%s", line)
    if state.config.objective.kind != "sft":
        logger.info("objective: %s", objective_line(state))
    optimizer = state.config.optim.optimizer
    if optimizer != "adamw" and all(p.numel() < MIN_8BIT for p in state.tuned.trainable_parameters()):
        logger.info("%s saves nothing: bitsandbytes keeps 32 bits for tensors below %d numbers", optimizer, MIN_8BIT)
    logger.info("%s", example_line(example_text(state.tokenizer, [state.encoded["train"].rows[0]])))
    state.run.log({"step": 0, "event": "start", **state.truncated, **({"untrained": untrained} if untrained else {})})


def _tags_line(data: TaskData, chosen: str | None) -> str:
    """Say which scheme the tags are of, how they are scored, and which option says otherwise."""
    if data.tag_scheme != PLAIN:
        todo = (
            ", converted (--tag-scheme)"
            if chosen
            else "; --tag-scheme iob2 converts others, plain takes all for classes"
        )
        return f"{data.tag_scheme}, entities are right if type and both ends are{todo}"
    if all(label.isdecimal() for label in data.labels):
        return "numbers, each a class; --labels O,B-PER,… names them in the order of their numbers"
    return "plain, each a class (--tag-scheme)" if chosen else "plain, each a class, as none looks like B-PER"


def _listed(names: Sequence[str], most: int = 8) -> str:
    """Return names with commas between them, only the first of many."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _finish(state: RunState, bar: ProgressDisplay) -> RunMetrics:
    """Score the best delta as it is on the disk, on the splits it has not answered yet, and write the metrics."""
    seconds, cpu_seconds = state.seconds, state.cpu_seconds
    count = state.tuned.count().as_dict()
    sharded, device = sharding.is_sharded(state.model), state.model.device
    if sharded:
        seed, setup = state.config.runtime.seed, TaskSetup(state.data, state.kind, state.metrics)
        model = _base_model(state.config.model, setup, state.tokenizer, seed, ModelCache())
    else:
        wants_probe = state.config.runtime.probe == "on" and state.probe is None and state.measure is None
        if wants_probe and state.kind.head in HEADS_WITH_LABELS:
            bar.start("a linear probe", sum(map(len, state.encoded.values())))
            state.probe = _probe(state, bar)[1]
        model = state.tuned.detach("default")  # the reference of an objective stays
    state.tuned = load(model, state.run.delta)
    if sharded:
        distributed.shard_model(state.tuned, device)
    splits = [split for split in SPLITS if split in state.encoded]
    answered = state.reusable_predictions()
    remaining = [split for split in splits if split not in answered]
    bar.start("scoring", sum(len(state.encoded[split]) for split in remaining))
    answered |= {split: state.write_predictions(split, state.score(split, bar)) for split in remaining}
    last: dict[str, Any] = answered[splits[-1]] if splits else {"signatures": {}, "omitted": {}}
    metrics = RunMetrics(
        **{split: answered[split]["metrics"] for split in splits},
        seconds=round(seconds, 3),
        cpu_seconds=None if cpu_seconds is None else round(cpu_seconds, 3),
        count=count,
        best=Best(**{key: value for key, value in state.best.items() if key not in ("rank", "answered")}),
        truncated=state.truncated["truncated"],
        truncated_targets=state.truncated["truncated_targets"],
        signatures=last["signatures"],
        omitted=last["omitted"],
        intervals={split: answered[split].get("intervals", {}) for split in splits},
        probe=state.probe,
    )
    state.tuned.detach()
    state.run.finish(metrics)
    return metrics
