"""Pieces of work, done one after the other and kept: what was interrupted goes on where it was."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .rows import Row

PACKAGES = ("deltune", "torch", "transformers", "peft", "accelerate")


@dataclass(frozen=True)
class Piece:
    """Some rows that are measured together. seconds: about how long that takes on two cores."""

    name: str
    measure: Callable[[], list[Row]]
    seconds: float


@dataclass
class Report:
    """What was found, in one file: rows, seconds and commit by piece, the pieces that are left, and the machine."""

    path: Path
    machine: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    commits: dict[str, str | None] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Report:
        """Errors: OSError, ValueError and KeyError for a file that is none of ours."""
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = {piece: [Row.of_json(row) for row in of_piece] for piece, of_piece in content["rows"].items()}
        return cls(path, content["machine"], rows, content["seconds"], content["commits"], content["left"])

    @classmethod
    def begin(
        cls,
        path: Path,
        machine: dict[str, Any],
        pieces: Sequence[Piece],
        known: Sequence[Piece] = (),
        again: bool = False,
    ) -> Report:
        """The file's report, if it is of this machine and these versions, else an empty one; `left` has what is asked.

        Of pieces that an interrupted run has left, only those; else all of them, `again` in any case. Nothing stays of
        pieces that there are no more; known: those that there are besides the ones asked for.
        """
        report = cls.read(path) if path.is_file() else cls(path, machine)
        if report.machine != machine:
            report = cls(path, machine)
        names = {piece.name for piece in (*pieces, *known)}
        for of_piece in (report.rows, report.seconds, report.commits):
            for gone in of_piece.keys() - names:
                del of_piece[gone]
        report.left = [name for name in report.left if name in names]
        picked = [piece.name for piece in pieces]
        if again or not set(picked) & set(report.left):
            report.left = [*picked, *(name for name in report.left if name not in picked)]
        return report

    def write(self) -> None:
        """Whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = {piece: [row.json() for row in of_piece] for piece, of_piece in self.rows.items()}
        known = {"machine": self.machine, "left": self.left, "seconds": self.seconds, "commits": self.commits}
        fresh = self.path.with_suffix(".fresh")
        fresh.write_text(json.dumps({**known, "rows": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(fresh, self.path)

    def all_rows(self) -> list[Row]:
        return [row for of_piece in self.rows.values() for row in of_piece]


def machine(threads: int) -> dict[str, Any]:
    """What the numbers depend on: processor, threads, versions."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def commit() -> str | None:
    """Of the checkout that this is, with `-dirty` where it was changed."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def carry_out(pieces: Sequence[Piece], report: Report, begins: Callable[[Piece], None]) -> None:
    """Measure every piece that is left, writing after each. begins: is told of each before."""
    for piece in pieces:
        if piece.name not in report.left:
            continue
        begins(piece)
        began = time.perf_counter()
        report.rows[piece.name] = piece.measure()
        report.seconds[piece.name] = round(time.perf_counter() - began, 1)
        report.commits[piece.name] = commit()
        report.left.remove(piece.name)
        report.write()


def chosen(parts: Mapping[str, Sequence[Piece]], only: str) -> list[Piece]:
    """The pieces of the parts (a,b,…) that are named. Error: a part that does not exist."""
    names = only.split(",")
    if unknown := [name for name in names if name not in parts]:
        raise SystemExit(f"there is no part {', '.join(unknown)}; the parts are {', '.join(parts)}")
    return [piece for name in names for piece in parts[name]]
