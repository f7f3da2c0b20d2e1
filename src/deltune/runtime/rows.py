"""Groups of batch rows that use the same delta: operations on their rows, and modules run with the delta's tensors.

A row of the batch may be several consecutive rows of a tensor: the beams of generation, or a batch whose rows and
tokens are one axis. Where a delta has its own tensors of a module, `module.forward` is replaced by an object that
computes with the tensors the pass needs: different ones for each row, or partly trained ones. The module keeps its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import nn

from ..compat import (
    backward_id,
    hooks_of_tensor,
    is_plain_inference,
    parameters_of,
    replace_parameters,
    when_backward_ends,
)
from ..errors import DeltuneError
from ..models import Pooling
from .hard_concrete import GatedDifference
from .linear import linear_forward
from .modules import Delta, Edit, SparseParameter

TensorGetters = Mapping[str, Callable[[], torch.Tensor]]
"""By parameter name, functions that return a delta's own values of a module's parameters."""


def forward_with(module: nn.Module, tensors: Mapping[str, torch.Tensor | None], *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward with other tensors in place of some of its parameters.

    The module itself is not changed, so other threads may run it at the same time: a copy of its attributes is run.
    """
    twin = module
    if tensors:
        twin = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        replace_parameters(twin, {**parameters_of(module), **tensors})
    linear = linear_forward(module)
    forward = type(module).forward if linear is None else linear.run
    return forward(twin, *args, **kwargs)


Indices = dict[tuple[int, torch.device], torch.Tensor]
"""Index tensors by the number of rows and the device of what they are for."""


