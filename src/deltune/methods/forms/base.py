"""The functional forms of a change Δh of hidden states: bottleneck, low rank, vector, rescaling, mixture and prompt.

u is what a form reads: the input x of a frozen sub-module (parallel insertion) or the hidden states h that it changes
(sequential insertion). Forms that act inside an attention are in `attention_forms`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, NoReturn, Protocol, TypeAlias

from ...errors import DeltuneError, excerpt, unknown_name
from ..masks import Factor
from ..parser import check_fields, to_expression

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "Mapping[str, torch.Tensor]"
Shapes = dict[str, tuple[int, ...]]
Init = Literal["lora", "bert"]

ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "identity")
"""The activations of a bottleneck, as `torch.nn.functional` calls them but for the last one, which does nothing."""


@dataclass(frozen=True)
class Widths:
    """The sizes that a form needs at one place.

    Attributes:
        in_width: The width of u, what the form reads.
        out_width: The width of h, what the form changes.
        x_width: The width of x, what the frozen sub-module reads; 0 where there is none.
        heads: Query heads of the attention; 0 outside of one, as are the next three.
        kv_heads: Key-value heads.
        head_width: The width of a query or key of one head.
        value_width: The width of a value of one head.
        states: The number of hidden states to mix, at the site that has them all; else 0.
        experts: The number of experts that have tensors of their own each; 0 outside of experts.
        lookup: Whether x is token ids, each of which stands for a one-hot vector of `in_width`.
        bias: Whether the projection or norm has a bias.
    """

    in_width: int
    out_width: int
    x_width: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_width: int = 0
    value_width: int = 0
    states: int = 0
    experts: int = 0
    lookup: bool = field(default=False, kw_only=True)
    bias: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a form or a composition.

    Attributes:
        shape: Its shape at one place. Of a tensor that several places share, each axis has the greatest of their sizes,
            and each place reads the first entries.
        trained: Whether it is a parameter; otherwise it is a buffer.
        saved: Whether it is in the saved file. A parameter that is not saved exists only until `fold` has computed the
            saved tensors from it; a buffer that is not saved is drawn again from `seed`.
        shared: The places that share it: those of one "sublayer", those of one kind of attention ("group"), or all of
            the "term"; None where each place has its own.
        seed: The seed from which `draw` makes a buffer that is not saved, on the CPU.
        below: Of a buffer of whole numbers, such as positions, what all of them are below.
    """

    shape: tuple[int, ...]
    _: KW_ONLY
    trained: bool = True
    saved: bool = True
    shared: Literal["sublayer", "group", "term"] | None = None
    seed: int | None = None
    below: int | None = None

    @property
    def numel(self) -> int:
        """The number of its scalars."""
        return math.prod(self.shape)


Specs = dict[str, TensorSpec]


def trained(shapes: Shapes) -> Specs:
    """Return the specifications of tensors that are trained and saved, each place with its own."""
    return {name: TensorSpec(shape) for name, shape in shapes.items()}


