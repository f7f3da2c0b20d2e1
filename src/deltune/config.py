"""Base of the configurations of a run and of a server: sections of checked values, their names, and YAML within bounds.

A field has three names: nested (`optim: {lr: …}`), dotted (`optim.lr`) and flat (`lr`, as on the command line).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .errors import DeltuneError, excerpt, unknown_name
from .files import user_path

MAX_BYTES = 2**18
"""Size in bytes of the largest YAML file: the config of a run has two thousand bytes, a study a few times as many."""
MAX_DEPTH = 20
"""The most lists and mappings inside one another; no configuration has a third of them."""
MAX_VALUES = 20_000
"""The most values of a YAML document; values behind an alias count each time that it is used."""
MAX_COUNT = 2**31 - 1
"""The greatest value of any count: a greater one does not fit into the tensors that hold it."""


class Section(BaseModel):
    """One part of a configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def option(default: Any, description: str, *, common: bool = False, **constraints: Any) -> Any:
    """Return a field with a default. `--help` lists `common` fields."""
    return Field(default, description=description, json_schema_extra={"common": common}, **constraints)


def split_commas(value: Any) -> Any:
    """Turn the text "a, b" into a tuple, and "text=a, label=b" into a dictionary; leave other values alone."""
    if not isinstance(value, str):
        return value
    items = [item.strip() for item in value.split(",") if item.strip()]
    if items and all("=" in item for item in items):
        return {key.strip(): name.strip() for key, name in (item.split("=", 1) for item in items)}
    return tuple(items)


CommaSeparated = BeforeValidator(split_commas)


@dataclass(frozen=True)
class Layout:
    """The sections of a configuration, and the names of their fields.

    Attributes:
        sections: The models of the sections, by name.
        flat_names: By dotted name, the flat names that are not the field's own.
    """

    sections: Mapping[str, type[Section]]
    flat_names: Mapping[str, str]

    @cached_property
    def places(self) -> Mapping[str, tuple[str, str]]:
        """Flat name -> section and field."""
        return {
            self.flat_names.get(f"{section}.{field}", field): (section, field)
            for section, kind in self.sections.items()
            for field in kind.model_fields
        }

    @cached_property
    def flat_by_dotted(self) -> Mapping[str, str]:
        """Dotted name (section.field) -> flat name."""
        return {f"{section}.{field}": name for name, (section, field) in self.places.items()}

    def dotted(self, name: str) -> str:
        """Return section.field of a flat name; another name as it is."""
        return ".".join(self.places[name]) if name in self.places else name

    def flatten(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        """Return values by flat name, from nested, dotted and flat names in any mixture.

        Nothing is refused here: unknown names, and names given a second time, stay as they are, and `name_problems`
        lists them.
        """
        entries: list[tuple[Any, Any]] = []
        for key, value in values.items():
            if key in self.sections and isinstance(value, Mapping | Section):
                entries += [(f"{key}.{field}", item) for field, item in dict(value).items()]
            elif key not in self.sections or key in self.places or value is not None:  # an empty section has no values
                entries.append((key, value))
        return self.by_flat_name(entries)

    def by_flat_name(self, values: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return values by flat name; one that is given a second time stays beside the first, as section.field."""
        flat: dict[Any, Any] = {}
        for name, value in values:
            short = self.flat_by_dotted.get(name, name)
            flat[self.dotted(short) if short in flat else short] = value
        return flat

    def nest(self, flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return values by section and field; names that are no flat names are left out."""
        nested: dict[str, dict[str, Any]] = {section: {} for section in self.sections}
        for name, (section, field) in self.places.items():
            if name in flat:
                nested[section][field] = flat[name]
        return nested

    def name_problems(
        self,
        flat: Mapping[Any, Any],
        further: Iterable[str] = (),
        hint: Callable[[str], str | None] = lambda name: None,
    ) -> list[str]:
        """List names of no field, sections that are no mappings, and fields that are given twice."""
        problems = []
        for name in flat:
            if name in self.places:
                continue
            if not isinstance(name, str):
                problems.append(f"{excerpt(name)} is no name of an option but {type(name).__name__}")
                continue
            section, _, field = name.partition(".")
            if name in self.flat_by_dotted:
                problems.append(f"{name} is given twice, also as {self.flat_by_dotted[name]}")
            elif name in self.sections:
                fields = ", ".join(self.sections[name].model_fields)
                problems.append(f"{name} is a section: give a mapping of its options, {fields}")
            elif field and section in self.sections:
                problems.append(unknown_name("option", field, self.sections[section].model_fields, section))
            else:
                problems.append(unknown_name("option", name, [*self.places, *further], hint=hint(name)))
        return problems


def read_values(path: str | Path) -> dict[str, Any]:
    """Read the mapping of a YAML file; whether its values are right is not checked."""
    try:
        with user_path(path, "file").open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        hint = ". If it belongs to the option before it, put all of its value in quotes" if "=" in str(path) else ""
        raise DeltuneError(f"{path} cannot be read: {error}{hint}") from error
    if len(text) > MAX_BYTES:
        raise DeltuneError(
            f"{path} is larger than {MAX_BYTES // 1024} KiB, which no config is; give the YAML file of a run or a study"
        )
    try:
        values = parse_yaml(text.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise DeltuneError(f"{path} cannot be read: it is not UTF-8 ({error}); save it as UTF-8") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise DeltuneError(f"{path} is no config: it must be a mapping such as `model: minilm`, not {excerpt(values)}")
    return values


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML document within bounds."""
    try:
        return _load(text)
    except yaml.YAMLError as error:
        raise DeltuneError(f"{where} is broken YAML: {' '.join(str(error).split())}") from error
    except _TooLarge as error:
        raise DeltuneError(f"{where} {error}") from error


def _load(text: str) -> Any:
    loader = _BoundedLoader(text)
    try:
        root = loader.get_single_node()
        if loader.repeated_keys:
            raise yaml.YAMLError("; ".join(loader.repeated_keys))
        try:
            return None if root is None else loader.construct_document(root)
        except yaml.YAMLError:
            raise
        except Exception as error:  # what a constructor says of a value that its tag does not fit: almost anything
            raise yaml.YAMLError(f"a value does not fit its type ({type(error).__name__}: {error})") from error
    except RecursionError:
        raise _TooLarge("is nested too deeply") from None
    finally:
        loader.dispose()


class _TooLarge(Exception):
    """A document that is larger inside than it may be."""


class _BoundedLoader(yaml.SafeLoader):
    """A safe loader that counts nodes while it composes them, before any value is made.

    Attributes:
        repeated_keys: Keys that a mapping gives twice, of which YAML readers silently take the last.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated_keys: list[str] = []
        self._depth = self._count = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth > MAX_DEPTH:
            raise _TooLarge(f"is nested too deeply: more than {MAX_DEPTH} lists and mappings inside one another")
        is_alias, before = self.check_event(yaml.AliasEvent), self._count
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise _TooLarge("has an alias inside of what it stands for; write it out")
        self._count += self._sizes[id(node)] if is_alias else 1
        if self._count > MAX_VALUES:
            raise _TooLarge(f"holds more than {MAX_VALUES:,} values, aliases counted each time; no config does")
        self._sizes[id(node)] = self._count - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        mapping = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in mapping.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    problem = f"the key {excerpt(key.value)} is given twice, on lines {lines[name]} and {line}"
                    self.repeated_keys.append(problem)
                lines[name] = line
        return mapping
