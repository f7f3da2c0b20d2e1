"""What the files of a run hold: checked for its shape where it is read, so that a damaged file is one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..disk import read_object
from ..errors import all_problems, excerpt
from ..sources.columns import KINDS

SHOWN = 10
"""Problems of one file that are listed."""


class Record(BaseModel):
    """A JSON object of which these fields are read; it may have others."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class DataFacts(Record):
    """The data of a run (`Data.facts`)."""

    fingerprint: str | None = None
    kind: str = Field(default="classification", pattern=f"^({'|'.join(KINDS)})$")
    source: str = ""
    columns: dict[str, str] = {}
    digests: dict[str, str] = {}
    rows: dict[str, int] = {}
    labels: list[str] = []


class Environment(Record):
    """environment.json: what a run was begun with."""

    data: DataFacts = DataFacts()


class Best(Record):
    """The validation that a run's delta is of; of several runs also which of them it is."""

    metric: str | None = None
    value: float | None = None
    run: str | None = Field(default=None, pattern=r"^[\w-]+$")


class Metrics(Record):
    """metrics.json: what a finished run came to."""

    seconds: float
    best: Best
    count: dict[str, Any]
    signatures: dict[str, str]
    omitted: dict[str, str]
    truncated: dict[str, int]
    truncated_targets: dict[str, int]
    validation: dict[str, float] = {}
    test: dict[str, float] = {}


class OptimizerFacts(Record):
    """What of an optimiser's state is no tensor."""

    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]


class Answered(Record):
    """What the best epoch answered to the validation split: by which delta, in which file, with which scores."""

    delta: str
    sha256: str
    metrics: dict[str, float]
    signatures: dict[str, str]
    omitted: dict[str, str]


class ProgressBest(Best):
    """The best validation so far: `rank` is compared with later ones, `answered` says what it answered."""

    rank: list[float] | None = None
    answered: Answered | None = None


class Progress(Record):
    """facts.json of a checkpoint: how far training is."""

    best: ProgressBest
    stale: int = Field(ge=0)
    seconds: float
    optimizer: OptimizerFacts
    scheduler: dict[str, Any]
    rng: list[dict[str, Any]]


class LogLine(Record):
    """A line of log.jsonl."""

    step: int = 0


class Predicted(Record):
    """A line of predictions/SPLIT.jsonl, as far as it is scored again."""

    prediction: Any
    reference: Any


def checked(kind: type[Record], values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the values of a file as they are.

    Raises:
        DeltuneError: They are not what deltune writes there; the message lists what is missing or of another kind.
    """
    try:
        kind.model_validate(values)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg'][0].lower()}{e['msg'][1:]}"
            + ("" if e["type"] == "missing" else f", not {excerpt(e['input'])}")
            for e in error.errors()[:SHOWN]
        ]
        raise all_problems(f"{where} is not as deltune wrote it", problems) from error
    return values


def read(kind: type[Record], path: Path) -> dict[str, Any]:
    """Read a JSON object that a run wrote. Raises DeltuneError: unreadable, or not what a run writes there."""
    return checked(kind, read_object(path), str(path))
