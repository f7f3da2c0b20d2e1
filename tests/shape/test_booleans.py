"""Booleans of the public names: they are given by name, and are True or False."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import deltune
from deltune import DeltuneError, LowRank

DOCS = Path(__file__).parents[2] / "docs"
CALLED_BY_THE_LIBRARY = {"inner", "add_to", "affine"}
"""Methods of forms, which users write and do not call: `training` is the last argument of each, as of `__call__`."""
MADE_BY_THE_LIBRARY = {
    "Widths", "Anatomy", "Attention", "Layer", "DeltaInfo", "MetricChoice", "Measurement", "Comparison", "Exact",
    "SettingResult", "ComparisonResult", "PrintedFinding", "PlannedCell", "StudySetup",
}  # fmt: skip
"""Descriptions and results, which users read."""
NEEDED: dict[str, tuple[Any, ...]] = {
    "Bottleneck": (2,), "Prefix": (2,), "MultiHead": (2,), "OwnMultiHead": (2,), "Scale": (2.0,),
    "Modification": ("ffn", LowRank(2)), "Selection": (("norm.gain",),), "load_run": ("run",),
}  # fmt: skip
"""What a call needs beside its booleans, where it would be refused for want of it."""


def documented() -> Iterator[tuple[str, Any]]:
    """The public names, those that the reference describes, and the functions and classes of the studies."""
    for name in deltune.__all__:
        yield f"deltune.{name}", getattr(deltune, name)
    for page in sorted(DOCS.rglob("*.md")):
        for name in re.findall(r"^::: (deltune\.[\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            owner, _, last = name.rpartition(".")
            yield name, getattr(importlib.import_module(owner), last)
    for name in STUDIES:
        module = importlib.import_module(f"deltune.studies.{name}")
        public = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
        yield from ((n, v) for n, v in public.items() if n[0] != "_")


STUDIES = (
    "study",
    "scales",
    "report.page",
    "papers.thresholds",
    "jobs.store",
    "claims.decisions",
    "claims.comparisons",
)
STUDIES += ("report.findings", "report.provenance")
"""The modules that a study is written with, decided and shown."""


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions among the documented names, and of the classes the constructor and their own methods."""
    for name, value in documented():
        if not isinstance(value, type):
            if callable(value):
                yield name, value
            continue
        if value.__name__ in MADE_BY_THE_LIBRARY or issubclass(value, Exception):
            continue
        yield name, value
        others = [base for base in value.__mro__ if not base.__module__.startswith("deltune")]
        for method, function in vars(value).items():
            inherited = any(hasattr(base, method) for base in others)
            if inspect.isfunction(function) and not (inherited or method[0] == "_" or method in CALLED_BY_THE_LIBRARY):
                yield f"{name}.{method}", function


def booleans() -> dict[str, tuple[Callable[..., Any], list[inspect.Parameter]]]:
    by_name = {}
    for name, function in callables():
        parameters = [
            p
            for p in inspect.signature(function).parameters.values()
            if (p.default in (True, False) and isinstance(p.default, bool))
            or (p.annotation if isinstance(p.annotation, str) else getattr(p.annotation, "__name__", ""))
            in ("bool", "bool | None")
        ]
        if parameters:
            by_name[name] = function, parameters
    return by_name


BOOLEANS = booleans()


def test_the_table_has_functions_methods_forms_and_studies() -> None:
    for name in ("load", "Tuned.merge", "Tuned.save", "prefix", "serve.Server.load", "Bottleneck", "optimize_linear"):
        assert f"deltune.{name}" in BOOLEANS
    assert {"deltune.models.load_model", "deltune.train.run.train", "cross_product"} <= BOOLEANS.keys()


@pytest.mark.parametrize("name", BOOLEANS)
def test_a_boolean_is_given_by_name_and_is_one(name: str) -> None:
    function, parameters = BOOLEANS[name]
    by_place = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert by_place == []
    if dataclasses.is_dataclass(function) and not hasattr(function, "__post_init__"):
        return  # of a request's settings, which are checked as one
    needed = NEEDED.get(name.rpartition(".")[2], ())
    for parameter in parameters:
        for wrong in ("yes", "b", 1, 0, [], *([None] if parameter.default is not None else [])):
            with pytest.raises(DeltuneError, match=rf"{parameter.name}=.* is not .*True or False"):
                function(*needed, **{parameter.name: wrong})
