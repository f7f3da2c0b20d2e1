"""Edits of several deltas at one tensor, computed for all rows of the batch at once.

Where no tensor of a delta changes between passes, the tensors of several deltas are stacked once. A pass then has two
products in place of two for each delta. With D, U, d and e the projections and biases of the deltas beside each other,

    h ← h + m ⊙ f(u Dᵀ + d) Uᵀ + e,  then h ← h ⊙ g,

where m keeps the ranks of each row's own delta, and e and g are those of its row. Values of other deltas are replaced
by zeros, and not multiplied by them, so that nothing that is not finite crosses from one row to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch
from torch.nn import functional as F

from ..compat import transforms_active
from ..methods.forms import TwoLayers
from ..methods.registry import FORMS
from .modules import Delta, Edit
from .rows import DeltaRows

MOST_OPERATIONS = 1_000_000
"""Up to so many multiplications for each delta, stacked products take less time than products of the deltas' own rows,
which cost about 30 µs each on one core of a CPU whatever their size."""

FACTOR_OPERATIONS = 40
"""How many multiplications of a product take as long as one of a factor, which reads and writes h for it."""

Chain = tuple[DeltaRows, tuple[Edit, ...]]
"""The rows of a delta, and its edits of one tensor in their order."""

_ADDITION, _FACTOR, _LATE_ADDITION, _OTHER = range(4)
"""What an edit does, in the order in which a stack does it: add what it computes from x, scale h, add what it computes
from h. The last is no part of a stack."""


def _stage(edit: Edit) -> int:
    """What an edit does."""
    if edit.only_scales():
        return _FACTOR
    if edit.factor is None or not edit.is_dense or edit.training or edit.place.widths.lookup:
        return _OTHER
    if two_layers(edit) is None:
        return _OTHER
    if edit.parallel:
        return _ADDITION
    return _OTHER if edit.place.target.columns is not None or edit.place.apply_norm_first else _LATE_ADDITION


def two_layers(edit: Edit) -> TwoLayers | None:
    """The two layers of an edit's form, or None for other forms and for a user's own, which may override anything."""
    return edit.form.two_layers(edit.tensors()) if type(edit.form) in FORMS else None


def can_stack(edits: Sequence[Edit]) -> bool:
    """Whether the edits of one delta at one tensor can be part of a stack.

    Args:
        edits: The edits, in their order.
    """
    stages = [_stage(edit) for edit in edits]
    return stages == sorted(stages) and _OTHER not in stages and stages.count(_LATE_ADDITION) <= 1


class _Product:
    """The edits h + s Δh, Δh = f(u Dᵀ + d) Uᵀ + e, that read the same u.

    Args:
        edits: The edits, each with the number of its delta in the stack, counted from 1.
        deltas: How many deltas the stack has.
        h: A tensor like those that it will change.

    Attributes:
        is_finite: Whether zeros in place of other deltas' values remove all that these add.
    """

    def __init__(self, edits: Sequence[tuple[int, Edit]], deltas: int, h: torch.Tensor) -> None:
        def activation(part: tuple[int, Edit, TwoLayers]) -> str:
            return part[2].activation

        like = partial(torch.Tensor.to, dtype=h.dtype, device=h.device)
        pairs = [(number, edit, two_layers(edit)) for number, edit in edits]
        parts = sorted(((number, edit, two) for number, edit, two in pairs if two is not None), key=activation)
        self.edits = [edit for _, edit, _ in parts]
        self.down = torch.cat([like(layers.down) for _, _, layers in parts])
        ranks = [layers.down.shape[0] for _, _, layers in parts]
        self.owners = torch.tensor([number for number, _, _ in parts], device=h.device).repeat_interleave(
            torch.tensor(ranks, device=h.device)
        )
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
        self.is_finite = bool(self.up.isfinite().all())

    def inner(self, u: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return m ⊙ f(u Dᵀ + d); `others` says for each row which ranks are not its own."""
        inner = F.linear(u.to(self.down.dtype), self.down, self.down_bias)
        for name, columns in self.activations:
            inner[..., columns] = getattr(F, name)(inner[..., columns])
        return inner.masked_fill_(others, 0.0)