def _made_once(made: Indices, size: int, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the index tensor for tensors of `size` rows on a device."""
    if (size, device) not in made:
        with torch.inference_mode(False):  # the index is also used in training
            index = make()
        if torch.compiler.is_exporting():  # such a tensor has no values, so it is not cached
            return index
        made[size, device] = index
    return made[size, device]


@dataclass(eq=False)
class DeltaRows:
    """Deltas that act together, mostly one, and the rows of the batch that use them."""

    deltas: tuple[Delta, ...]  # the deltas, in the order in which they act
    rows: tuple[int, ...] | None = None  # the numbers of the rows, or None for all rows
    batch_size: int = 0  # the number of rows of the batch; 0 where all rows use the deltas
    # where only some rows use the deltas, or several act together, their own values of the parameters of modules
    overrides: Mapping[nn.Module, TensorGetters] = field(default_factory=dict)
    frozen: frozenset[Delta] = frozenset()  # those of the deltas that do not train
    pooling: Pooling = "model"  # what the head reads
    _indices: Indices = field(default_factory=dict)

    @property
    def trained(self) -> list[Delta]:
        return [delta for delta in self.deltas if delta not in self.frozen]

    def all_edits(self) -> Iterator[Edit]:
        """Iterate over the edits of the deltas in the order in which they act."""
        for delta in self.deltas:
            yield from delta.all_edits()

    def index(self, size: int, device: torch.device) -> torch.Tensor:
        """Return the indices of these rows in a tensor of `size` rows."""
        assert self.rows is not None
        if size % self.batch_size:
            raise DeltuneError(
                f"rows() was given {self.batch_size} names, but a tensor has {size} rows: give one name (or None) "
                "for each row of the batch"
            )
        repeats = size // self.batch_size
        positions = (row * repeats + i for row in self.rows for i in range(repeats))
        return _made_once(self._indices, size, device, lambda: torch.tensor([*positions], device=device))

    @property
    def partial_rows(self) -> tuple[int, ...] | None:
        """The batch's number of rows, then the rows that use the delta; None where all do."""
        return None if self.rows is None or len(self.rows) == self.batch_size else (self.batch_size, *self.rows)

    @property
    def selects_view(self) -> bool:
        """Whether `select` returns a view: consecutive rows, in a pass without gradients."""
        return self.is_consecutive and is_plain_inference()

    @cached_property
    def is_consecutive(self) -> bool:
        return self.rows is not None and self.rows[-1] - self.rows[0] + 1 == len(self.rows)

    def select(self, whole: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            return whole
        index = self.index(whole.shape[0], whole.device)
        if self.selects_view:
            return whole.narrow(0, self.rows[0] * (whole.shape[0] // self.batch_size), len(index))
        return whole.index_select(0, index)

    def replace(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            return part
        return whole.index_copy(0, self.index(whole.shape[0], whole.device), part)

    def forward_of(self, module: nn.Module) -> Callable[..., Any]:
        """Return the module's forward with the delta's own tensors, to be called with these rows only."""
        if self.rows is None:
            return module.forward
        tensors = {leaf: value() for leaf, value in self.overrides.get(module, {}).items()}
        return partial(forward_with, module, tensors)


def all_rows_alike(groups: Sequence[DeltaRows]) -> bool:
    """Whether all rows of the batch use the same delta."""
    return all(group.rows is None for group in groups)


def combine_rows(whole: torch.Tensor, parts: Mapping[DeltaRows, torch.Tensor]) -> torch.Tensor:
    """Return the tensor with the rows of every group replaced, in one copy for any number of groups."""
    if len(parts) == 1:
        ((group, part),) = parts.items()
        return group.replace(whole, part)
    index = torch.cat([group.index(whole.shape[0], whole.device) for group in parts])
    return whole.index_copy(0, index, torch.cat(tuple(parts.values())))


def stack_by_row(
    parts: Sequence[tuple[DeltaRows, torch.Tensor]], size: int, at_end: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stack the tensor (l_i, …) of each group into one with an entry for every row, padded to the longest.

    Returns the tensor (size, l, …) and which entries are no padding, (size, l), or None for all. Rows outside every
    group are all padding. With `at_end` the shorter ones are padded at the beginning.
    """
    if all_rows_alike([group for group, _ in parts]):
        ((_, only),) = parts
        return only.expand(size, *only.shape), None
    longest = max(part.shape[0] for _, part in parts)
    device = parts[0][1].device
    numbers = torch.full((size,), len(parts), device=device)
    padded, present = [], []
    for number, (group, part) in enumerate(parts):
        numbers[group.index(size, device)] = number
        padding = longest - part.shape[0]
        padded.append(nn.functional.pad(part, (0, 0) * (part.dim() - 1) + ((padding, 0) if at_end else (0, padding))))
        columns = torch.arange(longest, device=device)
        present.append(columns >= padding if at_end else columns < part.shape[0])
    padded.append(torch.zeros_like(padded[0]))
    present.append(torch.zeros_like(present[0]))
    return torch.stack(padded)[numbers], torch.stack(present)[numbers]


def active_edits(groups: Sequence[DeltaRows]) -> list[tuple[Edit, DeltaRows]]:
    return [(edit, group) for group in groups for edit in group.all_edits()]


_LATE_GRADIENT = (
    "a backward pass computed a gradient for a delta that is not in use any more: run the backward pass of a mixed "
    "batch inside its rows(), and that of any other batch before the next use()"
)


def refuse_frozen(groups: Iterable[DeltaRows]) -> None:
    """Raise an error if a delta of a forward pass is frozen when a part of the pass is recomputed in the backward pass.

    The delta would be treated as a constant, and its gradient would be lost silently.
    """
    if any(delta.saved_requires_grad is not None for group in groups for delta in group.trained):
        raise DeltuneError(_LATE_GRADIENT)


def refuse_late_gradients(delta: Delta) -> None:
    """Make it an error when a gradient arrives after a delta was frozen, since it would be lost silently."""
    check = _LateGradientCheck(delta)
    for parameter in delta.parameters():
        hooks = hooks_of_tensor(parameter)
        if parameter.requires_grad and not any(type(hook) is _LateGradientCheck for hook in hooks):
            parameter.register_hook(check)


class _LateGradientCheck:
    """The hook that `refuse_late_gradients` registers on the parameters of a delta.

    Torch drops the gradient of a parameter that another thread freezes between this hook and the sum in `.grad`, so the
    check is repeated when the backward pass ends.
    """

    __torch_unserializable__ = True  # a copy registers its own when it needs one

    def __init__(self, delta: Delta) -> None:
        self.delta = weakref.ref(delta)  # its parameters refer to this hook
        self.checked: int | None = None  # the backward pass that repeats the check

    def __call__(self, gradient: torch.Tensor) -> None:
        delta = self.delta()
        if delta is None:
            return
        freezes = delta.freezes
        refuse_frozen([DeltaRows((delta,))])
        if self.checked != backward_id():
            self.checked = backward_id()
            when_backward_ends(lambda: _refuse_if_frozen_since(delta, freezes))


def _refuse_if_frozen_since(delta: Delta, freezes: int) -> None:
    if delta.freezes != freezes:
        raise DeltuneError(_LATE_GRADIENT)


Change = SparseParameter | GatedDifference | Edit
"""A change of a tensor of the model: other values of some entries, or a change of an edit that is added."""


class TensorOverride(Protocol):
    """Runs a module with tensors that are not its own."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class SubstitutedTensors:
    """Runs a module with the values of its parameters that deltas have."""

    def __init__(self, getters: TensorGetters) -> None:
        self.getters = getters

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward_with(module, {leaf: value() for leaf, value in self.getters.items()}, *args, **kwargs)


class ChangedTensors:
    """Runs a module with changed tensors: its own, with trained entries replaced, or with a change of an edit added."""

    def __init__(self, parts: Mapping[str, Sequence[Change]]) -> None:
        self.parts = {leaf: tuple(changes) for leaf, changes in parts.items()}

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = {}
        for leaf, changes in self.parts.items():
            base = parameters_of(module)[leaf]
            assert base is not None
            tensors[leaf] = changed_tensor(base, changes)
        return forward_with(module, tensors, *args, **kwargs)


def changed_tensor(base: torch.Tensor, changes: Sequence[Change]) -> torch.Tensor:
    """Return a tensor with changes applied one after another; a delta's own value of it is trained through edits."""
    value = base
    for change in changes:
        if isinstance(change, Edit):
            value = change.apply_to_weight(value, base)
        else:
            value = change.apply_to_parameter(value.detach())
    return value


class AssignmentCache:
    """What the modules of one assignment share.

    Attributes:
        constant: Whether no tensor of a delta changes as long as it is attached.
        stacks: The newest stack of edits at each place, of this and of other assignments; see `StackedEdits`.
    """

    def __init__(self, constant: bool, stacks: dict[tuple[str, str], Any]) -> None:
        self.constant, self.stacks = constant, stacks
        self._numbers: dict[tuple[DeltaRows, ...], Indices] = {}

    def numbers(self, groups: tuple[DeltaRows, ...], size: int, device: torch.device) -> torch.Tensor:
        """Return the number of each row's group, counted from 1; 0 for rows outside every group."""

        def make() -> torch.Tensor:
            numbers = torch.zeros(size, dtype=torch.long, device=device)
            for number, group in enumerate(groups, start=1):
                numbers[group.index(size, device)] = number
            return numbers

        return _made_once(self._numbers.setdefault(groups, {}), size, device, make)


def override_by_row(module: nn.Module, groups: Sequence[DeltaRows], cache: AssignmentCache) -> TensorOverride:
    """Return how to run a module for which deltas have their own tensors, while each row uses its own delta."""
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        return NormByRow(module, groups, cache)
    if type(module) is nn.Linear and all(set(group.overrides.get(module, ())) <= {"bias"} for group in groups):
        return BiasByRow(module, groups, cache)
    return ModuleByRow(module, groups)


class ModuleByRow:
    """Runs the module once for each delta, with its tensors, on its rows, and once on the rows of all others."""

    def __init__(self, module: nn.Module, groups: Sequence[DeltaRows]) -> None:
        some = [group for group in groups if module in group.overrides]
        size = groups[0].batch_size
        taken = {row for group in some for row in group.rows or ()}
        rest = [row for row in range(size) if row not in taken]
        # where the rows of each delta are consecutive, those of the others between them are too, and no row is moved
        self.in_order = all(group.is_consecutive for group in some)
        runs = _consecutive_runs(rest) if self.in_order else [rest] if rest else []
        some += [DeltaRows((), tuple(run), size) for run in runs]  # without overrides
        self.groups = sorted(some, key=lambda group: group.rows or ())
        self._orders: Indices = {}

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module; its tensor arguments have the rows of the batch."""
        parts: list[Any] = []
        for group in self.groups:
            positional = [group.select(a) if isinstance(a, torch.Tensor) else a for a in args]
            keywords = {k: group.select(a) if isinstance(a, torch.Tensor) else a for k, a in kwargs.items()}
            parts.append(group.forward_of(module)(*positional, **keywords))
        if all(isinstance(part, torch.Tensor) for part in parts):
            return self._join(parts)
        if all(isinstance(part, tuple) and all(isinstance(value, torch.Tensor) for value in part) for part in parts):
            return tuple(self._join(column) for column in zip(*parts, strict=True))
        raise DeltuneError(
            "rows() needs modules that return tensors where deltas have their own, and "
            f"{type(module).__name__} does not"
        )

    def _join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the output of all rows; where deltas have heads of other numbers of labels, padded to the widest."""
        width = max(part.shape[-1] for part in parts)
        if any(part.shape[-1] < width for part in parts):
            parts = [nn.functional.pad(part, (0, width - part.shape[-1]), value=-torch.inf) for part in parts]
        padded = torch.cat(tuple(parts))
        if self.in_order:
            return padded
        size, device = len(padded), padded.device

        def make_order() -> torch.Tensor:
            return torch.cat([group.index(size, device) for group in self.groups]).argsort()

        return padded.index_select(0, _made_once(self._orders, size, device, make_order))


def _consecutive_runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return ascending numbers in runs of consecutive ones."""
    return [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]


class KeptByRow:
    """Tensors with an entry for each row, kept for further passes with as many rows; others replace them."""

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self._values: dict[object, torch.Tensor] = {}

    def get(self, key: object, like: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what is kept under a key, or what `make` returns, in the shape (rows, 1, …, d) for a tensor `like`."""
        size, values = like.shape[0], self._values.get(key)
        if values is None or values.shape[0] != size:
            values = make()
            if self.keep:
                self._values[key] = values
        return values.view(size, *(1,) * (like.dim() - 2), -1)


class ValuesByRow:
    """The values of a module's parameters for each row; where no tensor changes, kept from one pass to the next."""

    def __init__(self, module: nn.Module, groups: Sequence[DeltaRows], cache: AssignmentCache) -> None:
        self.groups = tuple(group for group in groups if module in group.overrides)
        self.cache, self.kept = cache, KeptByRow(cache.constant)

    def values(self, module: nn.Module, leaf: str, x: torch.Tensor) -> torch.Tensor | None:
        """Return the values of each row (rows, 1, …, d), or the module's own parameter where no delta has its own."""
        base = parameters_of(module)[leaf]
        of_groups = [group.overrides[module].get(leaf) for group in self.groups]
        if base is None or not any(of_groups):
            return base

        def make() -> torch.Tensor:
            every = torch.stack([base, *(base if value is None else value() for value in of_groups)])
            return every[self.cache.numbers(self.groups, x.shape[0], x.device)]

        return self.kept.get(leaf, x, make)


class BiasByRow(ValuesByRow):
    """Runs a linear layer once for all deltas, and adds the bias of each row: x Wᵀ + b.

    Where the rows of each delta are consecutive, the batch is large and nothing is recorded, the layer runs with the
    base's bias, and what a delta's own bias has more is added to its rows. The result differs from torch's kernel by
    rounding only, since that adds the bias to the sum of the products.
    """

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: torch.Tensor = args[0] if args else kwargs["input"]
        if may_change_views(self.groups, x):  # of the others' rows nothing is read or written once more
            base = parameters_of(module)["bias"]
            assert base is not None
            whole: torch.Tensor = forward_with(module, {}, x)
            for group in self.groups:
                group.select(whole).add_((group.overrides[module]["bias"]() - base).to(whole.dtype))
            return whole
        output: torch.Tensor = forward_with(module, {"bias": None}, x)
        bias = self.values(module, "bias", x)
        assert bias is not None
        return output + bias.to(output.dtype)


class NormByRow(ValuesByRow):
    """Runs a LayerNorm once for all deltas: g ⊙ n(x) + b with the g and b of each row.

    The result differs from torch's kernel by rounding only, since that does not round n(x). Where the rows of each
    delta are consecutive, the batch is large and nothing is recorded, it runs once more on the rows of each delta.
    """

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        assert isinstance(module, nn.LayerNorm)
        x: torch.Tensor = args[0] if args else kwargs["input"]
        if may_change_views(self.groups, x):
            whole: torch.Tensor = forward_with(module, {}, x)
            for group in self.groups:
                group.select(whole).copy_(group.forward_of(module)(group.select(x)))
            return whole
        precision = torch.promote_types(x.dtype, torch.float32)  # as in torch's kernel
        normed = nn.functional.layer_norm(x.to(precision), module.normalized_shape, None, None, module.eps)
        gain, bias = self.values(module, "weight", x), self.values(module, "bias", x)
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):  # the dtype that torch returns then differs by device
            dtype = type(module).forward(module, x[:0]).dtype
        if gain is None:
            return (normed if bias is None else normed + bias).to(dtype)
        return (normed * gain if bias is None else torch.addcmul(bias, normed, gain)).to(dtype)


MANY_NUMBERS = 20_000
"""From so many numbers on for each delta, writing another tensor of this size takes longer than operators on the rows
of each delta: 10 µs and more on one core of a CPU. Used on every device."""


def may_change_views(groups: Sequence[DeltaRows], whole: torch.Tensor) -> bool:
    """Whether to change the rows of each group in place, rather than the rows of all groups in one operation."""
    if whole.numel() < MANY_NUMBERS * len(groups) or torch.is_autocast_enabled(whole.device.type):
        return False
    return all(group.selects_view for group in groups)
