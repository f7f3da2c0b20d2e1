"""A missing extra is named, with the packages that it lacks, before anything else is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltune.errors import DeltuneError, check_extra

METADATA = """Metadata-Version: 2.4
Name: deltune
Version: 0.1.0
Requires-Dist: torch
Requires-Dist: numpy
Requires-Dist: no-such-package-a>=1; extra == "small"
Requires-Dist: numpy; extra == "small"
Requires-Dist: deltune[small]; extra == "large"
Requires-Dist: no-such-package-b; extra == "large"
Requires-Dist: numpy; extra == "complete"
"""


@pytest.fixture(autouse=True)
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed deltune whose extras name packages that nobody has."""
    folder = tmp_path / "deltune-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("extra", "packages"),
    [("small", "no-such-package-a"), ("large", "no-such-package-a, no-such-package-b")],
)
def test_what_is_missing_is_named(extra: str, packages: str) -> None:
    with pytest.raises(DeltuneError) as caught:
        check_extra(extra, "tests need")
    assert str(caught.value) == f"tests need {packages}: pip install 'deltune[{extra}]'"


def test_a_complete_extra_passes() -> None:
    check_extra("complete", "tests need")
