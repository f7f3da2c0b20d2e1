"""The modules that hold a delta's tensors: `Edit`, one modification at one place, and `Delta`, a whole method.

A tensor may have few trainable entries (`SparseParameter`), or be shared by several edits (a `TensorTable` of its own).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..anatomy.quantizers import bias_of, dequantized_weight
from ..anatomy.types import Columns
from ..compat import UncalledModule, buffers_of, parameters_of
from ..errors import DeltuneError, excerpt
from ..methods.compositions import SigmoidGate
from ..methods.forms.base import Form, Place, Specs, WeightForm, WeightPlace
from ..methods.forms.checks import initialize_part
from ..methods.forms.low_rank import LowRank
from ..methods.positions import ALL
from ..methods.resolve import START, ResolvedEdit, ResolvedMethod
from ..methods.schedules import Schedule
from ..methods.sites import Location
from ..methods.spec import Method, Modification
from ..models import Pooling
from .hard_concrete import GatedDifference, HardConcreteGates
from .scheduling import NEVER_ADVANCED, ScheduleState


class SparseParameter(UncalledModule):
    """A weight of which only some entries are parameters: `values` at the flat positions `index`."""

    index: torch.Tensor

    def __init__(self, shape: tuple[int, ...], index: np.ndarray) -> None:
        super().__init__()
        self.shape = shape
        self.values: torch.Tensor
        if len(index):
            self.values = nn.Parameter(torch.empty(len(index)))
        else:  # nothing of it is trained, so there is nothing to optimise
            self.register_buffer("values", torch.empty(0), persistent=False)
        self.register_buffer("index", torch.from_numpy(index))

    def initialize(self, dense: torch.Tensor) -> None:
        """Take the initial values from a dense weight, unless this is on the meta device."""
        if self.values.is_meta:
            return
        with torch.no_grad():
            flat = dense.reshape(-1)
            self.values.copy_(flat[self.index.to(flat.device)])

    def apply_to_parameter(self, base: torch.Tensor) -> torch.Tensor:
        """Return `base` with the trained values in their positions."""
        return base.reshape(-1).index_copy(0, self.index, self.values.to(base.dtype)).view(self.shape)

    def merged_value(self, base: torch.Tensor) -> torch.Tensor:
        """Return the tensor with its change added, as merging writes it: `apply_to_parameter` in any mode."""
        return self.apply_to_parameter(base)


class TensorTable(UncalledModule):
    """Tensors by name: parameters, buffers, or under a mask some entries of a tensor (`sparse`)."""

    specs: Specs
    sparse: nn.ModuleDict | None

    def __init__(self, specs: Specs, masks: Mapping[str, np.ndarray] | None = None) -> None:
        super().__init__()
        self._register_tensors(specs, masks)

    def _register_tensors(self, specs: Specs, masks: Mapping[str, np.ndarray] | None) -> None:
        self.__dict__["specs"] = specs
        self.__dict__["sparse"] = None
        if masks is not None:
            self.sparse = nn.ModuleDict()
        for name, spec in specs.items():
            if self.sparse is not None and spec.trained:
                index = (masks or {}).get(name, np.zeros(0, dtype=np.int64))
                self.sparse[f"of_{name}"] = SparseParameter(spec.shape, index)
            elif spec.trained:
                self.register_parameter(name, nn.Parameter(torch.empty(spec.shape)))
            else:
                dtype = None if spec.below is None else torch.int64
                self.register_buffer(name, torch.empty(spec.shape, dtype=dtype), persistent=spec.saved)

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are not under a mask."""
        return {n: t for n, t in (*parameters_of(self).items(), *buffers_of(self).items()) if t is not None}

    def sparse_parameters(self) -> dict[str, SparseParameter]:
        """Return the tensors under a mask."""
        # ModuleDict has methods called keys and values
        return {key.removeprefix("of_"): cast("SparseParameter", part) for key, part in (self.sparse or {}).items()}

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the first entries of a tensor in each axis; a mask leaves the initial values of the others, or 0."""
        sparse = self.sparse_parameters().get(name)
        if sparse is None:
            tensor = self.own_tensors()[name]
        else:
            start = self.own_tensors().get(f"{name}{START}")
            tensor = sparse.apply_to_parameter(sparse.values.new_zeros(sparse.shape) if start is None else start)
        return tensor if tensor.shape == shape else tensor[tuple(map(slice, shape))]

    def tensors_to_initialize(self) -> dict[str, torch.Tensor]:
        """Return the tensors to initialize; for those under a mask, new dense ones."""
        masked = {name: sparse.values.new_empty(sparse.shape) for name, sparse in self.sparse_parameters().items()}
        tensors = self.own_tensors() | masked
        return {n: t for n, t in tensors.items() if self.specs[n].seed is None and not n.endswith(START)}

    def initialize_sparse(self, dense: Mapping[str, torch.Tensor]) -> None:
        """Take the initial values of the tensors under a mask from dense ones."""
        tensors = self.own_tensors()
        for name, sparse in self.sparse_parameters().items():
            sparse.initialize(dense[name])
            if (start := tensors.get(f"{name}{START}")) is not None:
                start.copy_(dense[name])

    def draw_seeded(self, form: Form) -> None:
        """Fill the buffers that have a seed; buffers of one seed are drawn together."""
        for seed in {spec.seed for spec in self.specs.values()} - {None}:
            shapes = {name: spec.shape for name, spec in self.specs.items() if spec.seed == seed}
            drawn = form.draw(shapes, torch.Generator().manual_seed(cast("int", seed)))
            if (drawn_shapes := {name: tuple(value.shape) for name, value in drawn.items()}) != shapes:
                raise DeltuneError(
                    f"{form!r}: draw returns tensors of the shapes {drawn_shapes}, and was asked for {shapes}"
                )
            for name, value in drawn.items():
                self.own_tensors()[name].copy_(value)

    def tensors_to_save(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the saved file: dense ones, or the values and positions of those under a mask."""
        saved = {name: tensor for name, tensor in self.own_tensors().items() if self.specs[name].saved}
        return saved | _sparse_to_save(self.sparse_parameters())


