"""Counts the scalars that a method trains on a model, exactly and from shapes alone (METHODS §3)."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..anatomy.inspection import inspect
from ..anatomy.tracing import meta_model
from ..anatomy.types import Anatomy
from ..errors import DeltuneError, excerpt, unknown_name
from ..notebook import html_table
from .arguments import MAX_INTEGER
from .forms import Shapes
from .registry import parse
from .resolve import ResolvedMethod, resolve
from .sites import EditLocation
from .spec import Method, Modification

DENOMINATORS = {
    "model": "all of AutoModel of the configuration",
    "no_pooler": "without the pooler",
    "no_embeddings": "without the whole embedding module",
    "layers": "without embeddings and pooler",
    "untied": "as if input and output embeddings were not tied",
}


@dataclass(frozen=True)
class Count:
    """How many scalars a method has on a model. A scalar that several modules share counts once.

    Attributes:
        method: Scalars of the method that are saved.
        head: Scalars of the task head that are trained.
        training_only: Scalars that are trained too but not saved, such as those of a reparameterisation.
        stored: Numbers in the saved file, the task head's and the positions of masked scalars included.
        denominator: The name of what the method's size is compared with.
        denominator_size: The scalars of the denominator.
    """

    method: int
    head: int
    training_only: int
    stored: int
    denominator: str
    denominator_size: int

    @property
    def trained(self) -> int:
        """All scalars that the optimizer sees."""
        return self.method + self.head + self.training_only

    @property
    def percent(self) -> float:
        """The method's share of the denominator in percent, 100 · method / denominator_size."""
        return 100 * self.method / self.denominator_size

    def as_dict(self) -> dict[str, Any]:
        """Return all values, as `deltune count --json` prints them.

        Returns:
            A dictionary with a key for each attribute, "trained" and "percent".
        """
        return {**asdict(self), "trained": self.trained, "percent": self.percent}

    def __str__(self) -> str:
        """Return the count in one line."""
        base = DENOMINATORS.get(self.denominator, "the number given")
        text = f"{self.method:,} scalars, {self.percent:.4f} % of {self.denominator_size:,}"
        text += f" ({self.denominator}: {base})"
        text += f"; head {self.head:,}" if self.head else ""
        return text + (f"; while training {self.training_only:,} more" if self.training_only else "")

    def _repr_html_(self) -> str:
        rows = [
            ("method", f"{self.method:,}"),
            (f"share of {self.denominator_size:,} ({self.denominator})", f"{self.percent:.4f} %"),
            ("task head", f"{self.head:,}"),
            ("while training only", f"{self.training_only:,}"),
            ("trained in all", f"{self.trained:,}"),
            ("numbers in the saved file", f"{self.stored:,}"),
        ]
        return html_table("Trained scalars", ("of", "scalars"), rows)


def kept_shapes(modification: Modification, place: EditLocation) -> Shapes:
    """Return the shapes of an edit's tensors in the saved file, those of its composition included."""
    return modification.form.shapes(place.widths) | modification.compose.shapes(place.widths)


def trained_shapes(modification: Modification, place: EditLocation) -> Shapes:
    """Return the shapes of an edit's own trained tensors, those of its composition included."""
    return modification.form.trained(place.widths) | modification.compose.shapes(place.widths)


def total_numel(shapes: Shapes) -> int:
    """Return the number of scalars of several tensors."""
    return sum(math.prod(shape) for shape in shapes.values())


def count(
    model: PreTrainedModel | PreTrainedConfig,
    method: str | Method,
    denominator: str | int = "model",
    head: str = "train",
) -> Count:
    """Count the scalars that a method trains on a model, without attaching it.

    Args:
        model: A live model, or a configuration; of the latter, the base model (AutoModel) is counted without creating
            weights.
        method: An expression such as "lora(rank=8)", or a method.
        denominator: What the size is compared with: "model" (AutoModel of the configuration), "no_pooler",
            "no_embeddings", "layers" (without embeddings and pooler), "untied" (input and output embeddings counted
            apart), or a number of scalars.
        head: "train" or "freeze", in which case the task head counts as saved but not as trained.

    Returns:
        The count.

    Raises:
        DeltuneError: The method cannot be attached to the model, or an argument does not exist.
    """
    anatomy = inspect(model)
    if head not in ("train", "freeze"):
        raise DeltuneError(unknown_name("head", head, ("train", "freeze")))
    resolved = resolve(anatomy, parse(method), lambda: base_size(model)[1])
    return count_resolved(anatomy, resolved, *base_size(model, denominator), head=head)


