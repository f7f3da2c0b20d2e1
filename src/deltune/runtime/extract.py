"""`extract`: the difference of two models as a delta."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..compat import LOADING
from ..errors import DeltuneError, error_from_problems, excerpt, first_names
from ..interop.base import PlacedTensors, rows_of_columns, without_scope
from ..methods.forms.low_rank import LowRank
from ..methods.forms.starts import Singular, singular
from ..methods.parser import explain_arguments
from ..methods.registry import parse
from ..methods.spec import Method
from .attach import find_tuned
from .attached import Attached, check_name
from .combine import Projections, attach_tensors, shortest_method, truncate_to_rank
from .handle import Tuned
from .modules import HeadLabels

_NO_FUNCTION = re.compile(
    r"_.*|.*label.*|problem_type|architectures|auto_map|transformers_version|.*dtype|.*(drop|initializer).*"
    r"|(pad|bos|eos|sep|decoder_start)_token_id|(output|return)_.*|use_cache|tie_.*|chunk_size_feed_forward"
    r"|pretraining_tp|quantization_config|task_.*|finetuning_task|gradient_checkpointing|classifier_.*"
)
"""Settings of a configuration that do not change what the tensors before the head compute once trained."""


_Spectra = list[tuple[PlacedTensors, Singular]]
"""Places of changes of linears, or of parts of them, with their singular vectors and values."""


@explain_arguments
def extract(
    base: PreTrainedModel,
    checkpoint: PreTrainedModel | str | Path,
    method: str | None = None,
    *,
    energy: float = 0.99,
    name: str = "default",
) -> Tuned:
    """Attach the difference of a tuned model from its base as a delta and put it in use.

    The change of each linear's weight becomes a low rank by its singular values (Eckart and Young); what else differs
    is kept whole, with the head and its labels.

    Args:
        base: The base model.
        checkpoint: The tuned model, of the same class; or its folder or hub id.
        method: Where, such as "lora(rank=?, at=('query', 'value')) + layernorm", with ? for a rank that follows from
            `energy`, or with a rank; a warning says how much it leaves out. Default: lora(rank=?) at all linears that
            differ, and everything else that differs.
        energy: The share of the sum of the squares of the linears' changes that the rank keeps: one rank for all.
        name: The name of the delta on the base model.

    Returns:
        The handle of the base model.

    Raises:
        DeltuneError: The models have other tensors or settings, the checkpoint has deltas attached or nothing differs,
            the method has terms other than LoRA and parameters that are trained in place, or the name is taken. The
            base stays as it was.
    """
    if not 0 < energy <= 1:
        raise DeltuneError(f"energy={excerpt(energy)}: a share above 0, and 1 at most")
    handle = find_tuned(base)
    check_name(name, handle.names if handle else ())
    handle = handle or Tuned(base)
    with torch.inference_mode(False), torch.no_grad():
        _Difference(handle.attached, _loaded(base, checkpoint)).attach(method, energy, name)
    return handle


def _loaded(base: PreTrainedModel, checkpoint: PreTrainedModel | str | Path) -> PreTrainedModel:
    if isinstance(checkpoint, PreTrainedModel):
        if find_tuned(checkpoint) is not None:
            raise DeltuneError(
                "the checkpoint has deltas attached: fold them into its weights first (tuned.merge()), or save them "
                "(tuned.save(folder)) and load them on the base (deltune.load(base, folder))"
            )
        return checkpoint
    try:
        with LOADING:
            return type(base).from_pretrained(str(checkpoint), dtype=base.dtype)
    except (OSError, ValueError) as error:
        raise DeltuneError(f"the checkpoint {excerpt(str(checkpoint))} cannot be loaded: {str(error)[:300]}") from error


class _Difference:
    """What a tuned model differs in from its base."""

    def __init__(self, attached: Attached, tuned: PreTrainedModel) -> None:
        self.attached, self.at = attached, Projections(attached.anatomy)
        values = dict(tuned.named_parameters(remove_duplicate=False))
        tensors = attached.anatomy.tensors
        of_head = [t.name for t in tensors if t.area == "head"]
        names = {n: t for t in tensors for n in (t.name, *t.aliases)}
        wrong = [
            n for n, t in names.items() if n not in values or (t.name not in of_head and values[n].shape != t.shape)
        ]
        problems = [f"{first_names(wrong, 4)}: missing, or of another shape"] if wrong else []
        settings = [_settings(model.config.to_dict()) for model in (attached.model, tuned)]
        problems += [
            f"config.{name}: {excerpt(settings[1].get(name))}, and {excerpt(settings[0].get(name))} in the base"
            for name in sorted({*settings[0], *settings[1]})
            if settings[0].get(name) != settings[1].get(name)
        ]
        tied = [t for t in tensors if t.aliases and not {t.name, *t.aliases} <= {f"{p}.weight" for p in self.at.parts}]
        problems += [
            f"{alias}: not equal to {t.name}, which is the same tensor in the base: load a base without tied weights"
            for t in tied
            for alias in (t.aliases if not wrong else ())
            if not torch.equal(values[alias], values[t.name])
        ]
        if problems:
            raise error_from_problems(
                f"{type(tuned).__name__} is no tuned {type(attached.model).__name__} of this base", problems
            )
        whole = {n for t in tied for n in (t.name, *t.aliases)}
        # the linears whose changes become low ranks
        self.low_rank = {path for path in self.at.parts if f"{path}.weight" not in whole}
        self.head = {name: values[name] for name in of_head}  # the tensors of the tuned model's head
        self.labels = HeadLabels.from_config(tuned.config) if of_head else attached.base_labels
        # V - W of each tensor that differs, without the head. A weight that the base ties at several linears
        # has one at each.
        self.changes: dict[str, torch.Tensor] = {}
        for name, tensor in names.items():
            if tensor.name not in self.head and (name == tensor.name or name not in whole):
                value = attached.dense_value(tensor.name)
                precision = torch.promote_types(value.dtype, torch.float32)
                change = values[name].to(value.device, precision) - value.to(precision)
                if change.any():
                    self.changes[name] = change
        self.values: dict[str, torch.Tensor] = {name: values[name] for name in self.changes}  # V of the same

    def attach(self, method: str | None, energy: float, name: str) -> None:
        if not self.changes and all(torch.equal(self.attached.state.base_value(n), v) for n, v in self.head.items()):
            raise DeltuneError("the checkpoint has the weights of the base model: there is nothing to extract")
        spectra = self._of_method(method) if method is not None else self._of_all()
        squares = [change.s.square() for _, change in spectra]
        total = sum(float(s.sum()) for s in squares)
        rank = 1
        longest = max((len(s) for s in squares), default=1)
        while rank < longest and sum(float(s[:rank].sum()) for s in squares) < energy * total:
            rank += 1
        if method is None:
            pieces = []
            for piece, change in spectra:
                up, down = truncate_to_rank(*change, rank)
                modification = replace(piece.modification, form=LowRank(rank))
                pieces.append(PlacedTensors(modification, piece.place, {"up": up, "down": down}))
            in_linears = {f"{path}.weight" for path in self.low_rank}
            owned = {n: v for n, v in self.values.items() if n not in in_linears}
            chosen, tensors = shortest_method(self.attached.anatomy, pieces, set(owned))
        else:
            chosen = parse(method.replace("?", str(rank)))
            tensors, owned = self._tensors_of(chosen, spectra)
        attach_tensors(self.attached, name, chosen, tensors, owned | self.head, tuple(self.head), self.labels)

    def _of_all(self) -> _Spectra:
        """Return the spectra of all linears that differ."""
        spectra: _Spectra = []
        for path, columns in self.at.parts.items():
            change = self.changes.get(f"{path}.weight") if path in self.low_rank else None
            for part in columns if change is not None else ():
                modification, place = self.at.of(path, part)
                rows = self._rows(path, part)
                if rows.any():
                    spectra.append((PlacedTensors(modification, place, {}), singular(rows, slice(None))))
        return spectra

    def _rows(self, path: str, columns: object) -> torch.Tensor:
        change = self.changes[f"{path}.weight"]
        return rows_of_columns(change.mT if self.at.transposed(path) else change, columns)  # type: ignore[arg-type]

    def _of_method(self, method: str) -> _Spectra:
        """Return the spectra at the places of a method."""
        edits = self.attached.resolve(parse(method.replace("?", "1"))).edits
        spectra: _Spectra = []
        for edit in edits:
            linear, columns = edit.place.linear, edit.place.target.columns
            product = isinstance(edit.modification.form, LowRank) and edit.modification.insertion == "parallel"
            if linear is None or not product or linear.path not in self.low_rank:
                raise DeltuneError(
                    f"extract writes LoRA at linears and parameters in place, and {edit.modification!r} is neither"
                )
            rows = self._rows(linear.path, columns) if f"{linear.path}.weight" in self.changes else None
            if rows is not None:
                piece = PlacedTensors(without_scope(edit.modification), edit.place, {})
                spectra.append((piece, singular(rows, slice(None))))
        return spectra

    def _tensors_of(self, method: Method, spectra: _Spectra) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the tensors of a method's edits and its values of the model's own; warn of what it leaves out."""
        planned, by_place = self.attached.resolve(method), {piece.place.name: change for piece, change in spectra}
        selected = {t.name for t in (*planned.selected, *(t for t, _ in planned.masked))}
        owned, tensors = {n: v for n, v in self.values.items() if n in selected}, dict[str, torch.Tensor]()
        aliases = [(n, t.name) for t in planned.selected if t.name in owned for n in (t.name, *t.aliases)]
        in_place = {*owned} | {n for n, of in aliases if n in self.values and torch.equal(self.values[n], owned[of])}
        kept = sum(float(self.changes[name].square().sum()) for name in in_place)
        for edit in planned.edits:
            form, factor = edit.modification.form, edit.modification.compose.factor({})
            assert isinstance(form, LowRank) and factor is not None
            shapes = {name: spec.shape for name, spec in edit.tensors.items()}
            values = {name: torch.zeros(shape) for name, shape in shapes.items()}
            if change := by_place.get(edit.place.name):
                up, down = truncate_to_rank(*change, form.rank)
                values = {"up": up / factor, "down": down}
                kept += float(change.s[: form.rank].square().sum())
            tensors |= {f"edit.{edit.key}.{leaf}": value for leaf, value in values.items()}
        left = 1 - kept / (sum(float(change.square().sum()) for change in self.changes.values()) or 1.0)
        if left > 1e-9:
            warnings.warn(f"{method!r} leaves out {left:.1%} of the energy of the difference", stacklevel=6)
        return tensors, owned


def _settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of a configuration and of those inside that change what a model computes, by dotted name."""
    settings: dict[str, Any] = {}
    for name, value in config.items():
        if not _NO_FUNCTION.fullmatch(str(name)):
            settings |= _settings(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + str(name): value}
    return settings
