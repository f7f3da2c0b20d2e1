"""Rendering of the templates in this folder: every word is escaped, and a page loads nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from typing import Any

import jinja2

from .._version import __version__


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("deltune", "pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def render(template: str, **values: Any) -> str:
    """Return a page as HTML."""
    return _environment().get_template(template).render(**values, version=__version__)
