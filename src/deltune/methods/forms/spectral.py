"""Forms in a spectrum: Fourier transforms, and the singular vectors of the frozen weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ...errors import DeltuneError, is_installed, missing_extra
from ..parser import NonNegativeInt, Size
from ..schedules import ClusterSchedule
from .base import (
    BeforeUp,
    FactorForm,
    Form,
    MatrixForm,
    Place,
    Shapes,
    Specs,
    Statistic,
    Tensors,
    TensorSpec,
    TwoLayers,
    Widths,
    parameter_specs,
)
from .starts import at_least_float32, buffer_specs, down_up, indivisible, random_entries, rank_above, singular
from .weights import ChangeForm

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, repr=False)
class _DrawnSpectrum(ChangeForm):
    """What forms share that train n entries of a transform of the weight, drawn as PEFT draws them."""

    frequencies: Size
    scale: float
    seed: int

    def incompatibility(self, widths: Widths) -> str | None:
        size = widths.in_width * widths.out_width
        return f"frequencies={self.frequencies}: this weight has {size} entries" if self.frequencies > size else None

    def tensors(self, widths: Widths) -> Specs:
        size = widths.in_width * widths.out_width
        entries = TensorSpec((self.frequencies,), trained=False, below=size)
        return parameter_specs({"spectrum": (self.frequencies,)}) | {"entries": entries}

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        assert at is not None
        tensors["spectrum"].zero_()
        tensors["entries"].copy_(random_entries(at.weight.numel(), self.frequencies, self.seed))


@dataclass(frozen=True, repr=False)
class FourierFT(_DrawnSpectrum):
    """The inverse Fourier transform of n entries, W + s IDFT(c) (Gao et al. 2024; PEFT: FourierFTConfig).

    Tensors: spectrum c (n,), 0; the buffer entries (n,), their positions in the matrix, drawn as PEFT draws them.

    Args:
        frequencies: n, at most the number of the weight's entries.
        scale: s.
        seed: The seed of the positions.
    """

    frequencies: int = 1000
    scale: float = 150.0
    seed: int = 777

    def change(self, tensors: Tensors, at: Place) -> torch.Tensor:
        import torch

        spectrum = at_least_float32(tensors["spectrum"])
        flat = spectrum.new_zeros(at.weight.numel()).index_put((tensors["entries"],), spectrum)
        return self.scale * torch.fft.ifft2(flat.view(at.weight.shape)).real


@dataclass(frozen=True, repr=False)
class WaveFT(_DrawnSpectrum):
    """The inverse Haar transform of n entries, W + s IDWT(c) (Bilican et al. 2025; PEFT: WaveFTConfig).

    Tensors: spectrum c (n,), 0; the buffer entries (n,), their positions in the matrix, drawn as PEFT draws them.

    Args:
        frequencies: n, at most the number of the weight's entries.
        scale: s.
        seed: The seed of the positions.
    """

    frequencies: int = 2592
    scale: float = 25.0
    seed: int = 777

    def change(self, tensors: Tensors, at: Place) -> torch.Tensor:
        import torch
        from torch.nn import functional as F

        rows, columns = at.weight.shape
        scaled = tensors["spectrum"] * (self.scale / 2)
        flat = scaled.new_zeros(rows * columns).index_put((tensors["entries"],), scaled)
        blocks = F.pad(flat.view(rows, columns), (0, columns % 2, 0, rows % 2))
        for axis in (0, 1):  # PEFT has the differences of rows in the right half, and those of columns in the lower
            mean, half = blocks.chunk(2, 1 - axis)
            blocks = torch.stack((mean + half, mean - half), axis + 1).flatten(axis, axis + 1)
        return blocks[:rows, :columns]


@dataclass(frozen=True, repr=False)
class Circulant(MatrixForm):
    """Blocks of circulant matrices (Chen et al. 2025; PEFT: C3AConfig).

    Tensor: kernel (d_out / b, d_in / b, b), 0: the first column of each block, times d_in.

    Args:
        block_size: b, which divides both widths.
    """

    acts_on_weights: ClassVar[bool] = False
    block_size: Size

    def incompatibility(self, widths: Widths) -> str | None:
        return indivisible("block_size", self.block_size, widths.in_width, widths.out_width)

    def tensors(self, widths: Widths) -> Specs:
        b = self.block_size
        return parameter_specs({"kernel": (widths.out_width // b, widths.in_width // b, b)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        tensors["kernel"].zero_()

    def matrix(self, tensors: Tensors) -> torch.Tensor:
        m, n, b = tensors["kernel"].shape
        kernel = (tensors["kernel"] / (n * b))[:, :, None]
        # in rows of 2 b - 1, each repetition of b numbers begins one further to the right: no index, no sum by one
        blocks = kernel.expand(m, n, 2 * b - 1, b).reshape(m, n, b, 2 * b - 1)[..., :b]
        return blocks.transpose(1, 2).reshape(m * b, n * b)


@dataclass(frozen=True, repr=False)
class LoRAXS(FactorForm):
    """B R A x with the first r singular vectors of W as A and B, frozen, and R trained (Bałazy et al. 2024).

    Tensors: R (r, r), N(0, 1e-5); the buffers A (r, d_in), the right singular vectors, and B (d_out, r), the left ones
        with the singular values.

    Args:
        rank: r, at least 1.
    """

    reads_weight: ClassVar[bool] = True
    rank: Size

    @property
    def starts_at_zero(self) -> bool:
        return False

    def incompatibility(self, widths: Widths) -> str | None:
        return rank_above(self.rank, widths)

    def tensors(self, widths: Widths) -> Specs:
        fixed: Shapes = {"A": (self.rank, widths.in_width), "B": (widths.out_width, self.rank)}
        return parameter_specs({"R": (self.rank, self.rank)}) | buffer_specs(fixed)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        assert at is not None
        first = singular(at.weight, slice(self.rank))
        tensors["A"].copy_(first.v)
        tensors["B"].copy_(first.u * first.s)
        tensors["R"].normal_(std=1e-5)

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return tensors["A"], tensors["B"] @ tensors["R"]


@dataclass(frozen=True, repr=False)
class SVFT(FactorForm):
    """U M V with all singular vectors of W, frozen, and M trained near its diagonal (Lingam et al. 2024).

    Tensors: entries (k + b (2 k - b - 1),) of M, row by row, 0; the buffers U (d_out, k) and V (k, d_in), with k the
        lesser width.

    Args:
        band: b, how far from the diagonal entries are trained.
    """

    reads_weight: ClassVar[bool] = True
    band: NonNegativeInt = 0

    def incompatibility(self, widths: Widths) -> str | None:
        return rank_above(self.band + 1, widths)

    def tensors(self, widths: Widths) -> Specs:
        k = min(widths.in_width, widths.out_width)
        fixed: Shapes = {"U": (widths.out_width, k), "V": (k, widths.in_width)}
        return parameter_specs({"entries": (k + self.band * (2 * k - self.band - 1),)}) | buffer_specs(fixed)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        assert at is not None
        every = singular(at.weight, slice(None))
        tensors["U"].copy_(every.u)
        tensors["V"].copy_(every.v)
        tensors["entries"].zero_()

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        k, entries = len(tensors["V"]), tensors["entries"]
        near = entries.new_ones(k, k).tril(self.band).triu(-self.band).bool()
        return entries.new_zeros(k, k).masked_scatter(near, entries) @ tensors["V"], tensors["U"]


@dataclass(frozen=True, repr=False)
class Centred(FactorForm):
    """A low rank from any initial values, s (B A - B₀ A₀) x, so that it starts at 0 and the base is not changed.

    It is computed as s ((B - B₀) A + B₀ (A - A₀)), which is exactly 0 at the start.

    "pissa": A₀ and B₀ are the first r singular vectors of W with the roots of the singular values over s (Meng et al.
    2024). "olora": W = Q R, B₀ is the first r columns of Q, and A₀ the first r rows of R (Büyükakyüz 2024). "corda" and
    "corda_kpm": W C = U S V with the moments C of what the projection reads; B₀ = U √(S / s), A₀ = √(S / s) V C⁻¹, of
    the r greatest, or of the r least singular values (Yang et al. 2024). "lora_ga": the gradient is U S V; A₀ has the
    first r rows of V, and B₀ the next r columns of U S, times d_out^¼ / 4 (Wang et al. 2024).
    PEFT: LoraConfig(init_lora_weights=start).

    Tensors: down A (r, d_in) and up B (d_out, r); the buffers down_start A₀ and up_start B₀.

    Args:
        rank: r, at least 1.
        start: "pissa", "olora", "corda", "corda_kpm" or "lora_ga".
        scale: s, above 0.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    reads_weight: ClassVar[bool] = True
    rank: Size
    start: Literal["pissa", "olora", "corda", "corda_kpm", "lora_ga"] = "pissa"
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale <= 0:
            raise DeltuneError(f"scale={self.scale:g}: give a number above 0")

    @property
    def statistic(self) -> Statistic | None:
        return "gradient" if self.start == "lora_ga" else "moments" if self.start.startswith("corda") else None

    def incompatibility(self, widths: Widths) -> str | None:
        return rank_above(self.rank * (2 if self.start == "lora_ga" else 1), widths)

    def tensors(self, widths: Widths) -> Specs:
        shapes = down_up(self.rank, widths)
        return parameter_specs(shapes) | buffer_specs({f"{name}_start": shape for name, shape in shapes.items()})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        import torch

        assert at is not None
        if self.start == "olora":
            columns, rows = torch.linalg.qr(at.weight)
            down, up = rows[: self.rank], columns[:, : self.rank]
        elif self.start == "lora_ga":
            assert at.statistic is not None
            u, s, v = singular(at.statistic, slice(2 * self.rank))
            down, up = v[: self.rank], (u * s)[:, self.rank :] * (len(u) ** 0.25 / 4)
        else:
            part = slice(-self.rank, None) if self.start == "corda_kpm" else slice(self.rank)
            moments = None if at.statistic is None else _damped(at.statistic).to(at.weight)
            u, s, v = singular(at.weight if moments is None else at.weight @ moments, part)
            root = (s / self.scale).sqrt()
            down, up = root[:, None] * (v if moments is None else torch.linalg.solve(moments, v, left=False)), u * root
        for ending in ("", "_start"):
            tensors[f"down{ending}"].copy_(down)
            tensors[f"up{ending}"].copy_(up)

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(buffers[f"{name}_start"])

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        down, up, down_start, up_start = (tensors[f"{name}{end}"] for end in ("", "_start") for name in ("down", "up"))
        return torch.cat((down, down - down_start)), self.scale * torch.cat((up - up_start, up_start), 1)


