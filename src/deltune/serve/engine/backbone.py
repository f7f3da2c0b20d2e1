"""A model that many deltas share: attaching and detaching their versions, and passes in which each row has its own.

Deltas for several heads (a classifier, a tagger, embeddings) need models of several classes. Each `Backbone` has a
model of its own class, but all of them hold the same parameters, so the weights are in memory once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...anatomy.skeleton import base_modules, base_tensors
from ...anatomy.types import Stack
from ...compat import attention_implementation, auto_class_mapping, buffers_of, parameters_of
from ...errors import DeltuneError, error_summary
from ...methods.forms.prompt import Prompt
from ...methods.positions import ALL
from ...methods.registry import parse
from ...models import HEADS, align_padding_token, load_model, load_tokenizer, read_trained_head
from ...runtime.attach import (
    add_delta,
    attach_trained_head,
    check_base_of_delta,
    find_tuned,
    has_sliding_window,
    read_delta,
)
from ...runtime.attention import PREFIX, CacheablePrefix, cacheable_prefix
from ...runtime.delta_schema import TrainedFacts, merged_facts
from ...runtime.handle import Tuned
from ...runtime.modules import Delta, Edit, HeadLabels
from ...runtime.pass_manager import condition
from ...runtime.prompts import unused_position_rows
from ...runtime.row_assignment import parameter_names
from .cache import States
from .folders import HEAD_TASKS, FolderFacts, Signature, head_of_model_class, locate_delta, signature
from .requests import Task

T = TypeVar("T")

ALL_LENGTHS = 1 << 30
"""The number of positions of a model that has no table of them."""

OWN_HEAD = "deltune-own-head"
"""The name on the model of what has its own head read the pooling that sentence-transformers gives it."""

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Preamble:
    """The columns of a cache before every text of a delta: its prefix and its prompt."""

    prefix: int = 0  # how many columns its prefix has, whose keys and values are its edits' own
    columns: int = 0  # how many columns its prefix and its prompt have
    prompt: States = field(default_factory=list)  # the keys and values of its prompt
    edits: frozenset[Edit] = frozenset()  # the edits that no pass need apply where a cache holds these columns

    @property
    def bytes(self) -> int:
        """The bytes that it takes beside the delta's own tensors."""
        return sum(tensor.nbytes for pair in self.prompt if pair is not None for tensor in pair)


@dataclass(eq=False)
class LoadedDelta:
    """One version of a delta in memory, or the base model. Requests pin it as long as they need it."""

    name: str | None  # the name that clients use; None for the base model
    version: str  # a digest of its files
    backbone: Backbone  # the model that it is attached to
    internal: str | None  # its name there; None for the base model
    method: str = ""  # its expression
    parameters: int = 0  # how many numbers it has
    labels: tuple[str, ...] = ()  # the names of its labels, in the order of their ids
    problem_type: str | None = None  # what the outputs of its head mean, as in a configuration of transformers
    tasks: tuple[Task, ...] = ()  # what it can be asked
    row_tasks: tuple[str, ...] = ()  # the names of the tasks that it learned, of which each row has one
    group: str = ""  # rows of deltas with the same group may share a batch
    prompt_length: int = 0  # how many rows it puts before the text
    prompt_shift: int = 0  # how many positions these rows take
    prompt_edits: frozenset[Edit] = frozenset()  # the edits that put them there
    prefix: CacheablePrefix | None = None  # its prefixes, where a cache may hold them, or None
    # what a cache holds before the text of each of its rows; None until the first of them is read
    preamble: Preamble | None = None
    # by how many positions it moves the tokens of each stack besides, by name of the stack
    shifts: dict[str, int] = field(default_factory=dict)
    own_bytes: int = 0  # the size of its tensors
    trained: TrainedFacts = field(default_factory=TrainedFacts)  # the inputs of its run, if known
    users: int = 0  # how many requests need it now
    used: bool = False  # whether a request has used it since it was loaded
    last_used: float = 0.0  # when it was last needed, on the monotonic clock
    loaded_at: float | None = None  # when it was loaded, in seconds since the epoch
    permanent: bool = False  # whether it is never dropped from memory: the base model, and what was attached before

    @property
    def bytes(self) -> int:
        """The bytes of its tensors and of its preamble."""
        return self.own_bytes + (0 if self.preamble is None else self.preamble.bytes)


@dataclass(frozen=True)
class PreparedDelta:
    name: str  # the name that clients use
    facts: FolderFacts  # what its files say
    backbone: Backbone  # the model that it fits
    delta: Delta  # its module
    labels: HeadLabels
    bytes: int  # its size in memory