@dataclass(frozen=True)
class HeadLabels:
    """The labels of a head, as in the model's configuration: label names by id, and the problem type."""

    id2label: tuple[tuple[int, str], ...]
    problem_type: str | None = None

    @classmethod
    def from_config(cls, config: Any) -> HeadLabels:
        """Read the labels of a model's configuration."""
        pairs = sorted((int(k), str(v)) for k, v in (config.id2label or {}).items())
        return cls(tuple(pairs), getattr(config, "problem_type", None))

    def check_ids(self) -> None:
        """Check that the ids number the outputs from 0, so that a file with these labels can be loaded."""
        ids = [label_id for label_id, _ in self.id2label]
        if ids != list(range(len(ids))):
            raise DeltuneError(
                f"config.id2label of this model has the ids {excerpt(ids)}; name its {len(ids)} labels by the ids "
                f"0 to {len(ids) - 1}"
            )

    def apply_to(self, model: PreTrainedModel) -> None:
        """Write these labels into a model's configuration."""
        self.write_to(model.config)
        if hasattr(model, "num_labels"):
            model.num_labels = len(self.id2label)  # type: ignore[assignment]

    def write_to(self, config: Any) -> None:
        if HeadLabels.from_config(config) != self:
            config.id2label = dict(self.id2label)
            config.label2id = {label: index for index, label in self.id2label}
            config.problem_type = self.problem_type


ReadInput = Callable[["Edit"], torch.Tensor | None]
"""Returns the x of an edit, or None where it reads none."""


def input_reader(inputs: dict[Edit, torch.Tensor], module_input: torch.Tensor | None = None) -> ReadInput:
    """Return what reads the x of the edits at one place; several groups of rows may have an edit in common."""
    known: dict[Edit, torch.Tensor | None] = {}

    def read(edit: Edit) -> torch.Tensor | None:
        if edit.source_path is None:
            return edit.resolve_input(inputs, module_input)
        if edit not in known:
            known[edit] = edit.resolve_input(inputs, module_input)
        return known[edit]

    return read


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """A call of the module that edits act at."""

    module: nn.Module
    rerun: Callable[[torch.Tensor], torch.Tensor]  # calls it once more, with the tensors that the rows of the edits use
    output: torch.Tensor | None  # what it has computed, before any edit; None where no edit reads it
    # whether it has computed this with the base's weight, and not with one that an edit has changed
    by_base: bool = True
    facts: Mapping[Any, torch.Tensor] = field(default_factory=dict)  # what is known of the rows; see `ForwardPass`