def _damped(moments: torch.Tensor) -> torch.Tensor:
    """Return moments with as much added to the diagonal as their inverse needs, as CorDA's authors add it."""
    import torch

    identity = torch.eye(len(moments)).to(moments)
    for doubling in range(20):
        damped = moments + 0.01 * 2**doubling * moments.diagonal().mean() * identity
        if torch.dist(damped @ torch.linalg.inv(damped), identity) < 0.05:
            return damped
    raise DeltuneError("corda: the products of what a linear reads have no inverse; give more batches, data=")


@dataclass(frozen=True, repr=False)
class AdaMSS(Form):
    """A low rank for each cluster of outputs, in the first part of the spectrum of [W, c] (PEFT: AdamssConfig).

    [W, c] is about U S V with k singular values, and the rows of U are clustered. Output j in the cluster i changes by
    b_j A_i V [x, 1].

    Tensors: down A (K, r, k), orthonormal rows in the span of the cluster's rows of U; up b (d_out, r), 0, cluster by
        cluster; the buffers basis V (k, d_in), shift (k,), its column for the bias c, rows (d_out,), the output of each
        row of b, and clusters (d_out,), its cluster. Where a cluster has fewer rows than r, the rest of A and b is 0,
        and stays so.

    Args:
        rank: r, at least 1.
        clusters: K, at most d_out of them.
        singular_values: k, as many as there are at most.
        seed: The seed of the singular vectors, which are approximate, as PEFT computes them.
        schedule: Which clusters train; None: all of them.
    """

    reads_weight: ClassVar[bool] = True
    rank: Size = 1
    clusters: Size = 5
    singular_values: Size = 100
    seed: int = 0
    schedule: ClusterSchedule | None = None

    def tensors(self, widths: Widths) -> Specs:
        d_in, d_out = widths.in_width, widths.out_width
        k, clusters = min(self.singular_values, d_in + widths.bias, d_out), min(self.clusters, d_out)
        fixed: Shapes = {"basis": (k, d_in), **({"shift": (k,)} if widths.bias else {})}
        numbers = {"rows": d_out, "clusters": clusters}
        return (
            parameter_specs({"down": (clusters, self.rank, k), "up": (d_out, self.rank)})
            | buffer_specs(fixed)
            | {name: TensorSpec((d_out,), trained=False, below=below) for name, below in numbers.items()}
        )

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        import torch

        assert at is not None
        whole = at.weight.float()
        if at.bias is not None:
            whole = torch.cat((whole, at.bias.float()[:, None]), 1)
        number, rank, k = tensors["down"].shape
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            left, _, right = torch.svd_lowrank(whole.cpu(), q=k)
        clusters = _clustered(left, number)
        rows = clusters.sort(stable=True).indices
        tensors["basis"].copy_(right.t()[:, : at.weight.shape[1]])
        if at.bias is not None:
            tensors["shift"].copy_(right[-1])
        tensors["rows"].copy_(rows)
        tensors["clusters"].copy_(clusters[rows])
        tensors["up"].zero_()
        tensors["down"].zero_()
        for i in range(number):
            span = singular(left[clusters == i], slice(rank)).v
            tensors["down"][i, : len(span)] = span.to(tensors["down"])

    def two_layers(self, tensors: Tensors) -> TwoLayers:
        import torch

        down, up = tensors["down"].flatten(0, 1), tensors["up"]
        rank = up.shape[1]
        columns = tensors["clusters"][:, None] * rank + torch.arange(rank, device=up.device)
        spread = up.new_zeros(len(up), len(down)).index_put((tensors["rows"][:, None], columns), up)
        shift = down @ tensors["shift"] if "shift" in tensors else None
        return TwoLayers(down @ tensors["basis"], shift, "identity", spread, None)

    def affine(self, tensors: Tensors, at: Place | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        layers = self.two_layers(tensors)
        return layers.up @ layers.down, None if layers.down_bias is None else layers.up @ layers.down_bias

    def split_at_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp:
        from torch.nn import functional as F

        layers = self.two_layers(tensors)
        shift = None if layers.down_bias is None else layers.down_bias.to(u.dtype)
        return F.linear(u, layers.down.to(u.dtype), shift), layers.up, None


def _clustered(rows: torch.Tensor, number: int) -> torch.Tensor:
    """Return the number of the cluster of each row, as PEFT clusters them."""
    if not is_installed("scikit-learn"):
        raise DeltuneError(missing_extra("adamss clusters by", ["scikit-learn"], "train"))
    import torch
    from sklearn.cluster import KMeans

    means = KMeans(number, init="random", n_init=1, max_iter=10, random_state=123456789)
    return torch.from_numpy(means.fit_predict(rows.float().numpy())).long()