def load_to_serve(
    name: str, head: str | None = None, dtype: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model with the head that its files have, or another, and its tokenizer."""
    trained = read_trained_head(name)
    head = head or trained.kind or "base"
    is_sentence_model = head == trained.kind and trained.pooling != "model"
    tokenizer = load_tokenizer(name)
    model = load_model(name, head, trained.labels if is_sentence_model else None, dtype=dtype)
    align_padding_token(model, tokenizer)
    if is_sentence_model:
        HeadLabels(tuple(enumerate(trained.labels)), trained.problem_type).apply_to(model)
        attach_trained_head(model, name, trained.pooling, OWN_HEAD)
    return model, tokenizer


class Backbone:
    """A model of one class with the deltas that are attached to it; one thread attaches and detaches them."""

    def __init__(self, model: PreTrainedModel, head: str) -> None:
        self.model, self.head = model, head
        self.was_training = model.training
        model.eval()
        self.attached = (find_tuned(model) or Tuned(model)).attached
        self.attached.fix_base()  # it reads a sample of every weight, which no load need do again
        self.is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self.device = next(model.parameters()).device
        anatomy = self.attached.anatomy
        self.stacks: dict[str, Stack] = {stack.name: stack for stack in anatomy.stacks}
        self.first_stack, self.last_stack = anatomy.stacks[0], anatomy.stacks[-1]
        self.arguments = frozenset(parameter_names(model))
        self.rope_limit = longrope_limit(model)
        self.sees_all_columns = not has_sliding_window(model)
        self._attached: set[str] = set()

    # -- what is attached

    def base_entry(self, tasks: tuple[Task, ...]) -> LoadedDelta:
        labels = self.attached.base_labels
        names = tuple(name for _, name in labels.id2label) if set(tasks) & {"classify", "tag"} else ()
        return LoadedDelta(
            None, "", self, OWN_HEAD if OWN_HEAD in self.attached.names else None, labels=names,
            problem_type=labels.problem_type, tasks=tasks, trained=merged_facts(Path(self.model.name_or_path or "")),
            permanent=True,
        )  # fmt: skip

    def attached_before(self) -> Iterator[LoadedDelta]:
        """Yield the deltas that were attached to the model before the server was made."""
        for name in (name for name in self.attached.names if name != OWN_HEAD):
            self._check(self.attached.delta(name))
            yield self._loaded(name, name, "attached", self.attached.delta(name))

    def prepare(self, name: str, folder: Path, facts: FolderFacts, seen: Signature) -> PreparedDelta:
        """Read a delta and check that it fits this model, without attaching it."""
        try:
            delta, labels = read_delta(self.attached, locate_delta(folder))
        except OSError as error:
            raise DeltuneError(f"{folder} cannot be read: {error_summary(error)}") from error
        if signature(folder) != seen:
            raise DeltuneError(f"the files of {folder} were changed while they were read; load it again")
        self._check(delta)
        delta.requires_grad_(False)
        size = sum(tensor.nbytes for tensor in (*delta.parameters(), *delta.buffers()))
        return PreparedDelta(name, facts, self, delta, labels, size)

    def _check(self, delta: Delta) -> None:
        """Refuse what keeps more of a text than the cache has: which tokens were invoked, or a first pass."""
        if "generate" not in HEAD_TASKS[self.head]:
            return
        acts = (edit.modification.positions for edit in delta.all_edits())
        if chosen := next((one for one in acts if one != ALL), None):
            raise DeltuneError(
                f"this delta acts at the tokens {chosen!r} of a text, which a server that generates does not follow: "
                "call model.generate with the delta in use"
            )
        if any(edit.form.reads_first_pass or edit.form.reads_text for edit in delta.all_edits()):
            raise DeltuneError(
                "this delta reads more of a text than the cache of a server that generates has: call model.generate "
                "with the delta in use"
            )

    def attach(self, prepared: PreparedDelta) -> LoadedDelta:
        facts = prepared.facts
        internal = self._add(prepared.delta, prepared.labels)
        loaded = self._loaded(prepared.name, internal, facts.version, prepared.delta)
        loaded.own_bytes, loaded.trained, loaded.permanent = prepared.bytes, facts.trained, False
        loaded.parameters = facts.parameters or loaded.parameters
        loaded.tasks = tuple(task for task in facts.tasks if task in HEAD_TASKS[self.head])
        if not set(loaded.tasks) & {"classify", "tag"}:
            loaded.labels = ()
        return loaded

    def attach_trial(self, method: str) -> LoadedDelta:
        """Attach a delta with random values, to measure what the model does with its kind."""
        made = torch.Generator().manual_seed(0)
        with torch.inference_mode(False), torch.no_grad():
            delta = self.attached.new_delta(parse(method)).requires_grad_(False)
            for parameter in delta.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=made))
        return self._loaded(method, self._add(delta, self.attached.base_labels), "trial", delta)

    def _add(self, delta: Delta, labels: HeadLabels) -> str:
        """Attach a delta, and return its name on the model."""
        internal = f"deltune-serving-{next(_numbers)}"
        with torch.inference_mode(False):
            add_delta(self.attached, internal, delta, labels)
            self._attached.add(internal)
            delta.requires_grad_(False)
        return internal

    def _loaded(self, name: str, internal: str, version: str, delta: Delta) -> LoadedDelta:
        labels = delta.labels or self.attached.base_labels
        edits, parameters = list(delta.all_edits()), list(delta.parameters())
        prompts = [edit.modification.form for edit in edits if isinstance(edit.modification.form, Prompt)]
        prompt_length = sum(form.length for form in prompts)
        shifts: dict[str, int] = {}
        for stack, _, shift in {
            (e.place.shifted_stack, e.origin, e.modification.form.shift) for e in edits if e.place.shifted_stack
        }:
            shifts[stack] = shifts.get(stack, 0) + shift
        return LoadedDelta(
            name,
            version,
            self,
            internal,
            method=repr(delta.method),
            parameters=sum(parameter.numel() for parameter in parameters),
            labels=tuple(label for _, label in labels.id2label),
            problem_type=labels.problem_type,
            tasks=HEAD_TASKS[self.head],
            row_tasks=delta.tasks,
            group=self._group(internal, prompts),
            prompt_length=prompt_length,
            prompt_shift=prompt_length if all(form.positions == "shift" for form in prompts) else 0,
            prompt_edits=frozenset(edit for edit in edits if isinstance(edit.modification.form, Prompt)),
            prefix=cacheable_prefix(delta, self.model),
            shifts=shifts,
            own_bytes=sum(parameter.nbytes for parameter in parameters),
            loaded_at=time.time(),
            permanent=True,
        )

    def _group(self, internal: str, prompts: Sequence[Prompt]) -> str:
        """The group of deltas that may share a batch with this one: its own, where it changes what all rows share."""
        if not self.attached.shares_rows(internal) or (prompts and self.rope_limit is not None):
            return internal  # a prompt would take the padding of others beyond the limit
        return "none" if any(form.positions == "none" for form in prompts) else ""

    def detach(self, loaded: LoadedDelta) -> None:
        loaded.prompt_edits, loaded.prefix, loaded.preamble = frozenset(), None, None
        if loaded.internal is not None:
            self._attached.remove(loaded.internal)
            self.attached.detach(loaded.internal)

    def close(self) -> None:
        """Leave the model as it was before the server was made, but for deltas that were attached then."""
        while self._attached:
            self.attached.detach(self._attached.pop())
        self.attached.release_base()
        if not self.attached.names:
            self.attached.detach()
        self.model.train(self.was_training)

    # -- passes

    def run(
        self,
        rows: Sequence[LoadedDelta],
        call: Callable[[], T],
        left_out: frozenset[Edit] | None = None,
        tasks: Sequence[int] = (),
    ) -> T:
        """Let `call` run passes in which each row uses its own delta, and has its own of the delta's tasks.

        `left_out` is as for `inference_rows`.
        """
        facts: dict[str, torch.Tensor] = {}
        if any(row.row_tasks for row in rows):
            facts = {"task_ids": torch.tensor(tasks or [0] * len(rows))}
        with (
            torch.inference_mode(),
            self.attached.inference_rows([row.internal for row in rows], left_out),
            condition(self.attached.passes, facts),
        ):
            return call()

    def remaining_positions(self, stack: str, loaded: LoadedDelta) -> int:
        """Return how many tokens a stack has positions for, beside what a delta takes of them."""
        facts = self.stacks[stack]
        config = self.model.config.get_text_config()
        configured = getattr(config, "max_position_embeddings", None)
        limit = configured if isinstance(configured, int) and configured > 0 else ALL_LENGTHS
        limit = limit if self.rope_limit is None else min(limit, self.rope_limit)
        if facts.positions is not None:
            table = self.model.get_submodule(facts.positions)
            weight = parameters_of(table).get("weight")
            if weight is not None:
                limit = min(limit, weight.shape[0] - unused_position_rows(table))
        taken = loaded.shifts.get(stack, 0) if facts.positions is not None else 0
        return limit - taken - (loaded.prompt_shift if facts is self.first_stack else 0)


def longrope_limit(model: PreTrainedModel) -> int | None:
    """Return the length beyond which one row changes the rotary positions of all rows of its batch, or None."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]  # by type of layer
    limits = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(limits) if limits else None


class Backbones:
    """The models of one server, by head. Other heads than the first get a model with the same parameters."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.first = Backbone(model, head_of_model_class(type(model).__name__))
        self._by_head = {self.first.head: self.first}
        self._lock = threading.Lock()

    def for_head(self, head: str) -> Backbone:
        """Return the model with a head, which is made when it is first needed."""
        with self._lock:
            if head not in self._by_head:
                self._by_head[head] = Backbone(sibling(self.first, head), head)
            return self._by_head[head]

    def head_of(self, facts: FolderFacts) -> str:
        """Return the head of the model that a delta is loaded on: the server's, if the delta has none of its own."""
        head = self.first.head
        return head if facts.head == head or (not facts.has_head and facts.head == "base") else facts.head

    def check(self, facts: FolderFacts, folder: Path) -> None:
        """Check what the files of a delta say about it, before its tensors are read. Any thread may call it."""
        if facts.base is not None:
            check_base_of_delta(self.first.attached, facts.base, folder)
        if (head := self.head_of(facts)) != self.first.head:
            sibling_class(self.first, head)

    def close(self) -> None:
        """Leave the first model as it was."""
        for backbone in reversed(self._by_head.values()):
            backbone.close()


def sibling_class(first: Backbone, head: str) -> type[PreTrainedModel]:
    """Return the class of a model with another head over the parameters of a model."""
    model, kind = first.model, type(first.model).__name__
    classes = auto_class_mapping(getattr(transformers, HEADS[head].auto_class)).get(type(model.config), ())
    chosen = classes[0] if isinstance(classes, tuple) and classes else classes
    if head not in ("base", "classification", "tagging") or not isinstance(chosen, type):
        raise DeltuneError(
            f"this server's model is a {kind}, and a delta for {head} needs weights of a head that it does not have: "
            f"serve it on a model that was loaded with the head {head}"
        )
    return chosen


def sibling(first: Backbone, head: str) -> PreTrainedModel:
    """Return a model of another class over a model's parameters; its head is empty, since deltas bring theirs."""
    chosen = sibling_class(first, head)
    config = first.attached.base_config()
    implementation = str(attention_implementation(config) or "eager").removeprefix(PREFIX)
    with torch.device("meta"):
        made = getattr(transformers, HEADS[head].auto_class).from_config(config, attn_implementation=implementation)
    _share(first, made, chosen.__name__)
    return made.requires_grad_(False).eval()


def _share(first: Backbone, made: PreTrainedModel, kind: str) -> None:
    """Give a model on the meta device the parameters and buffers of a model's inner base model, and an empty head.

    The engine's thread may be running passes meanwhile, which put the tensors of deltas into the first model.
    """
    source, target = first.model.base_model, made.base_model
    sources = dict(base_modules(source, remove_duplicate=False))
    missing = []
    for path, module in base_modules(target, remove_duplicate=False):
        other = sources.get(path)
        for leaf, parameter in list(parameters_of(module).items()):
            if parameter is None:
                continue
            counterpart = None if other is None else first.attached.state.base_parameter(other, leaf)
            if counterpart is None or counterpart.shape != parameter.shape:
                missing.append(f"{path}.{leaf}".strip("."))
            else:
                parameters_of(module)[leaf] = counterpart
        for leaf, buffer in list(buffers_of(module).items()):
            if buffer is not None and other is not None:
                buffers_of(module)[leaf] = buffers_of(other).get(leaf)
    if missing:
        raise DeltuneError(
            f"a delta for {kind} needs weights that the server's {type(first.model).__name__} does not have "
            f"({', '.join(missing[:3])}): serve it on a model that was loaded as {kind}"
        )
    inside = {module for _, module in base_modules(target)}
    like = next(base_tensors(first.model))
    for _, module in base_modules(made):
        if module not in inside:
            for tensors in (parameters_of(module), buffers_of(module)):
                for leaf, tensor in list(tensors.items()):
                    if tensor is not None and tensor.is_meta:
                        empty = torch.zeros(tensor.shape, dtype=like.dtype, device=like.device)
                        tensors[leaf] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty  # type: ignore[assignment]


@contextmanager
def replaced_output(module: nn.Module, make: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Let a module return something else inside the block, in passes of the thread that entered it."""
    thread = threading.get_ident()

    def replace(*_: Any) -> torch.Tensor | None:
        return make() if threading.get_ident() == thread else None

    hook = module.register_forward_hook(replace)
    try:
        yield
    finally:
        hook.remove()
