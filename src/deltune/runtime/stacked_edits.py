"""Edits of several deltas at one tensor, computed for all rows of the batch at once.

Where no tensor of a delta changes between passes, the tensors of several deltas are stacked once. A pass then has two
products in place of two for each delta. With D, U, d and e the projections and biases of the deltas beside each other,

    h ← h + m ⊙ f(u Dᵀ + d) Uᵀ + e,  then h ← h ⊙ g,

where m keeps the ranks of each row's own delta, and e and g belong to its row. Values of other deltas are replaced
by zeros, and not multiplied by them, so that nothing that is not finite crosses from one row to another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch
from torch.nn import functional as F

from ..compat import is_plain_inference
from ..methods.forms.base import TwoLayers
from ..methods.positions import ALL
from .modules import Delta, Edit
from .rows import AssignmentCache, DeltaRows, KeptByRow

MOST_OPERATIONS = 1_000_000
"""Up to so many multiplications for each delta, stacked products take less time than products of the deltas' own rows,
which cost about 30 µs each whatever their size. Measured on one core of a CPU, and used on every device."""

FACTOR_OPERATIONS = 40
"""How many multiplications of a product take as long as one of a factor, which reads and writes h for it."""

_ADDITION, _FACTOR, _LATE_ADDITION, _OTHER = range(4)
"""Stages of a stack in their order: add a change that reads x, scale h, add a change that reads h. Edits of the last
kind are no part of a stack."""


def _stage(edit: Edit) -> int:
    """Return the stage of an edit. A user's own form may override anything, and is part of no stack."""
    if edit.form.is_own:
        return _OTHER
    if edit.only_scales():
        return _FACTOR
    if (
        edit.modification.positions != ALL
        or edit.factor is None
        or not edit.is_dense
        or edit.place.widths.lookup
        or two_layers(edit) is None
    ):
        return _OTHER
    if edit.parallel:
        return _ADDITION
    return _OTHER if edit.place.target.columns is not None or edit.place.apply_norm_first else _LATE_ADDITION


def two_layers(edit: Edit) -> TwoLayers | None:
    """The two layers of an edit's form, or None for other forms."""
    return edit.form.two_layers(edit.tensors())


def is_stackable(edits: Sequence[Edit]) -> bool:
    """Whether the edits of one delta at one tensor can be part of a stack."""
    stages = [_stage(edit) for edit in edits]
    return stages == sorted(stages) and _OTHER not in stages and stages.count(_LATE_ADDITION) <= 1


