"""Shared by the readers of PEFT and AdapterHub folders: options, files, names, and the shortest method for tensors.

Options are validated, and the patterns in them are matched within a time limit. `peft_read` and `adapterhub` say which
tensor belongs to which place of the model and what the options mean. Everything else is here, from finding the shortest
expression to listing tensors that are not used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import regex
import torch
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from ..anatomy.types import Anatomy, Columns, Linear
from ..errors import DeltuneError, error_from_problems, first_names, first_of, validation_problems
from ..files import find_file, read_json_object
from ..methods.forms.low_rank import LowRank
from ..methods.resolve import ResolvedEdit, resolve, selected_tensors
from ..methods.sites import Location, resolve_locations
from ..methods.spec import ATTENTIONS, Method, MethodSum, Modification, Selection
from .tensor_files import load_float_tensors

FiniteNumber = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=-1e30, lt=1e30)]
Probability = Annotated[float, Field(strict=True, ge=0, lt=1)]
PositiveInt = Annotated[int, Field(strict=True, ge=1, lt=1 << 40)]
TokenIds = Annotated[list[Annotated[int, Field(strict=True, ge=0, lt=1 << 40)]], Field(max_length=1 << 20)]
OptionalBool = StrictBool | None
ShortText = Annotated[str, Field(strict=True, max_length=4096)]
PatternText = Annotated[str, Field(strict=True, max_length=1000)]

PATTERN_SECONDS = 0.5
"""Seconds that the patterns of an option may take in all; in a real file they take milliseconds."""


class _Options(BaseModel):
    """Options by their names in the file. Others are ignored here; where they matter, they are refused by name."""

    model_config = ConfigDict(extra="ignore")


class PeftOptions(_Options):
    """The fields of a PeftConfig that decide how its tensors are read."""

    peft_type: ShortText
    task_type: ShortText | None = None
    target_modules: PatternText | list[ShortText] | None = None
    exclude_modules: PatternText | list[ShortText] | None = None
    layers_to_transform: StrictInt | list[StrictInt] | None = None
    layers_pattern: PatternText | list[PatternText] | None = None
    feedforward_modules: PatternText | list[ShortText] | None = None
    modules_to_save: list[ShortText] | None = None
    r: Annotated[int, Field(strict=True, ge=0, lt=1 << 40)] | None = None
    lora_alpha: FiniteNumber | None = None
    lora_dropout: Probability | None = None
    use_rslora: OptionalBool = None
    rank_pattern: dict[PatternText, PositiveInt | list[StrictBool]] | None = None
    alpha_pattern: dict[PatternText, FiniteNumber] | None = None
    lambda_pattern: dict[PatternText, FiniteNumber] | None = None
    n_frequency_pattern: dict[PatternText, PositiveInt] | None = None
    block_size_pattern: dict[PatternText, PositiveInt] | None = None
    num_virtual_tokens: PositiveInt | None = None
    token_indices: TokenIds | None = None
    trainable_token_indices: TokenIds | dict[ShortText, TokenIds] | None = None


class _AdapterHubConfig(_Options):
    architecture: StrictStr | None = None
    leave_out: list[StrictInt] | None = None
    dropout: Probability | None = None
    non_linearity: ShortText | None = None
    init_weights: ShortText | None = None


class AdapterHubBottleneck(_AdapterHubConfig):
    """AdapterHub's configuration of a bottleneck."""

    architecture: Literal["bottleneck"] | None = None
    mh_adapter: OptionalBool = None
    output_adapter: OptionalBool = None
    cross_adapter: OptionalBool = None
    original_ln_before: OptionalBool = None
    original_ln_after: OptionalBool = None
    ln_before: OptionalBool = None
    is_parallel: OptionalBool = None
    residual_before_ln: StrictBool | StrictStr | None = None
    scaling: FiniteNumber | Literal["learned", "channel"] = 1.0


class AdapterHubPrefix(_AdapterHubConfig):
    """AdapterHub's configuration of a prefix."""

    architecture: Literal["prefix_tuning"]
    prefix_length: PositiveInt
    flat: OptionalBool = None
    encoder_prefix: OptionalBool = None
    cross_prefix: OptionalBool = None