class EditStack:
    """The tensors of several deltas' edits of one tensor, stacked.

    Args:
        chains: The edits of each delta; `can_stack` is true of them.
        h: A tensor like those that they will change.

    Attributes:
        is_finite: Whether nothing of a delta can reach the rows of others.
    """

    def __init__(self, chains: Sequence[Chain], h: torch.Tensor) -> None:
        self.number_of = {group.delta: number for number, (group, _) in enumerate(chains, start=1)}
        self.like = _facts(h)
        products: dict[tuple[int, str | None], list[tuple[int, Edit]]] = {}
        self.gain: torch.Tensor | None = None
        for group, edits in chains:
            number = self.number_of[group.delta]
            for edit in edits:
                stage = _stage(edit)
                if stage != _FACTOR:
                    products.setdefault((stage, edit.source_path), []).append((number, edit))
                    continue
                assert edit.factor is not None and edit.form.multiplies is not None
                self.gain = h.new_ones(len(chains) + 1, h.shape[-1]) if self.gain is None else self.gain
                gain = 1 - edit.factor + edit.factor * edit.tensors()[edit.form.multiplies].to(h.dtype)
                self.gain[number, _columns_of(edit, h.shape[-1], h.device)] *= gain
        self.before, self.after = (
            [_Product(edits, len(chains), h) for (stage, _), edits in products.items() if stage == of_stage]
            for of_stage in (_ADDITION, _LATE_ADDITION)
        )
        self.is_finite = all(product.is_finite for product in (*self.before, *self.after))

    def has(self, chains: Sequence[Chain], h: torch.Tensor) -> bool:
        """Whether it has what a batch needs, and not much else.

        Args:
            chains: The edits of each delta of the batch.
            h: The tensor that they change.
        """
        few = len(self.number_of) <= 2 * len(chains)
        return few and self.like == _facts(h) and all(group.delta in self.number_of for group, _ in chains)


Stacks = dict[tuple[str, str], EditStack]
"""By path and side of the edits' module."""


class RowStacks:
    """What the stacked edits of one assignment share.

    Args:
        stacks: The stacks that were made for earlier assignments; new ones are added.
    """

    def __init__(self, stacks: Stacks) -> None:
        self.stacks = stacks
        self._numbers: dict[tuple[tuple[Delta, ...], int, torch.device], torch.Tensor] = {}

    def numbers(self, stack: EditStack, groups: Sequence[DeltaRows], size: int, device: torch.device) -> torch.Tensor:
        """Return the number of each row's delta in a stack, 0 for rows of other deltas, (size,)."""
        key = ((*stack.number_of, *(group.delta for group in groups)), size, device)
        if key not in self._numbers:
            numbers = torch.zeros(size, dtype=torch.long, device=device)
            for group in groups:
                numbers[group.index(size, device)] = stack.number_of[group.delta]
            self._numbers[key] = numbers
        return self._numbers[key]