def part_of(whole: torch.Tensor, columns: Columns | None, dim: int = 0) -> torch.Tensor:
    """Return the part of a fused projection's weight, bias or output along an axis."""
    if columns is None:
        return whole
    blocks = whole.unflatten(dim, (columns.groups, -1))
    first = dim if dim >= 0 else dim - 1
    return blocks.narrow(first + 1, columns.start, columns.stop - columns.start).flatten(first, first + 1)


class ModulePlace:
    """The place of an edit in a call of its module; see `Place`. W is read where a form asks for it."""

    statistic: torch.Tensor | None = None

    def __init__(self, call: ModuleCall, location: Location, training: bool, x: torch.Tensor | None = None) -> None:
        self._call, self._location, self.training, self._x = call, location, training, x
        self.facts = call.facts

    @property
    def weight(self) -> torch.Tensor:
        linear, module = self._location.linear, self._call.module
        assert linear is not None
        whole = dequantized_weight(module) if linear.quantized else parameters_of(module)["weight"]
        assert whole is not None
        return part_of(whole.detach().t() if linear.transposed else whole.detach(), self._location.target.columns)

    @property
    def bias(self) -> torch.Tensor | None:
        bias = bias_of(self._call.module)
        return None if bias is None else part_of(bias.detach(), self._location.target.columns)

    @property
    def output(self) -> torch.Tensor | None:
        # Not cached: it may first be read without gradients.
        if not self._call.by_base and self._x is not None:
            return self(self._x)
        return None if self._call.output is None else self._without_bias(self._call.output)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        linear, module = self._location.linear, self._call.module
        if linear is None or not linear.quantized:
            return nn.functional.linear(x, self.weight.to(x.dtype))
        return self._without_bias(type(module).forward(module, x))

    def _without_bias(self, output: torch.Tensor) -> torch.Tensor:
        columns, bias = self._location.target.columns, bias_of(self._call.module)
        product = part_of(output, columns, dim=-1)
        if bias is None:
            return product
        return product - part_of(bias, columns).to(product.dtype)  # with its gradient, which a trained one has twice


@dataclass(frozen=True, eq=False)
class BasePlace:
    """The base model's own projection at an edit, outside of a pass; see `Place`. Tensors are read when used."""

    location: Location  # where the edit is
    read_weight: Callable[[], torch.Tensor]  # returns the weight of the module in floating point
    read_bias: Callable[[], torch.Tensor | None]  # returns its bias, or None
    training: bool = False
    output: torch.Tensor | None = None
    statistic: torch.Tensor | None = None  # what `initialize` of the edit's form reads of data
    facts: Mapping[Any, torch.Tensor] = field(default_factory=dict)

    @property
    def weight(self) -> torch.Tensor:
        linear = self.location.linear or self.location.weight
        assert linear is not None
        whole = self.read_weight().detach()
        whole = whole.to(torch.promote_types(whole.dtype, torch.float32))
        return part_of(whole.mT if linear.transposed else whole, self.location.target.columns)

    @property
    def bias(self) -> torch.Tensor | None:
        bias = self.read_bias()
        return None if bias is None else part_of(bias.detach(), self.location.target.columns)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


