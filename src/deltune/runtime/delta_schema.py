"""The format of delta.json, and checks of a saved delta against a model before anything is allocated."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..anatomy.types import Anatomy
from ..compat import norms_are_finite
from ..errors import MAX_NAME_LENGTH, DeltuneError, error_from_problems, excerpt, first_of, validation_problems
from ..files import parse_json_file, read_json_bytes
from ..interop.tensor_files import FLOAT_DTYPES, INDEX_DTYPE, TensorInfo
from ..methods.other_names import registration_hint
from ..methods.registry import parse, unregistered_names
from ..methods.resolve import ResolvedMethod, resolve
from ..methods.spec import MaskedMethod, Method, explicit_expression
from ..models import Pooling

FORMAT = 1

MERGED_FACTS = "trained.json"
"""The file with the inputs that a merged model was trained on, which its own files do not say."""

LONGEST_NUMBER = 40
"""The number of digits that a number in a method may have. Python cannot print numbers beyond its own limit."""

Text = Annotated[str, Field(max_length=4096)]
Expression = Annotated[str, Field(max_length=1 << 20)]
Shape = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 48)]], Field(max_length=8)]


P = TypeVar("P", bound="_Part")


class _Part(BaseModel):
    """A part of delta.json. Fields that are not known here are left alone: a newer release may write more."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class HeadFacts(_Part):
    """Whether the head trains, and the names of its tensors in the model; without any the model has no head."""

    mode: Literal["train", "freeze"]
    tensors: list[Text]

    @field_validator("tensors")
    @classmethod
    def _once(cls, names: list[str]) -> list[str]:
        if len(set(names)) < len(names):
            raise ValueError("a tensor is named twice")
        return names


class LabelFacts(_Part):
    """What the outputs of the head mean."""

    id2label: dict[str, Any]
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = None

    @field_validator("id2label")
    @classmethod
    def _ids(cls, names: dict[str, Any]) -> dict[str, Any]:
        if wrong := sorted({*names} - {str(label) for label in range(len(names))}):
            raise ValueError(
                f"{wrong[0][:50]!r} is no label id; the ids of {len(names)} labels are 0 to {len(names) - 1}"
            )
        if wrong := [key for key, name in names.items() if not isinstance(name, str)]:
            raise ValueError(f"the name of label {wrong[0]} is no text")
        return names

    @property
    def pairs(self) -> tuple[tuple[int, str], ...]:
        """Ids and names, in the order of the ids."""
        return tuple(sorted((int(key), name) for key, name in self.id2label.items()))


class BaseFacts(_Part):
    """The base model that the delta belongs to: its family, class and name, and a digest for each area of it.

    `revision` is its commit on the hub, `quantization` how its weights are quantised, and `structure` a digest of the
    names and shapes of its tensors; each is empty where it is not known.
    `tokens` is the number of its token embeddings. The digest is over the first `compared_tokens` of them, if that is
    given: the delta holds the rows of the others.
    """

    family: Text
    model: Text
    name: Text
    revision: Text = ""
    quantization: Text = ""
    structure: Text = ""
    fingerprint: dict[Text, Text]
    tokens: Annotated[int, Field(ge=0, lt=1 << 48)] | None = None
    compared_tokens: Annotated[int, Field(ge=0, lt=1 << 48)] | None = None


class TrainedFacts(_Part):
    """The inputs on which a run trained the delta: their greatest length in tokens, and their columns by role.

    Of inputs that are answered in words also the template that they fill, the words of labels, and the greatest length
    of an answer in tokens; of conversations the chat template, and the tokens that end an answer; of several tasks
    their names, in the order of their numbers.
    """

    max_length: Annotated[int, Field(ge=1, lt=1 << 48)] | None = None
    columns: dict[Text, Text] | None = None
    template: Annotated[str, Field(max_length=1 << 20)] | None = None
    words: dict[Text, Text] | None = None
    target_length: Annotated[int, Field(ge=1, lt=1 << 48)] | None = None
    chat_template: Annotated[str, Field(max_length=1 << 20)] | None = None
    end_tokens: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 48)]], Field(max_length=64)] | None = None
    tasks: Annotated[list[Text], Field(max_length=1 << 16)] | None = None

    @property
    def takes_pairs(self) -> bool | None:
        """True for pairs of texts, False for single texts; None where the inputs are others, or not known."""
        return "pair" in self.columns if self.columns and "text" in self.columns else None

    @property
    def generates(self) -> bool:
        """True where texts were learned from texts, which are no conversations."""
        return "source" in (self.columns or {})

    @property
    def options(self) -> dict[str, Any]:
        """The options of a run that these facts stand for, beside its columns."""
        names = ("max_length", "target_length", "template")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class DeltaMetadata(_Part):
    """Everything in delta.json. `tensors` and `sha256` are the shapes in delta.safetensors and its checksum."""

    format: Literal[1]
    method: Expression
    explicit: Expression
    head: HeadFacts
    labels: LabelFacts | None
    pooling: Pooling = "model"
    base: BaseFacts
    trained: TrainedFacts | None = None
    tensors: dict[str, Shape]
    sha256: Text

    @field_validator("method", "explicit")
    @classmethod
    def _numbers(cls, text: str) -> str:
        if re.search(rf"[0-9a-fA-F_]{{{LONGEST_NUMBER + 1},}}", text):
            raise ValueError(f"it has a number of more than {LONGEST_NUMBER} digits")
        return text


