"""Checks of forms of the user's own: what `tensors`, `__call__` and `affine` return, before a model is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ...errors import DeltuneError, error_summary, excerpt
from ..sites import Location
from .base import FORM_METHOD_EXAMPLES, Form, MethodPart, Place, Specs, Tensors, TensorSpec, WeightPlace, Widths

LEADING = (2, 8)
"""Sequences and tokens of the u that a form is tried on."""
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
"""By how much of Δh, A u + b may differ from what `__call__` returns in a dtype."""


def check_form(form: Form, place: Location) -> None:
    """Check, on the meta device, that a form has tensors at a place and that its Δh has the width of the place.

    The library's own forms pass at once. Forms that act elsewhere than on hidden states are checked for their tensors.
    """
    if not form.is_own:
        return
    widths = place.widths
    specs = _call("tensors", form, widths, lambda: form.tensors(widths))
    if not isinstance(specs, dict) or not all(isinstance(s, TensorSpec) and _is_shape(s.shape) for s in specs.values()):
        raise DeltuneError(
            f"{form!r}: tensors returns {excerpt(specs)}, and not a TensorSpec with a shape of whole numbers for each "
            'name, such as {"w": deltune.TensorSpec((widths.in_width,))}'
        )
    _check_written(form, specs)
    shapes = {name: spec.shape for name, spec in specs.items()}
    if form.needs != "hidden" or widths.lookup or widths.experts:
        return
    if place.weight is not None and place.linear is None:
        affine = _try("affine", form, shapes, widths, lambda tensors, u, at: form.affine(tensors, at))
        matrix, shape = affine and affine[0], (widths.out_width, widths.in_width)
        if matrix is None or matrix.shape != shape:
            returned = "None" if matrix is None else f"a matrix of shape {tuple(matrix.shape)}"
            raise DeltuneError(f"{form!r}: affine returns {returned} for A, and at {place.name} it has shape {shape}")
        return
    delta = _try("__call__", form, shapes, widths, form)
    expected = (*LEADING, widths.out_width)
    if not isinstance(delta, torch.Tensor):
        raise DeltuneError(f"{form!r}: __call__ returns a {type(delta).__name__}, and not the tensor Δh")
    if not _spreads_to(tuple(delta.shape), expected):
        raise DeltuneError(
            f"{form!r}: __call__ returns Δh of shape {tuple(delta.shape)} for u of shape "
            f"{(*LEADING, widths.in_width)}; at {place.name} it must be {expected}, of width widths.out_width = "
            f"{widths.out_width} (widths.in_width is {widths.in_width})"
        )


def _check_written(form: Form, specs: Specs) -> None:
    """Check that a form has the methods that its tensors need beside `initialize`, and its buffers the seeds."""
    for name, spec in specs.items():
        needs_seed = not (spec.trained or spec.saved)
        if needs_seed != (spec.seed is not None):
            reason = (
                "a buffer that is not saved needs a seed" if needs_seed else "a seed is for trained=False, saved=False"
            )
            raise DeltuneError(f"{form!r}: {name} is {spec!r}: {reason}")
    drawn = [name for name, spec in specs.items() if spec.seed is not None]
    folded = [name for name, spec in specs.items() if spec.trained and not spec.saved]
    for name, tensors, have in (("draw", drawn, "a seed"), ("fold", folded, "saved=False")):
        if tensors and getattr(type(form), name) is getattr(Form, name):
            raise DeltuneError(
                f"{type(form).__name__}: {', '.join(tensors)} has {have}, and the form has no {name}; write, for "
                f"example:\n    {FORM_METHOD_EXAMPLES[name]}"
            )


def initialize_part(part: MethodPart, tensors: Tensors, widths: Widths, initialize: Callable[[], None]) -> None:
    """Call `initialize` of a form or composition; of the user's own also check that it sets every tensor.

    Args:
        part: The form or composition.
        tensors: The tensors that it fills in place.
        widths: The sizes at the place.
        initialize: Calls it.

    Raises:
        DeltuneError: It raises an error, or leaves values that are not numbers.
    """
    if not part.is_own:
        initialize()
        return
    known = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    for tensor in known.values():
        tensor.fill_(_unset(tensor))
    _call("initialize", part, widths, initialize)
    unset = [n for n, t in known.items() if bool((t.isnan() if t.is_floating_point() else t == _unset(t)).any())]
    if unset:
        raise DeltuneError(
            f"{part!r}: initialize leaves {', '.join(unset)} without initial values: set each tensor in place, such as "
            f'tensors["{unset[0]}"].zero_()'
        )


def affine_difference(form: Form, tensors: Tensors, widths: Widths, at: Place | None) -> str | None:
    """Return how A u + b of a form of the user's own differs from what `__call__` computes, on random u.

    Both are computed in float64 on the CPU; in float32 where the form cannot be computed in float64. Rows of u are
    zero, of the size of hidden states, and a hundred times as large, so that a form which is only nearly affine is
    seen.
    """
    if not form.is_own:
        return None
    failure = ""
    for dtype, tolerance in TOLERANCES.items():
        wide = {name: tensor.detach().to("cpu", dtype, copy=True) for name, tensor in tensors.items()}
        try:
            weight, bias = (at.weight, at.bias) if at is not None and form.reads_weight else (torch.empty(0), None)
            place = WeightPlace(weight.to("cpu", dtype), None if bias is None else bias.to("cpu", dtype))
            u, product, shift = _sample(form, wide, widths, place)
            reads_output = form.reads_weight and u.is_floating_point() and u.shape[-1] == weight.shape[-1]
            output = place(u) if reads_output else None
            delta = form(wide, u, dataclasses.replace(place, output=output))
        except DeltuneError as error:
            return str(error)
        except Exception as error:  # whatever the user's code raises in this dtype
            failure = f"{type(error).__name__}: {error_summary(error)}"
            continue
        tolerance = max(tolerance, TOLERANCES.get(delta.dtype, 1e-2))
        delta = delta.to(dtype).expand(product.shape)
        distance, size = (delta - product - shift).abs().amax(-1), torch.maximum(delta.abs(), (product + shift).abs())
        wrong = ~(distance <= tolerance * size.amax(-1).clamp_min(1e-30))
        if not wrong.any():
            return None
        row = int(wrong.flatten().int().argmax())
        part, sample = ("b", "u = 0") if row == 0 and not widths.lookup else ("A u + b", "a random u")
        return (
            f"affine of {type(form).__name__} is not what its __call__ computes: at {sample}, {part} differs from Δh "
            f"by up to {float(distance.flatten()[row]):.3g}, where Δh has values up to "
            f"{float(delta.abs().amax(-1).flatten()[row]):.3g}; correct affine, or leave it out, and the form is not "
            "merged"
        )
    return f"affine of {type(form).__name__} cannot be compared with its __call__, which raises {failure}"


def _unset(tensor: torch.Tensor) -> float:
    """Return what a tensor is filled with before its initial values are set."""
    return torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min


def _sample(
    form: Form, tensors: Tensors, widths: Widths, at: WeightPlace
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return u (1, 9, d_in), A u and b; u is token ids where the place reads ids."""
    generator, dtype = torch.Generator().manual_seed(0), at.weight.dtype
    affine = form.affine(tensors, at)
    gain, shift = affine if affine is not None else (None, None)
    shapes = ((widths.out_width, widths.in_width), (widths.in_width,))
    if gain is not None and gain.shape not in shapes:
        raise DeltuneError(f"affine of {type(form).__name__} returns A of shape {tuple(gain.shape)}, not {shapes[0]}")
    if shift is not None and shift.shape != (widths.out_width,):
        raise DeltuneError(
            f"affine of {type(form).__name__} returns b of shape {tuple(shift.shape)}, not {(widths.out_width,)}"
        )
    normal = torch.randn(1, 4, widths.in_width, generator=generator, dtype=dtype)
    u = one_hot = torch.cat([torch.zeros_like(normal[:, :1]), normal, 100 * normal], dim=1)
    if widths.lookup:
        u = torch.randint(widths.in_width, (1, 9), generator=generator)
        one_hot = torch.nn.functional.one_hot(u, widths.in_width).to(dtype)
    product = torch.zeros(1, 9, widths.out_width, dtype=dtype)
    if gain is not None:
        product = one_hot * gain.to(dtype) if gain.dim() == 1 else one_hot @ gain.to(dtype).t()
    return u, product, torch.zeros(widths.out_width, dtype=dtype) if shift is None else shift.to(dtype)


