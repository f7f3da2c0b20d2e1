"""The state of the schedules of a delta's terms: what is penalised, projected and pruned while it trains."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..compat import buffers_of, hooks_of_tensor, parameters_of, tensor_version
from ..errors import DeltuneError
from ..methods.schedules import Allocation, ClusterSchedule, RankSchedule, Schedule

NEVER_ADVANCED = (
    "call tuned.advance((step + 1) / steps) after optimizer.step(), like PEFT's update_and_allocate (in a Trainer, "
    "callbacks=[deltune.ScheduleCallback()]); it was never called"
)


class AdvanceWatch:
    """Warns in the second step of an optimizer if `advance` was not called after the first."""

    def __init__(self) -> None:
        self.advanced = False
        self.version: int | None = None

    def note_trained(self, parameter: torch.Tensor) -> None:
        """Note that a parameter is trained, and warn if an optimizer changed it without `advance`."""
        version = tensor_version(parameter)
        if not self.advanced and self.version not in (None, version):
            self.advanced = True  # it is said once here, and by `save` again
            warnings.warn(f"a method with a schedule is trained without it: {NEVER_ADVANCED}", stacklevel=2)
        self.version = version


class _PenaltyGradient:
    """A hook of a parameter: it notes that it is trained, and adds the gradient of the penalty once in each step."""

    __torch_unserializable__ = True  # a copy registers its own when it needs one

    def __init__(self, state: ScheduleState, number: int, name: str) -> None:
        self.state, self.number, self.name = state, number, name

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        key = (self.number, self.name)
        self.state.trained = True
        first = next(iter(self.state.parameters_at(0).items()))
        if key == (0, first[0]):
            self.state.watch_of_advance.note_trained(first[1])
        if key in self.state.missing:
            self.state.missing.discard(key)
            gradient = gradient + self.state.penalty_gradient(*key)
        frozen = self.state.frozen_rows(*key)
        return gradient if frozen is None else gradient.masked_fill(frozen, 0)


class ScheduleState(nn.Module):
    """The schedule of one term and its state."""

    steps: torch.Tensor
    is_final: torch.Tensor

    def __init__(self, schedule: Schedule, edits: Sequence[nn.Module]) -> None:
        super().__init__()
        self.__dict__.update(schedule=schedule, edits=list(edits))
        self.schedule: Schedule
        self.edits: list[nn.Module]  # the edits of the term
        self.trained = False  # whether a gradient has come
        self.missing: set[tuple[int, str]] = set()  # the parameters whose penalty was not yet added in this step
        self.watch_of_advance = AdvanceWatch()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("is_final", torch.zeros((), dtype=torch.bool))
        if isinstance(schedule, Allocation):
            buffers = ("sensitivity", "variation", *(["frozen"] if isinstance(schedule, ClusterSchedule) else []))
            for number, edit in enumerate(edits):
                for name in schedule.axes:
                    for buffer in buffers:
                        self.register_buffer(f"{buffer}_{number}_{name}", torch.zeros(edit.get_parameter(name).shape))
                first, axis = next(iter(schedule.axes.items()))
                units = edit.get_parameter(first).shape[axis]
                self.register_buffer(f"kept_{number}", torch.ones(units, dtype=torch.bool))
        self._expect_penalties()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.register_penalty_hooks()  # a copy's parameters have no hooks

    def parameters_at(self, number: int) -> dict[str, nn.Parameter]:
        return {name: p for name, p in parameters_of(self.edits[number]).items() if p is not None}

    def _expect_penalties(self) -> None:
        self.missing = {(n, name) for n in range(len(self.edits)) for name in parameters_of(self.edits[n])}

    @property
    def advanced(self) -> bool:
        """Whether it was advanced, in this process or before its checkpoint; also where it was not trained."""
        return not self.trained or bool(self.steps)

    def register_penalty_hooks(self) -> None:
        """Let the backward passes that follow add the gradient of the penalty."""
        for number in range(len(self.edits)):
            for name, parameter in self.parameters_at(number).items():
                hooks = hooks_of_tensor(parameter)
                if parameter.requires_grad and not any(isinstance(hook, _PenaltyGradient) for hook in hooks):
                    parameter.register_hook(_PenaltyGradient(self, number, name))

    @torch.no_grad()
    def has_penalty(self) -> bool:
        return any(self.schedule.penalty(self.parameters_at(number)) is not None for number in range(len(self.edits)))

    def penalty_gradient(self, number: int, name: str) -> torch.Tensor:
        with torch.enable_grad():
            tensors = {n: p.detach().requires_grad_(n == name) for n, p in self.parameters_at(number).items()}
            penalty = self.schedule.penalty(tensors)
            if penalty is None or not penalty.requires_grad:
                return torch.zeros_like(tensors[name])
            (gradient,) = torch.autograd.grad(penalty / len(self.edits), tensors[name], materialize_grads=True)
        return gradient

    @torch.no_grad()
    def advance(self, share: float) -> None:
        """Follow the schedule after a step of the optimizer, while the step's gradients are there."""
        self.register_penalty_hooks()
        self.watch_of_advance.advanced = True
        self._expect_penalties()
        if share:
            self.steps += 1
            for number in range(len(self.edits)):
                self.schedule.project(self.parameters_at(number))
            if isinstance(self.schedule, RankSchedule):
                self._allocate(self.schedule, share)
            elif isinstance(self.schedule, ClusterSchedule):
                self._freeze(self.schedule, share)

    def frozen_rows(self, number: int, name: str) -> torch.Tensor | None:
        """Return which rows of a parameter do not train any more, as its shape with axes of 1; None: all train."""
        kept = buffers_of(self).get(f"kept_{number}")
        if not isinstance(self.schedule, ClusterSchedule) or kept is None or bool(kept.all()):
            return None
        frozen = ~kept[self.schedule.units(name, self._tensors_at(number))]
        return frozen.view(-1, *(1,) * (self.parameters_at(number)[name].dim() - 1))

    def _tensors_at(self, number: int) -> dict[str, torch.Tensor]:
        edit = self.edits[number]
        return {n: t for n, t in (*parameters_of(edit).items(), *buffers_of(edit).items()) if t is not None}

    def _freeze(self, schedule: ClusterSchedule, share: float) -> None:
        """Leave the clusters that do not train as they were, and from time to time choose more of them."""
        values: list[tuple[nn.Parameter, Any, torch.Tensor | None]] = [
            (parameter, buffers_of(self)[f"frozen_{number}_{name}"], self.frozen_rows(number, name))
            for number in range(len(self.edits))
            for name, parameter in self.parameters_at(number).items()
        ]
        for parameter, before, frozen in values:
            if frozen is not None:
                parameter.copy_(torch.where(frozen, before, parameter))
        if schedule.is_before(share, schedule.start) or schedule.is_before(schedule.stop, share):
            return
        self._average(schedule)
        if self.steps % schedule.every:
            return
        scores = [self._scores(schedule, number) for number in range(len(self.edits))]
        masks: list[Any] = [buffers_of(self)[f"kept_{number}"] for number in range(len(self.edits))]
        every, kept = torch.cat(scores), torch.cat(masks)
        left = schedule.left(share, len(every), schedule.target, schedule.exponent)
        if left < int(kept.sum()):
            kept &= every > every[kept].topk(left).values[-1]
        for mask, part in zip(masks, kept.split([len(mask) for mask in masks]), strict=True):
            mask.copy_(part)
        for parameter, before, _ in values:
            before.copy_(parameter)
        for name, buffer in self.named_buffers():
            if name.startswith(("sensitivity_", "variation_")):
                buffer.zero_()

    def _allocate(self, schedule: RankSchedule, share: float) -> None:
        buffers = buffers_of(self)
        if not self.is_final and schedule.is_before(share, schedule.stop):
            self._average(schedule)
            waits = bool(self.steps % schedule.every) or not schedule.is_before(schedule.start, share)
        else:
            waits = bool(self.is_final)
            self.is_final.fill_(True)
        kept: list[Any] = [buffers[f"kept_{number}"] for number in range(len(self.edits))]
        values = [self.parameters_at(number)[next(iter(schedule.axes))] for number in range(len(self.edits))]
        if not waits:
            scores = [self._scores(schedule, number) for number in range(len(self.edits))]
            total = sum(map(len, scores))
            best = torch.cat(scores).topk(schedule.left(share, total, schedule.target * len(scores))).indices
            chosen = torch.zeros(total, dtype=torch.bool, device=best.device)
            chosen[best] = True
            for mask, part in zip(kept, chosen.split([len(s) for s in scores]), strict=True):
                mask.copy_(part)
        if self.is_final or not waits:
            for value, mask in zip(values, kept, strict=True):
                value.mul_(mask)

    def _average(self, schedule: Allocation) -> None:
        """Take the step into the averages."""
        buffers = buffers_of(self)
        for number in range(len(self.edits)):
            for name, parameter in self.parameters_at(number).items():
                if name not in schedule.axes:
                    continue
                if parameter.grad is None:
                    raise DeltuneError(
                        "advance needs the gradients of the step for the importance of each rank: call it after "
                        "optimizer.step() and before optimizer.zero_grad()"
                    )
                mean, variation = buffers[f"sensitivity_{number}_{name}"], buffers[f"variation_{number}_{name}"]
                assert mean is not None and variation is not None
                now = (parameter * parameter.grad).abs()
                before = mean.clone() if schedule.variation_first else mean
                mean.mul_(schedule.beta1).add_(now, alpha=1 - schedule.beta1)
                variation.mul_(schedule.beta2).add_((now - before).abs(), alpha=1 - schedule.beta2)

    def _scores(self, schedule: Allocation, number: int) -> torch.Tensor:
        """Return how much each unit of a place matters."""
        buffers: Any = buffers_of(self)
        places = {name: f"{number}_{name}" for name in schedule.axes}
        importance = {n: buffers[f"sensitivity_{p}"] * buffers[f"variation_{p}"] for n, p in places.items()}
        return schedule.scores(importance, self._tensors_at(number))

    def ranks(self) -> list[torch.Tensor]:
        """Return which ranks of each edit are left once they are final; nothing before, and where nothing allocates."""
        kept = [buffers_of(self).get(f"kept_{number}") for number in range(len(self.edits))] if self.is_final else []
        return [mask for mask in kept if mask is not None]
