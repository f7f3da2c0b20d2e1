"""The frozen trunk of a tuned model: the layers below everything that is trained, run without dropout, or not at all.

The model's own forward goes on. In a pass that is given the trunk's states, each of its layers hands on the state that
was kept there, or what it was given; masks, positions and whatever else a model computes outside of its layers stay its
own. The trunk is found from the plan and the anatomy, never from a method's name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..anatomy.types import Anatomy, Layer, Tensor
from ..compat import call_class, get_call_override, remove_call_override, set_call_override
from ..errors import DeltuneError
from .handle import NAME, Tuned
from .modules import Delta

PREFIX = "trunk_"
"""Arguments of a pass that are the trunk's states: trunk_STACK, (rows, tokens, states, width)."""

Argument = int | str
"""A place or a name among a layer's arguments."""


@dataclass(frozen=True)
class Frontier:
    """Where a trunk ends.

    layers: those of it, in order of execution. keeps: stack -> the states that what is above may read, by the number of
    layers that ran before (0: what enters the first). above: layers run after it.
    """

    layers: tuple[Layer, ...]
    keeps: Mapping[str, tuple[int, ...]]
    above: bool


def frontier(anatomy: Anatomy, delta: Delta) -> Frontier:
    """The trunk of a delta. Error: no layer is below all that is trained or changed."""
    lowest, what = min(_trained(anatomy, delta), default=(len(anatomy.layers), "nothing"))
    if not lowest:
        raise DeltuneError(
            f"trunk_dropout=off is for a frozen trunk, and {delta.method!r} has none: it trains or changes {what}, "
            "below which there is no layer. Give trunk_dropout=on, or a method on upper layers, such as one with "
            "layers='upper half'"
        )
    below, above = anatomy.layers[:lowest], anatomy.layers[lowest:]
    read_whole = {e.place.target.path for e in delta.planned.edits if e.place.target.side == "states"}
    last = above[0].stack if above else anatomy.stacks[-1].name
    keeps: dict[str, tuple[int, ...]] = {}
    for stack in anatomy.stacks:
        depth = sum(layer.passes for layer in below if layer.stack == stack.name)
        if depth and (above or stack.name == last):  # an encoder's end is read by the decoder's layers alone
            keeps[stack.name] = tuple(range(depth + 1)) if stack.container in read_whole else (depth,)
    return Frontier(below, keeps, bool(above))


def _trained(anatomy: Anatomy, delta: Delta) -> Iterator[tuple[int, str]]:
    """How many layers run before each thing that a delta trains or changes, and what it is."""
    plan = delta.planned
    for edit in plan.edits:
        ports = [edit.place.target, *([edit.place.source] if edit.place.source else [])]
        first = min(_before(anatomy, port.path, port.side) for port in ports)
        moved = [_first(anatomy, edit.place.shifted_stack)] if edit.place.shifted_stack else []
        yield min([first, *moved]), edit.place.name
    own: list[Tensor] = [*plan.selected, *(t for t, _ in plan.masked), *(t for g in plan.gated for t in g.tensors)]
    own += [t for t in anatomy.tensors if t.name in delta.head]
    for tensor in own:
        for name in (tensor.name, *tensor.aliases):
            yield _before(anatomy, name, tensor.area), tensor.name


def _before(anatomy: Anatomy, path: str, area: str) -> int:
    """How many layers run before what stands at a path; where it is in none, its area, or a port's side, tells."""
    inside = [i for i, layer in enumerate(anatomy.layers) if f"{path}.".startswith(f"{layer.path}.")]
    if inside:
        return inside[0]
    later = next((s.name for s in anatomy.stacks[1:] if f"{path}.".startswith(f"{s.entry}.")), "")
    if area in ("states", "head", "pooler", "vocabulary", "final"):
        ends_early = area == "final" and len(anatomy.stacks) > 1 and not later
        return _first(anatomy, anatomy.stacks[1].name) if ends_early else len(anatomy.layers)
    return _first(anatomy, later) if later else 0  # an embedding, or where nobody knows


def _first(anatomy: Anatomy, stack: str) -> int:
    """How many layers run before those of a stack."""
    return next(i for i, layer in enumerate(anatomy.layers) if layer.stack == stack)