class Place(Protocol):
    """What a form may read where it acts. It is made for each call and keeps nothing.

    A form that reads the weight acts at a frozen projection y = W x + c; of a fused projection it sees its own part.
    """

    @property
    def training(self) -> bool:
        """True while dropout acts."""
        ...

    @property
    def weight(self) -> torch.Tensor:
        """The weight W (d_out, d_in), dequantised where it is quantised."""
        ...

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias c (d_out,), or None."""
        ...

    @property
    def output(self) -> torch.Tensor | None:
        """W x, as the projection has computed it in this pass; None outside of a pass."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute W x, by the module itself where W is quantised.

        Args:
            x: What the projection reads (B, n, d_in).

        Returns:
            W x (B, n, d_out).
        """
        ...


@dataclass(frozen=True, eq=False)
class WeightPlace:
    """A place by its weight alone, outside of a pass; see `Place`."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    output: torch.Tensor | None = None
    training: bool = field(default=False, kw_only=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn import functional as F

        return F.linear(x, self.weight)


def refuse_sum(one: object, two: object) -> NoReturn:
    """Raise the error for a sum of which a side is no method, and say what to write.

    Args:
        one: The left side.
        two: The right side.

    Raises:
        DeltuneError: Always.
    """
    advice = {
        f"{term!r} is a part of a method; wrap it: Modification(site, {term!r})"
        for term in (one, two)
        if isinstance(term, MethodPart)
    }
    advice |= {
        f"a text is parsed first: deltune.parse({excerpt(term)})" for term in (one, two) if isinstance(term, str)
    }
    advice |= {f"call it: {term.__name__}(…)" for term in (one, two) if callable(term) and hasattr(term, "__name__")}
    raise DeltuneError(
        f"{excerpt(one)} and {excerpt(two)} cannot be added: only methods can. {'; '.join(sorted(advice))}".strip()
    )


class MethodPart:
    """What a modification consists of, a form or a composition. It is no method, so it cannot be added to one."""

    def __add__(self, other: object) -> NoReturn:
        refuse_sum(self, other)

    def __radd__(self, other: object) -> NoReturn:
        refuse_sum(other, self)


class TwoLayers(NamedTuple):
    """The tensors of Δh = f(u Dᵀ + d) Uᵀ + e.

    Attributes:
        down: D (r, d_in).
        down_bias: d (r,), or None for zero.
        activation: f, one of `ACTIVATIONS`.
        up: U (d_out, r).
        up_bias: e (d_out,), or None for zero.
    """

    down: torch.Tensor
    down_bias: torch.Tensor | None
    activation: str
    up: torch.Tensor
    up_bias: torch.Tensor | None


class Form(MethodPart):
    """A functional form of Δh: its tensors, their initial values and what it computes.

    A form of your own is a class that derives from this one and is a frozen dataclass; its fields are its arguments:

        @deltune.register
        @dataclass(frozen=True, repr=False)
        class Wave(deltune.Form):
            def tensors(self, widths):  # the tensors at one place, by name; widths is a deltune.Widths
                return {"w": deltune.TensorSpec((widths.in_width,))}

            def initialize(self, tensors, at):  # their initial values, in place
                tensors["w"].zero_()

            def __call__(self, tensors, u, at):  # Δh (B, n, out_width) from u (B, n, in_width)
                return torch.sin(tensors["w"] * u)

    These three must be written. Everything else has a default:

    - `__post_init__` checks the arguments: call `super().__post_init__()` first, and raise a DeltuneError.
    - `starts_at_zero` is False where Δh is not 0 at the start.
    - `affine` returns (A, b) where Δh = A u + b, so that the form can be merged into weights.
    - `incompatibility` says at which places the form cannot act, and `waste` where it trains more than it can use.
    - `before_up`, in place of `__call__`, returns (v, U, e) where Δh = v Uᵀ + e.
    - `product` and `fill_untrained` serve masks (`apet`), `fold` a reparameterisation, and `draw` random buffers.

    A form that is a product of two matrices derives from `FactorForm`, one that is a matrix from `MatrixForm`, and one
    that is any function of the frozen weight from `WeightForm`; each of them writes one method in place of `__call__`.

    Class attributes:
        needs: What a site must offer: "hidden" (hidden states at one point), "attention" (the inside of an attention),
            "tokens" (the input embeddings) or "states" (the outputs of all layers).
        multiplies: The name of the tensor w where h + Δh is w ⊙ h for a form that reads h; else None.
        replaces: Whether h + Δh does not depend on h, so that earlier changes at the same place would be lost.
        acts_on_weights: Whether Δh = A u with the A of `affine`, for one matrix or a stack of them, so that the form
            can act at a weight that a module reads itself, as those of experts and routers: W + s A.
        reads_ids: Whether u may be token ids, each of which stands for a one-hot vector.
        reads_weight: Whether it reads the frozen projection, so that it can act at projections only.
    """

    needs: ClassVar[str] = "hidden"
    multiplies: ClassVar[str | None] = None
    replaces: ClassVar[bool] = False
    acts_on_weights: ClassVar[bool] = False
    reads_ids: ClassVar[bool] = False
    reads_weight: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    def __repr__(self) -> str:
        return to_expression(self)

    def tensors(self, widths: Widths) -> Specs:
        """Return what the tensors of the form are at one place.

        Args:
            widths: The sizes at the place.

        Returns:
            Their specifications by name.
        """
        raise NotImplementedError

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        """Fill tensors with their initial values, in place.

        Args:
            tensors: The tensors of one place by name. Those that several places share are among them once, at the first
                of these places; those with a seed never are.
            at: The projection at the place, or None where there is none.
        """
        raise NotImplementedError

    def draw(self, shapes: Shapes, generator: torch.Generator) -> Tensors:
        """Return the values of the buffers that have one seed (`TensorSpec.seed`), on the CPU.

        Args:
            shapes: Their shapes by name.
            generator: A generator with that seed.

        Returns:
            Their values by name.
        """
        raise NotImplementedError

    def incompatibility(self, widths: Widths) -> str | None:
        """Return why the form cannot act at a place.

        Args:
            widths: The sizes at the place.

        Returns:
            The reason, or None where the form can act.
        """
        return None

    def waste(self, widths: Widths) -> str | None:
        """Return what the form trains beyond what can matter at a place.

        Args:
            widths: The sizes at the place.

        Returns:
            The reason, or None where all of it can matter.
        """
        return None

    @property
    def starts_at_zero(self) -> bool:
        """Whether Δh = 0 at the start for every u."""
        return True

    def fold(self, tensors: Tensors, widths: Widths) -> Tensors:
        """Compute the saved tensors of a reparameterisation.

        Args:
            tensors: The trained tensors by name.
            widths: The sizes at the place.

        Returns:
            The saved tensors by name.
        """
        return tensors

    @property
    def shift(self) -> int:
        """By how many positions the tokens of the form's stack are moved."""
        return 0

    def product(self, widths: Widths) -> Product | None:
        """Return the factors that share a rank, so that a mask keeps or drops the two sides of a rank jointly.

        Args:
            widths: The sizes at the place.

        Returns:
            The rank and the factors on both of its sides; None where each tensor acts alone.

        Raises:
            DeltuneError: The form cannot be masked with its options; the message says which to change.
        """
        return None

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        """Fill tensors, in place, with the values of entries that a mask leaves out, which change nothing.

        Args:
            tensors: The trained tensors by name.
            buffers: The other tensors by name.
        """
        for tensor in tensors.values():
            tensor.zero_()

    def affine(self, tensors: Tensors, at: Place | None) -> Affine | None:
        """Return (A, b) where Δh = A u + b, so that Δh can be merged into a weight.

        Args:
            tensors: The saved and drawn tensors by name.
            at: The projection, for forms that read its weight; None for others.

        Returns:
            A of shape (d_out, d_in), or (d,) for a diagonal matrix, and b (d_out,); either is None for zero. None for
            forms that are not affine.
        """
        return None

    def before_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp | None:
        """Return (v, U, e) where Δh = v Uᵀ + e, so that the last product can be added to h as it is computed.

        Args:
            tensors: The saved and drawn tensors by name.
            u: What the form reads (B, n, d_in).
            at: The place.

        Returns:
            v (B, n, r), U (d_out, r), and e (d_out,) or None; None for forms that do not end in such a product.
        """
        return None

    def two_layers(self, tensors: Tensors) -> TwoLayers | None:
        """Return the layers of a form of the library that is Δh = f(u Dᵀ + d) Uᵀ + e outside of training.

        Those of several deltas are computed in two products for a whole batch. Nothing asks it of a user's own forms.

        Args:
            tensors: The saved and drawn tensors by name.

        Returns:
            The layers, or None for other forms.
        """
        return None

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        """Compute Δh.

        Args:
            tensors: The saved and drawn tensors by name.
            u: What the form reads (B, n, d_in).
            at: The place.

        Returns:
            Δh (B, n, d_out).
        """
        last = self.before_up(tensors, u, at)
        assert last is not None
        return _up_projection(*last)

    def add_to(
        self,
        h: torch.Tensor,
        tensors: Tensors,
        u: torch.Tensor,
        at: Place,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return h + s Δh in the dtype of h.

        A last product of the form is added to h as it is computed, without a tensor for Δh.

        Args:
            h: The hidden states (B, n, d_out).
            tensors: The saved and drawn tensors by name.
            u: What the form reads (B, n, d_in); it may be h itself.
            at: The place.
            scale: s.
            out: h itself where it may be overwritten, else None.

        Returns:
            The new hidden states, of the shape of h; `out` where it is given.
        """
        if self.multiplies is not None and u is h and scale == 1:
            return (h.mul if out is None else out.mul_)(tensors[self.multiplies].to(h.dtype))
        last = self.before_up(tensors, u, at)
        if last is None or last[2] is not None or h.dtype != last[0].dtype:
            delta = self(tensors, u, at) if last is None else _up_projection(*last)
            # Δh may be a view of u, which may be h: it is not overwritten while it is read
            return (h.add if out is None or u is h else out.add_)(delta.to(h.dtype), alpha=scale)
        v, up = last[0].flatten(0, -2), last[1].to(h.dtype)
        if out is None:
            return h.flatten(0, -2).addmm(v, up.t(), alpha=scale).view(h.shape)
        out.view(-1, out.shape[-1]).addmm_(v, up.t(), alpha=scale)  # out= must be contiguous where it is compiled
        return out

    def per_head(self, tensors: Tensors, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Compute Δh inside an attention, for forms that need one.

        Args:
            tensors: The saved and drawn tensors by name.
            query: The model's own query (B, N_h, n, d_h).
            scaling: The factor by which the model scales q kᵀ.

        Returns:
            Δh (B, n, N_h, d_v).
        """
        raise NotImplementedError


REQUIRED = {
    "tensors": 'def tensors(self, widths): return {"w": TensorSpec((widths.in_width,))}  # the tensors at one place',
    "initialize": 'def initialize(self, tensors, at): tensors["w"].zero_()  # their initial values, in place',
    "__call__": 'def __call__(self, tensors, u, at): return tensors["w"] * u  # Δh, of width widths.out_width',
    "per_head": "def per_head(self, tensors, query, scaling): ...  # Δh (B, n, heads, value width)",
    "affine": "def affine(self, tensors, at): return A, b  # where Δh = A u + b; None for zero",
    "matrix": "def matrix(self, tensors): return A  # (out, in), where Δh = A u",
    "factors": "def factors(self, tensors): return D, U  # where Δh = U D u",
    "weight": "def weight(self, tensors, at): return at.weight + A  # W' of shape (out, in)",
}
"""What forms write, with a line that does."""


def check_frozen(kind: type) -> None:
    """Check that a class of forms or compositions is a frozen dataclass, so that its values compare and have a hash.

    Raises:
        DeltuneError: It is not; the message shows the line to write.
    """
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise DeltuneError(
            f"{kind.__name__} is compared and hashed by its fields: put @dataclass(frozen=True, repr=False) above it"
        )


def check_form_class(kind: type[Form]) -> None:
    """Check that a class of forms has what every form needs.

    Raises:
        DeltuneError: Something is missing; the message shows the lines to write.
    """
    check_frozen(kind)
    if issubclass(kind, FactorForm):
        computes = ["factors"]
    elif issubclass(kind, WeightForm):
        computes = ["matrix" if issubclass(kind, MatrixForm) else "weight"]
    else:
        computes = ["per_head"] if kind.needs == "attention" else ["__call__"] if kind.needs != "tokens" else []
        computes += ["affine"] if kind.acts_on_weights else []
    bases = (Form, FactorForm, WeightForm, MatrixForm)
    missing = [
        name
        for name in ("tensors", "initialize", *computes)
        if any(getattr(kind, name) is vars(base).get(name) for base in bases)
        and not (name == "__call__" and kind.before_up is not Form.before_up)
    ]
    if missing:
        lines = "".join(f"\n    {REQUIRED[name]}" for name in missing)
        raise DeltuneError(f"the form {kind.__name__} has no {' and no '.join(missing)}; write, for example:{lines}")


Affine: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None]"
BeforeUp: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]"

