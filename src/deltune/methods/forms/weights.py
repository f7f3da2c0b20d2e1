"""Forms that are functions of the frozen weight: W' = W + A(W)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import DeltuneError, check_choice
from ..parser import Depth, Share, Size
from .base import (
    BeforeUp,
    FactorForm,
    Place,
    Shapes,
    Specs,
    Tensors,
    WeightForm,
    Widths,
    parameter_specs,
)
from .hidden import ACTIVATIONS, activate
from .starts import buffer_specs, down_up, kaiming_, rank_above, singular

if TYPE_CHECKING:
    import torch


class ChangeForm(WeightForm):
    """A form W' = W + A that writes A = `change(tensors, at)`, so that A is no difference of rounded weights."""

    def change(self, tensors: Tensors, at: Place) -> torch.Tensor:
        """Compute the change of the weight.

        Args:
            tensors: The saved and drawn tensors by name.
            at: The projection.

        Returns:
            A (d_out, d_in).
        """
        raise NotImplementedError

    def weight(self, tensors: Tensors, at: Place) -> torch.Tensor:
        return at.weight + self.change(tensors, at).to(at.weight.dtype)

    def affine(self, tensors: Tensors, at: Place | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert at is not None
        return self.change(tensors, at), self.change_of_bias(tensors, at)


@dataclass(frozen=True, repr=False)
class DoRA(WeightForm):
    """A low rank and a magnitude, m / ‖W + s B A‖ ⊙ (W + s B A) x (Liu et al. 2024; PEFT: LoraConfig(use_dora=True)).

    The norm of each row is a constant of the gradient. ‖w + s b A‖² = ‖w‖² + 2 s b · (A w) + s² b A Aᵀ bᵀ needs no W'.

    Tensors: down A (r, d_in), Kaiming uniform; up B (d_out, r), 0; magnitude m (d_out,), ‖W‖; the buffer squares
        (d_out,), ‖W‖².

    Args:
        rank: r, at least 1.
        scale: s.
        dropout: The probability of dropping a value of x while training.
    """

    through_weight: ClassVar[bool] = False
    rank: Size
    scale: float = 1.0
    dropout: Share = 0.0

    def tensors(self, widths: Widths) -> Specs:
        magnitude = {"magnitude": (widths.out_width,)}
        return parameter_specs(down_up(self.rank, widths) | magnitude) | buffer_specs({"squares": (widths.out_width,)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        assert at is not None
        kaiming_(tensors["down"])
        tensors["squares"].copy_(at.weight.square().sum(1))
        self._fill(tensors, tensors["squares"])

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        tensors["down"].zero_()
        self._fill(tensors, buffers["squares"])

    def _fill(self, tensors: Tensors, squares: torch.Tensor) -> None:
        tensors["up"].zero_()
        tensors["magnitude"].copy_(squares.sqrt())

    def _gain(self, tensors: Tensors, at: Place) -> torch.Tensor:
        """Return m / ‖W + s B A‖ (d_out,)."""
        import torch

        down, up, s = tensors["down"].detach(), tensors["up"].detach(), self.scale
        mixed = torch.addmm(at(down).t().to(up.dtype), up, down @ down.t(), beta=2 * s, alpha=s**2)
        squares = tensors["squares"] + (up * mixed).sum(1)
        return tensors["magnitude"] / squares.detach().clamp_min(0).sqrt()

    def weight(self, tensors: Tensors, at: Place) -> torch.Tensor:
        return self._gain(tensors, at)[:, None] * (at.weight + self.scale * tensors["up"] @ tensors["down"])

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        from torch.nn import functional as F

        gain, base = self._gain(tensors, at).to(u.dtype), at.output
        if base is None or (self.dropout and at.training):
            u = F.dropout(u, self.dropout, at.training)
            dropped = at(u)
            return gain * (dropped + self._low_rank(tensors, u)) - (dropped if base is None else base)
        return (gain - 1) * base + gain * self._low_rank(tensors, u)

    def _low_rank(self, tensors: Tensors, u: torch.Tensor) -> torch.Tensor:
        return self.scale * (u @ tensors["down"].t().to(u.dtype)) @ tensors["up"].t().to(u.dtype)


@dataclass(frozen=True, repr=False)
class HiRA(ChangeForm):
    """A Hadamard product with a low rank, (W + s W ⊙ B A) x (Huang et al. 2025; PEFT: HiraConfig).

    Tensors: down A (r, d_in), Kaiming uniform; up B (d_out, r), 0.

    Args:
        rank: r, at least 1.
    """

    rank: Size

    def tensors(self, widths: Widths) -> Specs:
        return parameter_specs(down_up(self.rank, widths))

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        kaiming_(tensors["down"])
        tensors["up"].zero_()

    def change(self, tensors: Tensors, at: Place) -> torch.Tensor:
        return at.weight * (tensors["up"] @ tensors["down"])


@dataclass(frozen=True, repr=False)
class GLoRA(ChangeForm):
    """(W + W ⊙ A + B) x + c + D ⊙ c + E + W C with A, B and C of low rank (Chavan et al. 2023; PEFT: GloraConfig).

    Without a bias c, there is no C, D or E, as in PEFT.

    Tensors: a_down, b_down (r, d_in) and c_down (r, 1), Kaiming uniform; a_up, b_up (d_out, r) and c_up (d_in, r), 0;
        d and e (1,) or (d_out,), 0.

    Args:
        rank: r, at least 1.
        bias: D and E: "constant" (one number each, as in PEFT) or "vector" (one for each output).
    """

    through_weight: ClassVar[bool] = False
    rank: Size
    bias: Literal["constant", "vector"] = "constant"

    def tensors(self, widths: Widths) -> Specs:
        shapes: Shapes = {f"{name}_{side}": s for name in "ab" for side, s in down_up(self.rank, widths).items()}
        size = 1 if self.bias == "constant" else widths.out_width
        if widths.bias:
            shapes |= {"c_down": (self.rank, 1), "c_up": (widths.in_width, self.rank), "d": (size,), "e": (size,)}
        return parameter_specs(shapes)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        for name, tensor in tensors.items():
            kaiming_(tensor) if name.endswith("down") else tensor.zero_()

    def change(self, tensors: Tensors, at: Place) -> torch.Tensor:
        a, b = (tensors[f"{name}_up"] @ tensors[f"{name}_down"] for name in "ab")
        return at.weight * a + b

    def change_of_bias(self, tensors: Tensors, at: Place) -> torch.Tensor | None:
        if at.bias is None or "e" not in tensors:
            return None
        c = (tensors["c_up"] @ tensors["c_down"]).to(at.weight.dtype)
        return at.bias * tensors["d"] + tensors["e"] + (at.weight @ c).squeeze(-1)


@dataclass(frozen=True, repr=False)
class DEFT(ChangeForm):
    """A projection out of a subspace and a low rank into it, (1 - P relu(P)ᵀ) W x + P R x (PEFT: DeftConfig).

    Tensors: p (d_out, r), N(0, 0.02); r (r, d_in), relu(P)ᵀ W.

    Args:
        rank: r, at least 1.
    """

    through_weight: ClassVar[bool] = False
    rank: Size

    def tensors(self, widths: Widths) -> Specs:
        return parameter_specs({"p": (widths.out_width, self.rank), "r": (self.rank, widths.in_width)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        assert at is not None
        tensors["p"].normal_(std=0.02)
        tensors["r"].copy_(self._removed(tensors, at))

    def mask_factors(self, widths: Widths) -> None:
        raise DeltuneError("deft cannot be masked: without some entries of P and R it does not start at the base model")

    def _removed(self, tensors: Tensors, at: Place) -> torch.Tensor:
        return tensors["p"].relu().t() @ at.weight.to(tensors["p"].dtype)

    def change(self, tensors: Tensors, at: Place) -> torch.Tensor:
        return tensors["p"] @ (tensors["r"] - self._removed(tensors, at))

    def split_at_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp:
        return u @ (tensors["r"] - self._removed(tensors, at)).t().to(u.dtype), tensors["p"], None


@dataclass(frozen=True, repr=False)
class PEANuT(ChangeForm):
    """A small network on the rows of Wᵀ, W + s (B f(A Wᵀ))ᵀ (PEFT: PeanutConfig).

    With a depth l there are l encoders and l decoders f(E h) between A and B, with residual connections between
    the n-th encoder's input and the output of the n-th last decoder.

    Tensors: a (r, d_out), encoder_n and decoder_n (r, r), Kaiming uniform; b (d_out, r), 0.

    Args:
        rank: r, at least 1.
        depth: l, from 0 to 64.
        activation: f: "relu", "gelu", "silu", "tanh", "sigmoid" or "identity".
        scale: s.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    rank: Size
    depth: Depth = 0
    activation: str = "relu"
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("activation", self.activation, ACTIVATIONS)

    def tensors(self, widths: Widths) -> Specs:
        inner = {f"{kind}_{n}": (self.rank, self.rank) for kind in ("encoder", "decoder") for n in range(self.depth)}
        return parameter_specs({"a": (self.rank, widths.out_width), **inner, "b": (widths.out_width, self.rank)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        for name, tensor in tensors.items():
            tensor.zero_() if name == "b" else kaiming_(tensor)

    def change(self, tensors: Tensors, at: Place) -> torch.Tensor:
        h, inputs = activate(self.activation, at.weight.t().to(tensors["a"].dtype) @ tensors["a"].t()), []
        for n in range(self.depth):
            inputs.append(h)
            h = activate(self.activation, h @ tensors[f"encoder_{n}"].t())
        for n in range(self.depth):
            h = activate(self.activation, h @ tensors[f"decoder_{n}"].t()) + inputs.pop()
        return self.scale * (h @ tensors["b"].t()).t()


@dataclass(frozen=True, repr=False)
class DeLoRA(FactorForm):
    """A bounded low rank, λ/r Σ_i b_i a_iᵀ / (‖b_i‖ ‖a_i‖) diag(‖W_j‖) x (Bini et al. 2025; PEFT: DeloraConfig).

    Tensors: down (r, d_in), with the rows a_i, Kaiming uniform; up (d_out, r), with the columns b_i, 0; bound λ (1,);
        the buffer columns (d_in,), the norms ‖W_j‖ of the columns of W.

    Args:
        rank: r, at least 1.
        bound: λ at the start.
    """

    reads_weight: ClassVar[bool] = True
    rank: Size
    bound: float = 15.0

    def tensors(self, widths: Widths) -> Specs:
        return parameter_specs(down_up(self.rank, widths) | {"bound": (1,)}) | buffer_specs(
            {"columns": (widths.in_width,)}
        )

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        assert at is not None
        kaiming_(tensors["down"])
        tensors["up"].zero_()
        tensors["bound"].fill_(self.bound)
        tensors["columns"].copy_(at.weight.norm(dim=0))

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        super().fill_untrained(tensors, buffers)
        tensors["bound"].fill_(self.bound)

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        down, up = tensors["down"], tensors["up"]
        norms = down.norm(dim=1).clamp_min(1e-4) * up.norm(dim=0).clamp_min(1e-4)
        return down * tensors["columns"], up * (tensors["bound"] / self.rank / norms)


@dataclass(frozen=True, repr=False)
class OSF(ChangeForm):
    """W with the lower part of its spectrum trained, U_h S_h V_h + U_l S_l V_l (Nayak et al. 2025; PEFT: OSFConfig).

    Gradients are projected to be orthogonal to the upper part, (1 - U_h U_hᵀ) ∂U_l and ∂V_l (1 - V_hᵀ V_h).

    Tensors: u (d_out, n), s (n,) and v (n, d_in), the lower n singular vectors and values of W; the buffers u_start,
        s_start and v_start, the same; the buffer u_upper (d_out, r) or v_upper (r, d_in) on the longer side of W, whose
        upper part does not follow from the lower one.

    Args:
        rank: r, the number of singular values that are kept; None: half of them.
    """

    rank: Size | None = None

    def _kept(self, widths: Widths) -> int:
        return max(1, min(widths.in_width, widths.out_width) // 2) if self.rank is None else self.rank

    def incompatibility(self, widths: Widths) -> str | None:
        return rank_above(self._kept(widths) + 1, widths)

    def tensors(self, widths: Widths) -> Specs:
        d_in, d_out, r = widths.in_width, widths.out_width, self._kept(widths)
        n = min(d_in, d_out) - r
        lower: Shapes = {"u": (d_out, n), "s": (n,), "v": (n, d_in)}
        upper: Shapes = {"u_upper": (d_out, r)} if d_out > d_in else {"v_upper": (r, d_in)} if d_in > d_out else {}
        return parameter_specs(lower) | buffer_specs({f"{name}_start": shape for name, shape in lower.items()} | upper)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        assert at is not None
        kept = min(at.weight.shape) - len(tensors["s"])
        for ending, part in (("", slice(kept, None)), ("_start", slice(kept, None)), ("_upper", slice(kept))):
            for name, value in zip("usv", singular(at.weight, part), strict=True):
                if f"{name}{ending}" in tensors:
                    tensors[f"{name}{ending}"].copy_(value)

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(buffers[f"{name}_start"])

    def change(self, tensors: Tensors, at: Place) -> torch.Tensor:
        u = _orthogonal_gradient(tensors["u"], tensors["u_start"], tensors.get("u_upper"))
        v = _orthogonal_gradient(
            tensors["v"].t(), tensors["v_start"].t(), tensors["v_upper"].t() if "v_upper" in tensors else None
        ).t()
        return (u * tensors["s"]) @ v - (tensors["u_start"] * tensors["s_start"]) @ tensors["v_start"]


def _orthogonal_gradient(u: torch.Tensor, start: torch.Tensor, upper: torch.Tensor | None) -> torch.Tensor:
    """Return u, with gradients that are orthogonal to the upper singular vectors: those of a square matrix are the
    complement of the lower ones at the start."""
    projected = start @ (start.t() @ u) if upper is None else u - upper @ (upper.t() @ u)
    return u.detach() + (projected - projected.detach())
