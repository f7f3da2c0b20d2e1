"""The base of functional forms of a change Δh of hidden states, and of forms that are products, weights or matrices.

u is what a form reads: the input x of a frozen sub-module (parallel insertion) or the hidden states h that it changes
(sequential insertion).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol, TypeAlias

from ...errors import DeltuneError, excerpt
from ..masks import Factor
from ..parser import check_fields, to_expression
from ..schedules import Schedule

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "Mapping[str, torch.Tensor]"
Shapes = dict[str, tuple[int, ...]]
INSERTIONS = ("parallel", "sequential", "input")
"""Where a form may act: beside what it changes, behind it, or at the input of a projection."""
Statistic = Literal["covariance", "moments", "gradient", "quantisation error", "common basis"]
"""What a form's initial values may need of data, or of other weights; see `Place.statistic`."""
FIRST_PASS = "first pass"
"""The fact that is the last hidden states of a first pass; see `Place.facts`."""
TEXT = "the whole text"
"""The fact that is which tokens of a text see each other; see `Place.facts`."""


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
        stack_width: The width of the hidden states of the model's stack; 0 where it has several.
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
    stack_width: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a form or a composition.

    Attributes:
        shape: Its shape at one place. Of a tensor that several places share, each axis has the greatest of their sizes,
            and each place reads the first entries.
        trained: Whether it is a parameter; otherwise it is a buffer.
        saved: Whether it is in the saved file. A parameter that is not saved exists only until `fold` has computed the
            saved tensors from it; a buffer that is not saved is drawn again from `seed`.
        shared: Which places share it: all in one "sublayer", all in one kind of attention ("group"), or all of the
            "term"; None where each place has its own.
        seed: The seed from which `draw` makes a buffer that is not saved, on the CPU; any dtype is cast.
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


def parameter_specs(shapes: Shapes) -> Specs:
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

    @property
    def statistic(self) -> torch.Tensor | None:
        """In `initialize`, what the form's `statistic` names, in float32 or float64; else None.

        "covariance": of the tokens x that the projection reads (d_in, d_in). "moments": the mean of Xᵀ X / max(X)² over
        the rows X (n, d_in) of the data (d_in, d_in). "gradient": the mean over the batches of the gradient of the loss
        by W (d_out, d_in). "quantisation error": the weight before it was quantised, less W (d_out, d_in). "common
        basis": a basis (d_in, d_in) of the weights of all places that share tensors of the "group", as FRoD has it.
        """
        ...

    @property
    def facts(self) -> Mapping[Any, torch.Tensor]:
        """What is known of the rows of this pass, by name.

        "task_ids" (B,), as `Tuned.condition` was given them; for forms that read a first pass the hidden states that it
        ended with, `FIRST_PASS` (B, n, d), which have no gradient, and a width of 0 in the first pass itself; for forms
        that read the text which tokens each of them sees, `TEXT` (B, n, n).
        """
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
    statistic: torch.Tensor | None = field(default=None, kw_only=True)
    facts: Mapping[Any, torch.Tensor] = field(default_factory=dict, kw_only=True)

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

    @property
    def is_own(self) -> bool:
        """Whether its class was written outside deltune."""
        return type(self).__module__.partition(".")[0] != __name__.partition(".")[0]

    def __add__(self, other: object) -> NoReturn:
        refuse_sum(self, other)

    def __radd__(self, other: object) -> NoReturn:
        refuse_sum(other, self)


