"""The tensors of an attached method: one Edit for each place, one Delta for each name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .algebra import Gate, Method, Modification, Scale
from .anatomy import Columns
from .counting import kept_shapes, trained_shapes
from .forms import Shapes
from .sites import Place, Plan


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

    def __init__(self, modification: Modification, place: Place, shared: nn.ParameterDict | None, folded: bool) -> None:
        super().__init__()
        self.modification, self.place = modification, place
        self.folded = folded or shared is None
        self.gated = isinstance(modification.compose, Gate)
        self.fired = False
        self.seen: torch.Tensor | None = None
        self.__dict__["shared"] = shared  # belongs to the delta; here it is only read
        make = kept_shapes if self.folded else trained_shapes
        for name, shape in make(modification, place).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.float32)))

    def start(self) -> None:
        """Initial values; a learned scale starts at its value."""
        with torch.no_grad():
            self.modification.form.start({n: p for n, p in self._parameters.items() if n != "scale" and p is not None})
            if isinstance(self.modification.compose, Scale) and self.modification.compose.learned:
                self._parameters["scale"].fill_(self.modification.compose.value)  # type: ignore[union-attr]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The kept tensors of the form, folded from what is trained."""
        own: dict[str, torch.Tensor] = {n: p for n, p in self._parameters.items() if n != "scale" and p is not None}
        if self.folded:
            return own
        shared: Mapping[str, torch.Tensor] = self.__dict__["shared"]
        return dict(self.modification.form.fold(own, shared, self.place.widths))

    def kept(self) -> dict[str, torch.Tensor]:
        """What the file holds: the kept tensors and a learned scale."""
        scale = self._parameters.get("scale")
        return self.tensors() | ({} if scale is None else {"scale": scale})

    def change(self, h: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """compose(h, Δh) for add and scale, in h's own precision."""
        delta = delta.to(h.dtype)
        compose = self.modification.compose
        if not isinstance(compose, Scale):
            return h + delta
        if compose.learned:
            return h + self._parameters["scale"].to(h.dtype) * delta  # type: ignore[union-attr]
        return torch.add(h, delta, alpha=compose.value)

    def apply_to(self, h: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """h with Δh of what was seen, or of h itself where nothing is read elsewhere."""
        columns = self.place.target.columns
        part = h if columns is None else _part(h, columns).flatten(-2)
        u, self.seen = self.seen, None  # released on use: kept, it would hold the graph
        if u is None:
            u = module.forward(part) if self.place.again else part
        changed = self.change(part, self.modification.form(self.tensors(), u, self.training))
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
        self.head, self.head_mode, self.folded = head, head_mode, folded
        self.labels: Labels | None = None
        self.edits = nn.ModuleDict()
        self.shared = nn.ModuleDict()
        self.held = nn.ParameterDict()
        for index, modification, place in planned.edits:
            shapes = {} if folded else modification.form.shared(place.widths)
            shared = self._shared(f"{index}_{place.group}", shapes) if shapes else None
            self.edits[Plan.key(index, place)] = Edit(modification, place, shared, folded)

    def _shared(self, key: str, shapes: Shapes) -> nn.ParameterDict:
        if key not in self.shared:
            self.shared[key] = nn.ParameterDict({n: nn.Parameter(torch.empty(s)) for n, s in shapes.items()})
        return self.shared[key]  # type: ignore[return-value]

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


def slot_key(name: str) -> str:
    """A tensor's name as a key of a ParameterDict, which allows no dots."""
    return name.replace(".", "/")
