"""Write a list of what each page of the reference describes, for readers of the repository; the site leaves it out.

`python docs/hooks/reference.py` writes the lists; on the site mkdocstrings has the whole docstrings in their place.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "reference" / f"{name}.md" for name in ("attach", "blocks", "count", "serving", "training")]
"""Those of names alone: methods.md has tables, and stable.md is text."""
BLOCK = re.compile(r"<!-- names -->\n.*?<!-- end -->\n\n", re.DOTALL)
ENTRY = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", re.MULTILINE)


def with_names(page: str) -> str:
    """Return a page with the list of its objects below its introduction."""
    page = BLOCK.sub("", page)
    lines = [line for name, options in ENTRY.findall(page + "\n") for line in _lines(name, options)]
    at = next(re.finditer(r"^(:::|##) ", page, re.MULTILINE)).start()
    return page[:at] + "\n".join(["<!-- names -->", *lines, "<!-- end -->", "", ""]) + page[at:]


def _lines(name: str, options: str) -> list[str]:
    """Return a line for an object, and one for each of its members that the page lists."""
    thing, short = _find(name), name.rpartition(".")[2]
    if inspect.ismodule(thing):
        classes = [one for one in vars(thing).values() if inspect.isclass(one) and one.__module__ == name]
        return [_line(one.__name__, one) for one in classes]
    members = re.findall(r"^        - (\w+)", options, re.MULTILINE)
    return [_line(short, thing), *(f"    {_line(member, getattr(thing, member))}" for member in members)]


def _find(name: str) -> Any:
    """Return the object of a dotted name."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        return importlib.import_module(name)


def _line(name: str, thing: Any) -> str:
    """Return a name with the names of its parameters, the first line of its docstring, and where its source is."""
    function = inspect.unwrap(thing.fget if isinstance(thing, property) else thing)
    called = "" if isinstance(thing, property) else f"({', '.join(_parameters(function))})"
    first = (inspect.getdoc(thing) or "").partition("\n")[0]
    source = Path(inspect.getsourcefile(function) or "").relative_to(ROOT)
    return f"- [`{name}{called}`](../../{source.as_posix()}): {first}"


def _parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_names(path.read_text(encoding="utf-8")), encoding="utf-8")
