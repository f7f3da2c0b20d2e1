"""Fixtures that every test may use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_configure(config: pytest.Config) -> None:
    """Properties that name no number of examples are tried on few in `make test`, on more in `make test-all`."""
    settings.register_profile("everyday", max_examples=8)
    settings.register_profile("all", max_examples=50)
    settings.load_profile("everyday" if config.option.markexpr == "not slow" else "all")


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
