"""What initial values need of data: some passes of the base model over batches, once, while a method is attached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import DeltuneError, describe_value, first_names
from ..methods.forms.base import Statistic
from ..methods.forms.shared import common_basis
from ..methods.spec import Method, Modification
from .attached import Attached
from .modules import Delta, Edit, part_of

Batch = Mapping[str, Any]


def needed_statistics(method: Method) -> set[Statistic]:
    """Return what the initial values of a method read of data, or of the model before it was quantised."""
    statistics = {part.form.statistic for part in method.parts if isinstance(part, Modification)}
    return {statistic for statistic in statistics if statistic not in (None, "common basis")}


def check_data(method: Method, data: object, original: object) -> None:
    """Check that a method gets the data that its initial values need, and no other."""
    needed = needed_statistics(method)
    of_data, problems = needed - {"quantisation error"}, []
    if of_data and data is None:
        labelled = ", with labels" if "gradient" in needed else ""
        problems.append(f"starts from data: give some batches as the model reads them{labelled}, data=[batch, …]")
    if data is not None and not of_data:
        problems.append("reads no data at its start: leave data= out")
    if original is None and needed - of_data:
        problems.append("starts from what quantisation took away: give the model before it, original=model")
    if original is not None and not needed - of_data:
        problems.append("starts from no other model: leave original= out")
    if problems:
        raise DeltuneError(f"{method!r} {'; and '.join(problems)}")


def collect_statistics(
    attached: Attached, delta: Delta, data: Iterable[Batch] | None, original: PreTrainedModel | None
) -> dict[Edit, torch.Tensor]:
    """Return the statistic that each edit needs whose initial values read one; see `Place.statistic`."""
    bases = _common_bases(attached, delta)
    edits = [edit for edit in delta.all_edits() if edit.form.statistic is not None and edit not in bases]
    if wrong := [e.place.name for e in edits if e.place.linear is None or e.place.widths.lookup or not e.parallel]:
        raise DeltuneError(
            f"{delta.method!r} starts from what linears read, beside which it acts, and {first_names(wrong, 3)} is no "
            "such place"
        )
    errors = {edit: _quantisation_error(attached, edit, original) for edit in edits
              if original is not None and edit.form.statistic == "quantisation error"}  # fmt: skip
    rest = [edit for edit in edits if edit not in errors]
    return bases | errors | (_Passes(attached, rest).over(data) if data is not None else {})


def _common_bases(attached: Attached, delta: Delta) -> dict[Edit, torch.Tensor]:
    """Return the basis of the weights of all edits that share tensors, for each of them."""
    groups: dict[nn.Module, list[Edit]] = {}
    for edit in (edit for edit in delta.all_edits() if edit.form.statistic == "common basis"):
        table, _ = next(iter(edit.shared.values()))
        groups.setdefault(table, []).append(edit)
    bases: dict[Edit, torch.Tensor] = {}
    for edits in groups.values():
        places = [attached.place_of(edit) for edit in edits]
        bases |= dict.fromkeys(edits, common_basis([place.weight for place in places if place is not None]))
    return bases


def _quantisation_error(attached: Attached, edit: Edit, original: PreTrainedModel) -> torch.Tensor:
    linear, at = edit.place.linear, attached.place_of(edit)
    assert linear is not None and at is not None
    if not linear.quantized:
        raise DeltuneError(f"{edit.form!r} makes up for quantisation, and the weight of {linear.path} is not quantised")
    try:
        whole = original.get_submodule(linear.path).get_parameter("weight").detach().to(at.weight)
    except AttributeError as error:
        raise DeltuneError(f"original={describe_value(original)} has no weight of {linear.path}") from error
    return part_of(whole.t() if linear.transposed else whole, edit.place.target.columns) - at.weight


class _Passes:
    """Passes of the base model in which the linears of edits are watched; nothing stays on the model."""

    def __init__(self, attached: Attached, edits: list[Edit]) -> None:
        self.model, self.edits, anatomy = attached.model, edits, attached.anatomy
        self.watched: dict[str, set[str]] = {}
        for edit in edits:
            self.watched.setdefault(_path(edit), set()).add(cast(str, edit.form.statistic))
        self.needs_loss = any("gradient" in kinds for kinds in self.watched.values())
        self.encoder_decoder = bool(self.model.config.is_encoder_decoder)
        decoder = [layer for layer in anatomy.layers if layer.stack == "decoder" and self.encoder_decoder]
        states = [a for layer in decoder for a in layer.attentions if a.kind == "cross"]
        of_encoder = {linear.path for a in states for linear in (a.key, a.value) if linear is not None}
        self.decoder = {p for p in self.watched if any(p.startswith(f"{x.path}.") for x in decoder)} - of_encoder
        self.sums: dict[tuple[str, str], torch.Tensor] = {}
        self.counts: dict[tuple[str, str], int] = {}
        self.batch: Batch = {}
        self.probes: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def over(self, data: Iterable[Batch]) -> dict[Edit, torch.Tensor]:
        """Return the statistics of batches."""
        modes, device = [(module, module.training) for module in self.model.modules()], self.model.device
        with ExitStack() as stack:
            for path in self.watched:
                hook = self.model.get_submodule(path).register_forward_hook(partial(self._see, path), with_kwargs=True)
                stack.callback(hook.remove)
            for module, mode in modes:
                stack.callback(setattr, module, "training", mode)
            if hasattr(config := self.model.config, "problem_type"):  # which the loss of a classifier writes
                stack.callback(setattr, config, "problem_type", config.problem_type)
            stack.enter_context(torch.set_grad_enabled(self.needs_loss))
            self.model.eval()
            for batch in data:
                if not isinstance(batch, Mapping):
                    raise DeltuneError(
                        f"data= has batches as the model reads them, {{'input_ids': …}}, not {describe_value(batch)}"
                    )
                self.batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
                try:
                    output = self.model(**self.batch)
                except (TypeError, ValueError) as error:
                    raise DeltuneError(f"{type(self.model).__name__} cannot read a batch of data=: {error}") from error
                if self.needs_loss:
                    self._add_gradients(getattr(output, "loss", None))
        if unseen := [path for path, kinds in self.watched.items() for kind in kinds if (path, kind) not in self.sums]:
            raise DeltuneError(f"data= has no token that {first_names(unseen, 3)} reads: give more batches")
        return {edit: self._of(edit) for edit in self.edits}

    def _see(self, path: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        kinds = self.watched[path]
        x = next(iter((*args, *kwargs.values()))).detach()
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        for row in self._rows(path, x) if kinds - {"gradient"} else ():
            product = row.mT @ row
            if "covariance" in kinds:
                self._add(path, "sum", row.sum(0), len(row))
                self._add(path, "covariance", product, len(row))
            if "moments" in kinds:
                self._add(path, "moments", product / row.max().square(), 1)
        if "gradient" in kinds:
            probe = torch.zeros_like(output, requires_grad=True)
            self.probes.append((path, x, probe))
            return output + probe
        return None

    def _rows(self, path: str, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the tokens of each row, without padding and those whose label is ignored."""
        if x.dim() < 3:
            yield x.reshape(-1, x.shape[-1])
            return
        visible = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        names = ("attention_mask",) if self.encoder_decoder else ("attention_mask", "labels")
        for name in ("decoder_attention_mask", "labels") if path in self.decoder else names:
            mask = self.batch.get(name)
            if not isinstance(mask, torch.Tensor) or not (hides := mask == (-100 if name == "labels" else 0)).any():
                continue
            if hides.shape[-1:] != visible.shape[-1:] or hides.numel() != visible.numel():  # (B, C, T) is as (B·C, T)
                raise DeltuneError(
                    f"{path} reads {tuple(visible.shape)} tokens, and {name} of shape {tuple(mask.shape)} does not say "
                    "which of them are left out: give rows of data= of one length, without padding"
                )
            visible &= ~hides.reshape(visible.shape)
        yield from (row[seen] for row, seen in zip(x.flatten(0, -3), visible.flatten(0, -2), strict=True) if seen.any())

    def _add_gradients(self, loss: torch.Tensor | None) -> None:
        if loss is None:
            raise DeltuneError("the model returned no loss, whose gradient is asked for: give batches with labels")
        gradients = torch.autograd.grad(loss, [probe for _, _, probe in self.probes], allow_unused=True)
        for (path, x, _), gradient in zip(self.probes, gradients, strict=True):
            if gradient is not None:
                self._add(path, "gradient", gradient.flatten(0, -2).to(x.dtype).mT @ x.flatten(0, -2), 1)
        self.probes.clear()

    def _add(self, path: str, name: str, value: torch.Tensor, count: int) -> None:
        self.sums[path, name] = self.sums[path, name] + value if (path, name) in self.sums else value
        self.counts[path, name] = self.counts.get((path, name), 0) + count

    def _of(self, edit: Edit) -> torch.Tensor:
        kind, path = cast(str, edit.form.statistic), _path(edit)
        mean = self.sums[path, kind] / self.counts[path, kind]
        if not mean.isfinite().all():
            raise DeltuneError(
                f"{edit.form!r} cannot start from what {path} reads of data=: numbers there are infinite or NaN"
            )
        if kind == "covariance":
            center = self.sums[path, "sum"] / self.counts[path, "sum"]
            return mean - center[:, None] * center
        return part_of(mean, edit.place.target.columns) if kind == "gradient" else mean


def _path(edit: Edit) -> str:
    assert edit.place.linear is not None
    return edit.place.linear.path
