"""Which delta every row of a batch uses, and what follows from it at each module: all that hooks look up in a pass.

An assignment is made when a delta is put in use, or when `rows()` or `disable()` is entered, and never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from ..anatomy.types import Anatomy
from ..errors import DeltuneError, error_from_problems, excerpt, unknown_name
from ..methods.forms import Prompt
from .edit_chain import EditChain
from .model_state import ModelState
from .modules import Delta, Edit, HeadLabels
from .rows import DeltaRows, OwnTensors, active_edits, is_single
from .tensor_overrides import MaskedOverride, TensorOverride, override_by_row

BATCH_ARGUMENTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
"""Arguments of a model that have a row for each row of the batch."""

BY_ROW = ("norm.gain", "norm.bias", "linear.weight", "linear.bias")
"""Roles of tensors whose module reads a batch row by row."""


class RowAssignment:
    """What is in use, and what each module does for it.

    Attributes:
        uses: The deltas in use, each with its rows.
        rows: The delta's name, or None, for each row; empty where all rows are alike.
        standing: The delta whose tensors must stand in the model's own slots during a pass, or None for the base's.
        labels: What the logits mean.
        inputs: For each module, by path, the edits elsewhere that read what it is given.
        writes: What writes at a side of a module, by path and side.
        attention: The edits inside each attention, by path.
        states: The edits of all hidden states of a stack, by path of its container.
        prompts: The prompts of each use.
        shifts: By how much each use moves the positions of a stack's tokens, by name of the stack.
        tensors: For each module, by path, the tensors that take the place of its own.
    """

    def __init__(self, uses: Sequence[DeltaRows], standing: str | None, labels: HeadLabels) -> None:
        self.uses, self.standing, self.labels = list(uses), standing, labels
        self.rows: tuple[str | None, ...] = ()
        self.no_common_loss = self.unequal_labels = False
        self.inputs: dict[str, list[tuple[Edit, DeltaRows]]] = {}
        self.attention: dict[str, list[tuple[Edit, DeltaRows]]] = {}
        self.states: dict[str, list[tuple[Edit, DeltaRows]]] = {}
        self.tensors: dict[str, TensorOverride] = {}
        written: dict[tuple[str, str], list[tuple[Edit, DeltaRows]]] = {}
        for edit, use in active_edits(self.uses):
            target = edit.place.target
            if edit.elsewhere is not None:
                self.inputs.setdefault(edit.elsewhere, []).append((edit, use))
            if target.side == "attention":
                self.attention.setdefault(target.path, []).append((edit, use))
            elif target.side == "states":
                self.states.setdefault(target.path, []).append((edit, use))
            elif target.side != "tokens":
                written.setdefault((target.path, target.side), []).append((edit, use))
        self.writes = {key: EditChain(edits) for key, edits in written.items()}
        prompts = [(use, [e for e in use.delta.all_edits() if e.place.target.side == "tokens"]) for use in self.uses]
        self.prompts = [(use, edits) for use, edits in prompts if edits]
        self.shifts = _shifts(self.uses)
        if not is_single(self.uses) and len({prompt_form(e).positions for _, edits in self.prompts for e in edits}) > 1:
            raise DeltuneError("prompts with positions='shift' and with positions='none' cannot be in one batch")

    @classmethod
    def of_all(cls, name: str, delta: Delta, labels: HeadLabels, anatomy: Anatomy) -> RowAssignment:
        """One delta for all rows."""
        made = cls([DeltaRows(delta)], name, labels)
        masked: dict[str, dict[str, Any]] = {}
        for tensor, part in delta.masked():
            for path, leaf in owning_modules(anatomy, tensor):
                masked.setdefault(path, {})[leaf] = part
        made.tensors = {path: MaskedOverride(parts) for path, parts in masked.items()}
        return made

    @classmethod
    def of_rows(
        cls,
        names: Sequence[str | None],
        deltas: Mapping[str, Delta],
        base_labels: HeadLabels,
        anatomy: Anatomy,
        state: ModelState,
    ) -> RowAssignment:
        """A delta for each row. Errors: names that are not attached, deltas that cannot differ by row."""
        uses = _uses_of_rows(names, deltas, anatomy, state)
        labels = [use.delta.labels or base_labels for use in uses]
        labels += [base_labels] if None in names else []
        if not anatomy.head:
            labels = [base_labels]
        made = cls(uses, None, max(labels, key=lambda own: len(own.id2label)))
        made.rows = tuple(names)
        sizes, kinds = {len(known.id2label) for known in labels}, {known.problem_type for known in labels}
        made.no_common_loss = (1 in sizes and len(sizes) > 1) or len(kinds - {None}) > 1
        made.unequal_labels = len(sizes) > 1
        paths = {module: path for path, module in state.model.named_modules(remove_duplicate=False)}
        modules = dict.fromkeys(module for use in uses for module in use.own)
        made.tensors = {paths[module]: override_by_row(module, uses) for module in modules}
        return made

    def check_batch(self, arguments: Mapping[str, Any]) -> None:
        """Errors: another number of rows than there are names; labels that have no common loss."""
        if not self.rows:
            return
        encoded = arguments.get("encoder_outputs")
        sizes = (*(arguments.get(name) for name in BATCH_ARGUMENTS), None if encoded is None else encoded[0])
        first = next((tensor.shape[0] for tensor in sizes if isinstance(tensor, torch.Tensor)), None)
        if first is not None and first != len(self.rows):
            raise DeltuneError(
                f"rows() names the deltas of {len(self.rows)} rows, and a batch of {first} came: give one name (or "
                "None) for each row of the batch"
            )
        labels = arguments.get("labels")
        several = isinstance(labels, torch.Tensor) and labels.is_floating_point() and self.unequal_labels
        if labels is not None and (self.no_common_loss or several):
            raise DeltuneError(
                "the rows of this batch have different kinds of labels (classes, numbers, several at once), for which "
                "the model has no common loss; leave labels out and take the loss of each row's logits"
            )

    def check_prompts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Error: `generate` got another number of prompts than there are names; beams come later."""
        if not self.rows:
            return
        encoded = kwargs.get("encoder_outputs")
        values = (*args, *kwargs.values(), None if encoded is None else encoded[0])
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 1]
        prompts = tensors[0].shape[0] if tensors else 1
        if prompts != len(self.rows):
            raise DeltuneError(
                f"rows() names the deltas of {len(self.rows)} rows, and generate got {prompts} prompts: give one name "
                "(or None) for each prompt; its beams follow it"
            )