class Station:
    """One layer of a trunk: `calls`, the numbers of its passes in its stack."""

    def __init__(self, trunk: FrozenLayers, module: nn.Module, stack: str, calls: tuple[int, ...]) -> None:
        self.trunk, self.module, self.stack, self.calls = trunk, module, stack, calls
        self.at = 0  # passes so far
        self.skipped = True
        self.single = True  # its output is a tensor alone
        self.rest: tuple[Argument | None, ...] = ()  # else what comes after it: arguments handed on, or nothing
        self.handles = [
            module.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True),
            module.register_forward_hook(self.leave, with_kwargs=True, prepend=True),
        ]

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What enters a stack's first layer is the kept state, if that was kept."""
        if not self.trunk.inside or self.calls[self.at]:
            return None
        state = self.trunk.given.get((self.stack, 0))
        if self.trunk.taking and 0 in self.trunk.keeps.get(self.stack, ()):
            self.trunk.taken[self.stack, 0] = _hidden(args, kwargs)
        if state is None:
            return None
        return ((state, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): state})

    def pass_on(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the layer's forward: the kept state, or what enters."""
        number = self.calls[self.at] + 1
        state = self.trunk.given.get((self.stack, number), _hidden(args, kwargs))
        if self.single:
            return state
        return (state, *(None if a is None else args[a] if isinstance(a, int) else kwargs.get(a) for a in self.rest))

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self.trunk.inside:
            return
        number = self.calls[self.at] + 1
        self.at += 1
        if self.trunk.taking and number in self.trunk.keeps.get(self.stack, ()):
            self.trunk.taken[self.stack, number] = output if isinstance(output, torch.Tensor) else output[0]
        if self is self.trunk.stations[-1] and self.at == len(self.calls):
            self.trunk.passed()


class _PassedError(Exception):
    """The trunk's end was reached, and nothing above it is wanted."""


class TrunkEntry:
    """Surrounds the call of the model, or of a stack that may be called `alone`."""

    of_live_model = True

    def __init__(self, trunk: FrozenLayers, alone: str, module: nn.Module) -> None:
        self.trunk, self.alone, self.module = trunk, alone, module
        self.before = get_call_override(module)
        set_call_override(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.trunk.run(self, args, kwargs)

    def inner(self, *args: Any, **kwargs: Any) -> Any:
        return call_class(self.module, args, kwargs) if self.before is None else self.before(*args, **kwargs)


class FrozenLayers:
    """The trunk of the delta in use, on a live model until `remove`.

    While the model trains, it runs in eval mode up to the end of the trunk's last layer. A pass that is given states
    (arguments with PREFIX) skips it; the encoder of an encoder-decoder, called alone, takes its own.
    Errors: see frontier.
    """

    def __init__(self, tuned: Tuned) -> None:
        self.model = model = tuned.model
        self.anatomy = anatomy = tuned.anatomy
        self.frontier = frontier(anatomy, tuned.delta())
        self.keeps = dict(self.frontier.keeps)
        self.inside, self.taking = 0, False
        self.given: dict[tuple[str, int], torch.Tensor] = {}
        self.taken: dict[tuple[str, int], torch.Tensor] = {}
        self.resting: list[nn.Module] = []
        self.modules = [m for name, m in model.named_modules() if name.split(".")[0] != NAME]
        numbers = {stack.name: 0 for stack in anatomy.stacks}
        self.stations: list[Station] = []
        for layer in self.frontier.layers:
            first = numbers[layer.stack]
            numbers[layer.stack] = first + layer.passes
            calls = tuple(range(first, first + layer.passes))
            self.stations.append(Station(self, model.get_submodule(layer.path), layer.stack, calls))
        entries: dict[str, nn.Module] = {"": model}
        if len(anatomy.stacks) > 1:
            entries[anatomy.stacks[0].name] = model.get_submodule(anatomy.stacks[0].entry)
        self.thread = 0  # that runs a pass
        self.mutex = threading.Lock()
        self.entries = [TrunkEntry(self, alone, module) for alone, module in entries.items()]

    def remove(self) -> None:
        """Leave the model as it was."""
        for entry in self.entries:
            remove_call_override(entry.module, entry, entry.before)
        for handle in (h for station in self.stations for h in station.handles):
            handle.remove()

    # -- a pass

    def run(self, entry: TrunkEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, or one stack alone; the arguments are without the states there.

        Raises:
            DeltuneError: another thread is inside: modes and states of a trunk are those of one pass at a time.
        """
        with self.mutex:
            taken = self.inside and self.thread != threading.get_ident()
            if not taken:
                self.thread = threading.get_ident()
                self.inside += 1
        if taken:
            raise DeltuneError(
                "a model whose frozen layers are run apart (trunk_dropout=off, or with kept states) runs in one thread "
                "at a time"
            )
        try:
            if self.inside == 1:
                self.begin(entry.alone, kwargs)
            passed = {name: value for name, value in kwargs.items() if not name.startswith(PREFIX)}
            return entry.inner(*args, **passed)
        finally:
            self.inside -= 1
            if not self.inside:
                self.end()

    def begin(self, alone: str, kwargs: dict[str, Any]) -> None:
        """Start a pass of the model, or of one stack `alone`."""
        for station in self.stations:
            station.at = 0
        if self.model.training:
            self.resting = [module for module in self.modules if module.training]
            for module in self.resting:
                module.training = False
        states = {name.removeprefix(PREFIX): t for name, t in kwargs.items() if name.startswith(PREFIX)}
        if states and (not alone or alone in states):
            self.given = {
                (stack, number): states[stack][:, :, i]
                for stack, numbers in self.keeps.items()
                for i, number in enumerate(numbers)
                if stack in states
            }
            for station in self.stations:
                if station.skipped:
                    station.module.__dict__["forward"] = station.pass_on

    def passed(self) -> None:
        """The trunk's last layer is done."""
        if self.taking:
            raise _PassedError
        self._wake()

    def end(self) -> None:
        self._wake()
        self.given = {}
        for station in self.stations:
            station.module.__dict__.pop("forward", None)

    def _wake(self) -> None:
        for module in self.resting:
            module.training = True
        self.resting = []

    # -- its states

    def second(self, argument: str) -> bool:
        """Whether the states of an argument are those of an encoder-decoder's decoder."""
        return len(self.anatomy.stacks) > 1 and argument == f"{PREFIX}{self.anatomy.stacks[1].name}"

    def states(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The states of a batch that what is above reads, as a pass takes them; nothing above is run."""
        self.taking, self.taken = True, {}
        try:
            self.model(**batch)
        except _PassedError:
            pass
        finally:
            self.taking = False
        found, self.taken = self.taken, {}
        return {
            f"{PREFIX}{stack}": torch.stack([found[stack, number] for number in numbers], dim=2)
            for stack, numbers in self.keeps.items()
        }

    def study(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """See in a pass what each layer of the trunk gives besides its state, and who reads it; the pass's output.

        A layer whose own tensor is read above the trunk (a position bias that the first layer computes for all) is run,
        with those before it.
        """
        outputs: list[tuple[Station, tuple[Any, ...], dict[str, Any], Any]] = []
        read: list[Any] = []
        below = {layer.path for layer in self.frontier.layers}
        handles = [
            station.module.register_forward_hook(
                lambda m, args, kwargs, output, s=station: outputs.append((s, args, kwargs, output)), with_kwargs=True
            )
            for station in self.stations
        ]
        handles += [
            self.model.get_submodule(layer.path).register_forward_pre_hook(
                lambda m, args, kwargs: read.extend((*args, *kwargs.values())), with_kwargs=True
            )
            for layer in self.anatomy.layers
            if layer.path not in below
        ]
        try:
            whole = self.model(**batch)
        finally:
            for handle in handles:
                handle.remove()
        for station, args, kwargs, output in outputs:
            station.single = isinstance(output, torch.Tensor)
            if not station.single:
                station.rest = tuple(_source(value, args, kwargs) for value in output[1:])
                made = [value for value, at in zip(output[1:], station.rest, strict=True) if at is None]
                station.skipped = not any(value is other for value in made for other in read if value is not None)
        for stack in {station.stack for station in self.stations}:
            stations = [station for station in self.stations if station.stack == stack]
            needed = max((i + 1 for i, station in enumerate(stations) if not station.skipped), default=0)
            for station in stations[:needed]:
                station.skipped = False
            if needed == len(stations):
                self.keeps.pop(stack, None)
        return whole


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    found: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
    return found


def _source(value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Argument | None:
    """Which argument a layer hands on as it is."""
    given: list[tuple[Argument, Any]] = [*enumerate(args), *kwargs.items()]
    return None if value is None else next((name for name, other in given if other is value), None)
