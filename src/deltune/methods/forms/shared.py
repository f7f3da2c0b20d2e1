"""Forms of a low rank that is made of few numbers, from random or shared matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from ..parser import Share, Size
from .base import (
    BeforeUp,
    FactorForm,
    Place,
    Shapes,
    Specs,
    Statistic,
    Tensors,
    TensorSpec,
    Widths,
    parameter_specs,
)
from .starts import buffer_specs, down_up, indivisible, random_entries, rank_above, seeded_buffer_specs, singular
from .weights import ChangeForm

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, repr=False)
class VeRA(FactorForm):
    """b ⊙ B (d ⊙ A x) with random matrices A and B that all places share (Kopiczko et al. 2024; PEFT: VeraConfig).

    Tensors: d (r,); b (d_out,), 0; A (r, d_in) and B (d_out, r), Kaiming uniform with a = 0, drawn from the seed as
        PEFT draws them.

    Args:
        rank: r, at least 1.
        d_initial: d at the start.
        seed: The seed of A and B.
    """

    rank: Size
    d_initial: float = 0.1
    seed: int = 0

    def tensors(self, widths: Widths) -> Specs:
        random: Shapes = {"A": (self.rank, widths.in_width), "B": (widths.out_width, self.rank)}
        return parameter_specs({"d": (self.rank,), "b": (widths.out_width,)}) | seeded_buffer_specs(random, self.seed)

    def draw(self, shapes: Shapes, generator: torch.Generator) -> Tensors:
        import torch

        bounds = {name: math.sqrt(6 / shape[1]) for name, shape in shapes.items()}
        return {n: torch.empty(s).uniform_(-bounds[n], bounds[n], generator=generator) for n, s in shapes.items()}

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        tensors["d"].fill_(self.d_initial)
        tensors["b"].zero_()

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return tensors["d"][:, None] * tensors["A"], tensors["b"][:, None] * tensors["B"]

    def split_at_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp:
        if not u.is_floating_point():
            return super().split_at_up(tensors, u, at)
        inner = u @ tensors["A"].t().to(u.dtype) * tensors["d"].to(u.dtype)  # no gradient of a whole d ⊙ A
        return inner, tensors["b"][:, None] * tensors["B"], None


@dataclass(frozen=True, repr=False)
class RandLoRA(FactorForm):
    """Σ_n B_n Λ_n A Γ_n x with random A and B_n that all places share (Albert et al. 2025; PEFT: RandLoraConfig).

    The smaller side of W has A; there are as many n as give the full rank.

    Tensors: lambda_ Λ (r, n), 0; gamma_in or gamma_out Γ (n, w), 1 / max(n, w), for a smaller side of width w; A
        (r, 1, w) and B (the other width, n, r), drawn from the seed as PEFT draws them.

    Args:
        rank: r, at least 1.
        seed: The seed of A and B.
    """

    rank: Size
    seed: int = 0

    def tensors(self, widths: Widths) -> Specs:
        low, high = sorted((widths.in_width, widths.out_width))
        n, side = -(-low // self.rank), "in" if widths.in_width == low else "out"
        random: Shapes = {"A": (self.rank, 1, low), "B": (high, n, self.rank)}
        return parameter_specs({"lambda_": (self.rank, n), f"gamma_{side}": (n, low)}) | seeded_buffer_specs(
            random, self.seed
        )

    def draw(self, shapes: Shapes, generator: torch.Generator) -> Tensors:
        import torch

        def one(shape: tuple[int, ...]) -> torch.Tensor:
            bound = math.prod(shape[1:]) ** -0.5
            return torch.empty(shape, dtype=torch.bfloat16).uniform_(-bound, bound, generator=generator)

        high, n, rank = shapes["B"]
        both = {"A": one(shapes["A"]), "B": torch.cat([one((high, 1, rank)) for _ in range(n)], 1)}
        return {name: tensor / tensor.std() for name, tensor in both.items()}

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        for name, tensor in tensors.items():
            tensor.zero_() if name == "lambda_" else tensor.fill_(1 / max(tensor.shape))

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        low_in = "gamma_in" in tensors
        gamma = tensors["gamma_in" if low_in else "gamma_out"]
        a = (tensors["lambda_"][:, :, None] * tensors["A"] * gamma).flatten(0, 1)
        b = tensors["B"].flatten(1)
        return (a, b) if low_in else (b.t(), a.t())


@dataclass(frozen=True, repr=False)
class VBLoRA(FactorForm):
    """A low rank whose pieces are mixtures of the top k vectors of one bank (Li et al. 2024; PEFT: VBLoRAConfig).

    Tensors: bank (h, b), uniform in ±0.02, which all places share; logits_down (r, d_in / b, h) and logits_up
        (d_out / b, r, h), N(0, 0.1).

    Args:
        rank: r, at least 1.
        vectors: h, the vectors of the bank.
        length: b, their length, which divides the widths.
        top_k: k, how many are mixed by the softmax of their logits.
    """

    rank: Size
    vectors: Size = 256
    length: Size = 64
    top_k: Size = 2

    @property
    def starts_at_zero(self) -> bool:
        return False

    def incompatibility(self, widths: Widths) -> str | None:
        if self.top_k > self.vectors:
            return f"top_k={self.top_k} is above vectors={self.vectors}"
        return indivisible("length", self.length, widths.in_width, widths.out_width)

    def tensors(self, widths: Widths) -> Specs:
        down, up = (self.rank, widths.in_width // self.length), (widths.out_width // self.length, self.rank)
        logits = parameter_specs({"logits_down": (*down, self.vectors), "logits_up": (*up, self.vectors)})
        return logits | {"bank": TensorSpec((self.vectors, self.length), shared="term")}

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        for name, tensor in tensors.items():
            tensor.uniform_(-0.02, 0.02) if name == "bank" else tensor.normal_(std=0.1)

    def _mixed(self, logits: torch.Tensor, bank: torch.Tensor) -> torch.Tensor:
        top, index = logits.topk(self.top_k, dim=-1)
        return (top.softmax(-1)[..., None] * bank[index]).sum(-2)

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        down, up = (self._mixed(tensors[f"logits_{side}"], tensors["bank"]) for side in ("down", "up"))
        return down.flatten(1), up.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, repr=False)
class UniLoRA(FactorForm):
    """A low rank whose entries are those of one vector θ at random places (Li et al. 2025; PEFT: UniLoraConfig).

    Each entry is divided by the square root of how often its number is used at the place.

    Tensors: theta θ (n,), uniform in ±0.02, which all places share; the buffers entries_down (r, d_in) and entries_up
        (d_out, r), positions in θ, and their factors scales_down and scales_up.

    Args:
        rank: r, at least 1.
        length: n, the length of θ.
    """

    rank: Size
    length: Size = 256

    @property
    def starts_at_zero(self) -> bool:
        return False

    def tensors(self, widths: Widths) -> Specs:
        shapes = down_up(self.rank, widths)
        entries = {f"entries_{n}": TensorSpec(s, trained=False, below=self.length) for n, s in shapes.items()}
        scales = buffer_specs({f"scales_{name}": shape for name, shape in shapes.items()})
        return {"theta": TensorSpec((self.length,), shared="term")} | entries | scales

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        down, up = (tensors[f"entries_{side}"].random_(self.length) for side in ("down", "up"))
        counts = down.flatten().bincount(minlength=self.length) + up.flatten().bincount(minlength=self.length)
        tensors["scales_down"].copy_(counts[down] ** -0.5)
        tensors["scales_up"].copy_(counts[up] ** -0.5)
        if "theta" in tensors:
            tensors["theta"].uniform_(-0.02, 0.02)

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        down, up = (tensors["theta"][tensors[f"entries_{s}"]] * tensors[f"scales_{s}"] for s in ("down", "up"))
        return down, up


@dataclass(frozen=True, repr=False)
class TinyLoRA(FactorForm):
    """B (Σ_i v_i P_i) A x with the first r singular vectors of W as A and B and random P_i (PEFT: TinyLoraConfig).

    Tensors: v (u,), 0; the buffers A (r, d_in) and B (d_out, r), scaled by the roots of the singular values, and P
        (u, r, r), N(0, 1 / r).

    Args:
        rank: r, at least 1.
        parameters: u, the number of parameters v.
        tied: Whether all places have one v in common.
    """

    reads_weight: ClassVar[bool] = True
    rank: Size
    parameters: Size = 64
    tied: bool = field(default=False, kw_only=True)

    def incompatibility(self, widths: Widths) -> str | None:
        return rank_above(self.rank, widths)

    def tensors(self, widths: Widths) -> Specs:
        fixed: Shapes = {"A": (self.rank, widths.in_width), "B": (widths.out_width, self.rank)}
        fixed["P"] = (self.parameters, self.rank, self.rank)
        return {"v": TensorSpec((self.parameters,), shared="term" if self.tied else None)} | buffer_specs(fixed)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        assert at is not None
        first = singular(at.weight, slice(self.rank))
        tensors["A"].copy_(first.s[:, None].sqrt() * first.v)
        tensors["B"].copy_(first.u * first.s.sqrt())
        tensors["P"].normal_(std=self.rank**-0.5)
        if "v" in tensors:
            tensors["v"].zero_()

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = (tensors["v"] @ tensors["P"].flatten(1)).view(self.rank, self.rank)
        return tensors["A"], tensors["B"] @ mixed


@dataclass(frozen=True, repr=False)
class NoLA(FactorForm):
    """A low rank of sums of random matrices, (Σ_i β_i B_i) (Σ_i α_i A_i) x (Koohpayegani et al. 2024).

    Tensors: alpha (n,), uniform in ±1 / √n; beta (n,), 0; A (n, r, d_in) and B (n, d_out, r), which all places share,
        drawn from the seed as a low rank starts, uniform in ±1 / √d_in and ±1 / √r.

    Args:
        rank: r, at least 1.
        bases: n, the random matrices on either side.
        seed: Their seed.
    """

    rank: Size
    bases: Size = 64
    seed: int = 0

    def tensors(self, widths: Widths) -> Specs:
        random: Shapes = {"A": (self.bases, self.rank, widths.in_width), "B": (self.bases, widths.out_width, self.rank)}
        return parameter_specs({"alpha": (self.bases,), "beta": (self.bases,)}) | seeded_buffer_specs(random, self.seed)

    def draw(self, shapes: Shapes, generator: torch.Generator) -> Tensors:
        import torch

        bounds = {name: shape[2] ** -0.5 for name, shape in shapes.items()}
        return {n: torch.empty(s).uniform_(-bounds[n], bounds[n], generator=generator) for n, s in shapes.items()}

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        tensors["alpha"].uniform_(-(self.bases**-0.5), self.bases**-0.5)
        tensors["beta"].zero_()

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        down = torch.einsum("n,nri->ri", tensors["alpha"], tensors["A"])
        return down, torch.einsum("n,nor->or", tensors["beta"], tensors["B"])


@dataclass(frozen=True, repr=False)
class FRoD(ChangeForm):
    """A rotation and scales in a basis V that weights have in common, U (S + diag(λ)) Vᵀ x (PEFT: FrodConfig).

    W is U diag(λ₀) Vᵀ, and the columns of U have length 1. S is sparse, and 0 on its diagonal.

    Tensors: values λ (d_in,), λ₀; entries (n,) of S, 0; the buffers start λ₀ (d_in,) and U (d_out, d_in); the buffers
        basis V (d_in, d_in) and positions (n,) of the entries in S, which all places of one site share in one kind of
        attention.

    Args:
        density: The share of the entries of S that are trained; at least one is.
        seed: The seed of their positions.
    """

    density: Share = 0.01
    seed: int = 0

    @property
    def statistic(self) -> Statistic | None:
        return "common basis"

    def tensors(self, widths: Widths) -> Specs:
        d = widths.in_width
        n = max(1, min(int(d * d * self.density), d * d - d))
        common = {"basis": TensorSpec((d, d)), "positions": TensorSpec((n,), below=d * d)}
        return (
            parameter_specs({"values": (d,), "entries": (n,)})
            | buffer_specs({"start": (d,), "U": (widths.out_width, d)})
            | {name: replace(spec, trained=False, shared="group") for name, spec in common.items()}
        )

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        import torch

        assert at is not None
        basis = tensors["basis"] if at.statistic is None else at.statistic
        left = torch.linalg.solve(basis.double(), at.weight.double().t()).t()
        scales = left.norm(dim=0)
        for name in ("start", "values"):
            tensors[name].copy_(scales)
        tensors["U"].copy_(left * (scales > 1e-12) / scales.clamp_min(1e-12))
        tensors["entries"].zero_()
        if at.statistic is not None and "basis" in tensors:
            tensors["basis"].copy_(basis)
            d = len(basis)
            beside = random_entries(d * d - d, len(tensors["positions"]), self.seed)  # beside the diagonal, row by row
            tensors["positions"].copy_(beside + beside // d + 1)

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(buffers["start"]) if name == "values" else tensor.zero_()

    def change(self, tensors: Tensors, at: Place) -> torch.Tensor:
        difference = tensors["values"] - tensors["start"]
        flat = difference.diag().flatten().index_put((tensors["positions"],), tensors["entries"])
        return tensors["U"] @ flat.view(len(difference), -1) @ tensors["basis"].t()


def common_basis(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a basis V (d_in, d_in) that weights (d_out, d_in) have in common, as PEFT's FRoD computes it."""
    import torch

    stacked = torch.cat([weight.float() for weight in weights])
    if stacked.shape[0] < stacked.shape[1]:
        return torch.linalg.svd(stacked, full_matrices=True).Vh.t()
    columns, triangle = torch.linalg.qr(stacked)
    one = torch.eye(stacked.shape[1]).to(stacked)
    inverses = [torch.linalg.inv(q.t() @ q + 1e-3 * one) for q in columns.split([len(weight) for weight in weights])]
    return triangle.t() @ torch.linalg.eigh(sum(inverses[1:], inverses[0]) / len(inverses)).eigenvectors