class TwoLayers(NamedTuple):
    """The tensors of Δh = f(u Dᵀ + d) Uᵀ + e."""

    down: torch.Tensor  # D (r, d_in)
    down_bias: torch.Tensor | None  # d (r,), or None for zero
    activation: str  # f, one of `ACTIVATIONS`
    up: torch.Tensor  # U (d_out, r)
    up_bias: torch.Tensor | None  # e (d_out,), or None for zero


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
    - `split_at_up`, in place of `__call__`, returns (v, U, e) where Δh = v Uᵀ + e.
    - `statistic` names what the initial values need of data, which `initialize` finds in `at.statistic`.
    - `schedule` is a `deltune.Schedule` where training does more to the tensors than the steps of the optimizer.
    - `mask_factors` and `fill_untrained` serve masks (`apet`), `fold` a reparameterisation, and `draw` random buffers.

    A form that is a product of two matrices derives from `FactorForm`, one that is a matrix from `MatrixForm`, one that
    is any function of the frozen weight from `WeightForm`, and one of several experts with a router from `Routed`; each
    of them writes one method in place of `__call__`.

    Arguments of its methods:
        widths: The sizes at the place.
        tensors: The form's tensors at one place by name: the saved and the drawn ones, in `fold` and `fill_untrained`
            the trained ones. In `initialize`, those that several places share are among them once, at the first of
            these places, and those with a seed never are.
        u: What the form reads (B, n, d_in).
        at: The place, through which a form reads the frozen projection. In `affine` and `initialize` it is None where
            there is no projection, and in `affine` of forms that do not read its weight.

    Class attributes:
        needs: What a site must offer: "hidden" (hidden states at one point), "attention" (the inside of an attention),
            "tokens" (the input embeddings) or "states" (the outputs of all layers).
        multiplies: The name of the tensor w where h + Δh is w ⊙ h for a form that reads h; else None.
        replaces: Whether h + Δh does not depend on h, so that earlier changes at the same place would be lost.
        acts_on_weights: Whether Δh = A u with the A of `affine`, for one matrix or a stack of them, so that the form
            can act at a weight that a module reads itself, as experts and routers do: W + s A.
        reads_ids: Whether u may be token ids, each of which stands for a one-hot vector.
        reads_weight: Whether it reads the frozen projection, so that it can act at projections only, in parallel.
        reads_first_pass: Whether it reads the last hidden states of a first pass of the stack, which runs before each.
        reads_text: Whether it reads which tokens of the text see each other.
    """

    needs: ClassVar[str] = "hidden"
    multiplies: ClassVar[str | None] = None
    replaces: ClassVar[bool] = False
    acts_on_weights: ClassVar[bool] = False
    reads_ids: ClassVar[bool] = False
    reads_weight: ClassVar[bool] = False
    reads_first_pass: ClassVar[bool] = False
    reads_text: ClassVar[bool] = False

    @property
    def insertions(self) -> tuple[str, ...]:
        """Where it can act; what is computed from the weight of a projection reads what the projection reads."""
        return ("parallel",) if self.reads_weight else INSERTIONS

    def __post_init__(self) -> None:
        check_fields(self)

    def __repr__(self) -> str:
        return to_expression(self)

    def tensors(self, widths: Widths) -> Specs:
        """Return what the tensors of the form are at one place.

        Returns:
            Their specifications by name.
        """
        raise NotImplementedError

    def initialize(self, tensors: Tensors, at: Place | None) -> None:
        """Fill tensors with their initial values, in place."""
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

        Returns:
            The reason, or None where the form can act.
        """
        return None

    def waste(self, widths: Widths) -> str | None:
        """Return what the form trains beyond what can matter at a place.

        Returns:
            The reason, or None where all of it can matter.
        """
        return None

    @property
    def starts_at_zero(self) -> bool:
        """Whether Δh = 0 at the start for every u."""
        return True

    @property
    def statistic(self) -> Statistic | None:
        """What the initial values need of data, at projections alone; None where they need nothing."""
        return None

    @property
    def schedule(self) -> Schedule | None:
        """The penalty, projection or allocation of ranks beside the steps of the optimizer, or None."""
        return None

    def fold(self, tensors: Tensors, widths: Widths) -> Tensors:
        """Compute the saved tensors of a reparameterisation.

        Returns:
            The saved tensors by name.
        """
        return tensors

    @property
    def shift(self) -> int:
        """By how many positions the tokens of the form's stack are moved."""
        return 0

    def mask_factors(self, widths: Widths) -> Product | None:
        """Return the factors that share a rank, so that a mask keeps or drops the two sides of a rank jointly.

        Returns:
            The rank and the factors on both of its sides; None where each tensor acts alone.

        Raises:
            DeltuneError: The form cannot be masked with its options; the message says which to change.
        """
        return None

    def fill_untrained(self, tensors: Tensors, buffers: Tensors) -> None:
        """Fill tensors, in place, with the values of entries that a mask leaves out, which change nothing.

        In a form of your own that does not write it, these entries keep their initial values, which are then saved;
        entries of the factors of `mask_factors` are 0.

        Args:
            buffers: The other tensors by name.
        """
        for tensor in tensors.values():
            tensor.zero_()

    def affine(self, tensors: Tensors, at: Place | None) -> Affine | None:
        """Return (A, b) where Δh = A u + b, so that Δh can be merged into a weight.

        Returns:
            A of shape (d_out, d_in), or (d,) for a diagonal matrix, and b (d_out,); either is None for zero. None for
            forms that are not affine.
        """
        return None

    def split_at_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp | None:
        """Return (v, U, e) where Δh = v Uᵀ + e, so that the last product can be added to h as it is computed.

        Returns:
            v (B, n, r), U (d_out, r), and e (d_out,) or None; None for forms that do not end in such a product.
        """
        return None

    def changed(self, tensors: Tensors, h: torch.Tensor) -> torch.Tensor | None:
        """Compute h + Δh of a form that reads h, where this takes less than Δh does.

        Args:
            h: The hidden states (B, n, d_out).

        Returns:
            The new hidden states, or None where Δh is computed and added.
        """
        return None

    def two_layers(self, tensors: Tensors) -> TwoLayers | None:
        """Return the layers of a form of the library that is Δh = f(u Dᵀ + d) Uᵀ + e outside of training.

        Those of several deltas are computed in two products for a whole batch. Nothing asks it of a user's own forms.

        Returns:
            The layers, or None for other forms.
        """
        return None

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        """Compute Δh.

        Returns:
            Δh (B, n, d_out).
        """
        last = self.split_at_up(tensors, u, at)
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
            scale: s.
            out: h itself where it may be overwritten, else None.

        Returns:
            The new hidden states, of the shape of h; `out` where it is given.
        """
        if self.multiplies is not None and u is h and scale == 1:
            return (h.mul if out is None else out.mul_)(tensors[self.multiplies].to(h.dtype))
        changed = self.changed(tensors, h) if u is h and scale == 1 else None
        if changed is not None:
            return changed.to(h.dtype) if out is None else out.copy_(changed)
        last = self.split_at_up(tensors, u, at)
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
            query: The model's own query (B, N_h, n, d_h).
            scaling: The factor by which the model scales q kᵀ.

        Returns:
            Δh (B, n, N_h, d_v).
        """
        raise NotImplementedError


