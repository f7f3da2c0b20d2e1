"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from tables.covering import covering_cases

Collected = pytest.Item | pytest.Collector | list[pytest.Item | pytest.Collector] | None
SHARED = Path(__file__).resolve().parents[2] / "shared"
REQUIRED = "DELTUNE_REQUIRED"
"""The variable that names, with commas, what this machine must have; a test that is skipped for want of it fails."""
WANT = re.compile(r"Skipped: (?:no ([^:;]+)|could not import '([\w.]+)')")
"""The reason of a test that is skipped for want of something begins with "no" and what there is not."""


def pytest_configure(config: pytest.Config) -> None:
    """Properties that name no number of examples are tried on few in `make test`, on more in `make test-all`."""
    settings.register_profile("everyday", max_examples=8)
    settings.register_profile("all", max_examples=50)
    settings.load_profile("everyday" if config.option.markexpr == "not slow" else "all")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> Generator[None, Collected, Collected]:
    """Collect of the cases of a law those that `tables.covering` chooses."""
    made = yield
    if isinstance(made, list) and made:
        return covering_cases(made, everyday=collector.config.option.markexpr == "not slow")
    return made


def missing_part(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return what a test was skipped for want of; "" for one that was skipped for another reason, or that ran."""
    match = WANT.match(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else None
    return (match[1] or match[2]) if match else ""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let tests fail that are skipped for want of what `DELTUNE_REQUIRED` names."""
    report = yield
    if (want := missing_part(report)) and want in os.environ.get(REQUIRED, "").split(","):
        report.outcome, report.longrepr = "failed", f"there is no {want} here, and {REQUIRED} names it"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Say at the end, above pytest's last line, what tests were skipped for want of."""
    yield
    counts = Counter(filter(None, map(missing_part, terminalreporter.getreports("skipped"))))
    if counts:
        wants = ", ".join(f"{want} ({number})" for want, number in sorted(counts.items()))
        terminalreporter.write_line(f"skipped for want of: {wants}")


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


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model and the tiny data of `tiny.spec`, for the tests of a file."""
    import tiny  # most tests need none

    folder = tmp_path_factory.mktemp("tiny")
    tiny.spec(folder)
    return folder


MadeOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Fill a folder by a function in one process of the tests, and return its path in all of them."""
    base = tmp_path_factory.getbasetemp()
    common = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name: str, fill: Callable[[Path], None]) -> Path:
        folder = common / "made once" / name
        folder.parent.mkdir(exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not (done := folder.with_suffix(".done")).exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data sets and small models beside the repository; a test that needs it is skipped without it."""
    if not (SHARED / "data").is_dir():
        pytest.skip("no ../shared beside the repository")
    return SHARED
