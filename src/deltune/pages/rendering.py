"""Rendering of the templates in this folder: every word is escaped, and a page loads nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..errors import require_extra

if TYPE_CHECKING:
    import jinja2


@cache
def _environment() -> jinja2.Environment:
    with require_extra("studies", "Jinja2", "a page needs"):
        import jinja2
    return jinja2.Environment(
        loader=jinja2.PackageLoader("deltune", "pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def render(template: str, **values: Any) -> str:
    """Return a page as HTML.

    Args:
        template: The name of a file in this folder.
        values: What the template shows; only `markupsafe.Markup` is taken as HTML.

    Raises:
        DeltuneError: Jinja2 is not installed.
    """
    return _environment().get_template(template).render(**values, version=__version__)
