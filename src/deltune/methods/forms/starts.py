"""Initial values and shapes that several forms have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .base import Shapes, Specs, TensorSpec, Widths

if TYPE_CHECKING:
    import torch


def buffer_specs(shapes: Shapes) -> Specs:
    """Return the specifications of tensors that are saved and not trained."""
    return {name: TensorSpec(shape, trained=False) for name, shape in shapes.items()}


def seeded_buffer_specs(shapes: Shapes, seed: int) -> Specs:
    """Return the specifications of buffers that all places of a term share and that are drawn again from a seed."""
    return {
        name: TensorSpec(shape, trained=False, saved=False, shared="term", seed=seed) for name, shape in shapes.items()
    }


def down_up(rank: int, widths: Widths) -> Shapes:
    """Return the shapes of the two matrices of a low rank."""
    return {"down": (rank, widths.in_width), "up": (widths.out_width, rank)}


def kaiming_(tensor: torch.Tensor, fan_in: int | None = None) -> torch.Tensor:
    """Fill a matrix (…, fan_in) as PyTorch fills a linear's weight, Kaiming uniform with a = sqrt 5."""
    bound = (tensor.shape[-1] if fan_in is None else fan_in) ** -0.5
    return tensor.uniform_(-bound, bound)


class Singular(NamedTuple):
    """A part of U diag(s) V: u (d_out, r), s (r,) and v (r, d_in)."""

    u: torch.Tensor
    s: torch.Tensor
    v: torch.Tensor


def singular(weight: torch.Tensor, part: slice) -> Singular:
    """Return the singular vectors and values of a weight from the greatest on, or a part of them."""
    import torch

    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    return Singular(u[:, part], s[part], v[part])


def rank_above(rank: int, widths: Widths) -> str | None:
    """Return why a weight has fewer singular vectors, or None where it has."""
    full = min(widths.in_width, widths.out_width)
    return (
        None if rank <= full else f"rank={rank}: a weight of {widths.out_width} × {widths.in_width} has {full} at most"
    )


def indivisible(name: str, size: int, *widths: int) -> str | None:
    """Return why a block size fits no widths, or None where it divides all of them."""
    wrong = [width for width in widths if width % size]
    return f"{name}={size} does not divide the width {wrong[0]}" if wrong else None


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a dtype that decompositions and Fourier transforms can be computed in."""
    import torch

    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def random_entries(size: int, number: int, seed: int) -> torch.Tensor:
    """Return so many different positions below `size`, drawn from a seed on the CPU."""
    import torch

    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:number]
