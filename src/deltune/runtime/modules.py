"""The tensors of an attached method: one Edit for each place, one Delta for each name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import DeltuneError
from ..methods.compositions import Gate
from ..methods.counting import kept_shapes, trained_shapes
from ..methods.forms import Shapes
from ..methods.masks import Mask
from ..methods.resolve import ResolvedEdit, ResolvedMethod
from ..methods.spec import Method
from .hard_concrete import GatedDifference, HardConcreteGates
from .sparse_params import SharedParameter, SparseParameter


@dataclass(frozen=True)
class HeadLabels:
    """What a head means: the configuration's label facts that change with the delta in use."""

    id2label: tuple[tuple[int, str], ...]
    problem_type: str | None = None

    @classmethod
    def from_config(cls, config: Any) -> HeadLabels:
        pairs = sorted((int(k), str(v)) for k, v in (config.id2label or {}).items())
        return cls(tuple(pairs), getattr(config, "problem_type", None))

    def apply_to(self, model: PreTrainedModel) -> None:
        """Give a model these label facts."""
        config = model.config
        if HeadLabels.from_config(config) != self:
            config.id2label = dict(self.id2label)
            config.label2id = {label: index for index, label in self.id2label}
            config.problem_type = self.problem_type  # type: ignore[assignment]
        if hasattr(model, "num_labels"):
            model.num_labels = len(self.id2label)  # type: ignore[assignment]


RerunModule = Callable[[torch.Tensor], torch.Tensor]
"""Runs the module that an edit is at once more, with the tensors that its rows use."""


