"""The processor: one reading of it names it in environment.json and tells the measured products of machines apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltune import processor

LINUX = "processor\t: 0\nvendor_id\t: X\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Xeon\ncpu MHz\t: 2100\n"


def test_a_processor_is_named_by_its_first_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes from reading to reading, such as the frequency, is no fact of it."""
    (tmp_path / "cpuinfo").write_text(f"{LINUX}\n{LINUX.replace('85', '86')}")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    assert processor.processor_name() == "Xeon, family 6, model 85"
    linux = {"vendor_id": "X", "cpu family": "6", "model": "85", "model name": "Xeon"}
    assert {k: v for k, v in processor.processor_facts().items() if k not in ("machine", "processor")} == linux
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")
    facts = processor.processor_facts()
    assert set(facts) == {"machine", "processor"}
    assert processor.processor_name() == (facts["processor"] or facts["machine"])