def count_resolved(
    anatomy: Anatomy,
    resolved: ResolvedMethod,
    denominator: str,
    size: int,
    head: str = "train",
    folded: bool = False,
    head_size: int | None = None,
) -> Count:
    """Count a resolved method.

    Args:
        anatomy: The model's anatomy.
        resolved: The method resolved on the model.
        denominator: The name of the denominator.
        size: The scalars of the denominator.
        head: "train" or "freeze".
        folded: Whether the method was loaded, so that nothing is trained beyond what is saved.
        head_size: Scalars of a head that differs from the anatomy's, as that of a loaded delta with other labels may.

    Returns:
        The count.
    """
    stored = trained = masked = 0
    shared: dict[tuple[str, str], int] = {}
    tied: dict[str, int] = {}
    for edit in resolved.edits:
        modification, widths = edit.modification, edit.place.widths
        if edit.mask is not None:
            masked += edit.mask.count
            continue
        stored += total_numel(kept_shapes(modification, edit.place))
        trained += total_numel(trained_shapes(modification, edit.place))
        shared[edit.term, edit.place.group] = total_numel(modification.form.shared(widths))
        tied[edit.tied] = total_numel(modification.compose.tied(widths))
    masked += sum(mask.count for _, mask in (*resolved.masked, *resolved.tied))
    masked += sum(gates.keep for gates in resolved.gated)
    trained += sum(2 * gates.size - gates.keep for gates in resolved.gated)  # a difference and a gate for every scalar
    method = stored + sum(tied.values()) + sum(t.numel for t in resolved.selected) + masked
    if head_size is None:
        head_size = sum(t.numel for t in anatomy.tensors if t.area == "head")
    return Count(
        method=method,
        head=head_size if head == "train" else 0,
        training_only=0 if folded else trained + sum(shared.values()) - stored,
        stored=method + masked + head_size,  # a masked scalar is stored with its index
        denominator=denominator,
        denominator_size=size,
    )


def base_size(model: PreTrainedModel | PreTrainedConfig, denominator: str | int = "model") -> tuple[str, int]:
    """Return the name and the number of scalars of a denominator, always of AutoModel of the configuration.

    Raises:
        DeltuneError: The denominator does not exist, or is out of range.
    """
    size = denominator if isinstance(denominator, int) and not isinstance(denominator, bool) else None
    if isinstance(denominator, str) and re.fullmatch(r"[0-9][0-9,]{0,30}", denominator):
        size = int(denominator.replace(",", ""))
    if size is not None:
        if not 1 <= size <= MAX_INTEGER:
            raise DeltuneError(f"denominator={excerpt(denominator)}: must be at least 1 and at most {MAX_INTEGER:,}")
        return "number", size
    if not isinstance(denominator, str) or denominator not in DENOMINATORS:
        raise DeltuneError(unknown_name("denominator", denominator, [*DENOMINATORS, "a number"]))
    config = model if isinstance(model, PreTrainedConfig) else model.config
    anatomy = inspect(meta_model(config))
    areas: dict[str, int] = {}
    for tensor in anatomy.tensors:
        areas[tensor.area] = areas.get(tensor.area, 0) + tensor.numel
    total = sum(areas.values())
    without = {"no_pooler": ("pooler",), "no_embeddings": ("embedding",), "layers": ("embedding", "pooler")}
    if denominator == "untied":
        return denominator, total + _output_embeddings(anatomy, config)
    return denominator, total - sum(areas.get(area, 0) for area in without.get(denominator, ()))


def _output_embeddings(anatomy: Anatomy, config: PreTrainedConfig) -> int:
    """Return the scalars of the output embeddings that an untied model has beside its input embeddings."""
    word_embedding = anatomy.stacks[-1].words
    matches = [t for t in anatomy.tensors if word_embedding and f"{word_embedding}.weight" in (t.name, *t.aliases)]
    if not matches:
        raise DeltuneError(f"{config.model_type}: the word embeddings cannot be seen, so there is no untied size")
    return matches[0].numel
