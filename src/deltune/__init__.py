"""deltune: parameter-efficient tuning of pretrained language models over one design space."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .anatomy.inspection import inspect
    from .errors import DeltuneError
    from .methods.attention_forms import MultiHead, OwnMultiHead, Prefix
    from .methods.budget import fit
    from .methods.compositions import Add, Gate, Scale, SigmoidGate
    from .methods.counting import Count, count
    from .methods.forms import Bottleneck, LowRank, Mixture, Prompt, Rescale, Vector
    from .methods.library import (
        adapter,
        apet,
        bitfit,
        diff_pruning,
        full,
        head,
        ia3,
        layernorm,
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
    from .methods.registry import methods, parse
    from .methods.spec import Modification, Selection
    from .runtime.attaching import attach, export, load, tuned
    from .runtime.attention import prefix_attention, prefix_report
    from .runtime.handle import Tuned

from ._version import __version__ as __version__

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
    **dict.fromkeys(("Modification", "Selection"), "methods.spec"),
    **dict.fromkeys(("Add", "Scale", "Gate", "SigmoidGate"), "methods.compositions"),
    **dict.fromkeys(_FORMS, "methods.forms"),
    **dict.fromkeys(_HEADS, "methods.attention_forms"),
    **dict.fromkeys(_STACKS, "methods.forms"),
    **dict.fromkeys(_RECIPES, "methods.library"),
    **dict.fromkeys(_SELECTIONS, "methods.library"),
    **dict.fromkeys(("attach", "export", "load", "tuned"), "runtime.attaching"),
    **dict.fromkeys(("prefix_attention", "prefix_report"), "runtime.attention"),
    "Tuned": "runtime.handle",
    **dict.fromkeys(("count", "Count"), "methods.counting"),
    **dict.fromkeys(("methods", "parse"), "methods.registry"),
    "DeltuneError": "errors",
    "fit": "methods.budget",
    "inspect": "anatomy.inspection",
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