Product = tuple[int, tuple[Factor, ...], tuple[Factor, ...]]
"""A shared rank, the factors below it, and the factors above it."""


def _down_up_product(rank: int, widths: Widths) -> Product:
    """Return the product of down (r, d_in) and up (d_out, r)."""
    down, up = Factor("down", widths.in_width, widths.in_width, 1), Factor("up", widths.out_width, 1, rank)
    return rank, (down,), (up,)


def _up_projection(v: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return v Uᵀ + e."""
    from torch.nn import functional as F

    return F.linear(v, up.to(v.dtype), None if bias is None else bias.to(v.dtype))


def check_positive(**sizes: int) -> None:
    """Check that sizes are at least 1.

    Raises:
        DeltuneError: One of them is less; the message has its name.
    """
    for name, size in sizes.items():
        if size < 1:
            raise DeltuneError(f"{name}={size}: must be a whole number of at least 1")


def check_share(name: str, value: float) -> None:
    """Check that a value lies in [0, 1).

    Raises:
        DeltuneError: It does not; the message has its name.
    """
    if not 0 <= value < 1:
        raise DeltuneError(f"{name}={value}: must lie in [0, 1)")


def init_down_up(down: torch.Tensor, up: torch.Tensor, init: Init, zero_up: bool) -> None:
    """Initialise the two projections of a bottleneck in place.

    Args:
        down: The down projection.
        up: The up projection.
        init: "lora": down Kaiming uniform with a = sqrt 5 (Hu et al. 2021). "bert": down N(0, 0.02).
        zero_up: Whether the up projection is 0; else it is N(0, 0.02).
    """
    import torch

    if init == "lora":
        for matrix in down if down.dim() == 3 else (down,):  # one for each expert
            torch.nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
    else:
        torch.nn.init.normal_(down, std=0.02)
    torch.nn.init.zeros_(up) if zero_up else torch.nn.init.normal_(up, std=0.02)


class FactorForm(Form):
    """A form that is a product of two matrices, Δh = U D u with (D, U) = `factors(tensors)`.

    Deltas of such forms are computed together in a mixed batch, as those of LoRA.
    """

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two matrices of the product.

        Args:
            tensors: The saved and drawn tensors by name.

        Returns:
            D (r, d_in) and U (d_out, r).
        """
        raise NotImplementedError

    def two_layers(self, tensors: Tensors) -> TwoLayers | None:
        down, up = self.factors(tensors)
        return TwoLayers(down, None, "identity", up, None)

    def affine(self, tensors: Tensors, at: Place | None) -> Affine:
        down, up = self.factors(tensors)
        return up @ down, None

    def before_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp:
        from torch.nn import functional as F

        down, up = self.factors(tensors)
        if not u.is_floating_point():  # token ids: a row of Dᵀ each
            return F.embedding(u, down.t()), up, None
        return F.linear(u, down.to(u.dtype)), up, None


class WeightForm(Form):
    """A form that is a function of the frozen weight: h + Δh = W' x with W' = `weight(tensors, at)`.

    A subclass writes `weight`, and `__call__` where Δh can be computed faster than by a product of this size.
    """

    reads_weight: ClassVar[bool] = True
    through_weight: ClassVar[bool] = True
    """Whether the projection is best computed with W' in place of W; False for a form with a faster `__call__`."""

    def weight(self, tensors: Tensors, at: Place) -> torch.Tensor:
        """Compute the weight with the change.

        Args:
            tensors: The saved and drawn tensors by name.
            at: The projection.

        Returns:
            W' (d_out, d_in).
        """
        raise NotImplementedError

    def change_of_bias(self, tensors: Tensors, at: Place) -> torch.Tensor | None:
        """Compute what Δh has beside (W' - W) x.

        Args:
            tensors: The saved and drawn tensors by name.
            at: The projection.

        Returns:
            A vector (d_out,), or None for zero.
        """
        return None

    def affine(self, tensors: Tensors, at: Place | None) -> Affine:
        assert at is not None
        return self.weight(tensors, at) - at.weight, self.change_of_bias(tensors, at)

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        from torch.nn import functional as F

        change, shift = self.affine(tensors, at)
        assert change is not None
        if not u.is_floating_point():
            rows = F.embedding(u, change.t())
            return rows if shift is None else rows + shift
        return F.linear(u.to(change.dtype), change, shift)


class MatrixForm(WeightForm):
    """A form that is a matrix: Δh = A u and W' = W + A with A = `matrix(tensors)`, which does not depend on W."""

    acts_on_weights: ClassVar[bool] = True

    def matrix(self, tensors: Tensors) -> torch.Tensor:
        """Compute the matrix.

        Args:
            tensors: The saved and drawn tensors by name.

        Returns:
            A (d_out, d_in).
        """
        raise NotImplementedError

    def weight(self, tensors: Tensors, at: Place) -> torch.Tensor:
        return at.weight + self.matrix(tensors).to(at.weight.dtype)

    def affine(self, tensors: Tensors, at: Place | None) -> Affine:
        return self.matrix(tensors), None


@dataclass(frozen=True, repr=False)
class Bottleneck(Form):
    """Two projections with an activation between them, Δh = f(u W_down + b_down) W_up + b_up (UV eq. 4).

    Tensors: down (r, d_in) and up (d_out, r); with `bias` down_bias (r,) and up_bias (d_out,), 0 at the start; with
    `layer_norm` norm_gain and norm_bias (d_in,).

    Args:
        rank: r, at least 1.
        activation: f: "relu", "gelu", "silu", "tanh", "sigmoid" or "identity".
        bias: Whether both projections have biases.
        layer_norm: Whether a LayerNorm stands before the down projection.
        dropout: The probability of dropping an output of f while training.
        init: "bert" (down N(0, 0.02)) or "lora" (down Kaiming uniform).
        zero_up: Whether W_up starts at 0, so that Δh = 0 at the start; else N(0, 0.02).

    Raises:
        DeltuneError: An argument is out of its range, or the activation does not exist.
    """

    rank: int
    activation: str = "relu"
    bias: bool = field(default=False, kw_only=True)
    layer_norm: bool = field(default=False, kw_only=True)
    dropout: float = 0.0
    init: Init = "bert"
    zero_up: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(rank=self.rank)
        check_share("dropout", self.dropout)
        if self.activation not in ACTIVATIONS:
            raise DeltuneError(unknown_name("activation", self.activation, ACTIVATIONS))

    @property
    def starts_at_zero(self) -> bool:
        return self.zero_up

    def tensors(self, widths: Widths) -> Specs:
        shapes: Shapes = {"down": (self.rank, widths.in_width), "up": (widths.out_width, self.rank)}
        if self.bias:
            shapes |= {"down_bias": (self.rank,), "up_bias": (widths.out_width,)}
        if self.layer_norm:
            shapes |= {"norm_gain": (widths.in_width,), "norm_bias": (widths.in_width,)}
        return trained(shapes)

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        import torch

        init_down_up(tensors["down"], tensors["up"], self.init, self.zero_up)
        for name, tensor in tensors.items():
            if name not in ("down", "up"):
                torch.nn.init.constant_(tensor, 1.0 if name == "norm_gain" else 0.0)

    def product(self, widths: Widths) -> Product:
        if self.layer_norm:
            raise DeltuneError("a masked adapter has no LayerNorm of its own: give layer_norm=False")
        rank, down, up = _down_up_product(self.rank, widths)
        biases = (Factor("down_bias", 1, 1, 1, constant=True),) if self.bias else ()
        return rank, (*down, *biases), up

    def two_layers(self, tensors: Tensors) -> TwoLayers | None:
        if self.layer_norm:
            return None
        biases = tensors.get("down_bias"), tensors.get("up_bias")
        return TwoLayers(tensors["down"], biases[0], self.activation, tensors["up"], biases[1])

    def before_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp:
        from torch.nn import functional as F

        t = {name: tensor.to(u.dtype) for name, tensor in tensors.items() if not name.startswith("up")}
        if self.layer_norm:
            u = F.layer_norm(u, u.shape[-1:], t["norm_gain"], t["norm_bias"])
        inner = F.linear(u, t["down"], t.get("down_bias"))
        inner = inner if self.activation == "identity" else getattr(F, self.activation)(inner)
        inner = F.dropout(inner, self.dropout) if self.dropout and at.training else inner
        return inner, tensors["up"], tensors.get("up_bias")


@dataclass(frozen=True, repr=False)
class LowRank(FactorForm):
    """Two projections without an activation, Δh = dropout(u) W_down W_up (UV eq. 6; Hu et al. 2021).

    Tensors: down (r, d_in) and up (d_out, r), which is 0 at the start; at the weights of E experts (E, r, d_in) and
        (E, d_out, r).

    Args:
        rank: r, at least 1.
        dropout: The probability of dropping a value of u while training.
        init: "lora" (down Kaiming uniform) or "bert" (down N(0, 0.02)).

    Raises:
        DeltuneError: An argument is out of its range.
    """

    acts_on_weights: ClassVar[bool] = True
    reads_ids: ClassVar[bool] = True
    rank: int
    dropout: float = 0.0
    init: Init = "lora"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(rank=self.rank)
        check_share("dropout", self.dropout)

    def incompatibility(self, widths: Widths) -> str | None:
        if self.dropout and widths.lookup:
            return "dropout drops values of x, and token ids have none: give dropout=0 at the embedding"
        return None

    def waste(self, widths: Widths) -> str | None:
        full = min(widths.in_width, widths.out_width)
        if self.rank <= full:
            return None
        return (
            f"a matrix of {widths.out_width} × {widths.in_width} has a rank of {full} at most, so that rank={full} "
            "reaches every change that this one reaches, with fewer parameters"
        )

    def tensors(self, widths: Widths) -> Specs:
        experts = (widths.experts,) if widths.experts else ()
        return trained({"down": (*experts, self.rank, widths.in_width), "up": (*experts, widths.out_width, self.rank)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        init_down_up(tensors["down"], tensors["up"], self.init, zero_up=True)

    def product(self, widths: Widths) -> Product:
        if widths.experts:
            raise DeltuneError("a mask is drawn on one product, and experts have one each: mask other sites")
        return _down_up_product(self.rank, widths)

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return tensors["down"], tensors["up"]

    def before_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp:
        from torch.nn import functional as F

        u = F.dropout(u, self.dropout) if self.dropout and at.training else u
        return super().before_up(tensors, u, at)


@dataclass(frozen=True, repr=False)
class Vector(Form):
    """A trained vector, Δh = b (d_out,), which is 0 at the start (a bias).

    Args:
        where: "all" places, "biased" (those that have a bias already) or "unbiased" (those that have none).
    """

    reads_ids: ClassVar[bool] = True
    where: Literal["all", "biased", "unbiased"] = "all"

    def tensors(self, widths: Widths) -> Specs:
        return trained({"vector": (widths.out_width,)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        import torch

        torch.nn.init.zeros_(tensors["vector"])

    def affine(self, tensors: Tensors, at: Place | None) -> Affine:
        return None, tensors["vector"]

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        return tensors["vector"].to(u.dtype) if u.is_floating_point() else tensors["vector"]


@dataclass(frozen=True, repr=False)
class Rescale(Form):
    """Multiply by a trained vector, Δh = w ⊙ u - u, so that h + Δh = w ⊙ h where u is h (Liu et al. 2022).

    Tensor: gain w (d,), which is 1 at the start.
    """

    multiplies: ClassVar[str | None] = "gain"

    def tensors(self, widths: Widths) -> Specs:
        return trained({"gain": (widths.out_width,)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        import torch

        torch.nn.init.ones_(tensors["gain"])

    def incompatibility(self, widths: Widths) -> str | None:
        if widths.in_width == widths.out_width:
            return None
        return f"Rescale needs u as wide as h, here they are {widths.in_width} and {widths.out_width}"

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        self.initialize(tensors, None)

    def affine(self, tensors: Tensors, at: Place | None) -> Affine:
        return tensors["gain"] - 1, None

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        return tensors["gain"].to(u.dtype) * u - u


@dataclass(frozen=True, repr=False)
class Mixture(Form):
    """Mix all hidden states in place of the last, γ ⊙ Σ_l α_l h_l + β over the L + 1 of them (3V; LN table 1).

    Tensors: layers α (L + 1,), 1 for the last state and 0 for the others at the start; gain γ (d,), 1 at the start;
        bias β
    (d,), 0 at the start. So the last hidden state is unchanged at the start.
    """

    needs: ClassVar[str] = "states"
    replaces: ClassVar[bool] = True

    def tensors(self, widths: Widths) -> Specs:
        return trained({"layers": (widths.states,), "gain": (widths.out_width,), "bias": (widths.out_width,)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        import torch

        torch.nn.init.zeros_(tensors["layers"])
        tensors["layers"][-1] = 1
        torch.nn.init.ones_(tensors["gain"])
        torch.nn.init.zeros_(tensors["bias"])

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        self.initialize(tensors, None)

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        """Compute Δh of the last hidden state.

        Args:
            tensors: The saved and drawn tensors by name.
            u: All hidden states (L + 1, B, n, d).
            at: Not used.

        Returns:
            Δh (B, n, d).
        """
        import torch

        t = {name: tensor.to(u.dtype) for name, tensor in tensors.items()}
        return t["gain"] * torch.einsum("l,l...->...", t["layers"], u) + t["bias"] - u[-1]


@dataclass(frozen=True, repr=False)
class Prompt(Form):
    """l trained vectors before the input embeddings (Lester et al. 2021).

    Tensor: rows (l, d).

    Args:
        length: l, at least 1.
        init_from: Token ids whose embeddings the vectors start from, repeated up to l; None: N(0, 0.02).
        positions: "shift": the vectors take positions 0 to l - 1 and the text follows. "none": they have no position
            and the text keeps its own, as in UV's code; for absolute positions only.

    Raises:
        DeltuneError: An argument is out of its range.
    """

    needs: ClassVar[str] = "tokens"
    length: int
    init_from: tuple[int, ...] | None = None
    positions: Literal["shift", "none"] = "shift"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(length=self.length)
        if self.positions not in ("shift", "none"):
            raise DeltuneError(unknown_name("positions", self.positions, ("shift", "none")))
        if self.init_from == ():
            raise DeltuneError("init_from is empty; give token ids, or None for random rows")

    @property
    def starts_at_zero(self) -> bool:
        return False

    def tensors(self, widths: Widths) -> Specs:
        return trained({"rows": (self.length, widths.in_width)})

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        """Fill `rows` with N(0, 0.02), in place; `init_from` is applied later, when the delta is attached.

        Args:
            tensors: The form's tensors by name.
            at: Not used.
        """
        import torch

        torch.nn.init.normal_(tensors["rows"], std=0.02)