def read_metadata_file(path: Path) -> DeltaMetadata:
    """Read and validate a delta.json."""
    value = parse_json_file(read_json_bytes(path), path)
    written = value.get("format") if isinstance(value, dict) else None
    if isinstance(written, int) and not isinstance(written, bool) and written != FORMAT and "method" in value:
        raise DeltuneError(f"{path} has format {str(written)[:20]}, this deltune reads {FORMAT}; update deltune")
    return _validated(DeltaMetadata, value, path)


def merged_facts(folder: Path) -> TrainedFacts:
    """Return what `deltune merge` wrote of the inputs that a model was trained on; nothing of other models."""
    file = folder / MERGED_FACTS
    return (
        _validated(TrainedFacts, parse_json_file(read_json_bytes(file), file), file)
        if file.is_file()
        else TrainedFacts()
    )


def _validated(kind: type[P], value: object, path: Path) -> P:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        title = f"{path} is not as deltune writes it (it was damaged or edited, or it is another program's)"
        raise error_from_problems(title, validation_problems(error), fault="files") from error


Shapes = Mapping[str, tuple[int, ...] | None]
"""Shapes by the names of tensors; None where any shape is allowed."""

SPARE_PARTS = 64
"""Parts of a method beyond one for each tensor of its file: terms that overlap, or that this model has no place for."""

SMALL = ("F8_E4M3", "F8_E5M2")
"""Additional types that are allowed for tensors of the model itself."""

LEAST_SPAN = 1 << 24
"""Scalars that a masked method may always span; beyond, four times those of the model. A mask is drawn over all of
them, and they are made in every forward pass, though the file holds a few of them only."""


@dataclass(frozen=True)
class Drawn:
    """`count` entries of several tensors under one mask. The file has STEM LEAF.values and STEM LEAF.index."""

    stem: str
    count: int
    leaves: Mapping[str, int]


@dataclass
class Expected:
    """The tensors that a file should hold: those of a known shape, and those of which a mask selects some entries."""

    shapes: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    drawn: list[Drawn] = field(default_factory=list)
    below: dict[str, int] = field(default_factory=dict)  # what the numbers of a buffer of whole numbers are below

    @property
    def bounds(self) -> dict[str, int]:
        """The number of entries of the tensor that each tensor of positions refers to."""
        return self.below | {f"{d.stem}{leaf}.index": size for d in self.drawn for leaf, size in d.leaves.items()}


def expected_tensors(
    anatomy: Anatomy, planned: ResolvedMethod, owned: tuple[str, ...], head: tuple[str, ...]
) -> Expected:
    """Return the tensors that the file of a resolved method holds."""
    needed = Expected()
    for edit in planned.edits:
        saved = {leaf: spec for leaf, spec in edit.own_tensors(folded=True).items() if spec.saved}
        if edit.mask is not None:
            sizes = {leaf: spec.numel for leaf, spec in saved.items() if spec.trained}
            needed.drawn.append(Drawn(f"edit.{edit.key}.", edit.mask.count, sizes))
            saved = {leaf: spec for leaf, spec in saved.items() if not spec.trained}
        needed.shapes |= {f"edit.{edit.key}.{leaf}": spec.shape for leaf, spec in saved.items()}
        needed.below |= {f"edit.{edit.key}.{leaf}": spec.below for leaf, spec in saved.items() if spec.below}
    masks = dict(planned.common)
    for owner, specs in planned.shared_tensors(folded=True).items():
        for leaf, spec in specs.items():
            if (owner, leaf) in masks:
                sizes = {leaf: spec.numel}
                needed.drawn.append(Drawn(f"common.{owner}.", masks[owner, leaf].count, sizes))
            elif spec.saved:
                needed.shapes[f"common.{owner}.{leaf}"] = spec.shape
                needed.below |= {f"common.{owner}.{leaf}": spec.below} if spec.below else {}
    for tensor, chosen in planned.masked:
        needed.drawn.append(Drawn("partly.", chosen.count, {tensor.name: tensor.numel}))
    for gates in planned.gated:
        needed.drawn.append(Drawn("gated.", gates.keep, {gates.key: gates.size}))
    shapes = {tensor.name: tuple(tensor.shape) for tensor in anatomy.tensors}
    needed.shapes |= {f"base.{name}": None if name in head else shapes[name] for name in owned}
    return needed