class _Product:
    """The edits h + s Δh, Δh = f(u Dᵀ + d) Uᵀ + e, that read the same u."""

    def __init__(self, edits: Sequence[tuple[int, Edit]], deltas: int, h: torch.Tensor) -> None:
        def activation(part: tuple[int, Edit, TwoLayers]) -> str:
            return part[2].activation

        like = partial(torch.Tensor.to, dtype=h.dtype, device=h.device)
        pairs = [(number, edit, two_layers(edit)) for number, edit in edits]
        parts = sorted(((number, edit, two) for number, edit, two in pairs if two is not None), key=activation)
        self.edits = [edit for _, edit, _ in parts]
        self.down = torch.cat([like(layers.down) for _, _, layers in parts])
        ranks = [layers.down.shape[0] for _, _, layers in parts]
        owners = torch.tensor([number for number, _, _ in parts], device=h.device)
        owners = owners.repeat_interleave(torch.tensor(ranks, device=h.device))
        # for each delta which ranks are not its own, (deltas + 1, Σ r)
        self.others = torch.arange(deltas + 1, device=h.device)[:, None] != owners
        self.down_bias: torch.Tensor | None = None
        if any(layers.down_bias is not None for _, _, layers in parts):
            none = [h.new_zeros(rank) for rank in ranks]
            biases = [layers.down_bias for _, _, layers in parts]
            self.down_bias = torch.cat([zero if b is None else like(b) for b, zero in zip(biases, none, strict=True)])
        self.up, self.bias = h.new_zeros(sum(ranks), h.shape[-1]), None
        for (number, edit, layers), up in zip(parts, self.up.split(ranks), strict=True):
            columns = _columns_of(edit, h.shape[-1], h.device)
            assert edit.factor is not None
            up[:, columns] = like(layers.up).t() * edit.factor
            if layers.up_bias is not None:
                self.bias = h.new_zeros(deltas + 1, h.shape[-1]) if self.bias is None else self.bias
                self.bias[number, columns] += like(layers.up_bias) * edit.factor
        self.activations: list[tuple[str, slice]] = []
        end = 0
        for name, same in groupby(parts, key=activation):
            start, end = end, end + sum(layers.down.shape[0] for _, _, layers in same)
            if name != "identity":
                self.activations.append((name, slice(start, end)))
        # whether zeros in place of other deltas' values remove all that these add
        self.is_finite = bool(self.up.isfinite().all())

    def split_at_up(self, u: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return m ⊙ f(u Dᵀ + d); `others` says for each row which ranks are not its own."""
        inner = F.linear(u.to(self.down.dtype), self.down, self.down_bias)
        for name, columns in self.activations:
            inner[..., columns] = getattr(F, name)(inner[..., columns])
        return inner.masked_fill_(others, 0.0)


class EditStack:
    """The tensors of several deltas' edits of one tensor, stacked."""

    def __init__(self, edits: Mapping[tuple[Delta, ...], Sequence[Edit]], h: torch.Tensor) -> None:
        self.edits, self.like = dict(edits), _facts(h)
        # the number of the deltas that act together, mostly one, counted from 1
        self.number_of = {deltas: number for number, deltas in enumerate(edits, start=1)}
        products: dict[tuple[int, str | None], list[tuple[int, Edit]]] = {}
        self.gain: torch.Tensor | None = None
        for deltas, its_edits in edits.items():
            number = self.number_of[deltas]
            for edit in its_edits:
                stage = _stage(edit)
                assert stage != _OTHER
                if stage != _FACTOR:
                    products.setdefault((stage, edit.source_path), []).append((number, edit))
                    continue
                assert edit.factor is not None and edit.form.multiplies is not None
                self.gain = h.new_ones(len(edits) + 1, h.shape[-1]) if self.gain is None else self.gain
                gain = 1 - edit.factor + edit.factor * edit.tensors()[edit.form.multiplies].to(h.dtype)
                self.gain[number, _columns_of(edit, h.shape[-1], h.device)] *= gain
        self.before, self.after = (
            [_Product(some, len(edits), h) for (stage, _), some in products.items() if stage == of_stage]
            for of_stage in (_ADDITION, _LATE_ADDITION)
        )
        # whether nothing of a delta can reach the rows of others
        self.is_finite = all(product.is_finite for product in (*self.before, *self.after))

    def has(self, groups: Collection[tuple[Delta, ...]], h: torch.Tensor) -> bool:
        """Whether the stack covers the deltas of these groups and at most twice as many, for tensors like h."""
        few = len(self.number_of) <= MOST_OTHERS * len(groups)
        return few and self.like == _facts(h) and all(deltas in self.number_of for deltas in groups)


MOST_OTHERS = 2
"""How many times as many deltas a stack may have as the batch, so that batches of other deltas can use the same one."""


class StackedEdits:
    """The edits of one tensor that an assignment's deltas have, as far as they can be stacked.

    Attributes:
        groups: The groups whose edits can be stacked.
    """

    def __init__(
        self, place: tuple[str, str], edits: Mapping[DeltaRows, Sequence[Edit]], cache: AssignmentCache
    ) -> None:
        chains = {group: tuple(some) for group, some in edits.items() if is_stackable(some)}
        self.place, self.cache, self.groups = place, cache, tuple(chains)
        self.edits = {group.deltas: some for group, some in chains.items()}
        self.all_edits = {edit for some in chains.values() for edit in some}
        layers = [two_layers(edit) for edit in self.all_edits if not edit.only_scales()]
        self.down_size = sum(two.down.numel() for two in layers if two is not None)
        self.ranks = sum(two.down.shape[0] for two in layers if two is not None)
        self.scales = any(edit.only_scales() for edit in self.all_edits)
        self._stack: EditStack | None = None
        self._shape: object = None  # of the last tensor that `_stack` was for
        self._kept = KeptByRow()  # what is looked up in `_stack`

    def stack_for(self, h: torch.Tensor) -> EditStack | None:
        """Return the stacked tensors for a pass, or None where they cannot be used or are not faster."""
        if not self.groups or not is_plain_inference() or not h.is_floating_point():
            return None
        if torch.is_autocast_enabled(h.device.type) or any(edit.training for edit in self.all_edits):
            return None
        stack: EditStack | None = self.cache.stacks.get(self.place)
        shape = (h.shape, *_facts(h))
        if stack is not None and stack is self._stack and shape == self._shape:  # as in the pass before
            return stack if stack.is_finite else None
        width = h.shape[-1]
        operations = self.down_size + self.ranks * width + (FACTOR_OPERATIONS * width if self.scales else 0)
        if operations * (h.numel() // width) > MOST_OPERATIONS * len(self.groups):
            return None
        if stack is None or not stack.has(self.edits, h):
            stack = self._stack
        if stack is None or not stack.has(self.edits, h):
            stack = self._make(h)
        if stack is not self._stack:
            self._stack, self._kept = stack, KeptByRow()
        self._shape = shape
        return stack if stack.is_finite else None

    def _make(self, h: torch.Tensor) -> EditStack:
        """Stack the edits of the batch's deltas, and of some that the newest stack has beside them."""
        newest = self.cache.stacks.get(self.place)
        others = [] if newest is None else [deltas for deltas in newest.edits if deltas not in self.edits]
        kept = others[: (MOST_OTHERS - 1) * len(self.edits)]
        edits = {**self.edits, **{deltas: newest.edits[deltas] for deltas in kept if newest is not None}}
        stack = self.cache.stacks[self.place] = EditStack(edits, h)
        return stack

    def apply(
        self, stack: EditStack, h: torch.Tensor, read: Callable[[Edit], torch.Tensor | None], in_place: bool
    ) -> torch.Tensor:
        """Return h with the edits applied to the rows that use them."""
        for product in stack.before:
            xs = [read(edit) for edit in product.edits if edit in self.all_edits]  # the same module's input
            if xs:
                assert xs[0] is not None
                h, in_place = self._add(stack, h, product, xs[0], in_place), True
        if stack.gain is not None:
            gain = self._by_row("gain", stack, stack.gain, h)
            h, in_place = h.mul_(gain) if in_place else h * gain, True
        for product in stack.after:
            h, in_place = self._add(stack, h, product, h, in_place), True
        return h

    def _add(
        self, stack: EditStack, h: torch.Tensor, product: _Product, u: torch.Tensor, in_place: bool
    ) -> torch.Tensor:
        owners = self._by_row(product, stack, product.others, u)
        inner = product.split_at_up(u, owners).flatten(0, -2)
        if in_place and h.is_contiguous():
            h.view(-1, h.shape[-1]).addmm_(inner, product.up)
        else:
            h = h.flatten(0, -2).addmm(inner, product.up).view(h.shape)
        return h if product.bias is None else h.add_(self._by_row((product, "bias"), stack, product.bias, h))

    def _by_row(self, key: object, stack: EditStack, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The values of each row's delta, (rows, 1, …, d); kept for passes with as many rows."""

        def make() -> torch.Tensor:
            numbers = [0, *(stack.number_of[group.deltas] for group in self.groups)]
            of_rows = self.cache.numbers(self.groups, like.shape[0], like.device)
            return values[torch.tensor(numbers, device=like.device)[of_rows]]

        return self._kept.get(key, like, make)


def _columns_of(edit: Edit, width: int, device: torch.device) -> torch.Tensor | slice:
    """The columns of a tensor of a width that an edit changes."""
    columns = edit.place.target.columns
    if columns is None:
        return slice(None)
    if columns.groups == 1:
        return slice(columns.start, columns.stop)
    return torch.arange(width, device=device).view(columns.groups, -1)[:, columns.start : columns.stop].flatten()


def _facts(h: torch.Tensor) -> tuple[torch.dtype, torch.device, int]:
    return h.dtype, h.device, h.shape[-1]
