"""Files that cannot be read or written, told in one way."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from .errors import DeltuneError, Full

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SAID = ("no space", "file too large", "is full")
"""Of errors without a number: those of safetensors and SQLite."""


def refused(where: str | Path, error: Exception, whole: str = "what is there is whole") -> DeltuneError:
    """The error for a write that the system, or safetensors or SQLite for it, refused; whole: what is not lost."""
    number = getattr(error, "errno", None)
    if number in FULL or (number is None and any(said in str(error).lower() for said in SAID)):
        return Full(f"no space left for {where}; {whole}. Make room and run the same command again")
    return DeltuneError(f"{where} cannot be written or read: {error}; {whole}")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Error: none there, or none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DeltuneError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DeltuneError(f"{path} is no JSON object but {type(found).__name__}")
    return found