class Edit(TensorTable):
    """One modification at one place: h <- compose(h, form(u)).

    Its tensors belong to the form and to the composition.
    """

    modification: Modification
    place: Location
    origin: int
    shared: dict[str, tuple[TensorTable, tuple[int, ...]]]
    folded: bool
    in_softmax: bool
    form: Form
    parallel: bool
    reads_own_input: bool
    source_path: str | None  # the path of the module whose input is x, where that is another one
    composition_names: tuple[str, ...]
    factor: float | None  # the number s if the composition is h + s Δh, else None
    is_masked: bool
    is_dense: bool

    def __init__(
        self, planned: ResolvedEdit, shared: dict[str, tuple[TensorTable, tuple[int, ...]]], folded: bool
    ) -> None:
        nn.Module.__init__(self)
        modification, source, target = planned.modification, planned.place.source, planned.place.target
        reads_own_input = source is not None and source.path == target.path and target.side == "output"
        folded, is_masked = folded or not planned.is_reparameterised, planned.mask is not None
        unshared = planned.own_tensors(folded)
        names = tuple(modification.compose.tensors(planned.place.widths))
        factor = None if names else modification.compose.factor({})
        self.__dict__.update(  # at once, since nn.Module looks for a parameter and a module in everything that is set
            modification=modification,
            place=planned.place,
            origin=planned.origin,
            shared=shared,  # registered in the delta; here they are only read
            folded=folded,
            in_softmax=modification.compose.in_softmax,
            form=modification.form,
            parallel=modification.insertion == "parallel",
            reads_own_input=reads_own_input,
            source_path=None if source is None or reads_own_input else source.path,
            composition_names=names,
            factor=float(factor) if isinstance(factor, int | float) else None,
            is_masked=is_masked,
            is_dense=folded and not (is_masked or names or shared) and all(s.trained for s in unshared.values()),
        )
        if clashing := [name for name in unshared if hasattr(type(self), name) or name in self.__dict__]:
            raise DeltuneError(
                f"{self.form!r}: a tensor cannot be called {', '.join(clashing)}, which nn.Module needs; rename it"
            )
        self._register_tensors(unshared, None if planned.mask is None else planned.mask.indices())

    def initialize(self, at: Place | None, shared: Mapping[str, torch.Tensor]) -> None:
        """Set the initial values of the form's and the composition's tensors."""
        with torch.no_grad():
            dense, names, widths = {**self.tensors_to_initialize(), **shared}, self.composition_names, self.place.widths
            form, compose = self.form, self.modification.compose
            of_form = {n: t for n, t in dense.items() if n not in names}
            of_compose = {n: t for n, t in dense.items() if n in names}
            initialize_part(form, of_form, widths, lambda: form.initialize(of_form, at))
            initialize_part(compose, of_compose, widths, lambda: compose.initialize(of_compose))
            self.initialize_sparse(dense)

    def set_initial_value(self, name: str, value: torch.Tensor) -> None:
        sparse = self.sparse_parameters().get(name)
        if sparse is not None:
            sparse.initialize(value)
        else:
            with torch.no_grad():
                self.get_parameter(name).copy_(value)

    def _tensors_of(self, of_form: bool) -> dict[str, torch.Tensor]:
        tensors = self.own_tensors()
        if self.is_masked:
            sparse = self.sparse_parameters()
            starts = {n.removesuffix(START): tensors.pop(n) for n in [*tensors] if n.endswith(START)}
            filled = {n: part.values.new_empty(part.shape) for n, part in sparse.items() if n not in starts}
            names = self.composition_names
            with torch.no_grad():
                self.form.fill_untrained({n: t for n, t in filled.items() if n not in names}, tensors)
                if of_compose := {n: t for n, t in filled.items() if n in names}:
                    self.modification.compose.initialize(of_compose)
            tensors |= {name: part.apply_to_parameter((starts | filled)[name]) for name, part in sparse.items()}
        tensors |= {name: table.get(name, shape) for name, (table, shape) in self.shared.items()}
        return {n: t for n, t in tensors.items() if (n not in self.composition_names) == of_form}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the form's dense tensors, folded. They must not be changed in place."""
        if self.is_dense:
            return cast("dict[str, torch.Tensor]", parameters_of(self))
        tensors = self._tensors_of(of_form=True)
        return tensors if self.folded else self.form.fold(tensors, self.place.widths)

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors that the edit computes with: masked entries filled in, a reparameterisation folded."""
        return {**self.tensors(), **self._tensors_of(of_form=False)}

    def tensors_to_save(self) -> dict[str, torch.Tensor]:
        if self.folded:
            return super().tensors_to_save()
        trained = self.own_tensors()
        return {
            n: t
            for n, t in self.full_tensors().items()
            if n not in self.shared and (n not in trained or self.specs[n].saved)
        }

    def compose(self, h: torch.Tensor, delta: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        """Return compose(h, Δh) in the dtype of h."""
        return self.modification.compose(h, delta.to(h.dtype), self._tensors_of(of_form=False), x)

    def gates(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gate of each position (B, n) of x (B, n, d)."""
        assert isinstance(self.modification.compose, SigmoidGate)
        return self.modification.compose.gates(self._tensors_of(of_form=False), x)

    def apply_to_weight(self, value: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """Return the weight that the place is at with the change of the form."""
        weight, columns, experts = self.place.weight, self.place.target.columns, self.place.experts
        assert weight is not None
        chosen = None if experts is None else torch.tensor(experts, device=base.device)
        whole = chosen is None and columns is None and not self.place.of_input
        matrix = base.mT if weight.transposed else base
        at = WeightPlace(part_of(matrix if chosen is None else matrix[chosen], columns))
        tensors = self.full_tensors()
        factor = self.modification.compose.factor(tensors)
        unscaled = factor is not None and not isinstance(factor, torch.Tensor) and factor == 1  # a learned 1 is trained
        if value is base and unscaled and whole and isinstance(self.form, WeightForm):
            changed = self.form.weight(tensors, at).to(base.dtype)
            return changed.mT if weight.transposed else changed
        affine = self.form.affine(tensors, at)
        assert affine is not None and affine[0] is not None and factor is not None
        change = affine[0] if unscaled else affine[0] * factor
        if self.place.of_input:  # W (1 + s A)
            change = at.weight * change if change.dim() == 1 else at.weight @ change
        if columns is not None:
            zeros = torch.zeros_like(matrix).unflatten(0, (columns.groups, -1))
            part = change.to(base.dtype).unflatten(0, (columns.groups, -1))
            zeros[:, columns.start : columns.stop] = part
            change = zeros.flatten(0, 1)
        change = (change.mT if weight.transposed else change).to(base.dtype)
        return value + change if chosen is None else value.index_add(0, chosen, change)

    def resolve_input(self, inputs: dict[Edit, torch.Tensor], module_input: torch.Tensor | None) -> torch.Tensor | None:
        """Return its x, for all rows: the input of its module, or of another one, which is removed from `inputs`."""
        if self.reads_own_input:
            return module_input
        if self.source_path is None:
            return None
        if self not in inputs:
            raise DeltuneError(
                f"{self.place.name} needs the input of {self.source_path!r}, which did not run before it: call the "
                "module that contains both"
            )
        return inputs.pop(self)

    def apply_to(self, h: torch.Tensor, call: ModuleCall, read: ReadInput, out: torch.Tensor | None) -> torch.Tensor:
        """Return compose(h, form(u)), where u is x (parallel) or h (sequential, or the input of a projection)."""
        positions = self.modification.positions
        if positions == ALL:
            return self._changed(h, call, read, out)
        chosen = call.facts.get(positions)
        if chosen is None or chosen.numel() != h[..., 0].numel():
            raise DeltuneError(
                f"{self.place.name} is changed at the tokens {positions!r}, and this call does not have those of a "
                "pass of the model: call the model itself, and checkpoint by gradient_checkpointing_enable()"
            )
        return torch.where(chosen.reshape(*h.shape[:-1], 1), self._changed(h, call, read, None), h)

    def _changed(self, h: torch.Tensor, call: ModuleCall, read: ReadInput, out: torch.Tensor | None) -> torch.Tensor:
        x = read(self)
        if not self.parallel:
            u = call.rerun(h) if self.place.apply_norm_first else h
        else:
            assert x is not None
            u = x
        at = ModulePlace(call, self.place, self.training, x)
        if self.factor is None:
            return self.compose(h, self.form(self.tensors(), u, at), x)
        return self.form.add_to(h, self.tensors(), u, at, self.factor, out)

    def only_scales(self) -> bool:
        """Whether its result is (1 - s + s w) ⊙ h with a number s, so that it only scales h."""
        reads_h = not self.parallel and not self.place.apply_norm_first
        everywhere = self.modification.positions == ALL
        return reads_h and everywhere and self.form.multiplies is not None and self.factor is not None


class Delta(nn.Module):
    """One attached method under one name: its edits, and its own values of the tensors it selects (head included).

    Tensors that it owns are in the model while the delta is in use and in `held` while it is not, so that each is
    registered exactly once at any time and follows .to(), state_dict and deepcopy like any parameter.
    """

    def __init__(
        self, method: Method, planned: ResolvedMethod, head: tuple[str, ...], head_mode: str, folded: bool = False
    ) -> None:
        super().__init__()
        self.method, self.planned = method, planned
        self.selected = tuple(t.name for t in planned.selected)
        self.head, self.head_mode, self.folded = head, head_mode, folded
        self.labels: HeadLabels | None = None
        self.pooling: Pooling = "model"
        self.trained: dict[str, Any] = {}  # what the run that trained it writes into delta.json, as `TrainedFacts`
        self.saved_requires_grad: dict[str, bool] | None = {}  # of a delta that is not in use; None while it is
        self.freezes = 0  # how often it was frozen
        self.attached_parameters: dict[str, nn.Parameter] = {}  # by name, as they were when it was attached
        self.edits = edits = nn.ModuleDict()
        self.common = nn.ModuleDict()  # tensors that several edits share, by owner
        self.partly = nn.ModuleDict()  # masked selections, by the tensor's name
        self.gated = nn.ModuleDict()  # selections whose mask is learned, by the part's number
        self.held = nn.ParameterDict()
        for owner, specs in planned.shared_tensors(folded).items():
            masks = {name: mask.indices() for (of, name), mask in planned.common if of == owner}
            self.common[owner] = TensorTable(specs, {n: i[n] for n, i in masks.items() if i} if masks else None)
        for edit in planned.edits:
            if edit.key in edits:
                raise DeltuneError(
                    f"{method!r}: two of its edits are called {edit.key!r}, the second at {edit.place.target.path!r}, "
                    "and only one of them could be kept; please report this with the configuration of the model"
                )
            shared = {}
            for name, spec in edit.tensors.items():
                if spec.shared and (owner := edit.owner(spec.shared)) in self.common:
                    shared[name] = cast("TensorTable", self.common[owner]), spec.shape
            edits[edit.key] = Edit(edit, shared, folded)
        for tensor, mask in planned.masked:
            self.partly[parameter_key(tensor.name)] = SparseParameter(tensor.shape, mask.indices()[tensor.name])
        self.schedules = nn.ModuleDict()  # states of schedules, by the number of the term's first part
        scheduled: dict[int, list[Edit]] = {}
        for one in self.all_edits():
            if one.form.schedule is not None:
                scheduled.setdefault(one.origin, []).append(one)
        for origin, some in scheduled.items():
            self.schedules[str(origin)] = ScheduleState(cast("Schedule", some[0].form.schedule), some)
        for gates in planned.gated:
            self.gated[gates.key] = HardConcreteGates(gates.tensors, gates.keep, folded)

    def draw(self) -> None:
        """Draw the buffers that have a seed and are not saved."""
        with torch.no_grad():
            for table, edit in self._tables().items():
                table.draw_seeded(edit.form)

    def _tables(self) -> dict[TensorTable, Edit]:
        """Return every table of tensors with the first edit that uses it."""
        tables: dict[TensorTable, Edit] = {}
        for edit in self.all_edits():
            for table in (edit, *(table for table, _ in edit.shared.values())):
                tables.setdefault(table, edit)
        return tables

    def initialize(self, place_of: Callable[[Edit], Place | None]) -> None:
        """Set the initial values of all trained tensors of the edits, drawn from torch's global random generator."""
        self.draw()
        first = self._tables()
        for edit in self.all_edits():
            tables = {table for table, _ in edit.shared.values() if first[table] is edit}
            shared = {
                name: t for table in tables for name, t in table.tensors_to_initialize().items() if name in edit.shared
            }
            edit.initialize(place_of(edit), shared)
            for table in tables:
                table.initialize_sparse(shared)

    def tensors_to_save(self) -> dict[str, torch.Tensor]:
        """Return all tensors except its values of the model's own, by their names in the saved file."""
        result = {
            f"edit.{key}.{leaf}": t for key, edit in self.named_edits() for leaf, t in edit.tensors_to_save().items()
        }
        for key, common in self.common.items():
            assert isinstance(common, TensorTable)
            result |= {f"common.{key}.{leaf}": t for leaf, t in common.tensors_to_save().items()}
        partly = {name_from_parameter_key(key): sparse for key, sparse in self.partly.items()}
        result |= {f"partly.{name}": t for name, t in _sparse_to_save(partly).items()}  # type: ignore[arg-type]
        for key, gates in self.learned_masks():
            result |= {f"gated.{key}.{leaf}": t for leaf, t in gates.tensors_to_save().items()}
        return result

    def schedule_states(self) -> Iterator[ScheduleState]:
        """Iterate over the states of the schedules of its terms."""
        for state in self.schedules.values():
            assert isinstance(state, ScheduleState)
            yield state

    def learned_masks(self) -> Iterator[tuple[str, HardConcreteGates]]:
        """Iterate over the learned masks with their keys."""
        for key, gates in self.gated.items():
            assert isinstance(gates, HardConcreteGates)
            yield key, gates

    def named_edits(self) -> Iterator[tuple[str, Edit]]:
        """Iterate over the edits with their keys."""
        for key, edit in self.edits.items():
            assert isinstance(edit, Edit)
            yield key, edit

    def all_edits(self) -> Iterator[Edit]:
        """Iterate over the edits in the order in which they act."""
        yield from (edit for _, edit in self.named_edits())

    def masked_tensors(self) -> Iterator[tuple[str, SparseParameter | GatedDifference]]:
        """Iterate over the partly trained tensors of the model, with their names there."""
        for key, sparse in self.partly.items():
            assert isinstance(sparse, SparseParameter)
            yield name_from_parameter_key(key), sparse
        for _, gates in self.learned_masks():
            yield from gates.differences()

    def weight_edits(self) -> Iterator[tuple[str, Edit]]:
        """Iterate over the edits of weights that modules read themselves, with the names of these in the model."""
        for edit in self.all_edits():
            if edit.place.weight is not None:
                yield f"{edit.place.weight.path}.{edit.place.weight.leaf}", edit

    def adds_penalties(self) -> bool:
        """Whether a backward pass adds the gradients of a penalty."""
        gated = any(not gates.folded for _, gates in self.learned_masks())
        return gated or any(state.has_penalty() for state in self.schedule_states())

    def warn_if_never_advanced(self) -> None:
        """Warn if the delta has learned gates or a schedule, and `advance` was not called while it was trained."""
        parts = (*(gates for _, gates in self.learned_masks()), *self.schedule_states())
        if not all(part.advanced for part in parts):
            warnings.warn(f"{self.method!r}: {NEVER_ADVANCED}", stacklevel=3)

    def freeze(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make nothing of it trainable, and remember what was. The call may be repeated after an interruption."""
        if self.saved_requires_grad is None:
            self.saved_requires_grad = self.trainable_when_used(parameters)
        self.freezes += 1
        for parameter in parameters.values():
            parameter.requires_grad_(False)

    def unfreeze(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make the parameters trainable again that were before `freeze`; at first all but a head with head="freeze"."""
        if self.saved_requires_grad is None:
            return
        for name, trainable in self.trainable_when_used(parameters).items():
            parameters[name].requires_grad_(trainable)
        self.saved_requires_grad = None
        for state in self.schedule_states():
            state.register_penalty_hooks()

    def trainable_when_used(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, bool]:
        """Return by name which of its parameters train while it is in use."""
        saved = self.saved_requires_grad
        if saved is None:
            return {name: parameter.requires_grad for name, parameter in parameters.items()}
        frozen = {
            f"held.{parameter_key(n)}" for n in self.head if self.head_mode == "freeze" and n not in self.selected
        }
        return {name: saved.get(name, name not in frozen) for name in parameters}

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks that rows may have, in the order of their numbers; empty where there are not several.

        Names that no run has written are the numbers themselves.
        """
        count = self.method.tasks
        return tuple(self.trained.get("tasks") or map(str, range(count))) if count > 1 else ()

    @property
    def owned_tensor_names(self) -> tuple[str, ...]:
        """Names of the model's tensors that this delta has values of its own for."""
        return tuple(dict.fromkeys((*self.selected, *self.head)))


def _sparse_to_save(masked: Mapping[str, SparseParameter]) -> dict[str, torch.Tensor]:
    """Return the values and positions of those masked tensors that have any."""
    result: dict[str, torch.Tensor] = {}
    for name, sparse in masked.items():
        if len(sparse.values):
            result |= {f"{name}.values": sparse.values, f"{name}.index": sparse.index}
    return result


def up_projections(delta: Delta) -> Iterator[nn.Parameter]:
    """Iterate over the up-projections of a delta's LoRAs; of one under a mask, over its trained entries."""
    for edit in delta.all_edits():
        if isinstance(edit.modification.form, LowRank):
            sparse = edit.sparse_parameters().get("up")
            up = parameters_of(edit).get("up") if sparse is None else sparse.values
            if isinstance(up, nn.Parameter):
                yield up


def parameter_key(name: str) -> str:
    """Return a tensor's name as a key of a ParameterDict, which allows no dots.

    The key has no slashes either: accelerate's disk_offload writes a file by the name of each tensor of a model.
    """
    return name.replace(".", "~")


def name_from_parameter_key(key: str) -> str:
    """Return the tensor's name that `parameter_key` made a key of."""
    return key.replace("~", ".")
