"""Try whether the everyday tests notice bugs: change one line of the library, run them, and see which of them fails.

    python -m tests.mutation                    all mutations
    python -m tests.mutation masks statistics   those whose names contain one of these words

The tracked files are copied to temporary folders, and only the copies are changed. Several mutations at a time run the
few tests that they name, and then one after the other all everyday tests those that were missed. Exit status 1: more
than one mutation was not caught. Exit status 2: a mutation's text does not stand exactly once in the library.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from .mutations import MUTATIONS, Mutation

REPOSITORY = Path(__file__).resolve().parents[2]
MISSED = 1
"""How many of the mutations may go unnoticed."""
FAILED = re.compile(r"^(?:FAILED|ERROR|SUBFAILED\S*) +(.*)$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutations whose name contains one of these")
    parser.add_argument("--workers", type=int, default=2, help="mutations that are tried at a time")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.words or any(word in m.name for word in options.words)]
    sources = {m: [p for p in modules(REPOSITORY) if m.text in p.read_text(encoding="utf-8")] for m in chosen}
    wrong = [m for m, paths in sources.items() if len(paths) != 1 or paths[0].read_text("utf-8").count(m.text) != 1]
    for mutation in wrong:
        print(f"{mutation.name}: {mutation.text!r} does not stand exactly once in src/deltune", file=sys.stderr)
    if wrong or not chosen:
        return 2
    with tempfile.TemporaryDirectory(prefix="deltune-mutation-") as folder:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(options.workers):
            copies.put(copied(Path(folder) / str(number)))

        def tried(mutation: Mutation, tests: tuple[str, ...], workers: int = 0) -> str:
            """The first of these tests that fails with a mutation, or nothing."""
            copy, began = copies.get(), time.monotonic()
            with changed(mutation, copy / sources[mutation][0].relative_to(REPOSITORY)):
                test = failing(copy, tests, workers)
            copies.put(copy)
            print(f"{mutation.name:55} {time.monotonic() - began:6.0f} s  {test or 'not caught'}", flush=True)
            return test

        with ThreadPoolExecutor(options.workers) as pool:
            caught = dict(zip(chosen, pool.map(lambda m: tried(m, m.tests), chosen), strict=True))
        for mutation in [m for m in chosen if not caught[m]]:
            print(f"{mutation.name}: trying all everyday tests", flush=True)
            caught[mutation] = tried(mutation, (), options.workers)
    missed = [m.name for m in chosen if not caught[m]]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations were caught")
    return int(len(missed) > MISSED)


def modules(root: Path) -> list[Path]:
    return sorted((root / "src" / "deltune").rglob("*.py"))


def copied(folder: Path) -> Path:
    """The tracked files, with the folder of data beside them that some tests read where it is there."""
    copy = folder / "repository"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    for name in listed.stdout.split("\0"):
        if name and (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    if (data := REPOSITORY.parent / "shared").is_dir():
        (folder / "shared").symlink_to(data)
    return copy


@contextmanager
def changed(mutation: Mutation, file: Path) -> Iterator[None]:
    before = file.read_text(encoding="utf-8")
    file.write_text(before.replace(mutation.text, mutation.becomes), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(before, encoding="utf-8")


def failing(copy: Path, tests: tuple[str, ...], workers: int) -> str:
    """The first of these tests that fails, of all everyday tests without any, or nothing."""
    if absent := [test for test in tests if not (copy / test.partition("::")[0]).exists()]:
        sys.exit(f"tests/mutation names tests that are not there: {', '.join(absent)}")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", str(workers), "--dist", "worksteal", "-m", "not slow"]
    environment = {
        **os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    run = subprocess.run([*command, *tests], cwd=copy, env=environment, capture_output=True, text=True)
    if run.returncode == 0:
        return ""
    if failed := FAILED.search(run.stdout):
        return failed[1].partition(" - ")[0]
    sys.exit(
        f"pytest ended with status {run.returncode} and no failing test:\n{run.stdout[-3000:]}{run.stderr[-3000:]}"
    )


if __name__ == "__main__":
    sys.exit(main())
