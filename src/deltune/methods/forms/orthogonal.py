"""Forms that rotate: the input of a projection, its output, or the weight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import DeltuneError
from ..parser import Depth, Factors, Size
from .base import FactorForm, Form, Place, Shapes, Specs, Tensors, Widths, parameter_specs
from .starts import at_least_float32, buffer_specs, indivisible, kaiming_, rank_above, singular
from .weights import ChangeForm

if TYPE_CHECKING:
    import torch


def skew(entries: torch.Tensor, size: int) -> torch.Tensor:
    """Return skew-symmetric matrices (…, b, b) from what is above their diagonals (…, b (b - 1) / 2)."""
    import torch

    rows, columns = torch.triu_indices(size, size, 1, device=entries.device)
    matrix = entries.new_zeros(*entries.shape[:-1], size * size)
    matrix = matrix.scatter(-1, (rows * size + columns).expand_as(entries), entries).unflatten(-1, (size, size))
    return matrix - matrix.mT


def cayley(skewed: torch.Tensor, terms: int = 0) -> torch.Tensor:
    """Return R = (1 - Q) (1 + Q)⁻¹, which is orthogonal, of skew-symmetric matrices Q.

    Args:
        skewed: Q (…, b, b), with `terms` (n, b, b).
        terms: The number of terms of a series in its place, 1 + 2 Q + 2 Q² + … + Q^(terms - 1) (as PEFT has it: with
            Q for -Q); 0: the inverse.
    """
    import torch

    q = at_least_float32(skewed)
    one = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    if not terms:
        return torch.linalg.solve(one + q, one - q, left=False)
    total, twice = q, 2 * q
    for _ in range(terms - 2):
        total = torch.baddbmm(twice, q, total)
    return one + total


@dataclass(frozen=True, repr=False)
class Rotation(Form):
    """R x with R = (1 - Q) (1 + Q)⁻¹ orthogonal in blocks, at the input of a projection (OFT; Qiu et al. 2023).

    PEFT: OFTConfig(oft_block_size, use_cayley_neumann, num_cayley_neumann_terms, block_share).

    Tensor: skew (d / b, b (b - 1) / 2), or (1, …) where blocks share it: what is above the diagonals of Q, 0.

    Args:
        block_size: b, which divides the width.
        terms: The number of terms of a series in place of the inverse, at least 4; 0: the inverse.
        shared_block: Whether all blocks are one.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    reads_weight: ClassVar[bool] = True
    block_size: Size
    terms: Depth = 5
    shared_block: bool = field(default=False, kw_only=True)

    @property
    def insertions(self) -> tuple[str, ...]:
        return ("parallel", "input")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2 or (0 < self.terms < 4):
            raise DeltuneError("block_size must be at least 2, and terms 0 or at least 4")

    def incompatibility(self, widths: Widths) -> str | None:
        if widths.in_width != widths.out_width:
            return f"Rotation needs u as wide as h, here they are {widths.in_width} and {widths.out_width}"
        return indivisible("block_size", self.block_size, widths.in_width)

    def tensors(self, widths: Widths) -> Specs:
        blocks = 1 if self.shared_block else widths.in_width // self.block_size
        return parameter_specs({"skew": (blocks, self.block_size * (self.block_size - 1) // 2)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        tensors["skew"].zero_()

    def _rotation(self, tensors: Tensors, width: int) -> torch.Tensor:
        """Return the blocks of R."""
        rotation = cayley(skew(tensors["skew"], self.block_size), self.terms)
        return rotation.expand(width // self.block_size, -1, -1)

    def affine(self, tensors: Tensors, at: Place | None) -> tuple[torch.Tensor, None]:
        import torch

        assert at is not None
        rotation = torch.block_diag(*self._rotation(tensors, at.weight.shape[1]).mT)
        return rotation - torch.eye(len(rotation), dtype=rotation.dtype, device=rotation.device), None

    def changed(self, tensors: Tensors, h: torch.Tensor) -> torch.Tensor:
        import torch

        rotation = self._rotation(tensors, h.shape[-1]).to(h.dtype)
        return torch.einsum("...kb,kbc->...kc", h.unflatten(-1, (-1, self.block_size)), rotation).flatten(-2)

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        return self.changed(tensors, u) - u


@dataclass(frozen=True, repr=False)
class Householder(FactorForm):
    """r reflections of the input of a projection, ∏ (1 - 2 u_i u_iᵀ) x (HRA; Yuan et al. 2024; PEFT: HRAConfig).

    It is 1 - U T Uᵀ with T⁻¹ = 1/2 + triu(Uᵀ U, 1) for unit vectors U.

    Tensor: vectors (d, r), Kaiming uniform, each one twice, so that the reflections cancel at the start.

    Args:
        rank: r, an even number.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    rank: Size

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank % 2:
            raise DeltuneError(f"rank={self.rank}: must be even, so that the reflections cancel at the start")

    def incompatibility(self, widths: Widths) -> str | None:
        if widths.in_width != widths.out_width:
            return f"Householder needs u as wide as h, here they are {widths.in_width} and {widths.out_width}"
        return None

    def tensors(self, widths: Widths) -> Specs:
        return parameter_specs({"vectors": (widths.in_width, self.rank)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        half = kaiming_(tensors["vectors"][:, ::2].clone())
        tensors["vectors"].copy_(half.repeat_interleave(2, dim=1))

    def mask_factors(self, widths: Widths) -> None:
        raise DeltuneError("hra cannot be masked: entries left out of a unit vector change the others")

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        vectors = at_least_float32(tensors["vectors"])
        unit = vectors / vectors.norm(dim=0)
        inverse = torch.eye(self.rank, dtype=unit.dtype, device=unit.device) / 2 + (unit.t() @ unit).triu(1)
        return unit.t(), -torch.linalg.solve_triangular(inverse, unit, upper=True, left=False)


@dataclass(frozen=True, repr=False)
class Butterfly(ChangeForm):
    """diag(s) W R with R a product of m orthogonal butterfly factors (BOFT; Liu et al. 2024; PEFT: BOFTConfig).

    Each factor is block-diagonal between two permutations; of one factor alone, these are none.

    Tensors: skew (m, d_in / b, b, b), 0, of which the skew-symmetric part is used; gain s (d_out, 1), 1.

    Args:
        block_size: b, an even number that divides the width.
        factors: m; b · 2^(m - 1) divides the width.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    block_size: Size
    factors: Factors = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size % 2:
            raise DeltuneError(f"block_size={self.block_size}: must be even")

    def incompatibility(self, widths: Widths) -> str | None:
        return indivisible("block_size · 2^(factors - 1)", self.block_size * 2 ** (self.factors - 1), widths.in_width)

    def tensors(self, widths: Widths) -> Specs:
        b = self.block_size
        return parameter_specs({"skew": (self.factors, widths.in_width // b, b, b), "gain": (widths.out_width, 1)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        tensors["skew"].zero_()
        tensors["gain"].fill_(1)

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        self.initialize(tensors, None)

    def change(self, tensors: Tensors, at: Place) -> torch.Tensor:
        weight = at.weight.to(tensors["skew"].dtype)
        rotated = weight
        for number, matrix in enumerate(tensors["skew"]):
            rotation = cayley((matrix - matrix.mT) / 2).to(weight.dtype)
            order = self._order(number, weight)
            columns = rotated[:, order.argsort()].unflatten(1, (-1, self.block_size))
            rotated = (columns[:, :, None] @ rotation.mT).flatten(1)[:, order]
        return tensors["gain"] * rotated - weight

    def _order(self, number: int, weight: torch.Tensor) -> torch.Tensor:
        """Return the permutation of a factor: where its blocks' columns come from."""
        import torch

        columns = torch.arange(weight.shape[1], device=weight.device)
        if self.factors == 1:
            return columns
        half = self.block_size // 2
        groups = columns.view(weight.shape[1] // self.block_size // 2**number, -1, half)
        return torch.cat((groups[:, ::2], groups[:, 1::2]), 1).flatten()


@dataclass(frozen=True, repr=False)
class PrincipalRotation(FactorForm):
    """B (R - 1) A x with B A the first r of W's spectrum and R orthogonal, scaled on both sides (PEFT: PsoftConfig).

    Tensors: skew (r (r - 1) / 2,), what is above the diagonal of Q in R = diag(β) (1 + Q) (1 - Q)⁻¹ diag(α), 0; alpha
        and beta (r,), 1; the buffers A (r, d_in), the right singular vectors, and B (d_out, r), the left ones with the
        singular values.

    Args:
        rank: r, at least 2.
        scales: Whether α and β are trained.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    reads_weight: ClassVar[bool] = True
    rank: int
    scales: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 2:
            raise DeltuneError(f"rank={self.rank}: must be at least 2")

    def incompatibility(self, widths: Widths) -> str | None:
        return rank_above(self.rank, widths)

    def tensors(self, widths: Widths) -> Specs:
        shapes: Shapes = {"skew": (self.rank * (self.rank - 1) // 2,)}
        shapes |= {"alpha": (self.rank,), "beta": (self.rank,)} if self.scales else {}
        return parameter_specs(shapes) | buffer_specs(
            {"A": (self.rank, widths.in_width), "B": (widths.out_width, self.rank)}
        )

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        assert at is not None
        first = singular(at.weight, slice(self.rank))
        tensors["A"].copy_(first.v)
        tensors["B"].copy_(first.u * first.s)
        self.fill_untrained({name: tensor for name, tensor in tensors.items() if name not in "AB"}, {})

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        for name, tensor in tensors.items():
            tensor.fill_(0 if name == "skew" else 1)

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        rotation = cayley(-skew(tensors["skew"], self.rank))
        if self.scales:
            rotation = tensors["beta"][:, None] * rotation * tensors["alpha"]
        one = torch.eye(self.rank, dtype=rotation.dtype, device=rotation.device)
        return tensors["A"], tensors["B"] @ (rotation - one).to(tensors["B"].dtype)


@dataclass(frozen=True, repr=False)
class PairRotation(Form):
    """Rotate and scale pairs of h, [α cos θ, -α sin θ; α sin θ, α cos θ] (RoAd; Liao and Monz 2024; PEFT: RoadConfig).

    The pairs are the two halves of each group.

    Tensors: theta, 0, and alpha, 1: (d / 2,), one for each pair; (d,), one for each number; or (2 d,), for the two
        products of each number apart.

    Args:
        group_size: The size of a group, an even number that divides the width.
        variant: 1 (one for each pair), 2 (for each number) or 4 (for each product).

    Raises:
        DeltuneError: An argument is out of its range.
    """

    group_size: int = 64
    variant: Literal[1, 2, 4] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2 or self.group_size % 2:
            raise DeltuneError(f"group_size={self.group_size}: must be even")
        if self.variant not in (1, 2, 4):
            raise DeltuneError(f"variant={self.variant}: must be 1, 2 or 4")

    def incompatibility(self, widths: Widths) -> str | None:
        if widths.in_width != widths.out_width:
            return f"PairRotation needs u as wide as h, here they are {widths.in_width} and {widths.out_width}"
        return indivisible("group_size", self.group_size, widths.out_width)

    def tensors(self, widths: Widths) -> Specs:
        size = widths.out_width * self.variant // 2
        return parameter_specs({"theta": (size,), "alpha": (size,)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        tensors["theta"].zero_()
        tensors["alpha"].fill_(1)

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        self.initialize(tensors, None)

    def _columns(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what h and h with its pairs turned by 90° are multiplied by."""
        theta, alpha = tensors["theta"], tensors["alpha"]
        if self.variant == 4:
            (theta, turned), (alpha, beta) = (
                t.view(-1, 2, self.group_size).transpose(0, 1).flatten(1) for t in (theta, alpha)
            )
            return alpha * theta.cos(), beta * turned.sin()
        both = alpha * theta.cos(), alpha * theta.sin()
        if self.variant == 2:
            return both
        cos, sin = (t.view(-1, self.group_size // 2).repeat_interleave(2, dim=0).flatten() for t in both)
        return cos, sin

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        return self.changed(tensors, u) - u

    def changed(self, tensors: Tensors, h: torch.Tensor) -> torch.Tensor:
        import torch

        cos, sin = (column.to(h.dtype) for column in self._columns(tensors))
        one, two = h.unflatten(-1, (-1, 2, self.group_size // 2)).unbind(-2)
        return (h * cos).addcmul(torch.stack((-two, one), -2).flatten(-3), sin)

    def affine(self, tensors: Tensors, at: Place | None) -> tuple[torch.Tensor, None]:
        import torch

        width = 2 * tensors["theta"].numel() // self.variant
        one = torch.eye(width, dtype=tensors["theta"].dtype, device=tensors["theta"].device)
        return self.changed(tensors, one).t() - one, None
