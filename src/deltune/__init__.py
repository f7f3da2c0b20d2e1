"""deltune: parameter-efficient tuning of pretrained language models over one design space."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algebra import Add, Gate, Modification, Scale, Selection
    from .attaching import attach, load, tuned
    from .catalogue import methods, parse
    from .counting import Count, count
    from .errors import DeltuneError
    from .forms import Bottleneck, LowRank, Prefix, Prompt, Vector
    from .handle import Tuned
    from .observe import inspect

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(("Modification", "Selection", "Add", "Scale", "Gate"), "algebra"),
    **dict.fromkeys(("Bottleneck", "LowRank", "Prefix", "Prompt", "Vector"), "forms"),
    **dict.fromkeys(("attach", "load", "tuned"), "attaching"),
    "Tuned": "handle",
    **dict.fromkeys(("count", "Count"), "counting"),
    **dict.fromkeys(("methods", "parse"), "catalogue"),
    "DeltuneError": "errors",
    "inspect": "observe",
}

__all__ = [
    "Add", "Bottleneck", "Count", "DeltuneError", "Gate", "LowRank", "Modification", "Prefix", "Prompt", "Scale",
    "Selection", "Tuned", "Vector", "attach", "count", "inspect", "load", "methods", "parse", "tuned",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names are imported when first used, so that `import deltune` needs neither torch nor transformers."""
    if name not in _HOME:
        raise AttributeError(f"module 'deltune' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
