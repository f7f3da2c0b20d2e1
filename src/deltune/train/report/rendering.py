"""Rendering of the templates in this folder: every word is escaped, and a page loads nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from ..._version import __version__


@cache
def _environment(folder: Path) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def render(template: Path, **values: Any) -> str:
    """Return a page as HTML; its template may include the templates of this folder."""
    return _environment(template.parent).get_template(template.name).render(**values, version=__version__)