FORM_METHOD_EXAMPLES = {
    "tensors": 'def tensors(self, widths): return {"w": TensorSpec((widths.in_width,))}  # the tensors at one place',
    "initialize": 'def initialize(self, tensors, at): tensors["w"].zero_()  # their initial values, in place',
    "__call__": 'def __call__(self, tensors, u, at): return tensors["w"] * u  # Δh, of width widths.out_width',
    "per_head": "def per_head(self, tensors, query, scaling): ...  # Δh (B, n, heads, value width)",
    "affine": "def affine(self, tensors, at): return A, b  # where Δh = A u + b; None for zero",
    "matrix": "def matrix(self, tensors): return A  # (out, in), where Δh = A u",
    "factors": "def factors(self, tensors): return D, U  # where Δh = U D u",
    "weights": "def weights(self, tensors, u, at): return (u @ tensors['router'].t()).softmax(-1)  # of n experts",
    "weight": "def weight(self, tensors, at): return at.weight + A  # W' of shape (out, in)",
    "draw": "def draw(self, shapes, generator): "
    "return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}",
    "fold": "def fold(self, tensors, widths): return {...}  # the saved tensors, from the trained ones",
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
    elif issubclass(kind, Routed):
        computes = ["weights"]
    elif issubclass(kind, WeightForm):
        computes = ["matrix" if issubclass(kind, MatrixForm) else "weight"]
    else:
        computes = ["per_head"] if kind.needs == "attention" else ["__call__"] if kind.needs != "tokens" else []
        computes += ["affine"] if kind.acts_on_weights else []
    bases = (Form, FactorForm, Routed, WeightForm, MatrixForm)
    missing = [
        name
        for name in ("tensors", "initialize", *computes)
        if any(getattr(kind, name) is vars(base).get(name) for base in bases)
        and not (name == "__call__" and kind.split_at_up is not Form.split_at_up)
    ]
    if missing:
        lines = "".join(f"\n    {FORM_METHOD_EXAMPLES[name]}" for name in missing)
        raise DeltuneError(f"the form {kind.__name__} has no {' and no '.join(missing)}; write, for example:{lines}")


Affine: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None]"
BeforeUp: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]"

Product = tuple[int, tuple[Factor, ...], tuple[Factor, ...]]
"""A shared rank, the factors below it, and the factors above it."""


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