def check_tensors(needed: Expected, facts: Mapping[str, TensorInfo], where: Path) -> None:
    """Compare the tensors of a file with those that are expected."""
    expected_names = set(needed.shapes)
    problems = list(_misfits(needed.shapes, facts))
    for drawn in needed.drawn:
        count = 0
        for leaf in drawn.leaves:
            values, index = (facts.get(f"{drawn.stem}{leaf}.{kind}") for kind in ("values", "index"))
            expected_names |= {f"{drawn.stem}{leaf}.values", f"{drawn.stem}{leaf}.index"}
            if values is None and (index is None or not index.numel):
                continue
            if values is None or index is None or len(values.shape) != 1 or values.shape != index.shape:
                problems.append(f"tensors {drawn.stem}{leaf}.values and .index are not as many positions as values")
                continue
            count += values.numel
        if count != drawn.count:
            leaves = f"{len(drawn.leaves)} tensors" if len(drawn.leaves) > 1 else next(iter(drawn.leaves))
            stem = drawn.stem.removesuffix(".")
            problems.append(f"{stem} ({leaves}) holds {count:,} masked values, this method has {drawn.count:,}")
    problems += [f"extra tensor {name[:200]}" for name in facts if name not in expected_names]
    for name, tensor in facts.items():
        positions = name in needed.below or (name.endswith(".index") and name.partition(".")[0] != "base")
        allowed = (
            [INDEX_DTYPE] if positions else [*FLOAT_DTYPES, *SMALL] if name.startswith("base.") else [*FLOAT_DTYPES]
        )
        if name in expected_names and tensor.dtype not in allowed:
            problems.append(f"tensor {name} is of type {tensor.dtype}, not {INDEX_DTYPE if positions else 'a float'}")
    if problems:
        raise misfit(where, problems)


def _misfits(shapes: Shapes, facts: Mapping[str, TensorInfo], source: str = "this model needs") -> Iterator[str]:
    for name, shape in shapes.items():
        if name not in facts:
            yield f"missing tensor {name[:200]}"
        elif shape is not None and facts[name].shape != shape:
            yield f"tensor {name} has shape {facts[name].shape}, {source} {shape}"


def check_against_metadata(described: DeltaMetadata, facts: Mapping[str, TensorInfo], where: Path) -> None:
    """Compare the tensors of a file with those that delta.json describes."""
    shapes: Shapes = {name: tuple(shape) for name, shape in described.tensors.items()}
    check_shapes(shapes, facts, where, "is not the file that delta.json describes", "delta.json says")


def check_shapes(
    shapes: Shapes, facts: Mapping[str, TensorInfo], where: Path, title: str = "", source: str = "this model needs"
) -> None:
    """Compare names and shapes only."""
    problems = [*_misfits(shapes, facts, source)]
    problems += [f"extra tensor {name[:200]}" for name in facts if name not in shapes]
    if problems:
        raise misfit(where, problems, title or "does not fit this model")


def misfit(
    where: Path, problems: list[str], title: str = "does not fit this model", in_python: str = ""
) -> DeltuneError:
    """Return the error for a file with the wrong tensors, which lists up to ten problems. The base model is compared
    before: the file does not fit what delta.json says."""
    return error_from_problems(f"{where} {title}", first_of(problems), in_python, "files")


