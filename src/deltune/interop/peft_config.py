"""Configurations of PEFT, such as LoraConfig(r=8), as methods of a model. Nothing of PEFT is imported."""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ..anatomy.types import Anatomy
from ..errors import DeltuneError, error_from_problems
from ..methods.library import ia3, layernorm, prefix, prompt
from ..methods.spec import Method
from .base import PeftOptions, PlacedTensors, UnusedTensors, check_types, method_from_pieces, methods_selecting
from .peft_projections import ProjectionReader
from .peft_read import (
    decoder_problems,
    ia3_pieces,
    module_matcher,
    modules_to_save_matcher,
    norm_method,
    targeted_modules,
    token_method,
    token_tables,
    whole_tensors,
)
from .peft_table import (
    COMMON_OPTIONS,
    OTHERS,
    PROMPTS,
    TARGET_OPTIONS,
    bias_mode,
    check_options,
    no_counterpart,
    row_of,
)


class PeftConfiguration(Protocol):
    """A configuration of PEFT, by what is read of it."""

    @property
    def peft_type(self) -> Any:
        """The type of the adapter."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return the options by name."""
        ...


def method_of_config(
    anatomy: Anatomy, config: PeftConfiguration, modules: Iterable[str], windowed: bool = False
) -> Method:
    """Return the method of a configuration for a model; see `read_peft` for the arguments.

    Where it names no target modules, the method acts at its own default places, with a warning.
    """
    options = {name: _plain(value) for name, value in config.to_dict().items()}
    kind = str(options["peft_type"])
    where = f"{type(config).__name__}({kind})"
    problems = check_types(PeftOptions, options) or check_options(options, training=True)
    problems = problems or _of_training(config, options)
    problems += decoder_problems(anatomy, kind, windowed) if kind in PROMPTS else []
    if problems:
        raise error_from_problems(f"{where} cannot be attached", problems)
    unused = UnusedTensors(anatomy, {})
    owners = {name.rpartition(".")[0] for t in anatomy.tensors for name in (t.name, *t.aliases)}
    paths = [path for path in modules if path in owners]
    tables = token_tables(anatomy, options, lambda path: path)
    terms = [] if kind == "TRAINABLE_TOKENS" else [_method(anatomy, options, unused, paths)]
    terms += [*token_method(anatomy, tables), *_whole_modules(anatomy, options)]
    if bias_mode(options) == "all":
        biases = {t.name for t in anatomy.tensors if t.role.endswith("bias") and t.area != "head"}
        terms += whole_tensors(anatomy, biases)
    if not terms:
        raise DeltuneError(f"{where} chooses tokens of no table of embeddings that this model shows")
    return sum(terms[1:], terms[0])


def _method(anatomy: Anatomy, options: Mapping[str, Any], unused: UnusedTensors, paths: list[str]) -> Method:
    """Return the method of a type without what it trains beside."""
    kind, row = str(options["peft_type"]), row_of(options, training=True)
    if kind == "PROMPT_TUNING":
        return prompt(options["num_virtual_tokens"])
    if kind == "PREFIX_TUNING":
        width = options.get("encoder_hidden_size") if options.get("prefix_projection") else None
        return prefix(options["num_virtual_tokens"], width, shift_positions=True)
    if options.get("target_modules") is None:
        method: Method = row.method(options) if row else (ia3() if kind == "IA3" else layernorm())
        warnings.warn(
            f"{kind} names no target_modules, which PEFT chooses by the family of the model: here it is {method!r}",
            stacklevel=5,
        )
        return method
    targeted = targeted_modules(anatomy, options, unused, paths)
    chosen = [path for path in paths if path in targeted]
    if not chosen:
        raise DeltuneError(f"target_modules={options['target_modules']!r} names no module of {anatomy.model}")
    if row is not None:
        return ProjectionReader(anatomy, options, row, unused, lambda place: None, {}).plan(chosen)
    if kind == "IA3":
        pieces = ia3_pieces(anatomy, chosen, module_matcher(options, "feedforward_modules"))
        return method_from_pieces(anatomy, [PlacedTensors(m, place, {}) for _, m, place in pieces], [ia3])
    names = {t.name for t in anatomy.tensors if t.role.startswith("norm.") and t.name.rpartition(".")[0] in targeted}
    return norm_method(anatomy, names)


def _of_training(config: PeftConfiguration, options: Mapping[str, Any]) -> list[str]:
    """Return the options that act in training or at the start, and that no method has, where they are no defaults."""
    row, other = row_of(options, training=True), OTHERS.get(str(options["peft_type"]))
    if not (row.written if row else other and other.written):
        return [f"{options['peft_type']} is read from folders alone: deltune has nothing that trains it"]
    known = (
        COMMON_OPTIONS | TARGET_OPTIONS | {"bias"} | (row.options if row else set(other.options) if other else set())
    )
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return [
        no_counterpart(field.name, options[field.name])
        for field in fields
        if field.name not in known and field.name in options and options[field.name] != _default(field)
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return _plain(field.default_factory())
    return None if field.default is dataclasses.MISSING else _plain(field.default)


def _plain(value: Any) -> Any:
    """Return a value as it would stand in a file of options."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _whole_modules(anatomy: Anatomy, options: Mapping[str, Any]) -> list[Method]:
    """Return selections of the modules that are trained as a whole; the head is trained anyway."""
    is_whole = modules_to_save_matcher(options)
    names = {
        tensor.name
        for tensor in anatomy.tensors
        for name in (tensor.name, *tensor.aliases)
        if tensor.area != "head" and is_whole(name)
    }
    return methods_selecting(anatomy, names)