class Edit(nn.Module):
    """One modification at one place: h <- compose(h, form(u)).

    Its parameters are the form's tensors and the composition's, or, under a mask, some of their entries (`sparse`).
    `folded`: the kept tensors, without a reparameterisation.
    """

    def __init__(
        self, planned: ResolvedEdit, shared: nn.ParameterDict | None, tied: nn.ModuleDict | None, folded: bool
    ) -> None:
        super().__init__()
        self.modification, self.place, self.origin = planned.modification, planned.place, planned.origin
        self.folded = folded or shared is None
        self.has_gate = isinstance(self.modification.compose, Gate)
        self.__dict__["shared"], self.__dict__["tied"] = shared, tied  # the delta's; here they are only read
        self.form, self.parallel = self.modification.form, self.modification.insertion == "parallel"
        source, target = self.place.source, self.place.target
        self.reads_own_input = source is not None and source.path == target.path and target.side == "output"
        self.source_path = None if source is None or self.reads_own_input else source.path  # where x is noted for it
        self.composition_names = tuple(self.modification.compose.shapes(self.place.widths))
        self.factor = self._factor()
        self.is_masked = planned.mask is not None
        self.is_dense = self.folded and not self.is_masked and not self.composition_names
        self.sparse = nn.ModuleDict()
        shapes = (kept_shapes if self.folded else trained_shapes)(self.modification, self.place)
        if taken := [name for name in shapes if hasattr(self, name)]:
            raise DeltuneError(f"{self.form!r}: no tensor can be called {', '.join(taken)}; rename it")
        if planned.mask is not None:
            indices = planned.mask.indices()
            for name, shape in shapes.items():
                self.sparse[f"of_{name}"] = SparseParameter(shape, indices.get(name, np.zeros(0, dtype=np.int64)))
            return
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def initialize(self) -> None:
        """Initial values of the form's and the composition's tensors."""
        with torch.no_grad():
            own: dict[str, torch.Tensor] = {n: p for n, p in self._parameters.items() if p is not None}
            own.update({name: torch.empty(sparse.shape) for name, sparse in self._sparse_parameters()})
            self.modification.form.start({n: t for n, t in own.items() if n not in self.composition_names})
            self.modification.compose.start({n: t for n, t in own.items() if n in self.composition_names})
            for name, sparse in self._sparse_parameters():
                sparse.initialize(own[name])

    def set_initial_value(self, name: str, value: torch.Tensor) -> None:
        """Give one tensor an initial value of its own."""
        sparse = dict(self._sparse_parameters()).get(name)
        if sparse is not None:
            sparse.initialize(value)
        else:
            with torch.no_grad():
                self.get_parameter(name).copy_(value)

    def _sparse_parameters(self) -> Iterator[tuple[str, SparseParameter]]:
        for key, sparse in self.sparse.items():
            assert isinstance(sparse, SparseParameter)
            yield key.removeprefix("of_"), sparse  # a ModuleDict has methods of its own called keys and values

    def _tensors_of(self, of_form: bool) -> dict[str, torch.Tensor]:
        own: dict[str, torch.Tensor] = {n: p for n, p in self._parameters.items() if p is not None}
        if self.is_masked:
            like = next(s.values for _, s in self._sparse_parameters())
            freeze = {name: like.new_empty(s.shape) for name, s in self._sparse_parameters()}
            with torch.no_grad():
                self.modification.form.rest({n: t for n, t in freeze.items() if n not in self.composition_names})
                self.modification.compose.start({n: t for n, t in freeze.items() if n in self.composition_names})
            own |= {name: sparse.on(freeze[name]) for name, sparse in self._sparse_parameters()}
        return {n: t for n, t in own.items() if (n not in self.composition_names) == of_form}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The kept tensors of the form, dense, folded from what is trained; to be read only."""
        if self.is_dense:
            return cast("dict[str, torch.Tensor]", self._parameters)
        own = self._tensors_of(of_form=True)
        if self.folded:
            return own
        shared: Mapping[str, torch.Tensor] = self.__dict__["shared"]
        return dict(self.modification.form.fold(own, shared, self.place.widths))

    def dense(self) -> dict[str, torch.Tensor]:
        """The kept tensors of the form, and the composition's."""
        return {**self.tensors(), **self._tensors_of(of_form=False)}

    def tensors_to_save(self) -> dict[str, torch.Tensor]:
        """What the file holds: dense tensors, or the values and positions of masked ones."""
        return _sparse_to_save(dict(self._sparse_parameters())) if self.is_masked else self.dense()

    def compose(self, h: torch.Tensor, delta: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        """compose(h, Δh), in h's own precision."""
        tied = self.__dict__["tied"] or {}
        tensors = self._tensors_of(of_form=False) | {name: tensor.value() for name, tensor in tied.items()}
        return self.modification.compose(h, delta.to(h.dtype), tensors, x)

    def _factor(self) -> float | None:
        """s where it is h + s Δh and s is a number; else None."""
        found = None if self.composition_names else self.modification.compose.factor({})
        return float(found) if isinstance(found, int | float) else None

    def resolve_input(self, inputs: dict[Edit, torch.Tensor], module_input: torch.Tensor | None) -> torch.Tensor | None:
        """Its x: what its own module read, or what another one did, which is taken out of the pass's notes."""
        if self.reads_own_input:
            return module_input
        if self.source_path is None:
            return None
        if self not in inputs:
            raise DeltuneError(
                f"{self.place.name} reads what {self.elsewhere!r} is given, which did not run before it: call the "
                "module that holds both"
            )
        return inputs.pop(self)

    def apply_to(
        self,
        h: torch.Tensor,
        rerun: RerunModule,
        inputs: dict[Edit, torch.Tensor],
        module_input: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """compose(h, form(u)): u is x (parallel), or h (sequential).

        Args:
            again: Runs the module that h belongs to.
            inputs: What other modules read in this pass.
            read: What that module read.
            out: h itself where it may be overwritten, else None.
        """
        x = self.resolve_input(inputs, module_input)
        if not self.parallel:
            u = rerun(h) if self.place.again else h
        else:
            assert x is not None
            u = x
        if self.factor is None:
            return self.compose(h, self.form(self.tensors(), u, self.training), x)
        return self.form.onto(h, self.tensors(), u, self.training, self.factor, out)

    def only_scales(self) -> bool:
        """Whether it makes of h (1 - s + s w) ⊙ h, with a number s, and no more."""
        return not self.parallel and self.form.multiplies is not None and self.factor is not None


class Delta(nn.Module):
    """One attached method under one name: its edits, and its own values of the tensors it selects (head included).

    Selected tensors stand in the model while the delta is in use and in `held` while it is not, so that each is
    registered exactly once at any time and follows .to(), state_dict and deepcopy like every parameter.
    """

    def __init__(
        self, method: Method, planned: ResolvedMethod, head: tuple[str, ...], head_mode: str, folded: bool = False
    ) -> None:
        super().__init__()
        self.method, self.planned = method, planned
        self.selected = tuple(t.name for t in planned.selected)
        self.head, self.head_mode, self.folded = head, head_mode, folded
        self.labels: HeadLabels | None = None
        self.saved_requires_grad: (
            dict[str, bool] | None
        ) = {}  # which parameters train when it is in use; None while it is
        self.edits = nn.ModuleDict()
        self.shared = nn.ModuleDict()  # reparameterisations, by term and attention kind
        self.tied = nn.ModuleDict()  # what the places of one sub-module have in common
        self.partly = nn.ModuleDict()  # masked selections, by the tensor's name
        self.gated = nn.ModuleDict()  # selections whose mask is learned, by the part's number
        self.held = nn.ParameterDict()
        masks = dict(planned.tied)
        for edit in planned.edits:
            form, compose, widths = edit.modification.form, edit.modification.compose, edit.place.widths
            shapes = {} if folded or edit.mask else form.shared(widths)
            shared = _shared(self.shared, f"{edit.term}_{edit.place.group}", shapes)
            tied = _tied(self.tied, edit, compose.tied(widths), masks.get(edit.tied))
            self.edits[edit.key] = Edit(edit, shared, tied, folded)
        for tensor, mask in planned.partly:
            self.partly[parameter_key(tensor.name)] = SparseParameter(tensor.shape, mask.indices()[tensor.name])
        for gates in planned.gated:
            self.gated[gates.key] = HardConcreteGates(gates.tensors, gates.keep, folded)

    def initialize(self) -> None:
        """Initial values of every trained tensor of the edits, drawn from torch's global generator."""
        started: set[int] = set()
        with torch.no_grad():
            for edit in self.all_edits():
                edit.initialize()
                shared, tied = edit.__dict__["shared"], edit.__dict__["tied"]
                if shared is not None and id(shared) not in started:
                    started.add(id(shared))
                    edit.modification.form.start(shared)
                for name, tensor in (tied or {}).items():
                    tensor.initialize(edit.modification.compose, name)

    def tensors_to_save(self) -> dict[str, torch.Tensor]:
        """All numbers of the edits by their names in the file: edit., tied. and partly."""
        found = {
            f"edit.{key}.{leaf}": t for key, edit in self.named_edits() for leaf, t in edit.tensors_to_save().items()
        }
        for key, common in self.tied.items():
            found |= {f"tied.{key}.{leaf}": t for leaf, t in common.state_dict(keep_vars=True).items()}
        partly = {key.replace("/", "."): sparse for key, sparse in self.partly.items()}
        found |= {f"partly.{name}": t for name, t in _sparse_to_save(partly).items()}  # type: ignore[arg-type]
        for key, gates in self.all_gates():
            found |= {f"gated.{key}.{leaf}": t for leaf, t in gates.tensors_to_save().items()}
        return found

    def all_gates(self) -> Iterator[tuple[str, HardConcreteGates]]:
        for key, gates in self.gated.items():
            assert isinstance(gates, HardConcreteGates)
            yield key, gates

    def named_edits(self) -> Iterator[tuple[str, Edit]]:
        for key, edit in self.edits.items():
            assert isinstance(edit, Edit)
            yield key, edit

    def all_edits(self) -> Iterator[Edit]:
        yield from (edit for _, edit in self.named_edits())

    def masked_tensors(self) -> Iterator[tuple[str, SparseParameter | GatedDifference]]:
        """The tensors of the model that are trained in part, by their names there."""
        for key, sparse in self.partly.items():
            assert isinstance(sparse, SparseParameter)
            yield key.replace("/", "."), sparse
        for _, gates in self.all_gates():
            yield from gates.differences()

    def warn_if_never_advanced(self) -> None:
        """Warn if the delta has learned gates and `advance` was never called while they were trained."""
        if not all(gates.advanced for _, gates in self.all_gates()):
            warnings.warn(
                f"{self.method!r} was not told of its training's progress, so its gates never closed: call "
                "tuned.advance(step / steps) before every step",
                stacklevel=3,
            )

    def freeze(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let nothing of it train; what did is remembered. It may be repeated after an interruption.

        Args:
            parameters: Its parameters by name, wherever they stand.
        """
        if self.saved_requires_grad is None:
            self.saved_requires_grad = {name: parameter.requires_grad for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.requires_grad_(False)

    def unfreeze(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let train what trained before; at first everything but a frozen head that it does not select."""
        if self.saved_requires_grad is None:
            return
        frozen = {
            f"held.{parameter_key(n)}" for n in self.head if self.head_mode == "freeze" and n not in self.selected
        }
        for name, parameter in parameters.items():
            parameter.requires_grad_(self.saved_requires_grad.get(name, name not in frozen))
        self.saved_requires_grad = None

    @property
    def owned_tensors(self) -> tuple[str, ...]:
        """Names of the model's tensors that this delta has values of its own for."""
        return tuple(dict.fromkeys((*self.selected, *self.head)))


def _shared(home: nn.ModuleDict, key: str, shapes: Shapes) -> nn.ParameterDict | None:
    """The tensors under a key, made when first asked for; None where there are none."""
    if shapes and key not in home:
        home[key] = nn.ParameterDict({n: nn.Parameter(torch.empty(s)) for n, s in shapes.items()})
    found = home[key] if shapes else None
    assert found is None or isinstance(found, nn.ParameterDict)
    return found


def _tied(home: nn.ModuleDict, edit: ResolvedEdit, shapes: Shapes, mask: Mask | None) -> nn.ModuleDict | None:
    """The same for what the places of one sub-module share."""
    if shapes and edit.tied not in home:
        masked = edit.mask is not None
        home[edit.tied] = nn.ModuleDict({n: SharedParameter(s, mask, masked) for n, s in shapes.items()})
    found = home[edit.tied] if shapes else None
    assert found is None or isinstance(found, nn.ModuleDict)
    return found


def _sparse_to_save(masked: Mapping[str, SparseParameter]) -> dict[str, torch.Tensor]:
    """Values and positions of masked tensors that have any."""
    found: dict[str, torch.Tensor] = {}
    for name, sparse in masked.items():
        if len(sparse.values):
            found |= {f"{name}.values": sparse.values, f"{name}.index": sparse.index}
    return found


def parameter_key(name: str) -> str:
    """A tensor's name as a key of a ParameterDict, which allows no dots."""
    return name.replace(".", "/")
