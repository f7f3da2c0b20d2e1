"""The processor of this machine, whose instructions decide in which order sums are rounded."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
"""Where Linux describes the processors; virtual machines hide the name there, but not the numbers."""


def processor_name() -> str:
    """Return the name and the numbers of the first processor that Linux shows, or what Python knows of it."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return f"{facts['model name']}, family {facts.get('cpu family')}, model {facts.get('model')}"
