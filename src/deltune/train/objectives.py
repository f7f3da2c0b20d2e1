"""Objectives beside the likelihood of answers, by TRL's trainers: dpo, kto, orpo, reward and grpo.

No second base model is held: the reference of a policy is its own model, without the delta where that is fresh, and as
it is before the first step where it was tuned before. DPO and KTO score their rows by it once, before they begin; GRPO,
whose answers are drawn anew, keeps a frozen copy of a delta that was tuned before.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import logging
import os
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from ..errors import DeltuneError, check_extra, error_from_problems, error_summary
from ..runtime.attach import load, tuned
from ..runtime.padding import eval_mode
from ..templates import chat_prompt, end_tokens, tokenize_prompts
from . import distributed
from .config import RunConfig, check_processes
from .data.formats import COLUMN
from .data.rows import stored_dataset
from .progress import ProgressDisplay
from .tasks.preferences import split_answer
from .trainer import DeltaCheckpointTrainer, RunState

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel

    from ..runtime.handle import Tuned

Reference = Literal["base", "start"]
"""What a policy is held to: the model without its delta, or the policy as it is before the first step."""
RewardFunction = Callable[..., Sequence[float | None]]
"""reward(prompts, completions, reference, …) returns a number for each completion."""

REFERENCE = "reference"
"""The name of the frozen copy of a delta that was tuned before."""

logger = logging.getLogger("deltune")


@dataclass(frozen=True)
class Objective:
    """An objective as TRL has it.

    Attributes:
        name: What TRL calls its trainer and its arguments.
        measures: TRL's name of a measure -> its name here.
        has_reference: Whether the policy is held to a reference.
        experimental: Whether TRL may change it at any time.
        calls_lm_head: Whether TRL calls the projection to the vocabulary, whose weight it reads otherwise.
        options: Further arguments.
    """

    name: str
    measures: Mapping[str, str]
    has_reference: bool = False
    experimental: bool = False
    calls_lm_head: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


PAIR = {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}
ALL_TOKENS = {"max_length": None}  # rows are cut before
BEFOREHAND = {**ALL_TOKENS, "precompute_ref_log_probs": True}
OBJECTIVES: Mapping[str, Objective] = {
    "dpo": Objective("DPO", PAIR, has_reference=True, calls_lm_head=False, options=BEFOREHAND),
    "kto": Objective(
        "KTO", {"rewards/margins": "margin", "kl": "kl"}, has_reference=True, calls_lm_head=False, options=BEFOREHAND
    ),
    "orpo": Objective("ORPO", {**PAIR, "nll_loss": "nll"}, experimental=True, options={"max_length": 1}),
    "reward": Objective("Reward", {"accuracy": "accuracy", "margin": "margin"}, options=ALL_TOKENS),
    "grpo": Objective(
        "GRPO", {"reward": "reward", "kl": "kl", "completions/mean_length": "length"}, calls_lm_head=False
    ),
}


def trainer_class(objective: str, reference: Reference = "base") -> type[Any]:
    """Return TRL's trainer of an objective for a model with a delta, which loads no second base model.

    Args:
        objective: One of `OBJECTIVES`.
        reference: "base" where the delta begins untrained. "start" where it was tuned before: the reference is the
            policy before the first step.

    Returns:
        A subclass of TRL's trainer, with the same arguments. Let DPO and KTO score their rows beforehand
        (`precompute_ref_log_probs=True`).

    Raises:
        DeltuneError: TRL is not installed.
    """
    kind = {"dpo": _OfPairs, "kto": _OfPairs, "grpo": _OfDrawnAnswers}.get(objective)
    base = _from_trl(objective, "Trainer")
    return base if kind is None else type(f"Delta{base.__name__}", (kind, base), {"reference": reference})


def arguments_class(objective: str) -> type[TrainingArguments]:
    """Return the class of TRL's arguments for an objective."""
    arguments: type[TrainingArguments] = _from_trl(objective, "Config")
    return arguments


