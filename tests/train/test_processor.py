"""The name of the processor in environment.json."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from deltune.train import records

LINUX = "processor\t: 0\nvendor_id\t: X\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Xeon\ncpu MHz\t: 2100\n"


def test_a_processor_is_named_by_its_first_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(f"{LINUX}\n{LINUX.replace('85', '86')}")
    monkeypatch.setattr(records, "CPUINFO", tmp_path / "cpuinfo")
    assert records.processor_name() == "Xeon, family 6, model 85"
    monkeypatch.setattr(records, "CPUINFO", tmp_path / "none")
    assert records.processor_name() == (platform.processor() or platform.machine())