def prompt_form(edit: Edit) -> Prompt:
    assert isinstance(edit.modification.form, Prompt)
    return edit.modification.form


def parameter_names(module: nn.Module) -> list[str]:
    """The names of a module's arguments, in order."""
    return list(signature(type(module).forward).parameters)[1:]


def _shifts(uses: Sequence[DeltaRows]) -> dict[str, list[tuple[DeltaRows, int]]]:
    shifts: dict[str, list[tuple[DeltaRows, int]]] = {}
    for use in uses:
        each = {
            (e.place.shifted_stack, e.origin): e.modification.form.shift
            for e in use.delta.all_edits()
            if e.place.shifted_stack
        }
        for stack in dict.fromkeys(stack for stack, _ in each):
            if total := sum(shift for (of, _), shift in each.items() if of == stack):
                shifts.setdefault(stack or "", []).append((use, total))
    return shifts


def owning_modules(anatomy: Anatomy, tensor: str) -> list[tuple[str, str]]:
    """The modules that hold a tensor of the model: path and leaf of each."""
    names = next((t.name, *t.aliases) for t in anatomy.tensors if t.name == tensor)
    return [(name.rpartition(".")[0], name.rpartition(".")[2]) for name in names]


def _uses_of_rows(
    names: Sequence[str | None], deltas: Mapping[str, Delta], anatomy: Anatomy, state: ModelState
) -> list[DeltaRows]:
    if not isinstance(names, Sequence) or isinstance(names, str | bytes) or not names:
        raise DeltuneError(
            f"rows() takes a list with a delta's name, or None, for each row of the batch, not {excerpt(names)}"
        )
    if strange := [name for name in names if name is not None and not isinstance(name, str)]:
        raise DeltuneError(unknown_name("delta", strange[0], deltas, "rows()"))
    different = [name for name in dict.fromkeys(names) if name is not None]
    problems = [unknown_name("delta", name, deltas) for name in different if name not in deltas]
    uses = []
    for name in different if not problems else []:
        delta = deltas[name]
        own = {*delta.owned, *(tensor for tensor, _ in delta.masked())}
        tensors = anatomy.tensors
        shared = [t.name for t in tensors if t.name in own and (t.common or t.role not in BY_ROW) and t.area != "head"]
        if shared:
            more = f" and {len(shared) - 2} more" if len(shared) > 2 else ""
            problems.append(
                f"{name!r} ({delta.method!r}) trains {', '.join(shared[:2])}{more}, which all rows of a batch share; "
                f"use({name!r}) it for a batch of its own"
            )
        rows = tuple(i for i, other in enumerate(names) if other == name)
        uses.append(DeltaRows(delta, rows, len(names), _own_tensors(state, delta)))
    if problems:
        raise error_from_problems("these rows cannot be in one batch", problems)
    return uses


def _own_tensors(state: ModelState, delta: Delta) -> dict[nn.Module, OwnTensors]:
    """The delta's own values of the model's tensors, by the modules that hold them."""
    own: dict[nn.Module, dict[str, Callable[[], torch.Tensor]]] = {}
    for name in delta.owned:
        for module, leaf in state.slots[name]:
            own.setdefault(module, {})[leaf] = partial(state.value, delta, name)
    for name, part in delta.masked():
        for module, leaf in state.slots[name]:
            own.setdefault(module, {})[leaf] = partial(_masked_value, state, part, name)
    return {**own}


def _masked_value(state: ModelState, part: Any, name: str) -> torch.Tensor:
    value: torch.Tensor = part.on(state.original(name).detach())
    return value