class StackedEdits:
    """The edits of those deltas of an assignment that are stacked at one tensor.

    Args:
        stack: Their tensors.
        chains: The edits of each delta, and its rows.
        rows: What the stacked edits of the assignment share.
    """

    def __init__(self, stack: EditStack, chains: Sequence[Chain], rows: RowStacks) -> None:
        self.stack, self.rows = stack, rows
        self.groups = tuple(group for group, _ in chains)
        edits = {edit for _, edits in chains for edit in edits}
        self.readers = [[edit for edit in product.edits if edit in edits] for product in stack.before]
        self._kept: dict[tuple[int, int], torch.Tensor] = {}  # by what is looked up by row, and the number of rows

    def apply(self, h: torch.Tensor, read: Callable[[Edit], torch.Tensor | None], in_place: bool) -> torch.Tensor:
        """Return h with the edits applied to the rows that use them.

        Args:
            h: The tensor.
            read: Returns the x of an edit, for all rows, and is called once for each.
            in_place: Whether h may be overwritten.
        """
        for product, readers in zip(self.stack.before, self.readers, strict=True):
            xs = [read(edit) for edit in readers]  # they read the same module's input
            if xs:
                assert xs[0] is not None
                h, in_place = self._add(h, product, xs[0], in_place), True
        if self.stack.gain is not None:
            gain = self._by_row(self.stack.gain, h)
            h, in_place = h.mul_(gain) if in_place else h * gain, True
        for product in self.stack.after:
            h, in_place = self._add(h, product, h, in_place), True
        return h

    def _add(self, h: torch.Tensor, product: _Product, u: torch.Tensor, in_place: bool) -> torch.Tensor:
        inner = product.inner(u, self._others(product, u)).flatten(0, -2)
        if in_place and h.is_contiguous():
            h.view(-1, h.shape[-1]).addmm_(inner, product.up)
        else:
            h = h.flatten(0, -2).addmm(inner, product.up).view(h.shape)
        return h if product.bias is None else h.add_(self._by_row(product.bias, h))

    def _others(self, product: _Product, u: torch.Tensor) -> torch.Tensor:
        """Which ranks are not those of each row's own delta, (rows, 1, …, Σ r)."""
        key = (id(product), u.shape[0])
        if key not in self._kept:
            self._kept[key] = self._numbers(u)[:, None] != product.owners
        return _with_tokens(self._kept[key], u)

    def _by_row(self, values: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """The values of each row, (rows, 1, …, d)."""
        key = (id(values), h.shape[0])
        if key not in self._kept:
            self._kept[key] = values[self._numbers(h)]
        return _with_tokens(self._kept[key], h)

    def _numbers(self, like: torch.Tensor) -> torch.Tensor:
        return self.rows.numbers(self.stack, self.groups, like.shape[0], like.device)


class EditStacker:
    """Chooses for each pass which deltas' edits of one tensor are stacked.

    Args:
        place: The path and side of the edits' module.
        edits: The edits of each delta.
        rows: What the stacked edits of the assignment share.
    """

    def __init__(self, place: tuple[str, str], edits: Mapping[DeltaRows, Sequence[Edit]], rows: RowStacks) -> None:
        self.place, self.rows = place, rows
        self.chains: list[Chain] = [(group, tuple(some)) for group, some in edits.items() if can_stack(some)]
        edits_of_chains = [edit for _, some in self.chains for edit in some]
        layers = [two_layers(edit) for edit in edits_of_chains]
        self.operations = sum(two.down.numel() + two.up.numel() for two in layers if two is not None)
        self.scales = any(edit.only_scales() for edit in edits_of_chains)
        self._stacked: StackedEdits | None = None

    def stacked(self, h: torch.Tensor) -> StackedEdits | None:
        """Return the edits that are stacked for a tensor, or None where others are faster.

        Args:
            h: The tensor.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or transforms_active():
            return None
        if torch.is_autocast_enabled(h.device.type) or not h.is_floating_point():
            return None
        operations = self.operations + (FACTOR_OPERATIONS * h.shape[-1] if self.scales else 0)
        if operations * (h.numel() // h.shape[-1]) > MOST_OPERATIONS * len(self.chains) or not self.chains:
            return None
        if self._stacked is None or not self._stacked.stack.has(self.chains, h):
            stack = self.rows.stacks.get(self.place)
            if stack is None or not stack.has(self.chains, h):
                stack = self.rows.stacks[self.place] = EditStack(self.chains, h)
            self._stacked = StackedEdits(stack, self.chains, self.rows)
        return self._stacked if self._stacked.stack.is_finite else None


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


def _with_tokens(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values of rows (rows, d) with as many dimensions as a tensor (rows, …, d)."""
    return values.view(values.shape[0], *(1,) * (like.dim() - 2), values.shape[-1])
