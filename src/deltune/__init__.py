"""deltune: parameter-efficient tuning of pretrained language models over one design space."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algebra import Modification, Selection
    from .attaching import attach, export, load, tuned
    from .attention import prefix_attention, prefix_report
    from .budget import fit
    from .catalogue import methods, parse
    from .compositions import Add, Gate, Scale, SigmoidGate
    from .counting import Count, count
    from .errors import DeltuneError
    from .forms import Bottleneck, LowRank, Mixture, Prompt, Rescale, Vector
    from .handle import Tuned
    from .heads import MultiHead, OwnMultiHead, Prefix
    from .observe import inspect
    from .recipes import (
        adapter,
        apet,
        ia3,
        lora,
        mam,
        multi_head_parallel_adapter,
        p_tuning_v2,
        parallel_adapter,
        prefix,
        prefix_layernorm,
        prompt,
        scaled_parallel_adapter,
        three_vectors,
        unipelt,
    )
    from .selections import bitfit, diff_pruning, full, head, layernorm

__version__ = "0.1.0"

_FORMS = ("Bottleneck", "LowRank", "Mixture", "Prompt", "Rescale", "Vector")
_RECIPES = (
    "adapter", "apet", "ia3", "lora", "mam", "multi_head_parallel_adapter",
    "p_tuning_v2", "parallel_adapter", "prefix", "prefix_layernorm", "prompt", "scaled_parallel_adapter",
    "three_vectors", "unipelt",
)  # fmt: skip
_SELECTIONS = ("bitfit", "diff_pruning", "full", "head", "layernorm")
_HEADS = ("MultiHead", "OwnMultiHead", "Prefix")

_HOME = {
    **dict.fromkeys(("Modification", "Selection"), "algebra"),
    **dict.fromkeys(("Add", "Scale", "Gate", "SigmoidGate"), "compositions"),
    **dict.fromkeys(_FORMS, "forms"),
    **dict.fromkeys(_HEADS, "heads"),
    **dict.fromkeys(_RECIPES, "recipes"),
    **dict.fromkeys(_SELECTIONS, "selections"),
    **dict.fromkeys(("attach", "export", "load", "tuned"), "attaching"),
    **dict.fromkeys(("prefix_attention", "prefix_report"), "attention"),
    "Tuned": "handle",
    **dict.fromkeys(("count", "Count"), "counting"),
    **dict.fromkeys(("methods", "parse"), "catalogue"),
    "DeltuneError": "errors",
    "fit": "budget",
    "inspect": "observe",
}

__all__ = [
    "Add", "Bottleneck", "Count", "DeltuneError", "Gate", "LowRank", "Mixture", "Modification", "MultiHead",
    "OwnMultiHead", "Prefix", "Prompt", "Rescale", "Scale", "Selection", "SigmoidGate", "Tuned", "Vector", "adapter",
    "apet", "attach", "bitfit", "count", "diff_pruning", "export", "fit", "full", "head", "ia3", "inspect",
    "layernorm", "load", "lora", "mam", "methods", "multi_head_parallel_adapter", "p_tuning_v2", "parallel_adapter",
    "parse", "prefix", "prefix_attention", "prefix_layernorm", "prefix_report", "prompt", "scaled_parallel_adapter",
    "three_vectors", "tuned", "unipelt",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names are imported when first used, so that `import deltune` needs neither torch nor transformers."""
    if name not in _HOME:
        raise AttributeError(f"module 'deltune' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
