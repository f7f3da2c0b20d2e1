"""`RowAssignment`: which delta each row of a batch uses, and which edits each hook therefore applies, in which order.

An assignment is made when a delta is put in use, or when `rows()` or `disable()` is entered, and never changes. All
edits of one tensor are applied in their order; edits of the parts of a fused projection are applied as one.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn

from ..anatomy.offloading import call_with_weights
from ..anatomy.types import Anatomy, is_inside
from ..errors import DeltuneError, error_from_problems, excerpt, first_names
from ..methods.forms.base import TEXT
from ..methods.forms.prompt import Prompt
from ..methods.masks import RowMask
from ..methods.positions import ALL
from ..methods.resolve import edit_conflicts
from .cached_prompts import identity_of
from .model_state import ModelState
from .modules import Delta, Edit, HeadLabels, ModuleCall, ReadInput, input_reader
from .rows import (
    AssignmentCache,
    Change,
    ChangedTensors,
    DeltaRows,
    SubstitutedTensors,
    TensorGetters,
    TensorOverride,
    active_edits,
    all_rows_alike,
    changed_tensor,
    combine_rows,
    override_by_row,
)
from .stacked_edits import EditStack, StackedEdits

Inputs = dict[Edit, torch.Tensor]
"""The inputs of other modules in a pass, by the edit that uses them; an edit removes its own."""


NO_FACTS: Mapping[Any, torch.Tensor] = {}

Names = str | tuple[str, ...] | None
"""What a row uses: the name of a delta, the names of several that act together, or None for the base model."""


@dataclass(frozen=True)
class Use:
    """What `use` and `rows` were told."""

    names: Names = None  # what all rows use
    rows: tuple[Names, ...] = ()  # what each row uses inside `rows()`; otherwise empty
    train: tuple[str, ...] | None = None  # which deltas train; None for all
    # the delta whose head answers where several act together; None where one alone has a head that trains
    head: str | None = None

    @property
    def deltas(self) -> frozenset[str]:
        return frozenset(name for names in (self.names, *self.rows) for name in each_name(names))


def each_name(names: Names) -> tuple[str, ...]:
    """Return the names of the deltas of a row."""
    return () if names is None else names if isinstance(names, tuple) else (names,)


def checked_names(names: object, where: str) -> Names:
    """Return what a row uses, as `use` and `rows` are given it."""
    if names is None or isinstance(names, str):
        return names
    several = names if isinstance(names, list | tuple) else ()
    if not several or not all(isinstance(name, str) for name in several) or len(set(several)) < len(several):
        raise DeltuneError(
            f"{where} was given {excerpt(names)}: give the name of a delta, a list of several that act together, each "
            "once, or None for the base model"
        )
    return several[0] if len(several) == 1 else tuple(several)


@dataclass(frozen=True)
class FusedEdits:
    """Edits of the parts of a fused projection, whose output is split and concatenated once for all of them."""

    groups: int  # the number of equal blocks of the output
    ends: tuple[int, ...]  # where the parts of a block end, except for the last
    edits: tuple[tuple[int, tuple[Edit, ...]], ...]  # the edits of each part, with the part's number
    # whether all edits only scale. They are then applied to a vector of ones, and the output is multiplied by the
    # result.
    multiplying: bool

    @classmethod
    def of(cls, edits: Sequence[Edit], groups: int) -> FusedEdits:
        """Group the edits of a fused projection by part; the columns of query, key and value do not overlap."""
        columns = [edit.place.target.columns for edit in edits]
        chosen = [part for part in dict.fromkeys(columns) if part is not None]
        ends = sorted({end for part in chosen for end in (part.start, part.stop)} - {0})
        edits_of_parts = (
            tuple(edit for edit, other in zip(edits, columns, strict=True) if other == part) for part in chosen
        )
        numbered = tuple(zip([bisect(ends, part.start) for part in chosen], edits_of_parts, strict=True))
        return cls(groups, tuple(ends), numbered, all(edit.only_scales() for edit in edits))

    def apply_to(self, h: torch.Tensor, call: ModuleCall, read: ReadInput, out: torch.Tensor | None) -> torch.Tensor:
        """Return h with the edits of all parts, from the arguments of `Edit.apply_to`."""
        if self.multiplying:
            factors = self._apply(h.new_ones(h.shape[-1]), call, read)
            return h * factors if out is None else out.mul_(factors)
        if out is None or self.groups > 1:
            return self._apply(h, call, read)
        return self._apply_in_place(out, call, read)

    def _apply_in_place(self, h: torch.Tensor, call: ModuleCall, read: ReadInput) -> torch.Tensor:
        parts = h.split(self._widths(h), dim=-1)
        for number, edits in self.edits:
            for edit in edits:
                changed = edit.apply_to(parts[number], call, read, parts[number])
                if changed is not parts[number]:
                    parts[number].copy_(changed)
        return h

    def _apply(self, h: torch.Tensor, call: ModuleCall, read: ReadInput) -> torch.Tensor:
        blocks = self._to_blocks(h)
        parts = list(blocks.split(self._widths(blocks), dim=-1))
        for number, edits in self.edits:
            part = self._from_blocks(parts[number])
            for edit in edits:
                part = edit.apply_to(part, call, read, None)
            parts[number] = self._to_blocks(part)
        return self._from_blocks(torch.cat(parts, dim=-1))

    def _to_blocks(self, flat: torch.Tensor) -> torch.Tensor:
        return flat if self.groups == 1 else flat.unflatten(-1, (self.groups, -1))

    def _from_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks if self.groups == 1 else blocks.flatten(-2)

    def _widths(self, block: torch.Tensor) -> list[int]:
        return [stop - start for start, stop in pairwise((0, *self.ends, block.shape[-1]))]


def group_fused_projections(edits: Iterable[Edit]) -> list[Edit | FusedEdits]:
    """Group consecutive edits of the parts of a fused projection; the order is kept."""
    chain: list[Edit | FusedEdits] = []
    for block_count, group in groupby(edits, key=_block_count):
        group_edits = list(group)
        chain += [FusedEdits.of(group_edits, block_count)] if block_count else group_edits
    return chain


def _block_count(edit: Edit) -> int:
    columns = edit.place.target.columns
    return 0 if columns is None else columns.groups


class EditChain:
    """The edits in use that change the input or the output of one module.

    Everything that is known before a pass is computed here, so that torch.compile can unroll the loop over them.
    """

    def __init__(
        self, edits: Sequence[tuple[Edit, DeltaRows]], place: tuple[str, str], cache: AssignmentCache | None = None
    ) -> None:
        edits_of_groups = {
            group: [edit for edit, its in edits if its is group] for group in dict.fromkeys(group for _, group in edits)
        }
        self.groups = tuple(edits_of_groups)
        alike = all_rows_alike(self.groups)
        self.for_all_rows = (
            [one for some in edits_of_groups.values() for one in group_fused_projections(some)] if alike else []
        )
        self.by_group = (
            [] if alike else [(group, group_fused_projections(some)) for group, some in edits_of_groups.items()]
        )
        self.reads_weight = any(edit.form.reads_weight for edit, _ in edits)
        changed = {n for group in edits_of_groups for delta in group.deltas for n, _ in delta.weight_edits()}
        self.by_base = f"{place[0]}.weight" not in changed
        self.stacked = None if alike or cache is None else StackedEdits(place, edits_of_groups, cache)

    def apply(
        self,
        h: torch.Tensor,
        module: nn.Module,
        inputs: Inputs,
        module_input: torch.Tensor | None = None,
        in_place: bool = False,
        facts: Mapping[Any, torch.Tensor] = NO_FACTS,
    ) -> torch.Tensor:
        """Return h with the edits applied, each to the rows that use it."""
        read = input_reader(inputs, module_input)
        if self.by_group:
            return self._row_by_row(h, module, read, in_place, facts)
        in_place = in_place and not self.reads_weight  # what the module has computed is read by every edit
        whole, output = h, h if self.reads_weight else None
        call = ModuleCall(module, module.forward, output, self._by_base(module), facts)
        for one in self.for_all_rows:  # only h itself may be overwritten, not the result of an edit
            h = one.apply_to(h, call, read, h if in_place and h is whole else None)
        return h

    def _by_base(self, module: nn.Module) -> bool:
        """Whether the module has computed with the base's tensors for all rows."""
        return self.by_base and not any(module in group.overrides for group in self.groups)

    def _row_by_row(
        self, h: torch.Tensor, module: nn.Module, read: ReadInput, in_place: bool, facts: Mapping[Any, torch.Tensor]
    ) -> torch.Tensor:
        chains = self.by_group
        stack = None if self.stacked is None else self.stacked.stack_for(h)
        if self.stacked is not None and stack is not None:
            h, in_place = self.stacked.apply(stack, h, read, in_place), True
            chains = [chain for chain in chains if chain[0] not in self.stacked.groups]
        in_place = in_place and h.is_contiguous()  # so that the rows of a group are a view that can be flattened
        parts: dict[DeltaRows, torch.Tensor] = {}
        for group, chain in chains:
            rows = part = group.select(h)
            overwritten = in_place and group.selects_view
            read_rows = _RowReader(group, read)
            output = rows if self.reads_weight else None
            of_rows = {name: group.select(fact) for name, fact in facts.items()}
            call = ModuleCall(module, partial(_forward_of, group, module), output, self._by_base(module), of_rows)
            for one in chain:  # each may read what the module has computed for these rows
                can_overwrite = overwritten and part is rows and not self.reads_weight
                part = one.apply_to(part, call, read_rows, part if can_overwrite else None)
            if not overwritten:
                parts[group] = part
            elif part is not rows:
                rows.copy_(part)
        return combine_rows(h, parts) if parts else h


