"""The tensors of an attached method: one Edit for each place, one Delta for each name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .algebra import Method, Modification
from .anatomy import Columns
from .compositions import Gate
from .counting import kept_shapes, tied_key, trained_shapes
from .forms import Shapes
from .planning import Plan
from .sites import Place


@dataclass(frozen=True)
class Labels:
    """What a head means: the configuration's label facts that change with the delta in use."""

    id2label: tuple[tuple[int, str], ...]
    problem_type: str | None = None

    @classmethod
    def of(cls, config: Any) -> Labels:
        pairs = sorted((int(k), str(v)) for k, v in (config.id2label or {}).items())
        return cls(tuple(pairs), getattr(config, "problem_type", None))


class Edit(nn.Module):
    """One modification at one place: h <- compose(h, form(u)).

    Its parameters are the form's tensors (and a learned scale). `folded`: the kept ones, without a reparameterisation.
    """

    def __init__(
        self,
        modification: Modification,
        place: Place,
        shared: nn.ParameterDict | None,
        tied: nn.ParameterDict | None,
        folded: bool,
    ) -> None:
        super().__init__()
        self.modification, self.place = modification, place
        self.folded = folded or shared is None
        self.gated = isinstance(modification.compose, Gate)
        self.fired = False
        self.seen: torch.Tensor | None = None
        self.__dict__["shared"], self.__dict__["tied"] = shared, tied  # the delta's; here they are only read
        self.composing = tuple(modification.compose.shapes(place.widths))
        make = kept_shapes if self.folded else trained_shapes
        for name, shape in make(modification, place).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.float32)))

    def start(self) -> None:
        """Initial values of the form's and the composition's tensors."""
        with torch.no_grad():
            self.modification.form.start(self._own(of_form=True))
            self.modification.compose.start({**self._own(of_form=False), **(self.__dict__["tied"] or {})})

    def _own(self, of_form: bool) -> dict[str, torch.Tensor]:
        own = self._parameters.items()
        return {n: p for n, p in own if p is not None and (n not in self.composing) == of_form}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The kept tensors of the form, folded from what is trained."""
        own = self._own(of_form=True)
        if self.folded:
            return own
        shared: Mapping[str, torch.Tensor] = self.__dict__["shared"]
        return dict(self.modification.form.fold(own, shared, self.place.widths))

    def kept(self) -> dict[str, torch.Tensor]:
        """What the file holds: the kept tensors of the form, and the composition's."""
        return self.tensors() | self._own(of_form=False)

    def change(self, h: torch.Tensor, delta: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        """compose(h, Δh), in h's own precision."""
        tensors = self._own(of_form=False) | dict(self.__dict__["tied"] or {})
        return self.modification.compose(h, delta.to(h.dtype), tensors, x)

    def take(self) -> torch.Tensor | None:
        """What was seen; released on use: kept, it would hold the graph."""
        seen, self.seen = self.seen, None
        return seen

    def apply_to(self, h: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """compose(h, form(u)): u is the x that was seen (parallel), or h (sequential)."""
        columns = self.place.target.columns
        part = h if columns is None else _part(h, columns).flatten(-2)
        x = self.take()
        if self.modification.insertion == "parallel":
            assert x is not None
            u = x
        else:
            u = module.forward(part) if self.place.again else part
        changed = self.change(part, self.modification.form(self.tensors(), u, self.training), x)
        if columns is None:
            return changed
        whole = h.clone()
        _part(whole, columns).copy_(changed.unflatten(-1, (columns.groups, -1)))
        return whole

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "seen": None}


def _part(h: torch.Tensor, columns: Columns) -> torch.Tensor:
    """The view (..., groups, width) of a fused projection's output that `columns` names."""
    return h.unflatten(-1, (columns.groups, -1))[..., columns.start : columns.stop]


class Delta(nn.Module):
    """One attached method under one name: its edits, and its own values of the tensors it selects (head included).

    Selected tensors stand in the model while the delta is in use and in `held` while it is not, so that each is
    registered exactly once at any time and follows .to(), state_dict and deepcopy like every parameter.
    """

    def __init__(
        self, method: Method, planned: Plan, head: tuple[str, ...], head_mode: str, folded: bool = False
    ) -> None:
        super().__init__()
        self.method, self.planned = method, planned
        self.selected = tuple(t.name for t in planned.selected)
        self.head, self.head_mode = head, head_mode
        self.labels: Labels | None = None
        self.folded = folded
        self.edits = nn.ModuleDict()
        self.shared = nn.ModuleDict()  # reparameterisations, by term and attention kind
        self.tied = nn.ModuleDict()  # what the places of one sub-module have in common
        self.held = nn.ParameterDict()
        for index, modification, place in planned.edits:
            shapes = {} if folded else modification.form.shared(place.widths)
            shared = _common(self.shared, f"{index}_{place.group}", shapes)
            tied = _common(self.tied, tied_key(modification, place), modification.compose.tied(place.widths))
            self.edits[Plan.key(index, place)] = Edit(modification, place, shared, tied, folded)

    def start(self) -> None:
        """Initial values of every trained tensor, drawn from torch's global generator."""
        started: set[int] = set()
        for edit in self.all_edits():
            edit.start()
            shared = edit.__dict__["shared"]
            if shared is not None and id(shared) not in started:
                started.add(id(shared))
                with torch.no_grad():
                    edit.modification.form.start(shared)

    def kept(self) -> dict[str, torch.Tensor]:
        """All numbers of the edits by their names in the file: edit.PLACE.TENSOR and tied.NAME.TENSOR."""
        found = {f"edit.{key}.{leaf}": t for key, edit in self.named_edits() for leaf, t in edit.kept().items()}
        for key, common in self.tied.items():
            found |= {f"tied.{key}.{leaf}": t for leaf, t in common.named_parameters()}
        return found

    def named_edits(self) -> Iterator[tuple[str, Edit]]:
        for key, edit in self.edits.items():
            assert isinstance(edit, Edit)
            yield key, edit

    def all_edits(self) -> Iterator[Edit]:
        yield from (edit for _, edit in self.named_edits())

    @property
    def owned(self) -> tuple[str, ...]:
        """Names of the model's tensors that this delta has values of its own for."""
        return tuple(dict.fromkeys((*self.selected, *self.head)))


def _common(home: nn.ModuleDict, key: str, shapes: Shapes) -> nn.ParameterDict | None:
    """The tensors under a key, made when first asked for; None where there are none."""
    if shapes and key not in home:
        home[key] = nn.ParameterDict({n: nn.Parameter(torch.empty(s)) for n, s in shapes.items()})
    found = home[key] if shapes else None
    assert found is None or isinstance(found, nn.ParameterDict)
    return found


def slot_key(name: str) -> str:
    """A tensor's name as a key of a ParameterDict, which allows no dots."""
    return name.replace(".", "/")
