"""Reading a YAML file within bounds: of its size, its depth and what its aliases repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..errors import DeltuneError, excerpt
from ..filesystem import user_path

MAX_BYTES = 2**18
"""The largest file: the config of a run has two thousand bytes, a study a few times as many."""
MAX_DEPTH = 20
"""The most lists and mappings inside one another; no run and no study has a third of them."""
MAX_VALUES = 20_000
"""The most values in all, those behind an alias counted each time that it is used."""


def read_values(path: str | Path) -> dict[str, Any]:
    """Read the mapping of a YAML file; whether its values are right is not checked.

    Raises:
        DeltuneError: There is no such file, it is broken or no mapping, or it is beyond the bounds above.
    """
    try:
        with user_path(path, "file").open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DeltuneError(f"{path} cannot be read: {error}") from error
    if len(text) > MAX_BYTES:
        raise DeltuneError(
            f"{path} is larger than {MAX_BYTES // 1024} KiB, which no config is; give the YAML file of a run or a study"
        )
    try:
        values = _construct(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DeltuneError(f"{path} cannot be read: it is not UTF-8 ({error}); save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise DeltuneError(f"{path} is broken YAML: {' '.join(str(error).split())}") from error
    except _TooLarge as error:
        raise DeltuneError(f"{path} {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise DeltuneError(f"{path} is no config: it must be a mapping such as `model: minilm`, not {excerpt(values)}")
    return values


class _TooLarge(Exception):
    """A file that is larger inside than it may be."""


def _construct(text: str) -> Any:
    """What a YAML document says: composed, measured, and only then made into values.

    Raises:
        yaml.YAMLError: It is broken.
        _TooLarge: It is too deep, holds itself, or has too many values.
    """
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _measure(root, {}, ())
        try:
            return loader.construct_document(root)
        except yaml.YAMLError:
            raise
        except Exception as error:  # what a constructor says of a value that its tag does not fit: almost anything
            raise yaml.YAMLError(f"a value does not fit its type ({type(error).__name__}: {error})") from error
    except RecursionError:
        raise _TooLarge("is nested too deeply") from None
    finally:
        loader.dispose()


def _measure(node: yaml.Node, known: dict[int, int], above: tuple[int, ...]) -> int:
    """Count the values at and below a node, what is behind an alias each time.

    Args:
        node: Where to begin.
        known: Counts by the identity of nodes, filled here.
        above: The nodes that hold this one.
    """
    if id(node) in above:
        raise _TooLarge("has an alias inside of what it stands for; write it out")
    if len(above) > MAX_DEPTH:
        raise _TooLarge(f"is nested too deeply: more than {MAX_DEPTH} lists and mappings inside one another")
    if id(node) not in known:
        inside = (*above, id(node))
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        children = [child for entry in below for child in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_measure(child, known, inside) for child in children)
        if known[id(node)] > MAX_VALUES:
            raise _TooLarge(f"holds more than {MAX_VALUES:,} values, aliases counted each time; no config does")
    return known[id(node)]
