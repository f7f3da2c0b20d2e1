"""Forms of several experts that a router weighs for each row of a batch, by its task, or for each token."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import DeltuneError
from ..parser import Positive, Share, Size
from .base import FIRST_PASS, Place, Routed, Specs, Tensors, TensorSpec, Widths, parameter_specs
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
class Poly(Routed):
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

    def experts(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B of each skill of each split, which are 0 at all other splits."""
        import torch

        down, up = tensors["down"].mT.flatten(1, 2), tensors["up"].flatten(1, 2)  # (q, s r, d / q)
        whole = [torch.block_diag(*blocks) if self.splits > 1 else blocks[0] for blocks in (down, up)]
        return whole[0].unflatten(0, (-1, self.rank)), whole[1].unflatten(0, (-1, self.rank)).mT

    def weights(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        import torch
        from torch.distributions.relaxed_bernoulli import RelaxedBernoulli

        logits = tensors["logits"][tasks_of_rows(at, u, self.tasks)].unflatten(1, (self.splits, self.skills))
        drawn = RelaxedBernoulli(torch.ones_like(logits), logits=logits).rsample() if at.training else logits.sigmoid()
        return (drawn / (drawn.sum(-1, keepdim=True) + 1e-12)).flatten(1)

    def inner(self, tensors: Tensors, v: torch.Tensor, weights: torch.Tensor, at: Place) -> torch.Tensor:
        return (weights * v).sum(-2, keepdim=True) / self.rank


@dataclass(frozen=True, repr=False)
class MTLLoRA(Routed):
    """A low rank with a matrix between A and B for each task, and several B that tasks share (Yang et al. 2024).

    Δh = Σ_i softmax_i(w_t / τ) B_i Λ_t A u for a row of the task t.

    Tensors: down A (r, d_in), Kaiming uniform; transform Λ (t, r, r), 1; logits w (t, n), Kaiming uniform; up B (n,
        d_out, r), 0.

    Args:
        rank: r, at least 1.
        tasks: t, the number of tasks; with one, passes need not say which.
        ups: n, the number of B.
        temperature: τ, above 0; the lower, the more a task keeps to one B.
    """

    rank: Size
    tasks: Size = 1
    ups: Size = 3
    temperature: Positive = 0.05

    def tensors(self, widths: Widths) -> Specs:
        shapes = {"down": (self.rank, widths.in_width), "transform": (self.tasks, self.rank, self.rank)}
        return parameter_specs(
            shapes | {"logits": (self.tasks, self.ups), "up": (self.ups, widths.out_width, self.rank)}
        )

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        kaiming_(tensors["down"])
        kaiming_(tensors["logits"])
        tensors["up"].zero_()
        tensors["transform"].zero_()
        tensors["transform"].diagonal(dim1=-2, dim2=-1).fill_(1.0)

    def experts(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return tensors["down"][None], tensors["up"]

    def weights(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        return (tensors["logits"][tasks_of_rows(at, u, self.tasks)] / self.temperature).softmax(-1)

    def inner(self, tensors: Tensors, v: torch.Tensor, weights: torch.Tensor, at: Place) -> torch.Tensor:
        transform = tensors["transform"][tasks_of_rows(at, v, self.tasks)].to(v.dtype)  # (B, r, r)
        return (v.flatten(1, -2) @ transform.mT).view(v.shape)


@dataclass(frozen=True, repr=False)
class XLoRA(Routed):
    """Low ranks that a classifier of the hidden states of a first pass weighs for each token (X-LoRA; Buehler 2024).

    Δh = s Σ_i w_i B_i A_i x with w = softmax(C(h) / τ), where h are the hidden states that a first pass ends with, in
    which every w_i is one number. C is a linear, or several with ReLU and dropout between them. PEFT: XLoraConfig.

    Tensors: down A (n, r, d_in), Kaiming uniform; up B (n, d_out, r), 0; weight_i and bias_i of the classifier's
        linears, uniform in ±1 / √d_in, which all places share; with `by_place` each place has its own last one.

    Args:
        number: n, at least 1.
        rank: r, at least 1; low ranks of lower rank end in zeros.
        depth: The number of linears of the classifier.
        width: The width between them.
        dropout: The probability of dropping a value between them while training, of each place for itself.
        by_place: Whether each place has weights of its own.
        softmax: Whether w is a softmax; otherwise w = C(h).
        temperature: τ, above 0.
        top_k: How many of the largest w_i are kept; None: all.
        softmax_top_k: Whether a softmax is made of those that are kept and not 0.
        first: The weights in the first pass, before `top_k`.
        scale: s.
        frozen: Whether the classifier alone is trained.
    """

    number: Size
    rank: Size = 8
    _: KW_ONLY
    depth: Size = 1
    width: Size = 2048
    dropout: Share = 0.2
    by_place: bool = False
    softmax: bool = True
    temperature: Positive = 1.0
    top_k: Size | None = None
    softmax_top_k: bool = False
    first: float = 0.0
    scale: float = 1.0
    frozen: bool = False

    reads_first_pass: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.top_k or 1) > self.number:
            raise DeltuneError(f"top_k={self.top_k}: there are {self.number} low ranks")

    @property
    def starts_at_zero(self) -> bool:
        return not self.frozen

    def tensors(self, widths: Widths) -> Specs:
        sizes = (widths.stack_width, *(self.width,) * (self.depth - 1), self.number)
        specs: Specs = {}
        for i in range(self.depth):
            owner: Literal["term"] | None = None if self.by_place and i == self.depth - 1 else "term"
            specs[f"weight_{i}"] = TensorSpec((sizes[i + 1], sizes[i]), shared=owner)
            specs[f"bias_{i}"] = TensorSpec((sizes[i + 1],), shared=owner)
        for name, shape in {"down": (self.rank, widths.in_width), "up": (widths.out_width, self.rank)}.items():
            specs[name] = TensorSpec((self.number, *shape), trained=not self.frozen)
        return specs

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        kaiming_(tensors["down"])
        if self.frozen:
            tensors["up"].normal_(std=0.02)
        else:
            tensors["up"].zero_()
        self.start(tensors)

    def start(self, tensors: Tensors) -> None:
        """Set what is not of the low ranks."""
        for i in range(self.depth):
            if f"weight_{i}" in tensors:
                weight = kaiming_(tensors[f"weight_{i}"])
                kaiming_(tensors[f"bias_{i}"], fan_in=weight.shape[1])

    def weights(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        import torch
        from torch.nn import functional as F

        h = at.facts.get(FIRST_PASS)
        if h is None or (h.shape[-1] and h.shape[:-1] != u.shape[:-1]):
            raise DeltuneError(
                f"{type(self).__name__} reads a first pass, and this call has none of its {u.shape[-2]} tokens: call "
                "the model itself, and use it without a prompt"
            )
        if not h.shape[-1]:
            w = u.new_full((*u.shape[:-1], self.number), self.first)
        else:
            for i in range(self.depth):
                h = F.linear(h, tensors[f"weight_{i}"].to(h.dtype), tensors[f"bias_{i}"].to(h.dtype))
                if i < self.depth - 1:
                    h = F.dropout(h.relu(), self.dropout, at.training)
            w = (h / self.temperature).softmax(-1) if self.softmax else h
        if self.top_k is not None:
            w = w * torch.zeros_like(w).scatter(-1, w.topk(self.top_k).indices, 1)
        if self.softmax_top_k:
            left_out = w == 0
            w = w.masked_fill(left_out, torch.finfo(w.dtype).min).softmax(-1).masked_fill(left_out, 0)
        return w * self.scale