def _is_shape(shape: object) -> bool:
    return isinstance(shape, tuple) and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape)


def _spreads_to(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can be added to one of the expected shape, and has its last size."""
    padded = (1,) * (len(expected) - len(shape)) + shape
    return shape[-1:] == expected[-1:] and all(a in (1, b) for a, b in zip(padded, expected, strict=False))


def _try(name: str, form: Form, shapes: dict[str, Any], widths: Widths, compute: Callable[..., Any]) -> Any:
    """Compute something of a form on the meta device, or on zeros on the CPU where that fails.

    It fails by a mistake, or for a form that looks at values, which zeros have.
    """

    def on(device: str) -> Any:
        with torch.device(device), torch.no_grad():
            tensors = {leaf: torch.zeros(shape) for leaf, shape in shapes.items()}
            weight = torch.zeros(widths.out_width, widths.in_width)
            at = WeightPlace(weight, weight[:, 0], torch.zeros(*LEADING, widths.out_width))
            return compute(tensors, torch.zeros(*LEADING, widths.in_width), at)

    try:
        return on("meta")
    except Exception:
        return _call(name, form, widths, lambda: on("cpu"), shapes)


def _call(
    name: str, form: MethodPart, widths: Widths, compute: Callable[[], Any], shapes: dict[str, Any] | None = None
) -> Any:
    """Call something of a form, and say of what it raises where that was."""
    try:
        return compute()
    except DeltuneError:
        raise
    except Exception as error:
        sizes = {field.name: getattr(widths, field.name) for field in dataclasses.fields(widths)}
        listed = ", ".join(f"{size}={value}" for size, value in sizes.items() if value)
        tensors = f", with u of shape {(*LEADING, widths.in_width)} and tensors {shapes}" if shapes else ""
        raise DeltuneError(
            f"{form!r}: {name} raises {type(error).__name__}: {error_summary(error)} (widths: {listed}{tensors})"
        ) from error
