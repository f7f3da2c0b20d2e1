"""Laws that need more than the oldest torch and transformers of pyproject.toml; docs/start/install.md lists them."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version


def is_older(library: str, oldest: str) -> bool:
    return Version(version(library)) < Version(oldest)


def needs(library: str, oldest: str) -> pytest.MarkDecorator:
    """Skip a test with an older version of a library."""
    return pytest.mark.skipif(is_older(library, oldest), reason=f"needs {library} {oldest}")