class _RowReader:
    """Reads the x of edits for the rows of one group."""

    def __init__(self, group: DeltaRows, read: ReadInput) -> None:
        self.group, self.read = group, read
        self.module_input: torch.Tensor | None = None

    def __call__(self, edit: Edit) -> torch.Tensor | None:
        x = self.read(edit)
        if x is None or not edit.reads_own_input:
            return None if x is None else self.group.select(x)
        if self.module_input is None:
            self.module_input = self.group.select(x)
        return self.module_input


def _forward_of(group: DeltaRows, module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = call_with_weights(module, group.forward_of(module), h)
    return output


BATCH_ARGUMENTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
"""The arguments of a model that have one row for each row of the batch."""

BY_ROW = ("norm.gain", "norm.bias", "linear.weight", "linear.bias")
"""The roles of tensors whose module treats each row of a batch separately."""


class RowAssignment:
    """The deltas in use by row, and for each module the edits and tensors that follow from them.

    Attributes:
        groups: The deltas in use, each with its rows.
        placed_delta: The delta whose tensors must be in the model's own slots during a pass, or None for the
            base's.
        labels: The labels of the logits.
        prompt_identity: Tells a cache that holds the rows of these prompts from others.
        explicit_positions: Whether the caller gives positions and a mask of all columns of the cache, whose number
            then says nothing about positions.
    """

    def __init__(
        self,
        groups: Sequence[DeltaRows],
        placed_delta: str | None,
        labels: HeadLabels,
        cache: AssignmentCache | None = None,
        left_out: Collection[Edit] | None = None,
    ) -> None:
        self.explicit_positions, left_out = left_out is not None, left_out or ()
        self.groups, self.placed_delta, self.labels = list(groups), placed_delta, labels
        self.used = Use()  # what `use` or `rows` was told
        self.no_common_loss = self.unequal_labels = False
        # the prefixes of all rows, by path of the attention, where no tensor changes; else None
        self.prefixes: dict[str, Any] | None = None
        # for each module, by path, the edits of other modules that read its input
        self.inputs: dict[str, list[tuple[Edit, DeltaRows]]] = {}
        self.attention: dict[str, list[tuple[Edit, DeltaRows]]] = {}  # the edits inside each attention, by path
        # the edits that read all hidden states of a stack, by path of its container
        self.states: dict[str, list[tuple[Edit, DeltaRows]]] = {}
        # for each module, by path, how it runs with tensors of deltas instead of its own
        self.tensors: dict[str, TensorOverride] = {}
        written: dict[tuple[str, str], list[tuple[Edit, DeltaRows]]] = {}
        for edit, group in active_edits(self.groups):
            if edit in left_out:
                continue
            target = edit.place.target
            if edit.source_path is not None:
                self.inputs.setdefault(edit.source_path, []).append((edit, group))
            if target.side == "attention":
                self.attention.setdefault(target.path, []).append((edit, group))
            elif target.side == "states":
                self.states.setdefault(target.path, []).append((edit, group))
            elif target.side not in ("tokens", "weight"):
                written.setdefault((target.path, target.side), []).append((edit, group))
        chosen = (edit.modification.positions for edit, _ in active_edits(self.groups) if edit not in left_out)
        # what chooses the tokens of edits that do not act at all of them, and `TEXT` where some read the text
        self.positions = tuple(dict.fromkeys(positions for positions in chosen if positions != ALL))
        if any(edit.form.reads_text for edit, _ in active_edits(self.groups) if edit not in left_out):
            self.positions = (*self.positions, TEXT)
        # whether some edit reads the hidden states of a first pass
        self.reads_first_pass = any(
            edit.form.reads_first_pass for edit, _ in active_edits(self.groups) if edit not in left_out
        )
        # the edits of a module's input or output, by path and side
        self.writes = {place: EditChain(edits, place, cache) for place, edits in written.items()}
        prompts = [
            (group, [e for e in group.all_edits() if e.place.target.side == "tokens" and e not in left_out])
            for group in self.groups
        ]
        self.prompts = [(group, edits) for group, edits in prompts if edits]  # the prompts of each group
        self.prompt_identity = identity_of(self.prompts)  # here, since torch.compile does not trace how they are named
        # the groups whose head reads something else than the class's pooler gives
        self.pooled = [group for group in self.groups if group.pooling != "model"]
        # by how much each group shifts the positions of a stack's tokens, by name of the stack
        self.shifts = _shifts(self.groups)
        if (
            not all_rows_alike(self.groups)
            and len({prompt_form(e).positions for _, edits in self.prompts for e in edits}) > 1
        ):
            raise DeltuneError("prompts with positions='shift' and with positions='none' cannot be in one batch")

    @property
    def rows(self) -> tuple[Names, ...]:
        """What each row uses; empty where all rows use the same."""
        return self.used.rows

    @classmethod
    def of_all(
        cls, use: Use, base_labels: HeadLabels, cache: DeltaCache, left_out: Collection[Edit] | None = None
    ) -> RowAssignment:
        """Assign one delta to all rows, or several that act together."""
        state, names = cache.state, each_name(use.names)
        frozen = frozenset(state.delta(name) for name in names if use.train is not None and name not in use.train)
        if len(names) > 1:
            group, labels = _together(names, use.head, cache, frozen=frozen)
            assignment = cls([group], None, labels or base_labels, left_out=left_out)
            assignment.tensors = {state.paths[m]: SubstitutedTensors(getters) for m, getters in group.overrides.items()}
        else:
            delta = state.delta(names[0])
            group = DeltaRows((delta,), frozen=frozen, pooling=delta.pooling)
            assignment = cls([group], names[0], delta.labels or base_labels, left_out=left_out)
            changed: dict[nn.Module, dict[str, list[Change]]] = {}
            for (module, leaf), (_, changes) in _changes_of(state, delta).items():
                changed.setdefault(module, {})[leaf] = changes
            assignment.tensors = {state.paths[module]: ChangedTensors(parts) for module, parts in changed.items()}
        assignment.used = use
        return assignment

    @classmethod
    def of_rows(
        cls,
        use: Use,
        base_labels: HeadLabels,
        cache: DeltaCache,
        constant: bool = False,
        left_out: Collection[Edit] | None = None,
    ) -> RowAssignment:
        """Assign a delta, or several that act together, to each row."""
        groups, heads = _group_rows(use, cache)
        labels = [head or base_labels for head in heads]
        labels += [base_labels] if None in use.rows else []
        if not cache.anatomy.head:
            labels = [base_labels]
        widest = max(labels, key=lambda head: len(head.id2label))
        shared = AssignmentCache(constant, cache.stacks)
        assignment = cls(groups, None, widest, shared if constant else None, left_out)
        assignment.used = use
        sizes, kinds = {len(head.id2label) for head in labels}, {head.problem_type for head in labels}
        assignment.no_common_loss = (1 in sizes and len(sizes) > 1) or len(kinds - {None}) > 1
        assignment.unequal_labels = len(sizes) > 1
        modules = dict.fromkeys(module for group in groups for module in group.overrides)
        assignment.tensors = {cache.state.paths[m]: override_by_row(m, groups, shared) for m in modules}
        assignment.prefixes = {} if constant else None
        return assignment

    def check_batch(self, arguments: Mapping[str, Any]) -> None:
        """Check the arguments of a model call."""
        if not self.rows:
            return
        encoded = arguments.get("encoder_outputs")
        sizes = (*(arguments.get(name) for name in BATCH_ARGUMENTS), None if encoded is None else encoded[0])
        first = next((tensor.shape[0] for tensor in sizes if isinstance(tensor, torch.Tensor)), None)
        if first is not None and first != len(self.rows):
            raise DeltuneError(
                f"rows() was given {len(self.rows)} names, but the batch has {first} rows: give one name (or None) for "
                "each row of the batch"
            )
        labels = arguments.get("labels")
        is_multi_label = isinstance(labels, torch.Tensor) and labels.is_floating_point() and self.unequal_labels
        if labels is not None and (self.no_common_loss or is_multi_label):
            raise DeltuneError(
                "the rows of this batch have different kinds of labels (classes, numbers, several classes at once), "
                "for which the model has no common loss: leave labels out, and compute the loss from each row's logits"
            )

    def check_prompts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check the arguments of `generate`, before beams are made."""
        if not self.rows:
            return
        encoded = kwargs.get("encoder_outputs")
        values = (*args, *kwargs.values(), None if encoded is None else encoded[0])
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 1]
        prompts = tensors[0].shape[0] if tensors else 1
        if prompts != len(self.rows):
            raise DeltuneError(
                f"rows() was given {len(self.rows)} names, but generate got {prompts} prompts: give one name (or None) "
                "for each prompt; all of its beams use it"
            )


def prompt_form(edit: Edit) -> Prompt:
    assert isinstance(edit.modification.form, Prompt)
    return edit.modification.form


def parameter_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward, in order."""
    return list(signature(type(module).forward).parameters)[1:]


def name_arguments(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name; `names` are the function's, in order."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _shifts(groups: Sequence[DeltaRows]) -> dict[str, list[tuple[DeltaRows, int]]]:
    shifts: dict[str, list[tuple[DeltaRows, int]]] = {}
    for group in groups:
        each = {
            (e.place.shifted_stack, number, e.origin): e.modification.form.shift
            for number, delta in enumerate(group.deltas)
            for e in delta.all_edits()
            if e.place.shifted_stack
        }
        for stack in dict.fromkeys(stack for stack, _, _ in each):
            if total := sum(shift for (of, _, _), shift in each.items() if of == stack):
                shifts.setdefault(stack or "", []).append((group, total))
    return shifts


def owning_modules(anatomy: Anatomy, tensor: str) -> list[tuple[str, str]]:
    """Return the modules that hold a tensor of the model, as (path, parameter name); a tied tensor has several."""
    names = (tensor, *anatomy.tensor(tensor).aliases)
    return [(name.rpartition(".")[0], name.rpartition(".")[2]) for name in names]


@dataclass(frozen=True)
class DeltaFacts:
    """What every assignment of rows needs to know of a delta."""

    shared: tuple[str, ...]  # the tensors of the delta that all rows of a batch share
    # the modules that it changes whose tensors do not have the rows of the batch as their first axis
    not_by_row: tuple[str, ...]
    overrides: dict[nn.Module, TensorGetters]  # its own values of the model's tensors, by the modules that hold them


class DeltaCache:
    """Facts about a model and its deltas that every assignment of rows needs, each kept until its delta is detached."""

    def __init__(self, anatomy: Anatomy, state: ModelState) -> None:
        self.anatomy, self.state = anatomy, state
        # the stacked tensors of the edits of deltas that were in a batch together, for passes without
        # gradients
        self.stacks: dict[tuple[str, str], EditStack] = {}
        self._of: dict[Delta, DeltaFacts] = {}

    def forget(self, delta: Delta) -> None:
        """Forget a delta that is detached."""
        self._of.pop(delta, None)
        for place, stack in list(self.stacks.items()):
            if any(delta in deltas for deltas in stack.number_of):
                del self.stacks[place]

    def facts_of(self, name: str) -> DeltaFacts:
        delta, anatomy = self.state.delta(name), self.anatomy
        if delta not in self._of:
            names = {*delta.owned_tensor_names, *(tensor for tensor, _ in delta.masked_tensors())}
            by_token = {tensor.name for tensor, mask in delta.planned.masked if isinstance(mask, RowMask)}
            shared = tuple(
                t.name
                for t in anatomy.tensors
                if t.name in names
                and (t.batch_independent or (t.role not in BY_ROW and t.name not in by_token))
                and t.area != "head"
            )
            not_by_row = _modules_not_by_row(delta, names, anatomy)
            self._of[delta] = DeltaFacts(shared, not_by_row, _overrides_of(self.state, delta))
        return self._of[delta]


def _modules_not_by_row(delta: Delta, names: Iterable[str], anatomy: Anatomy) -> tuple[str, ...]:
    """Return the modules that a delta changes whose tensors do not have the rows of the batch as their first axis."""
    parts = (anatomy, *anatomy.other_towers)
    changed = [path for name in names for path, _ in owning_modules(anatomy, name)]
    for edit in delta.all_edits():
        target = edit.place.target.path
        changed += [target, *([edit.source_path] if edit.source_path else [])]
        if edit.place.target.side == "states":
            changed += [layer.path for part in parts for layer in part.layers if is_inside(layer.path, target)]
    return tuple(dict.fromkeys(path for part in parts for path in part.not_by_row if path in {*changed}))


def head_of(names: tuple[str, ...], deltas: Mapping[str, Delta], head: str | None) -> str | None:
    """Return which of deltas that act together has the head that answers; None where none has one.

    Raises:
        DeltuneError: Several have one, and `head` names none of them.
    """
    having = [name for name in names if deltas[name].head]
    candidates = [name for name in having if deltas[name].head_mode == "train"] or having
    if head is not None and head not in having:
        raise DeltuneError(f"head_of={excerpt(head)}: it is the head of one of {', '.join(having) or 'no delta here'}")
    if head is None and len(candidates) > 1:
        raise DeltuneError(
            f"{' and '.join(map(repr, candidates))} each have a head, and one can answer: name it, "
            f"head_of={candidates[0]!r} (deltune combine … --head-of {candidates[0]})"
        )
    return head or next(iter(candidates), None)


def _together(
    some: tuple[str, ...],
    head: str | None,
    cache: DeltaCache,
    rows: tuple[int, ...] | None = None,
    size: int = 0,
    frozen: frozenset[Delta] = frozenset(),
) -> tuple[DeltaRows, HeadLabels | None]:
    """Return the group of rows that use some deltas, and the labels of the head that answers; None for the model's own.

    In place of the model's own tensors they have W + Σ (W_i - W) where several deltas have a W_i.
    """
    anatomy, state = cache.anatomy, cache.state
    deltas = {name: state.delta(name) for name in some}
    make = partial(DeltaRows, tuple(deltas.values()), rows, size, frozen=frozen)
    if len(some) == 1:
        delta = deltas[some[0]]
        return make(overrides=cache.facts_of(some[0]).overrides, pooling=delta.pooling), delta.labels
    answering = head_of(some, deltas, head)
    problems = list(edit_conflicts(edit for name in some for edit in deltas[name].planned.edits))
    values: dict[tuple[nn.Module, str], list[Callable[[], torch.Tensor]]] = {}
    for name in some:
        delta = deltas[name]
        of_head = {place for tensor in delta.head for place in state.slots[tensor]}
        directly = [t for t in delta.owned_tensor_names if t not in delta.head and anatomy.tensor(t).read_without_call]
        if directly:
            problems.append(
                f"{name!r} ({delta.method!r}) trains {first_names(directly, 2)}, which the model reads directly and "
                "not by calling its module: merge it, and load the others on the merged model"
            )
        for module, getters in cache.facts_of(name).overrides.items():
            for leaf, value in getters.items():
                if name == answering or (module, leaf) not in of_head:
                    values.setdefault((module, leaf), []).append(value)
    if problems:
        raise error_from_problems(f"{' and '.join(map(repr, some))} cannot act together", problems)
    overrides: dict[nn.Module, dict[str, Callable[[], torch.Tensor]]] = {}
    for (module, leaf), each in values.items():
        summed = partial(_sum_of_changes, partial(state.base_parameter, module, leaf), each)
        overrides.setdefault(module, {})[leaf] = each[0] if len(each) == 1 else summed
    if answering is None:
        return make(overrides=overrides), None
    return make(overrides=overrides, pooling=deltas[answering].pooling), deltas[answering].labels


def _sum_of_changes(base: Callable[[], Any], values: Sequence[Callable[[], torch.Tensor]]) -> torch.Tensor:
    """Return W + Σ (W_i - W)."""
    whole: torch.Tensor = base().detach()
    return sum((value() - whole for value in values), whole)


def _group_rows(use: Use, cache: DeltaCache) -> tuple[list[DeltaRows], list[HeadLabels | None]]:
    """Return the groups of rows that use the same, and the labels of each group's head."""
    unique = dict.fromkeys(names for names in use.rows if names is not None)
    problems: list[str] = []
    groups: list[DeltaRows] = []
    labels: list[HeadLabels | None] = []
    for name in dict.fromkeys(name for names in unique for name in each_name(names)):
        delta, facts = cache.state.delta(name), cache.facts_of(name)
        shared = facts.shared
        if facts.not_by_row and not shared:
            problems.append(
                f"{name!r} ({delta.method!r}) changes {first_names(facts.not_by_row, 1)}, whose hidden states are not "
                "in the order of the batch's rows (their first axis is the length, or they are tokens that a router "
                f"chose); call use({name!r}) and run its rows in a batch of their own"
            )
        if all_rows := [edit.place.name for edit in delta.all_edits() if not edit.place.can_differ_by_row]:
            problems.append(
                f"{name!r} ({delta.method!r}) changes {all_rows[0]}, whose module reads something that all rows of a "
                f"batch share, or copies of the rows in an order of its own; call use({name!r}) and run its rows in a "
                "batch of their own"
            )
        if shared:
            problems.append(
                f"{name!r} ({delta.method!r}) trains {first_names(shared, 2)}, which all rows of a batch share; "
                f"call use({name!r}) and run its rows in a batch of their own"
            )
    for names in unique if not problems else ():
        rows = tuple(i for i, other in enumerate(use.rows) if other == names)
        some = each_name(names)
        try:
            group, of_head = _together(some, use.head if use.head in some else None, cache, rows, len(use.rows))
        except DeltuneError as error:
            problems.append(str(error))
        else:
            groups.append(group)
            labels.append(of_head)
    if problems:
        raise error_from_problems("these deltas cannot be used in one batch", problems)
    return groups, labels


def _changes_of(state: ModelState, delta: Delta) -> dict[tuple[nn.Module, str], tuple[str, list[Change]]]:
    """What a delta changes of the model's tensors, by where they are, with their names."""
    changes: dict[tuple[nn.Module, str], tuple[str, list[Change]]] = {}
    for name, part in delta.masked_tensors():
        changes |= {place: (name, [part]) for place in state.slots[name]}
    for name, edit in delta.weight_edits():
        path, _, leaf = name.rpartition(".")
        changes.setdefault((state.model.get_submodule(path), leaf), (name, []))[1].append(edit)
    return changes


def _overrides_of(state: ModelState, delta: Delta) -> dict[nn.Module, TensorGetters]:
    """The delta's own values of the model's tensors, by the modules that hold them."""
    overrides: dict[nn.Module, dict[str, Callable[[], torch.Tensor]]] = {}
    for name in delta.owned_tensor_names:
        for module, leaf in state.slots[name]:
            overrides.setdefault(module, {})[leaf] = partial(state.delta_value, delta, name)
    for (module, leaf), (name, changes) in _changes_of(state, delta).items():
        unchanged = overrides.setdefault(module, {}).get(leaf, partial(state.base_value, name))
        overrides[module][leaf] = partial(_changed_value, unchanged, changes)
    return {**overrides}


def _changed_value(unchanged: Callable[[], torch.Tensor], changes: Sequence[Change]) -> torch.Tensor:
    return changed_tensor(unchanged(), changes)
