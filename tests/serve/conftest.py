"""A server with deltas, made once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .served import Served, decoder_with_deltas, served


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a tiny language model, and a folder with its deltas; nothing may change them."""
    return decoder_with_deltas(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def server(decoder: tuple[Path, Path]) -> Iterator[Served]:
    """A server without keys."""
    with served(decoder, served_name="base") as running:
        yield running