class FactorForm(Form):
    """A form that is a product of two matrices, Δh = U D u with (D, U) = `factors(tensors)`.

    Deltas of such forms are computed together in a mixed batch, as with LoRA. A field `dropout` of a subclass is the
    probability of dropping a value of u while training.
    """

    dropout = 0.0

    def factors(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two matrices of the product.

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

    def split_at_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp:
        from torch.nn import functional as F

        down, up = self.factors(tensors)
        u = F.dropout(u, self.dropout) if self.dropout and at.training else u
        if not u.is_floating_point():  # token ids: a row of Dᵀ each
            return F.embedding(u, down.t()), up, None
        return F.linear(u, down.to(u.dtype)), up, None


class Routed(Form):
    """Low-rank experts that a router weighs for each row of a batch or for each token, Δh = Σ_i w_i B_i v_i.

    v_i is A_i u. A subclass has the tensors down, all A_i (n, r, d_in), and up, all B_i (n, d_out, r), and writes
    `weights`, the router; `experts` where its tensors are others; and `inner` where v_i is not A_i u alone. All experts
    of a place are computed in two products. A field `tasks` of a subclass is the number of tasks that rows may have,
    which a pass is told where there are several.
    """

    tasks = 1

    def weights(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        """Compute the weights of the experts.

        Returns:
            w, for each row (B, n) or for each token (B, N, n).
        """
        raise NotImplementedError

    def experts(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrices of the experts.

        Returns:
            All A_i (n, r, d_in), or (1, r, d_in) where the experts have one in common, and all B_i (n, d_out, r).
        """
        return tensors["down"], tensors["up"]

    def inner(self, tensors: Tensors, v: torch.Tensor, weights: torch.Tensor, at: Place) -> torch.Tensor:
        """Compute what the B_i read.

        Args:
            v: All A_i u (B, N, n, r).
            weights: The weights of the experts (B, 1, n, 1) or (B, N, n, 1).

        Returns:
            All v_i (B, N, n, r), or (B, N, 1, r) where they are one.
        """
        return v

    def split_at_up(self, tensors: Tensors, u: torch.Tensor, at: Place) -> BeforeUp:
        from torch.nn import functional as F

        down, up = self.experts(tensors)
        weights = self.weights(tensors, u, at).to(u.dtype)
        if weights.dim() < u.dim():
            weights = weights.view(len(weights), *(1,) * (u.dim() - 2), -1)
        v = F.linear(u, down.flatten(0, 1).to(u.dtype)).unflatten(-1, down.shape[:2])
        v = weights[..., None] * self.inner(tensors, v, weights[..., None], at)
        return v.flatten(-2), up.movedim(0, 1).flatten(1), None


class WeightForm(Form):
    """A form that is a function of the frozen weight: h + Δh = W' x with W' = `weight(tensors, at)`.

    A subclass writes `weight`, and `__call__` where Δh can be computed faster than by a product of this size.
    """

    reads_weight: ClassVar[bool] = True
    through_weight: ClassVar[bool] = True
    """Whether the projection is best computed with W' in place of W; False for a form with a faster `__call__`."""

    def weight(self, tensors: Tensors, at: Place) -> torch.Tensor:
        """Compute the weight with the change.

        Returns:
            W' (d_out, d_in).
        """
        raise NotImplementedError

    def change_of_bias(self, tensors: Tensors, at: Place) -> torch.Tensor | None:
        """Compute what Δh has beside (W' - W) x.

        Returns:
            A vector (d_out,), or None for zero.
        """
        return None

    def affine(self, tensors: Tensors, at: Place | None) -> Affine:
        assert at is not None
        return self.weight(tensors, at) - at.weight, self.change_of_bias(tensors, at)

    def __call__(self, tensors: Tensors, u: torch.Tensor, at: Place) -> torch.Tensor:
        from torch.nn import functional as F

        if (last := self.split_at_up(tensors, u, at)) is not None:
            return _up_projection(*last)
        change, shift = self.affine(tensors, at)
        assert change is not None
        if not u.is_floating_point():
            rows = F.embedding(u, change.t())
            return rows if shift is None else rows + shift
        return F.linear(u.to(change.dtype), change, shift)


class MatrixForm(WeightForm):
    """A form that is a matrix: Δh = A u and W' = W + A with A = `matrix(tensors)`, which does not depend on W."""

    acts_on_weights: ClassVar[bool] = True

    @property
    def insertions(self) -> tuple[str, ...]:
        return INSERTIONS

    def matrix(self, tensors: Tensors) -> torch.Tensor:
        """Compute the matrix.

        Returns:
            A (d_out, d_in).
        """
        raise NotImplementedError

    def weight(self, tensors: Tensors, at: Place) -> torch.Tensor:
        return at.weight + self.matrix(tensors).to(at.weight.dtype)

    def affine(self, tensors: Tensors, at: Place | None) -> Affine:
        return self.matrix(tensors), None
