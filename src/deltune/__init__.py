"""deltune: parameter-efficient tuning of pretrained language models over one design space."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algebra.budget import fit
    from .algebra.catalogue import methods, parse
    from .algebra.counting import Count, count
    from .algebra.elements import Modification, Selection
    from .algebra.recipes import (
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
    from .algebra.selections import bitfit, diff_pruning, full, head, layernorm
    from .anatomy.observe import inspect
    from .errors import DeltuneError
    from .live.attaching import attach, export, load, tuned
    from .live.attention import prefix_attention, prefix_report
    from .live.handle import Tuned
    from .mathematics.compositions import Add, Gate, Scale, SigmoidGate
    from .mathematics.forms import Bottleneck, LowRank, Rescale, Vector
    from .mathematics.heads import MultiHead, OwnMultiHead, Prefix
    from .mathematics.stacks import Mixture, Prompt

__version__ = "0.1.0"

_FORMS = ("Bottleneck", "LowRank", "Rescale", "Vector")
_RECIPES = (
    "adapter", "apet", "ia3", "lora", "mam", "multi_head_parallel_adapter",
    "p_tuning_v2", "parallel_adapter", "prefix", "prefix_layernorm", "prompt", "scaled_parallel_adapter",
    "three_vectors", "unipelt",
)  # fmt: skip
_SELECTIONS = ("bitfit", "diff_pruning", "full", "head", "layernorm")
_HEADS = ("MultiHead", "OwnMultiHead", "Prefix")
_STACKS = ("Mixture", "Prompt")

_HOME = {
    **dict.fromkeys(("Modification", "Selection"), "algebra.elements"),
    **dict.fromkeys(("Add", "Scale", "Gate", "SigmoidGate"), "mathematics.compositions"),
    **dict.fromkeys(_FORMS, "mathematics.forms"),
    **dict.fromkeys(_HEADS, "mathematics.heads"),
    **dict.fromkeys(_STACKS, "mathematics.stacks"),
    **dict.fromkeys(_RECIPES, "algebra.recipes"),
    **dict.fromkeys(_SELECTIONS, "algebra.selections"),
    **dict.fromkeys(("attach", "export", "load", "tuned"), "live.attaching"),
    **dict.fromkeys(("prefix_attention", "prefix_report"), "live.attention"),
    "Tuned": "live.handle",
    **dict.fromkeys(("count", "Count"), "algebra.counting"),
    **dict.fromkeys(("methods", "parse"), "algebra.catalogue"),
    "DeltuneError": "errors",
    "fit": "algebra.budget",
    "inspect": "anatomy.observe",
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
