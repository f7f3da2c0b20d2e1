"""What processor this machine has, of which depend the order in which sums are rounded and the fastest product."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
"""Where Linux describes the processors; virtual machines hide the name there, but not the numbers."""
FIELDS = ("vendor_id", "cpu family", "model", "stepping", "model name", "flags", "Features", "CPU part")
"""The fields of that file that tell processors apart."""


def processor_facts() -> dict[str, str]:
    """Return what tells processors apart: the machine, and the first processor that Linux shows."""
    facts = {"machine": platform.machine(), "processor": platform.processor()}
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in FIELDS:
                facts.setdefault(name.strip(), value.strip())
    return facts


def processor_name() -> str:
    """Return the name and the numbers of the processor, whose instructions decide in which order sums are rounded."""
    facts = processor_facts()
    if "model name" not in facts:
        return facts["processor"] or facts["machine"]
    return f"{facts['model name']}, family {facts.get('cpu family')}, model {facts.get('model')}"
