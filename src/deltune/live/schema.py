"""What delta.json holds, as a validated value: every field is of its kind and of a size that a delta can have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..disk import read_json
from ..errors import DeltuneError, all_problems, validation_problems

FORMAT = 1

LONGEST_NUMBER = 40
"""Digits of the longest number in a method. Beyond Python's own limit, a number cannot even be printed."""

Text = Annotated[str, Field(max_length=4096)]
Expression = Annotated[str, Field(max_length=1 << 20)]
Shape = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 48)]], Field(max_length=8)]


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
        if wrong := [key for key in names if not re.fullmatch(r"0|-?[1-9][0-9]{0,8}", key)]:
            raise ValueError(f"{wrong[0][:50]!r} is no label id; ids are whole numbers")
        if wrong := [key for key, name in names.items() if isinstance(name, list | dict)]:
            raise ValueError(f"the name of label {wrong[0]} is no text")
        return names

    @property
    def pairs(self) -> tuple[tuple[int, str], ...]:
        """Ids and names, in the order of the ids."""
        return tuple(sorted((int(key), str(name)) for key, name in self.id2label.items()))


class BaseFacts(_Part):
    """The base model that the delta belongs to: its family, class and name, and a digest for each area of it."""

    family: Text
    model: Text
    name: Text
    fingerprint: dict[Text, Text]


class DeltaFacts(_Part):
    """Everything in delta.json. `tensors` and `sha256` are the shapes in delta.safetensors and its checksum."""

    format: Literal[1]
    method: Expression
    explicit: Expression
    head: HeadFacts
    labels: LabelFacts | None
    base: BaseFacts
    tensors: dict[str, Shape]
    sha256: Text

    @field_validator("method", "explicit")
    @classmethod
    def _numbers(cls, text: str) -> str:
        if re.search(rf"[0-9a-fA-F_]{{{LONGEST_NUMBER + 1},}}", text):
            raise ValueError(f"it has a number of more than {LONGEST_NUMBER} digits")
        return text


def read_facts_file(path: Path) -> DeltaFacts:
    """Read and validate a delta.json.

    Raises:
        DeltuneError: The file cannot be read, was written by a newer deltune, or is not what deltune writes; every
            field that is missing or wrong is listed.
    """
    value: Any = read_json(path)
    written = value.get("format") if isinstance(value, dict) else None
    if isinstance(written, int) and not isinstance(written, bool) and written != FORMAT and "method" in value:
        raise DeltuneError(f"{path} has format {str(written)[:20]}, this deltune reads {FORMAT}; update deltune")
    try:
        return DeltaFacts.model_validate(value)
    except ValidationError as error:
        title = f"{path} is not as deltune writes it (it was damaged or edited, or it is another program's)"
        raise all_problems(title, validation_problems(error)) from error
