"""Fixtures that every test may use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="module", autouse=True)
def imported_objects_are_no_garbage() -> None:
    """Collecting garbage looks at what the tests of a file make, and not at everything that was imported before."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokenised rows of the tests are kept by the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data sets and small models beside the repository; a test that needs it is skipped without it."""
    if not (SHARED / "data").is_dir():
        pytest.skip("no ../shared beside the repository")
    return SHARED