def check_positions(needed: Expected, numbers: Mapping[str, torch.Tensor], where: Path) -> None:
    """Check that the positions under masks are sorted, unique and inside their tensors."""
    problems = []
    for name, size in needed.bounds.items():
        index = numbers.get(name)
        if index is None or not index.numel():
            continue
        if int(index.min()) < 0 or int(index.max()) >= size:
            problems.append(
                f"{name} has positions from {int(index.min())} to {int(index.max())} among {size:,} scalars"
            )
        elif name not in needed.below and bool((index[1:] <= index[:-1]).any()):
            problems.append(f"{name} has positions that are not sorted, or twice")
    if problems:
        raise misfit(where, problems)


def check_finite(values: Mapping[str, torch.Tensor], where: Path) -> None:
    """Check that all values are finite in the precision that they are loaded in."""
    numbers = {name: value for name, value in values.items() if value.is_floating_point()}
    if all(value.itemsize > 1 for value in numbers.values()) and norms_are_finite(numbers.values()):
        return
    wrong = [name for name, value in numbers.items() if not _is_finite(value)]
    if wrong:
        advice = "deltune.load(…, allow_nonfinite=True) loads such values as they are"
        raise misfit(where, [f"tensor {name} is not finite" for name in wrong], "holds NaN or infinity", advice)


def _is_finite(tensor: torch.Tensor) -> bool:
    tensor = tensor.float() if tensor.itemsize == 1 else tensor
    # a sum with NaN or infinity is never finite; only a sum of finite values that overflows needs another look
    return math.isfinite(tensor.detach().sum()) or bool(torch.isfinite(tensor).all())


def parse_saved_method(anatomy: Anatomy, facts: DeltaMetadata, tensors: int, where: Path) -> tuple[Method, Method]:
    """Parse the method of a file, as the user wrote it and with every argument."""
    limit = tensors + SPARE_PARTS
    if max(text.count("(") + text.count("+") for text in (facts.method, facts.explicit)) > 8 * limit:
        raise DeltuneError(
            f"{where}: its method has far more terms than its file has tensors ({tensors})", fault="files"
        )
    try:
        short, explicit = parse(facts.method), parse(facts.explicit)
    except DeltuneError as error:
        missing = unregistered_names(facts.method) or unregistered_names(facts.explicit)
        if not missing:
            raise
        unmentioned = [name for name in missing[:3] if registration_hint([name]) not in str(error)]
        names = ", ".join(excerpt(name) for name in missing[:3])
        raise DeltuneError(
            f"{where}: its method has parts that are not registered here: {names}",
            f"{error}\n{registration_hint(unmentioned)}" if unmentioned else str(error),
            "part",
        ) from error
    if len(explicit.parts) > limit:
        raise DeltuneError(
            f"{where}: its method has {len(explicit.parts)} parts, its file {tensors} tensors", fault="files"
        )
    if short.parts != explicit.parts or _masks(short) != _masks(explicit):
        raise DeltuneError(
            f"{where}: 'method' and 'explicit' in delta.json must be the same method, the second with every argument, "
            f"but {_difference(short, explicit)}; change both or neither"
        )
    _check_spans(anatomy, explicit, where)
    return short, explicit


def _difference(short: Method, full: Method) -> str:
    """The first term in which two methods differ, with every argument."""
    pairs = list(
        zip_longest(*([explicit_expression(term) for term in method.terms] for method in (short, full)), fillvalue="")
    )
    first, second = next(
        (pair for pair in pairs if pair[0] != pair[1]), (explicit_expression(short), explicit_expression(full))
    )
    shown = [excerpt(term, MAX_NAME_LENGTH) if term else "nothing more" for term in (first, second)]
    return f"the first says {shown[0]} where the second says {shown[1]}"


def _masks(method: Method) -> list[tuple[Any, ...]]:
    return [(t.parameters, t.pattern, t.along, t.seed) for t in method.terms if isinstance(t, MaskedMethod)]


def _check_spans(anatomy: Anatomy, method: Method, where: Path) -> None:
    """Raise an error if a mask spans far more entries than the model has parameters."""
    limit = max(LEAST_SPAN, 4 * sum(tensor.numel for tensor in anatomy.tensors))
    for term in method.terms:
        if isinstance(term, MaskedMethod):
            edits = resolve(anatomy, term.method, lambda: 0).edits
            span = sum(spec.numel for e in edits for spec in e.own_tensors(folded=True).values() if spec.saved)
            if span > limit:
                raise DeltuneError(f"{where}: {term!r} spans {span:,} scalars; on this model at most {limit:,} do")
