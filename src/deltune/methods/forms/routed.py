"""Forms that each row of a batch computes with parameters of its own, by the task of the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import DeltuneError
from ..parser import Size
from .base import Form, Place, Specs, Tensors, Widths, parameter_specs
from .starts import indivisible, kaiming_

if TYPE_CHECKING:
    import torch


def tasks_of_rows(at: Place, u: torch.Tensor, tasks: int) -> torch.Tensor:
    """Return the task of each row of u (B, …); a row of the batch may be several rows of u, such as beams.

    Raises:
        DeltuneError: The pass does not know the tasks, or they do not fit.
    """
    import torch

    ids = at.facts.get("task_ids")
    if ids is None and tasks > 1:
        raise DeltuneError(
            f"this delta has {tasks} tasks, and a pass does not say which rows have which: with "
            "tuned.condition(task_ids=[…]): model(…)"
        )
    if ids is None:
        return torch.zeros(len(u), dtype=torch.long, device=u.device)
    if len(u) % len(ids) or int(ids.max()) >= tasks:
        raise DeltuneError(
            f"task_ids has {len(ids)} rows and tasks up to {int(ids.max())}, and here are {len(u)} rows and {tasks} "
            "tasks: give the number of a task from 0 on for each row of the batch"
        )
    return ids.to(u.device).repeat_interleave(len(u) // len(ids))


@dataclass(frozen=True, repr=False)
class Poly(Form):
    """A low rank whose two matrices are mixed from skills by the task of a row (Ponti et al. 2023; PEFT: PolyConfig).

    Δh = (Σ_s w_s A_s) (Σ_s w_s B_s) / r, with w = σ(logits of the task) divided by their sum. While training, relaxed
    Bernoulli variables are drawn in place of σ. With several splits, each part of the widths has weights of its own.

    Tensors: logits (t, q s), uniform in ±0.001; down A (q, s, d_in / q, r), Kaiming uniform; up B (q, s, r, d_out / q),
        0.

    Args:
        rank: r, at least 1.
        tasks: t, the number of tasks; with one, passes need not say which.
        skills: s, at least 1.
        splits: q, which divides both widths.
    """

    rank: Size
    tasks: Size = 1
    skills: Size = 4
    splits: Size = 1

    def incompatibility(self, widths: Widths) -> str | None:
        return indivisible("splits", self.splits, widths.in_width, widths.out_width)

    def tensors(self, widths: Widths) -> Specs:
        q, s, r = self.splits, self.skills, self.rank
        down, up = (q, s, widths.in_width // q, r), (q, s, r, widths.out_width // q)
        return parameter_specs({"logits": (self.tasks, q * s), "down": down, "up": up})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        tensors["logits"].uniform_(-1e-3, 1e-3)
        kaiming_(tensors["down"], fan_in=tensors["down"].shape[2])
        tensors["up"].zero_()

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        import torch
        from torch.distributions.relaxed_bernoulli import RelaxedBernoulli

        logits = tensors["logits"][tasks_of_rows(at, u, self.tasks)].unflatten(1, (self.splits, self.skills))
        weights = (
            RelaxedBernoulli(torch.ones_like(logits), logits=logits).rsample() if at.training else logits.sigmoid()
        )
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-12)
        down = torch.einsum("bqs,qsdr->bqdr", weights, tensors["down"]).flatten(1, 2)
        up = torch.einsum("bqs,qsrd->brqd", weights, tensors["up"]).flatten(2, 3) / self.rank
        rows = u if u.dim() == 3 else u[:, None]
        return (rows @ down.to(u.dtype) @ up.to(u.dtype)).view(*u.shape[:-1], -1)
