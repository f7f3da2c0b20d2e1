"""The modules that hold a delta's tensors: `Edit`, one modification at one place, and `Delta`, a whole method.

A weight may have few trainable entries (`SparseParameter`), or be shared by several edits (`SharedParameter`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..compat import parameters_of
from ..errors import DeltuneError, excerpt
from ..methods.compositions import Composition, SigmoidGate
from ..methods.counting import kept_shapes, trained_shapes
from ..methods.forms import Form, LowRank, Shapes
from ..methods.masks import Mask
from ..methods.resolve import ResolvedEdit, ResolvedMethod
from ..methods.sites import EditLocation
from ..methods.spec import Method, Modification
from .hard_concrete import GatedDifference, HardConcreteGates


class SparseParameter(nn.Module):
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

    def final(self, base: torch.Tensor) -> torch.Tensor:
        """Return the same as `apply_to_parameter`: it does not depend on the training mode."""
        return self.apply_to_parameter(base)


class SharedParameter(nn.Module):
    """A tensor that several edits share: dense, or under a mask, then 0 at all other entries."""

    def __init__(self, shape: tuple[int, ...], mask: Mask | None, masked: bool) -> None:
        super().__init__()
        self.sparse: SparseParameter | None = None
        if masked:
            index = mask.indices() if mask is not None else {}
            self.sparse = SparseParameter(shape, next(iter(index.values()), np.zeros(0, dtype=np.int64)))
        else:
            self.dense = nn.Parameter(torch.empty(shape))

    def initialize(self, compose: Composition, name: str) -> None:
        dense = self.dense if self.sparse is None else torch.empty(self.sparse.shape)
        compose.initialize({name: dense})
        if self.sparse is not None:
            self.sparse.initialize(dense)

    def value(self) -> torch.Tensor:
        """Return the dense tensor."""
        if self.sparse is None:
            return self.dense
        return self.sparse.apply_to_parameter(self.sparse.values.new_zeros(self.sparse.shape))


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
        """Check that the ids are those of outputs, so that a file with these labels can be loaded.

        Raises:
            DeltuneError: The ids are not 0, 1, …, n - 1.
        """
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
        """Write these labels into a configuration."""
        if HeadLabels.from_config(config) != self:
            config.id2label = dict(self.id2label)
            config.label2id = {label: index for index, label in self.id2label}
            config.problem_type = self.problem_type


RerunModule = Callable[[torch.Tensor], torch.Tensor]
"""Calls the module of an edit once more, with the tensors that its rows use."""

ReadInput = Callable[["Edit"], torch.Tensor | None]
"""Returns the x of an edit, or None where it reads none."""


class Edit(nn.Module):
    """One modification at one place: h <- compose(h, form(u)).

    Its parameters are the tensors of the form and of the composition, or, under a mask, some of their entries
    (`sparse`).

    Args:
        planned: The modification and its place.
        shared: The tensors of a reparameterisation that several edits share, or None.
        tied: The tensors that several edits share otherwise, or None.
        folded: Whether it holds the tensors of the saved file, without a reparameterisation.

    Attributes:
        source_path: The path of the module whose input is x, where that is another one.
        factor: The number s if the composition is h + s Δh, else None.
    """

    modification: Modification
    place: EditLocation
    origin: int
    folded: bool
    in_softmax: bool
    form: Form
    parallel: bool
    reads_own_input: bool
    source_path: str | None
    composition_names: tuple[str, ...]
    factor: float | None
    is_masked: bool
    is_dense: bool
    sparse: nn.ModuleDict | None

    def __init__(
        self, planned: ResolvedEdit, shared: nn.ParameterDict | None, tied: nn.ModuleDict | None, folded: bool
    ) -> None:
        super().__init__()
        modification, source, target = planned.modification, planned.place.source, planned.place.target
        reads_own_input = source is not None and source.path == target.path and target.side == "output"
        names = tuple(modification.compose.shapes(planned.place.widths))
        factor = None if names else modification.compose.factor({})
        folded, is_masked = folded or shared is None, planned.mask is not None
        self.__dict__.update(  # at once, since nn.Module looks for a parameter and a module in everything that is set
            shared=shared,  # these two are registered in the delta; here they are only read
            tied=tied,
            modification=modification,
            place=planned.place,
            origin=planned.origin,
            folded=folded,
            in_softmax=modification.compose.in_softmax,
            form=modification.form,
            parallel=modification.insertion == "parallel",
            reads_own_input=reads_own_input,
            source_path=None if source is None or reads_own_input else source.path,
            composition_names=names,
            factor=float(factor) if isinstance(factor, int | float) else None,
            is_masked=is_masked,
            is_dense=folded and not is_masked and not names,
            sparse=None,
        )
        shapes = (kept_shapes if folded else trained_shapes)(modification, planned.place)
        if clashing := [name for name in shapes if hasattr(type(self), name) or name in self.__dict__]:
            raise DeltuneError(
                f"{self.form!r}: a tensor cannot be called {', '.join(clashing)}, which nn.Module needs; rename it"
            )
        if planned.mask is not None:
            indices = planned.mask.indices()
            self.sparse = nn.ModuleDict()
            for name, shape in shapes.items():
                self.sparse[f"of_{name}"] = SparseParameter(shape, indices.get(name, np.zeros(0, dtype=np.int64)))
            return
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def initialize(self) -> None:
        """Set the initial values of the form's and the composition's tensors."""
        with torch.no_grad():
            tensors: dict[str, torch.Tensor] = {n: p for n, p in parameters_of(self).items() if p is not None}
            tensors.update({name: torch.empty(sparse.shape) for name, sparse in self._sparse_parameters()})
            self.modification.form.initialize({n: t for n, t in tensors.items() if n not in self.composition_names})
            self.modification.compose.initialize({n: t for n, t in tensors.items() if n in self.composition_names})
            for name, sparse in self._sparse_parameters():
                sparse.initialize(tensors[name])

    def set_initial_value(self, name: str, value: torch.Tensor) -> None:
        """Set the initial value of one tensor."""
        sparse = dict(self._sparse_parameters()).get(name)
        if sparse is not None:
            sparse.initialize(value)
        else:
            with torch.no_grad():
                self.get_parameter(name).copy_(value)

    def _sparse_parameters(self) -> Iterator[tuple[str, SparseParameter]]:
        for key, sparse in {} if self.sparse is None else self.sparse.items():
            assert isinstance(sparse, SparseParameter)
            yield key.removeprefix("of_"), sparse  # ModuleDict has methods called keys and values

    def _tensors_of(self, of_form: bool) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {n: p for n, p in parameters_of(self).items() if p is not None}
        if self.is_masked:
            like = next(s.values for _, s in self._sparse_parameters())
            untrained = {name: like.new_empty(s.shape) for name, s in self._sparse_parameters()}
            with torch.no_grad():
                self.modification.form.fill_untrained(
                    {n: t for n, t in untrained.items() if n not in self.composition_names}
                )
                self.modification.compose.initialize(
                    {n: t for n, t in untrained.items() if n in self.composition_names}
                )
            tensors |= {name: sparse.apply_to_parameter(untrained[name]) for name, sparse in self._sparse_parameters()}
        return {n: t for n, t in tensors.items() if (n not in self.composition_names) == of_form}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the form's dense tensors, as in the saved file. They must not be changed in place."""
        if self.is_dense:
            return cast("dict[str, torch.Tensor]", parameters_of(self))
        tensors = self._tensors_of(of_form=True)
        if self.folded:
            return tensors
        shared: Mapping[str, torch.Tensor] = self.__dict__["shared"]
        return dict(self.modification.form.fold(tensors, shared, self.place.widths))

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """Return the edit's parameters by name, as full tensors: masked entries filled in, shared tensors folded in."""
        return {**self.tensors(), **self._tensors_of(of_form=False)}

    def tensors_to_save(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the saved file: dense ones, or the values and positions of masked ones."""
        return _sparse_to_save(dict(self._sparse_parameters())) if self.is_masked else self.full_tensors()

    def compose(self, h: torch.Tensor, delta: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        """Return compose(h, Δh) in the dtype of h."""
        return self.modification.compose(h, delta.to(h.dtype), self._tensors_of_composition(), x)

    def gates(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gate of each position (B, n) of x (B, n, d)."""
        assert isinstance(self.modification.compose, SigmoidGate)
        return self.modification.compose.gates(self._tensors_of_composition(), x)

    def _tensors_of_composition(self) -> dict[str, torch.Tensor]:
        tied = self.__dict__["tied"] or {}
        return self._tensors_of(of_form=False) | {name: tensor.value() for name, tensor in tied.items()}

    def apply_to_parameter(self, base: torch.Tensor) -> torch.Tensor:
        """Return W + s A, the weight that the place is at with the change of the form, A being that of `affine`."""
        weight = self.place.weight
        tensors = self.full_tensors()
        affine, factor = self.modification.form.affine(tensors), self.modification.compose.factor(tensors)
        assert weight is not None and affine is not None and affine[0] is not None and factor is not None
        change = affine[0] * factor
        change = (change.mT if weight.transposed else change).to(base.dtype)
        if self.place.experts is None:
            return base + change
        return base.index_add(0, torch.tensor(self.place.experts, device=base.device), change)

    def resolve_input(self, inputs: dict[Edit, torch.Tensor], module_input: torch.Tensor | None) -> torch.Tensor | None:
        """Return its x, for all rows: its own module's input, or that of another, which is removed from `inputs`."""
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

    def apply_to(
        self,
        h: torch.Tensor,
        rerun: RerunModule,
        read: ReadInput,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return compose(h, form(u)), where u is x (parallel) or h (sequential).

        Args:
            h: The tensor to change.
            rerun: Calls the module that h belongs to once more.
            read: Returns x, with the rows of h.
            out: h itself where it may be overwritten, else None.

        Returns:
            The changed tensor.
        """
        x = read(self)
        if not self.parallel:
            u = rerun(h) if self.place.apply_norm_first else h
        else:
            assert x is not None
            u = x
        if self.factor is None:
            return self.compose(h, self.form(self.tensors(), u, self.training), x)
        return self.form.add_to(h, self.tensors(), u, self.training, self.factor, out)

    def only_scales(self) -> bool:
        """Whether its result is (1 - s + s w) ⊙ h with a number s, so that it only scales h."""
        reads_h = not self.parallel and not self.place.apply_norm_first
        return reads_h and self.form.multiplies is not None and self.factor is not None


class Delta(nn.Module):
    """One attached method under one name: its edits, and its own values of the tensors it selects (head included).

    Tensors that it owns are in the model while the delta is in use and in `held` while it is not, so that each is
    registered exactly once at any time and follows .to(), state_dict and deepcopy like any parameter.

    Args:
        method: The method.
        planned: The method resolved for one model.
        head: The names of the head's tensors.
        head_mode: "train" or "freeze".
        folded: Whether it holds the tensors of the saved file, without reparameterisations.

    Raises:
        DeltuneError: Two edits have one key, so that one of them would be lost.
    """

    def __init__(
        self, method: Method, planned: ResolvedMethod, head: tuple[str, ...], head_mode: str, folded: bool = False
    ) -> None:
        super().__init__()
        self.method, self.planned = method, planned
        self.selected = tuple(t.name for t in planned.selected)
        self.head, self.head_mode, self.folded = head, head_mode, folded
        self.labels: HeadLabels | None = None
        self.trained: dict[str, Any] = {}  # what the run that trained it writes into delta.json, as `TrainedFacts`
        self.saved_requires_grad: dict[str, bool] | None = {}  # of a delta that is not in use; None while it is
        self.freezes = 0  # how often it was frozen
        self.attached_parameters: dict[str, nn.Parameter] = {}  # by name, as they were when it was attached
        self.edits = edits = nn.ModuleDict()
        self.shared = nn.ModuleDict()  # reparameterisations, by term and attention kind
        self.tied = nn.ModuleDict()  # what the places of one sub-module have in common
        self.partly = nn.ModuleDict()  # masked selections, by the tensor's name
        self.gated = nn.ModuleDict()  # selections whose mask is learned, by the part's number
        self.held = nn.ParameterDict()
        masks = dict(planned.tied)
        for edit in planned.edits:
            if edit.key in edits:
                raise DeltuneError(
                    f"{method!r}: two of its edits are called {edit.key!r}, the second at {edit.place.target.path!r}, "
                    "and only one of them could be kept; please report this with the configuration of the model"
                )
            form, compose, widths = edit.modification.form, edit.modification.compose, edit.place.widths
            shapes = {} if folded or edit.mask else form.shared(widths)
            shared = _shared(self.shared, f"{edit.term}_{edit.place.group}", shapes)
            tied = _tied(self.tied, edit, compose.tied(widths), masks.get(edit.tied))
            edits[edit.key] = Edit(edit, shared, tied, folded)
        for tensor, mask in planned.masked:
            self.partly[parameter_key(tensor.name)] = SparseParameter(tensor.shape, mask.indices()[tensor.name])
        for gates in planned.gated:
            self.gated[gates.key] = HardConcreteGates(gates.tensors, gates.keep, folded)

    def initialize(self) -> None:
        """Set the initial values of all trained tensors of the edits, drawn from torch's global random generator."""
        started: set[int] = set()
        with torch.no_grad():
            for edit in self.all_edits():
                edit.initialize()
                shared, tied = edit.__dict__["shared"], edit.__dict__["tied"]
                if shared is not None and id(shared) not in started:
                    started.add(id(shared))
                    edit.modification.form.initialize(shared)
                for name, tensor in (tied or {}).items():
                    tensor.initialize(edit.modification.compose, name)

    def tensors_to_save(self) -> dict[str, torch.Tensor]:
        """Return all tensors but those of the model that it owns, by their names in the saved file."""
        result = {
            f"edit.{key}.{leaf}": t for key, edit in self.named_edits() for leaf, t in edit.tensors_to_save().items()
        }
        for key, common in self.tied.items():
            result |= {f"tied.{key}.{leaf}": t for leaf, t in common.state_dict(keep_vars=True).items()}
        partly = {parameter_name(key): sparse for key, sparse in self.partly.items()}
        result |= {f"partly.{name}": t for name, t in _sparse_to_save(partly).items()}  # type: ignore[arg-type]
        for key, gates in self.all_gates():
            result |= {f"gated.{key}.{leaf}": t for leaf, t in gates.tensors_to_save().items()}
        return result

    def all_gates(self) -> Iterator[tuple[str, HardConcreteGates]]:
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
            yield parameter_name(key), sparse
        for _, gates in self.all_gates():
            yield from gates.differences()

    def weight_edits(self) -> Iterator[tuple[str, Edit]]:
        """Iterate over the edits of weights that modules read themselves, with the names of these in the model."""
        for edit in self.all_edits():
            if edit.place.weight is not None:
                yield f"{edit.place.weight.path}.{edit.place.weight.leaf}", edit

    def warn_if_never_advanced(self) -> None:
        """Warn if the delta has learned gates and `advance` was never called while they were trained."""
        if not all(gates.advanced for _, gates in self.all_gates()):
            warnings.warn(
                f"{self.method!r} needs tuned.advance(step / steps) before every training step, but it was never "
                "called, so the mask was not learned",
                stacklevel=3,
            )

    def freeze(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make nothing of it trainable, and remember what was. The call may be repeated after an interruption.

        Args:
            parameters: Its parameters by name, wherever they are.
        """
        if self.saved_requires_grad is None:
            self.saved_requires_grad = self.trainable_when_used(parameters)
        self.freezes += 1
        for parameter in parameters.values():
            parameter.requires_grad_(False)

    def unfreeze(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make the parameters trainable again that were before `freeze`; at first all but a head with head="freeze".

        Args:
            parameters: Its parameters by name, wherever they are.
        """
        if self.saved_requires_grad is None:
            return
        for name, trainable in self.trainable_when_used(parameters).items():
            parameters[name].requires_grad_(trainable)
        self.saved_requires_grad = None

    def trainable_when_used(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, bool]:
        """Return by name which of its parameters train while it is in use.

        Args:
            parameters: Its parameters by name, wherever they are.
        """
        saved = self.saved_requires_grad
        if saved is None:
            return {name: parameter.requires_grad for name, parameter in parameters.items()}
        frozen = {
            f"held.{parameter_key(n)}" for n in self.head if self.head_mode == "freeze" and n not in self.selected
        }
        return {name: saved.get(name, name not in frozen) for name in parameters}

    @property
    def owned_tensors(self) -> tuple[str, ...]:
        """Names of the model's tensors that this delta has values of its own for."""
        return tuple(dict.fromkeys((*self.selected, *self.head)))


def _shared(container: nn.ModuleDict, key: str, shapes: Shapes) -> nn.ParameterDict | None:
    """Return the shared tensors under a key, which are made the first time; None where there are none."""
    if shapes and key not in container:
        container[key] = nn.ParameterDict({n: nn.Parameter(torch.empty(s)) for n, s in shapes.items()})
    result = container[key] if shapes else None
    assert result is None or isinstance(result, nn.ParameterDict)
    return result


def _tied(container: nn.ModuleDict, edit: ResolvedEdit, shapes: Shapes, mask: Mask | None) -> nn.ModuleDict | None:
    """Return the tensors that the places of one sub-module share, which are made the first time; None without any."""
    if shapes and edit.tied not in container:
        masked = edit.mask is not None
        container[edit.tied] = nn.ModuleDict({n: SharedParameter(s, mask, masked) for n, s in shapes.items()})
    result = container[edit.tied] if shapes else None
    assert result is None or isinstance(result, nn.ModuleDict)
    return result


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
            sparse = dict(edit._sparse_parameters()).get("up")
            up = parameters_of(edit).get("up") if sparse is None else sparse.values
            if isinstance(up, nn.Parameter):
                yield up


def parameter_key(name: str) -> str:
    """Return a tensor's name as a key of a ParameterDict, which allows no dots.

    The key has no slashes either: accelerate's disk_offload writes a file by the name of each tensor of a model.
    """
    return name.replace(".", "~")


def parameter_name(key: str) -> str:
    """Return the tensor's name that `parameter_key` made a key of."""
    return key.replace("~", ".")