class AdapterHubLoRA(_AdapterHubConfig):
    """AdapterHub's configuration of LoRA."""

    architecture: Literal["lora"]
    r: PositiveInt
    alpha: FiniteNumber
    attn_matrices: list[ShortText] | None = None


class AdapterHubUnion(_Options):
    """AdapterHub's configuration of several adapters at once."""

    architecture: Literal["union"]
    configs: Annotated[list[dict[StrictStr, Any]], Field(min_length=1, max_length=64)]


class AdapterHubOptions(_Options):
    """AdapterHub's options of an adapter. The configuration inside them is validated by its architecture."""

    model_type: ShortText
    model_class: ShortText | None = None
    name: ShortText | None = None
    config: dict[StrictStr, Any] | StrictStr
    version: ShortText | None = None


class AdapterHubHead(_Options):
    """AdapterHub's options of a head that was saved beside an adapter."""

    label2id: dict[ShortText, Annotated[int, Field(strict=True, ge=0, lt=1 << 30)]] | None = None


ADAPTERHUB_KINDS: dict[str, type[_Options]] = {
    "bottleneck": AdapterHubBottleneck, "prefix_tuning": AdapterHubPrefix, "lora": AdapterHubLoRA,
    "union": AdapterHubUnion,
}  # fmt: skip


def check_options(schema: type[_Options], options: Mapping[str, Any], path: Path) -> None:
    """Raise if options of a folder, or configurations of adapters inside them, are not valid; list all that are not."""
    problems = check_types(schema, options)
    config = options.get("config")
    if schema is AdapterHubOptions and isinstance(config, dict) and not problems:
        problems = _config_problems(config)
        if not problems and config.get("architecture") == "union":
            problems = [problem for inner in config["configs"] for problem in _config_problems(inner, nested=True)]
    if problems:
        raise error_from_problems(f"{path} has options that cannot be read", problems)


def _config_problems(config: Mapping[str, Any], nested: bool = False) -> list[str]:
    architecture = config.get("architecture")
    if nested and architecture == "union":
        return ["deltune cannot reproduce a union in a union"]
    if architecture is not None and not isinstance(architecture, str):
        return [f"architecture: {architecture!r:.100} is not a name"]
    kind = ADAPTERHUB_KINDS.get(architecture or "bottleneck")
    return [] if kind is None else check_types(kind, config)


def check_types(schema: type[_Options], options: Mapping[str, Any]) -> list[str]:
    """Return which options are of a wrong type or out of range."""
    try:
        schema.model_validate(options)
    except ValidationError as error:
        return [f"option {problem}" for problem in validation_problems(error)]
    return []


class Patterns:
    """Finds the first of an option's patterns that matches the path of a module.

    The patterns come from a stranger, and a regular expression can take arbitrarily long. So matching stops after
    `PATTERN_SECONDS` in all. Patterns without repetitions and groups take no time, and do not count.
    """

    def __init__(self, option: str, patterns: Iterable[str], form: str = r"(?:.*\.)?(?:{})$") -> None:
        """Compile the patterns of an option; `form` is the expression that PEFT makes of each, with {} in its place."""
        self.option, self.left = option, PATTERN_SECONDS
        try:
            self.matchers = [self._matcher(pattern, form) for pattern in patterns]
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise DeltuneError(
                f"option {option} has a pattern that is no regular expression: {str(error)[:200]}"
            ) from error

    def _matcher(self, text: str, form: str) -> Callable[[str], Any]:
        pattern = regex.compile(form.replace("{}", text))
        return pattern.match if regex.fullmatch(r"(?:[\w.-]|\\.)*", text) else lambda path: self._timed(pattern, path)

    def _timed(self, pattern: Any, path: str) -> Any:
        start = time.monotonic()
        try:
            return pattern.match(path, timeout=max(self.left, 0.001))
        except TimeoutError:
            self.left = 0
        finally:
            self.left -= time.monotonic() - start
        return None

    def first(self, path: str) -> tuple[int, Any] | None:
        """Return the number of the first pattern that matches, and its match."""
        matches = ((number, matcher(path)) for number, matcher in enumerate(self.matchers))
        first = next((pair for pair in matches if pair[1]), None)
        if self.left <= 0:
            raise DeltuneError(f"option {self.option} has patterns that take longer than {PATTERN_SECONDS:g} s")
        return first