def _from_trl(objective: str, what: str) -> Any:
    check_extra("align", f"--objective {objective} needs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the log of a run says what is experimental
        import trl

        if OBJECTIVES[objective].experimental:
            from trl.experimental import orpo as trl
    return getattr(trl, OBJECTIVES[objective].name + what)


class _OfPairs:
    """DPO or KTO, whose rows are scored by the reference before the first step."""

    reference: Reference

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        with tuned(model).disable() if self.reference == "base" else contextlib.nullcontext():
            return super().compute_ref_log_probs(model, inputs)  # type: ignore[misc]


class _OfDrawnAnswers:
    """GRPO, whose reference scores answers as they are drawn."""

    reference: Reference

    def __init__(self, model: PreTrainedModel, *, args: Any, **options: Any) -> None:
        beta, args.beta = args.beta, 0.0  # with another one TRL loads a second base model
        super().__init__(model, args=args, **options)  # type: ignore[call-arg]
        self.beta = args.beta = beta
        if beta:
            if self.reference == "start":
                _keep_copy(model)
            self.ref_model = _ReferencePass(model, self.reference)


def _keep_copy(model: PreTrainedModel) -> None:
    """Attach a frozen copy of the delta in use, which stays in use."""
    handle = tuned(model)
    with tempfile.TemporaryDirectory() as folder:
        handle.save(folder)
        active = handle.active
        load(model, folder, name=REFERENCE)
        handle.use(active)


class _ReferencePass(torch.nn.Module):
    """A model's passes with the delta of the reference, or without any, and without dropout."""

    def __init__(self, model: PreTrainedModel, reference: Reference) -> None:
        super().__init__()
        self.policy = lambda: model  # not a module of this one, which has no parameters
        self.reference = reference

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        policy = self.policy()
        handle = tuned(policy)
        scope = handle.disable() if self.reference == "base" else handle.rows([REFERENCE] * len(input_ids))
        with torch.no_grad(), eval_mode(policy), scope:
            return policy(input_ids=input_ids, **inputs)


# -- in a run


def check_objective(config: RunConfig, reward: RewardFunction | None, sharded: str) -> None:
    """Check that the options of a run go with its objective.

    Raises:
        DeltuneError: They do not, or TRL is not installed.
    """
    kind, optim, evaluation = config.objective.kind, config.optim, config.evaluation
    problems = []
    if (kind == "grpo") != (reward is not None):
        problems.append(
            "grpo draws answers that a function of yours rates: --reward FILE.py:function"
            if kind == "grpo"
            else f"--reward is for --objective grpo, not for {kind}"
        )
    if kind != "sft":
        others = {
            "packing": optim.packing, "label_smoothing": optim.label_smoothing, "batch_tokens": optim.batch_tokens,
            "trunk_dropout off": config.method.trunk_dropout == "off",
            "head_init": config.method.head_init != "model", "metrics": evaluation.metrics,
            "metric": evaluation.metric not in (None, "loss"), "loss_on": config.data.loss_on != "answers",
            "sharding": sharded != "none",
        }  # fmt: skip
        if names := ", ".join(name for name, is_set in others.items() if is_set):
            problems.append(f"{kind} is learned without {names}")
        check_processes(kind, distributed.world_size())
    if config.objective.beta is not None and kind in ("sft", "reward"):
        problems.append(f"beta is for dpo, kto, orpo and grpo, not for {kind}")
    if problems:
        raise error_from_problems("the options do not go with the objective", problems)
    if kind != "sft":
        check_extra("align", f"--objective {kind} needs")


def skips_lm_head(objective: str) -> bool:
    """Return whether TRL's trainer of an objective reads the weight of the projection to the vocabulary uncalled."""
    return objective != "sft" and not OBJECTIVES[objective].calls_lm_head


def check_lm_head(objective: str, tuned: Tuned) -> None:
    """Refuse a delta that acts at a projection to the vocabulary that TRL's trainer would not call."""
    path = tuned.attached.passes.vocabulary  # where some delta acts at it
    if path is not None and skips_lm_head(objective):
        raise DeltuneError(
            f"{tuned.method!r} acts at {path}, whose weight TRL's trainer of {objective} reads without calling it: "
            "tune with --objective sft, merge that run (deltune merge), and give the merged model a method that does "
            "not act there; or take --objective orpo"
        )


def trl_arguments(state: RunState) -> dict[str, Any]:
    """Return those arguments of TRL that a run's objective has beside the arguments of every run."""
    section, processes = state.config.objective, distributed.world_size()
    options = {**OBJECTIVES[section.kind].options}
    if processes > 1:  # every device has as many rows, since TRL takes the mean of the devices, in one order for all
        options |= {"accelerator_config": {"even_batches": True}, "data_seed": state.config.runtime.seed}
    if section.beta is not None:
        options["beta"] = section.beta
    if section.kind == "grpo":  # TRL counts completions, and deltune prompts
        rows, size = len(state.encoded["train"]), state.config.optim.batch_size
        if rows < size:
            raise DeltuneError(f"a step takes {size} prompts, and train has {rows}: --batch-size {rows} or less")
        completions = state.config.optim.rows_per_device(processes) * section.generations
        options |= {
            "per_device_train_batch_size": completions, "per_device_eval_batch_size": completions,
            "num_generations": section.generations,
            "max_completion_length": state.limits.generate_kwargs["max_new_tokens"],
        }  # fmt: skip
    elif section.kind == "kto" and state.config.optim.rows_per_device(processes) < 2:
        raise DeltuneError(
            "kto compares the rows of a device batch: give 2 or more (--batch-size, --device-batch-size)"
        )
    return options


def objective_trainer(
    state: RunState, arguments: TrainingArguments, bar: ProgressDisplay, reward: RewardFunction | None
) -> DeltaCheckpointTrainer:
    """Return the trainer of a run with an objective."""
    kind = state.config.objective.kind
    reference: Reference = "base" if state.is_fresh else "start"
    base = trainer_class(kind, reference)
    class_of_run: type[Any] = type(base.__name__, (_RunTrainer, DeltaCheckpointTrainer, base), {})
    with _quiet():
        trainer: DeltaCheckpointTrainer = class_of_run(state, arguments, bar, reward)
    return trainer


def objective_line(state: RunState) -> str:
    """Return in one line what a run learns, what it is held to, and by what."""
    import trl

    section = state.config.objective
    objective = OBJECTIVES[section.kind]
    beta = section.beta if section.beta is not None else 0.0 if section.kind == "grpo" else 0.1
    parts: list[str] = [section.kind]
    if objective.has_reference or (section.kind == "grpo" and beta):
        of = "the model without its delta" if state.is_fresh else "the delta as it was before"
        parts.append(f"beta {beta:g}; the reference is {of}")
        if state.is_fresh and _begins_elsewhere(state):
            parts.append("a fresh delta of this method changes the model from the start, so it is not the reference")
    experimental = ", where it is experimental and may change" if objective.experimental else ""
    return f"{'; '.join(parts)}; by TRL {trl.__version__}{experimental}"


@torch.no_grad()
def _begins_elsewhere(state: RunState) -> bool:
    """Return whether the delta changes the model before it is trained; one pass shows it."""
    ids = torch.tensor([state.encoded["train"][0]["input_ids"]], device=state.model.device)
    with eval_mode(state.model):
        with_delta = state.model(input_ids=ids).logits
        with state.tuned.disable():
            without = state.model(input_ids=ids).logits
    return not torch.allclose(with_delta, without, atol=1e-4)


class _RunTrainer:
    """TRL's trainer on the rows of a run, which are tokens already."""

    def __init__(
        self, state: RunState, arguments: TrainingArguments, bar: ProgressDisplay, reward: RewardFunction | None
    ) -> None:
        import datasets

        self.run_state, self.bar = state, bar
        state.names = OBJECTIVES[state.config.objective.kind].measures
        state.measure = self.measure
        tokenizer = copy.deepcopy(state.tokenizer)  # TRL gives it a token for padding
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(state.model.config.pad_token_id)
        rows = {split: _dataset(state, split, arguments) for split in state.encoded}
        held_out = {split: dataset for split, dataset in rows.items() if split != "train"}
        super().__init__(  # type: ignore[call-arg]
            model=state.model,
            args=arguments,
            train_dataset=rows["train"],
            eval_dataset=datasets.DatasetDict(held_out) if held_out else None,
            processing_class=tokenizer,
            **({} if reward is None else {"reward_funcs": _called(reward)}),
        )
        if reward is not None:  # answers end where those of `deltune chat` do
            self.eos_token_ids = list(end_tokens(state.tokenizer, state.model))
            self.generation_config: Any
            self.generation_config.eos_token_id = self.eos_token_ids

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with _quiet():
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def measure(self, split: str) -> dict[str, float]:
        """Return the loss and the measures of a split; answers are drawn from the same random numbers each time."""
        with _quiet(), torch.random.fork_rng():
            torch.manual_seed(self.run_state.config.runtime.seed)
            scores = super(DeltaCheckpointTrainer, self).evaluate(split)  # type: ignore[misc]
        return {"loss": scores["eval_loss"]} | {
            name: scores[f"eval_{of_trl}"]
            for of_trl, name in self.run_state.names.items()
            if f"eval_{of_trl}" in scores
        }

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Return the batches of a split, all of them in each of several processes, as for other tasks."""
        loader: DataLoader[Any] = super().get_eval_dataloader(*args, **kwargs)  # type: ignore[misc]
        if distributed.world_size() == 1:
            return loader
        arguments: TrainingArguments = self.args  # type: ignore[attr-defined]
        return DataLoader(loader.dataset, arguments.eval_batch_size, collate_fn=loader.collate_fn)

    def _precompute_ref_logps(self, dataset: datasets.Dataset, name: str, batch_size: int) -> datasets.Dataset:
        """Score the rows of dpo by the reference; each of several processes scores all of them.

        TRL would hand the scores on through a file beside the data, which is in memory here.
        """
        if distributed.world_size() == 1:
            scored: datasets.Dataset = super()._precompute_ref_logps(dataset, name, batch_size)  # type: ignore[misc]
            return scored
        trainer: Any = self
        scores: dict[str, list[float]] = {"ref_chosen_logps": [], "ref_rejected_logps": []}
        for start in range(0, len(dataset), batch_size):
            rows = dataset.select(range(start, min(start + batch_size, len(dataset)))).to_list()
            batch = {name: tensor.to(trainer.model.device) for name, tensor in trainer.data_collator(rows).items()}
            for column, values in zip(scores, trainer.compute_ref_log_probs(trainer.model, batch), strict=True):
                scores[column] += values.tolist()
        for column, numbers in scores.items():
            dataset = dataset.add_column(column, numbers)
        return dataset

    def tokenize_row(self, feature: Mapping[str, Any], model: Any = None) -> dict[str, Any]:
        """Return the tokens of a row as ORPO names them."""
        prompt = feature["prompt_ids"]
        batch: dict[str, list[int]] = {}
        for name in ("chosen", "rejected"):
            answer = feature[f"{name}_ids"]
            batch |= {
                f"{name}_input_ids": prompt + answer,
                f"{name}_attention_mask": [1] * len(prompt + answer),
                f"{name}_labels": [-100] * len(prompt) + answer,
            }
        return {**batch, "prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}

    def _tokenize_prompts(self, prompts: Sequence[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        tokenizer = self.run_state.tokenizer
        if isinstance(prompts[0], str):
            return [list(ids) for ids in tokenize_prompts(tokenizer, prompts)], None, {}
        return [chat_prompt(tokenizer, messages) for messages in prompts], None, {}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the bars of TRL and of datasets, and what they say of each other and of transformers."""
    import datasets

    shown, before = datasets.is_progress_bar_enabled(), os.environ.get("TQDM_DISABLE")
    verbosity = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    os.environ["TQDM_DISABLE"] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        os.environ.pop("TQDM_DISABLE") if before is None else os.environ.update(TQDM_DISABLE=before)
        datasets.logging.set_verbosity(verbosity)
        if shown:
            datasets.enable_progress_bars()


def _dataset(state: RunState, split: str, arguments: TrainingArguments) -> datasets.Dataset:
    """Return the rows of a split as TRL's trainer of the objective reads them."""
    kind, rows = state.config.objective.kind, state.encoded[split].rows
    if kind == "grpo":
        return stored_dataset(map(_prompt, state.columns[split][COLUMN]))
    if kind == "kto":
        return stored_dataset(_rated_rows(rows, arguments.per_device_train_batch_size, state.config.runtime.seed))
    texts = dict.fromkeys(("prompt", "chosen", "rejected"), "") if kind == "orpo" else {}

    def pairs() -> Iterator[dict[str, Any]]:
        for row in rows:
            prompt, chosen = split_answer(row)
            rejected = row["rejected_ids"]
            if kind == "reward":
                yield {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
            else:
                yield {**texts, "prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}

    return stored_dataset(pairs())


def _rated_rows(rows: Sequence[dict[str, Any]], size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rated answers, each with another answer of its batch.

    Completions are exchanged among the prompts of a batch, so its rows must not be the answers to one prompt.
    """
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    for place, number in enumerate(order):
        prompt, answer = split_answer(rows[number])
        _, other = split_answer(rows[order[_other_answer(place, size, len(order))]])
        yield {
            "prompt_ids": prompt, "completion_ids": answer, "label": rows[number]["desirable"],
            "KL_completion_ids": other,
        }  # fmt: skip


def _other_answer(place: int, size: int, count: int) -> int:
    """Return the place of the answer before one in its batch, the last for the first; alone, of the one before it."""
    first = place - place % size
    last = min(first + size, count) - 1
    return last if place == first < last else max(0, place - 1)


def _prompt(text: str) -> dict[str, Any]:
    """Return the prompt of a row, and the answer that stands behind it as `reference`."""
    row = json.loads(text)
    if "completion" in row:
        return {"prompt": row["prompt"], "reference": row["completion"]}
    if "text" in row or row.get("tools") or any("tool_calls" in one for one in row["messages"]):
        raise DeltuneError("grpo draws answers to prompts, and these rows are texts without a prompt or call tools")
    last = max(i for i, one in enumerate(row["messages"]) if one["role"] == "assistant")
    messages = [{"role": one["role"], "content": one["content"]} for one in row["messages"][: last + 1]]
    return {"prompt": messages[:last], "reference": messages[last]["content"]}


def _called(reward: RewardFunction) -> RewardFunction:
    """Return a reward function that is called with the arguments that it takes; its errors say where they are."""
    parameters = inspect.signature(reward).parameters.values()
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    names = {one.name for one in parameters}

    def called(**values: Any) -> Sequence[float | None]:
        try:
            rewards = reward(**{name: value for name, value in values.items() if takes_all or name in names})
            numbers = [None if one is None else float(one) for one in rewards]
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}, line {frame.lineno}"
            raise DeltuneError(f"--reward: {type(error).__name__}: {error_summary(error)} ({where})") from error
        if len(numbers) != len(values["completions"]):
            count = len(values["completions"])
            raise DeltuneError(f"--reward: {reward.__name__} returned {len(numbers)} numbers for {count} completions")
        return numbers

    called.__name__ = reward.__name__
    return called
