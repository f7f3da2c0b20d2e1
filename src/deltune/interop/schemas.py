"""Validates the options in PEFT and AdapterHub folders, and matches the patterns in them within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import regex
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from ..errors import DeltuneError, error_from_problems, validation_problems

FiniteNumber = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=-1e30, lt=1e30)]
Probability = Annotated[float, Field(strict=True, ge=0, lt=1)]
PositiveInt = Annotated[int, Field(strict=True, ge=1, lt=1 << 40)]
OptionalBool = StrictBool | None
ShortText = Annotated[str, Field(strict=True, max_length=4096)]
PatternText = Annotated[str, Field(strict=True, max_length=1000)]

PATTERN_SECONDS = 0.5
"""Seconds that all patterns of a folder may take in all; those of a real file take milliseconds."""


class _Options(BaseModel):
    """Options by their names in the file. Others are ignored here; where they matter, they are refused by name."""

    model_config = ConfigDict(extra="ignore")


class PeftOptions(_Options):
    """The options of PEFT that decide what its tensors mean."""

    peft_type: ShortText
    task_type: ShortText | None = None
    lora_alpha: FiniteNumber = 8
    lora_dropout: Probability | None = None
    use_rslora: OptionalBool = None
    alpha_pattern: dict[PatternText, FiniteNumber] | None = None


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
    """Validate the options of a folder, and the configurations of adapters inside them.

    Raises:
        DeltuneError: Options are missing, of a wrong type, or out of range; all of them are listed.
    """
    problems = _problems(schema, options)
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
        return ["a union in a union has no translation"]
    if architecture is not None and not isinstance(architecture, str):
        return [f"architecture: {architecture!r:.100} is not a name"]
    kind = ADAPTERHUB_KINDS.get(architecture or "bottleneck")
    return [] if kind is None else _problems(kind, config)


def _problems(schema: type[_Options], options: Mapping[str, Any]) -> list[str]:
    try:
        schema.model_validate(options)
    except ValidationError as error:
        return [f"option {problem}" for problem in validation_problems(error)]
    return []


class Patterns:
    """Finds the value for a module by PEFT's rule: that of the first pattern that matches the end of the module's path.

    The patterns come from a stranger, and a regular expression can take arbitrarily long. So matching stops after
    `PATTERN_SECONDS` in all. Patterns without repetitions and groups take no time, and do not count.
    """

    def __init__(self, patterns: Mapping[str, Any] | None) -> None:
        self.left = PATTERN_SECONDS
        self.values = list((patterns or {}).values())
        try:
            self.matchers = [self._matcher(key) for key in patterns or {}]
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise DeltuneError(
                f"option alpha_pattern has a pattern that is no regular expression: {str(error)[:200]}"
            ) from error

    def _matcher(self, key: str) -> Callable[[str], object]:
        pattern = regex.compile(rf"(?:.*\.)?(?:{key})$")
        return pattern.match if regex.fullmatch(r"(?:[\w.-]|\\.)*", key) else lambda path: self._timed(pattern, path)

    def _timed(self, pattern: Any, path: str) -> object:
        start = time.monotonic()
        try:
            return pattern.match(path, timeout=max(self.left, 0.001))
        except TimeoutError:
            self.left = 0
        finally:
            self.left -= time.monotonic() - start
        return None

    def value(self, path: str, default: Any) -> Any:
        """Return the value for a module.

        Raises:
            DeltuneError: The patterns take too long.
        """
        pairs = zip(self.matchers, self.values, strict=True)
        value = next((value for matches, value in pairs if matches(path)), default)
        if self.left <= 0:
            raise DeltuneError(f"option alpha_pattern has patterns that take longer than {PATTERN_SECONDS:g} s")
        return value