CONFIG_FILE = "adapter_config.json"
"""The file in which both PEFT and AdapterHub keep the options of an adapter."""

NamedTensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ForeignFolder:
    """The content of a folder of another library."""

    where: Path
    options: dict[str, Any]  # the adapter's options
    tensors: dict[str, torch.Tensor]  # the adapter's tensors, by their names there
    head_options: dict[str, Any] = field(default_factory=dict)  # the options of a head that was saved apart
    head: dict[str, torch.Tensor] = field(default_factory=dict)  # the tensors of a head that was saved apart


@dataclass(frozen=True)
class Translation:
    """A folder of another library in our terms."""

    method: Method
    tensors: dict[str, torch.Tensor]  # its tensors, by their names in our files
    head: dict[str, torch.Tensor] = field(default_factory=dict)  # the tensors of the head, by their names in the model
    labels: tuple[str, ...] = ()  # the names of the head's labels, in order


@dataclass(frozen=True)
class PlacedTensors:
    """One modification at one place with its tensors."""

    modification: Modification  # the modification, without a choice of layers, stack or attention
    place: Location
    tensors: NamedTensors  # the tensors of its form and composition, by name


@dataclass(frozen=True)
class ExportedDelta:
    """A delta that is to be written for another library."""

    anatomy: Anatomy  # the model's anatomy
    edits: tuple[ResolvedEdit, ...]
    full_tensors: Mapping[str, NamedTensors]  # the full tensors of each edit, by the edit's key
    in_place: NamedTensors  # the parameters that are tuned in place, by name
    head: NamedTensors  # the parameters of the head, by name
    original: Callable[[str], torch.Tensor]  # returns the pretrained value of a parameter
    sliding_window: bool = False  # whether some attention of the model has a sliding window
    # the rows of parameters of which only some rows are trained
    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class UnusedTensors:
    """The tensors of a file that are not used yet, by their names in this model; any left at the end are an error."""

    def __init__(self, anatomy: Anatomy, tensors: NamedTensors, stem: str = "") -> None:
        """Order the tensors of a file by their names in this model; in the file, all begin with `stem`."""
        self.anatomy, self.base = anatomy, f"{anatomy.base}." if anatomy.base else ""
        self.base_in_file = _base_in_file(anatomy, self.base, [name.removeprefix(stem) for name in tensors])
        self.stem, self.names, self.tensors = stem, dict[str, str](), dict[str, torch.Tensor]()
        self.doubles: list[str] = []
        for file_name, tensor in tensors.items():
            name = self._translate(file_name.removeprefix(stem))
            if name in self.names:
                self.doubles.append(f"tensors {self.names[name]} and {file_name} are both {name} of this model")
            self.names[name], self.tensors[name] = file_name, tensor

    def _translate(self, name: str) -> str:
        """Return the name in this model of a tensor that the file calls `name`."""
        inside = name.startswith(self.base_in_file)
        if not self.base_in_file and self.base:
            inside = not name.startswith(tuple(f"{path}." for path in self.anatomy.head))
        return self.base + name.removeprefix(self.base_in_file) if inside else name

    def name_in_file(self, name: str) -> str | None:
        """Return what the model of the file calls a module or tensor of this model, to which PEFT's options refer.

        Where the two are of different classes they have the base model in common, and the result is None outside it.
        """
        if self.base_in_file == self.base:
            return name
        return self.base_in_file + name.removeprefix(self.base) if name.startswith(self.base) else None

    def take(self, name: str, axes: int | None = None) -> torch.Tensor | None:
        """Remove and return the tensor of a name, which must have so many axes; None where there is none."""
        file_name = self.names.pop(name, name)
        tensor = self.tensors.pop(name, None)
        if tensor is not None and axes is not None and tensor.dim() != axes:
            raise DeltuneError(f"tensor {file_name} has shape {tuple(tensor.shape)}, it should have {axes} axes")
        return tensor

    def take_all(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Remove and return the tensors of those names that exist."""
        return {name: tensor for name in names if (tensor := self.take(name)) is not None}

    def check(self, folder: Path, problems: Sequence[str] = (), stopped: bool = False) -> None:
        """Raise if the folder has problems, tensors that were not used, or two that are one tensor of this model.

        Where reading `stopped` at a problem, what it did not come to is no extra tensor.
        """
        shown = sorted(self.names.values())
        problems = [*problems, *self.doubles]
        if shown and self.anatomy.unobserved:
            problems.append(f"not visible in this model: {'; '.join(self.anatomy.unobserved[:3])}")
        own_modules = {tensor.name.partition(".")[0] for tensor in self.anatomy.tensors}
        if not self.anatomy.head and any(name.partition(".")[0] not in own_modules for name in self.names):
            problems.append("this model has no head; load it with the head that the file was trained with")
        problems += first_of([f"extra tensor {name}" for name in shown]) if not stopped else []
        if problems:
            raise error_from_problems(f"{folder} does not fit this model", problems, fault="model")


def _base_in_file(anatomy: Anatomy, base: str, names: Sequence[str]) -> str:
    """Return what names inside the base model begin with in a file, whose model may be of another class."""
    inside = [f"{layer.path.removeprefix(base)}." for layer in anatomy.layers]
    return next((n.partition(layer)[0] for layer in inside for n in names if layer in f".{n}"), base)


# -- folders ----------------------------------------------------------------------------------------------------------


def has_file(folder: str | Path, name: str) -> bool:
    """Return whether a folder holds a file of a name, or a link of that name to a file."""
    try:
        return (Path(folder) / name).is_file()
    except (OSError, ValueError):
        return False


def is_foreign(folder: str | Path) -> bool:
    """Return whether a folder holds the options of PEFT or AdapterHub."""
    return has_file(folder, CONFIG_FILE)


def read_options(folder: Path, name: str = CONFIG_FILE) -> dict[str, Any]:
    """Read the options in a JSON file of a folder."""
    path = find_file(folder, name)
    if path is None:
        raise DeltuneError(f"{folder / name} is missing; the folder is incomplete", fault="files")
    return read_json_object(path)


def read_tensors(folder: Path, names: Sequence[str], *, allow_integers: bool = False) -> dict[str, torch.Tensor]:
    """Read the tensors in the first file that exists: safetensors, or torch's format without pickled objects.

    With `allow_integers`, some of them may be of whole numbers or empty.
    """
    path = next((path for name in names if (path := find_file(folder, name)) is not None), None)
    if path is None:
        raise DeltuneError(
            f"{folder} has its options, but none of {', '.join(names)}; the folder is incomplete", fault="files"
        )
    return load_float_tensors(path, allow_integers=allow_integers)


# -- a method from its places -----------------------------------------------------------------------------------------


def locations_or_none(anatomy: Anatomy, modification: Modification) -> list[Location]:
    """Return the places of a modification; none where the model does not have it."""
    try:
        return resolve_locations(anatomy, modification)
    except DeltuneError:
        return []


def linears_at(anatomy: Anatomy, site: str, tower: str = "main") -> list[tuple[Location, Linear]]:
    """Return the places of a site with their linears; without weights of experts that no linear holds."""
    places = locations_or_none(anatomy, Modification(site, LowRank(1), tower=tower))
    return [(place, place.linear) for place in places if place.linear is not None]


def without_scope(modification: Modification) -> Modification:
    """Return a modification that acts at all layers, stacks and attentions."""
    return replace(modification, layers="all", stack="all", attention="all", optional=False)


def method_from_pieces(
    anatomy: Anatomy, pieces: Sequence[PlacedTensors], candidates: Iterable[Callable[[], Method]] = ()
) -> Method:
    """Return the shortest method with these pieces and no others; named methods, the candidates, are tried first."""
    required = {(piece.modification, piece.place.name) for piece in pieces}
    for make in candidates:
        try:
            method = make()
            edits = resolve(anatomy, method, lambda: 0).edits
            if {(without_scope(edit.modification), edit.place.name) for edit in edits} == required:
                return method
        except DeltuneError:
            continue
    modifications: list[Method] = []
    for modification in dict.fromkeys(piece.modification for piece in pieces):
        remaining = {name for other, name in required if other == modification}
        for candidate in _scoped_candidates(anatomy, modification, remaining):
            names = {place.name for place in locations_or_none(anatomy, candidate)}
            if names and names <= remaining:
                modifications.append(candidate)
                remaining -= names
            if not remaining:
                break
        if remaining:
            names_left = ", ".join(sorted(remaining)[:4])
            raise DeltuneError(
                f"the file changes {names_left} alone, and site {modification.site!r} includes more than that"
            )
    return modifications[0] if len(modifications) == 1 else MethodSum(tuple(modifications))


def _scoped_candidates(anatomy: Anatomy, modification: Modification, names: set[str]) -> Iterable[Modification]:
    """Yield the modification with narrower and narrower choices of layers, stack and attention."""
    stacks = [stack.name for stack in anatomy.stacks]
    kinds = ATTENTIONS if modification.site in ("heads", "attention", "query", "key", "value", "output") else ("all",)
    for stack in ("all", *stacks):
        for kind in kinds:
            name_parts = [n.split(".") for n in names if stack in ("all", n.split(".")[0])]
            yield replace(modification, stack=stack, attention=kind)
            layers = sorted({int(parts[1]) for parts in name_parts if len(parts) > 1 and parts[1].isdigit()})
            if layers and not anatomy.shared:
                yield replace(modification, stack=stack, attention=kind, layers=tuple(layers))
    if not anatomy.shared:
        for stack in stacks:
            for index in sorted({int(n.split(".")[1]) for n in names if n.split(".")[1].isdigit()}):
                for kind in kinds:
                    yield replace(modification, stack=stack, attention=kind, layers=(index,))


def tensors_by_deltune_name(
    anatomy: Anatomy, method: Method, pieces: Sequence[PlacedTensors]
) -> dict[str, torch.Tensor]:
    """Return the tensors of the pieces by their names in our files."""
    by_place = {(piece.modification, piece.place.name): piece for piece in pieces}
    tensors: dict[str, torch.Tensor] = {}
    for edit in resolve(anatomy, method, lambda: 0).edits:
        piece = by_place[without_scope(edit.modification), edit.place.name]
        for leaf, tensor in piece.tensors.items():
            shared = edit.tensors[leaf].shared
            tensors[f"common.{edit.owner(shared)}.{leaf}" if shared else f"edit.{edit.key}.{leaf}"] = tensor
    return tensors


def method_selecting(anatomy: Anatomy, names: set[str], candidates: Iterable[Callable[[], Method]]) -> Method:
    """Return the first of the candidates that trains exactly these parameters in place."""
    for make in candidates:
        try:
            method = make()
            chosen = {
                t.name for part in method.parts if isinstance(part, Selection) for t in selected_tensors(anatomy, part)
            }
        except DeltuneError:
            continue
        if chosen == names:
            return method
    raise DeltuneError(f"no selection by role, area and layers trains {first_names(sorted(names), 4)} and no others")


def methods_selecting(anatomy: Anatomy, names: set[str]) -> list[Method]:
    """Return selections that train exactly these parameters in place, one for each role and area."""
    scopes = {(t.role, t.area, t.layer) for t in anatomy.tensors if t.name in names}
    selections: list[Method] = []
    for role, area in sorted({(role, area) for role, area, _ in scopes}):
        layers = tuple(sorted(layer for r, a, layer in scopes if (r, a) == (role, area) and layer is not None))
        names_there = {t.name for t in anatomy.tensors if (t.role, t.area) == (role, area)} & names
        scoped = [partial(Selection, (role,), (area,), of=of) for of in ("both", "attention", "ffn")]
        choices = [*scoped, *(partial(make, layers=layers) for make in scoped)]
        selections.append(method_selecting(anatomy, names_there, choices))
    return selections


def rows_of_columns(tensor: torch.Tensor, columns: Columns | None) -> torch.Tensor:
    """Return the rows of a fused projection's tensor (out, …) that belong to `columns`, in order."""
    if columns is None:
        return tensor
    rows = tensor.unflatten(0, (columns.groups, -1))[:, columns.start : columns.stop]
    return rows.flatten(0, 1).contiguous()
