"""What "Towards a Unified View of Parameter-Efficient Transfer Learning" (He et al. 2022) claims, study by study.

Margins are ours and said to be so, but where the text prints a difference. uv/representation and uv/full have the axes
"site" (attention, ffn) × "method" × "budget"; the prefix without its gate is the method "prefix ungated".
"""

from __future__ import annotations

from typing import Any

from .cells import EVERY, LARGEST, SMALLEST
from .claims import Beats, Best, Both, Claim, Falls, Fewer, Rises, Within

MATCHES = 1.0
"""Points below full tuning that still count as its performance (ours)."""

FULL = {"method": "full", "budget": EVERY}
EXISTING = ("adapter", "prefix", "lora")


def _at(site: str, method: str, budget: Any = LARGEST) -> dict[str, Any]:
    return {"site": site, "method": method, "budget": budget}


def _method(name: str) -> dict[str, Any]:
    return {"method": name}


FFN_WINS = Claim(
    "the same method at the FFN beats it at attention",
    "§4.4, figure 5",
    Both(tuple(Beats(_at("ffn", m), _at("attention", m)) for m in ("parallel_adapter", "lora"))),
)
ANY_FFN_WINS = Claim(
    "any method at the FFN beats every method at attention at a large budget",
    "§4.4, figure 5",
    Both(tuple(
        Beats(_at("ffn", m), _at("attention", other))
        for m in ("parallel_adapter", "lora") for other in ("parallel_adapter", "lora", "prefix")
    )),
)  # fmt: skip
FFN_GROWS = Claim(
    "the FFN uses a larger budget better than attention does",
    "§4.4, figure 5, table 4",
    Rises(
        "budget",
        {"site": "ffn", "method": "parallel_adapter"},
        less={"site": "attention", "method": "parallel_adapter"},
    ),
)
PREFIX_STOPS = Claim(
    "prefix-tuning does not keep improving with more parameters: less than 1 point a decade (margin ours)",
    "§4.4, figure 5, table 12",
    Falls("budget", {"site": "attention", "method": "prefix"}, margin=1.0),
)

UV_CLAIMS: dict[str, tuple[Claim, ...]] = {
    "uv/budget": (
        Claim("full tuning stays ahead of the existing methods at their largest budget", "§4.2, figure 4",
              Both(tuple(Beats(FULL, {"method": m, "budget": LARGEST}) for m in EXISTING))),
        Claim("adapter, prefix and LoRA beat BitFit and prompt tuning", "§4.1, figure 2, table 6",
              Both(tuple(Beats({"method": m, "budget": LARGEST}, {"method": low, "budget": EVERY})
                         for m in EXISTING for low in ("bitfit", "prompt")))),
        Claim("MAM matches full tuning: no more than 1 point below (margin ours)", "abstract, figure 2",
              Within({"method": "mam", "budget": LARGEST}, FULL, MATCHES)),
    ),
    "uv/insertion": (
        Claim("parallel beats sequential insertion, at attention and at the FFN", "§4.3, table 3", Both(tuple(
            Beats({"site": site, "insertion": "parallel"}, {"site": site, "insertion": "sequential"})
            for site in ("attention", "ffn")
        ))),
        Claim("the parallel adapter at the FFN is the best of the four", "§4.3, table 3", Both(tuple(
            Beats({"site": "ffn", "insertion": "parallel"}, {"site": site, "insertion": insertion})
            for site, insertion in (("ffn", "sequential"), ("attention", "parallel"), ("attention", "sequential"))
        ))),
    ),
    "uv/representation": (
        FFN_WINS,
        ANY_FFN_WINS,
        FFN_GROWS,
        PREFIX_STOPS,
        Claim("at a tiny budget the methods with heads beat those without", "§4.4, table 4", Both(tuple(
            Beats(_at("attention", m, SMALLEST), _at(site, "parallel_adapter", SMALLEST))
            for m in ("prefix", "multi_head_parallel_adapter") for site in ("attention", "ffn")
        ))),
        Claim("at a tiny budget the gate helps the prefix", "§4.4, table 4",
              Beats(_at("attention", "prefix", SMALLEST), _at("attention", "prefix ungated", SMALLEST))),
    ),
    "uv/composition": (
        Claim("scaling helps LoRA: s = 4 beats s = 1", "§4.5, table 5",
              Beats(_method("lora s=4"), _method("lora s=1"))),
        Claim("scaling helps the parallel adapter: s = 4 beats s = 1", "§4.5, table 5",
              Beats(_method("spa s=4"), _method("pa s=1"))),
        Claim("LoRA with s = 4 beats the parallel adapter", "§4.5, table 5",
              Beats(_method("lora s=4"), _method("pa s=1"))),
        Claim("at s = 1 LoRA's advantage is gone: not 0.3 points ahead (it was 0.33)", "§4.5, table 5",
              Within(_method("pa s=1"), _method("lora s=1"), 0.3)),
        Claim("a learned scale is no better than s = 4: not 0.3 points ahead (margin ours)", "§4.5, table 5",
              Within(_method("spa s=4"), _method("spa learned"), 0.3)),
        Claim("the scaled parallel adapter is the best", "§4.5, table 5",
              Best(_method("spa s=4"), "method", but=("spa learned",))),
    ),
    "uv/integration": (
        Claim("MAM is the best of the parameter-efficient methods", "§4.6, table 6",
              Best(_method("mam"), "method", but=("full",))),
        Claim("MAM matches full tuning: no more than 1 point below (margin ours)", "§4.6, table 6",
              Within(_method("mam"), _method("full"), MATCHES)),
        Claim("prefix + LoRA at the FFN beats both alone", "§4.6, table 6", Both((
            Beats(_method("prefix+lora_ffn"), _method("prefix")),
            Beats(_method("prefix+lora_ffn"), _method("lora_ffn")),
        ))),
        Claim("MAM has fewer parameters than the parallel adapter with r = 1024 and beats it", "§4.6, table 6", Both((
            Beats(_method("mam"), _method("parallel_adapter_ffn")),
            Fewer(_method("mam"), _method("parallel_adapter_ffn")),
        ))),
        Claim("BitFit and prompt tuning lag behind every other method", "§4.1, table 6", Both(tuple(
            Beats(_method(m), _method(low))
            for m in ("prefix", "adapter", "lora_ffn") for low in ("bitfit", "prompt")
        ))),
    ),
    "uv/full": (
        Claim("parallel beats sequential insertion at attention and at the FFN, whatever the bottleneck",
              "footnote 11, table 12", Both(tuple(
                  Beats(_at(site, "parallel_adapter", EVERY), _at(site, "adapter", EVERY))
                  for site in ("attention", "ffn")))),
        FFN_WINS,
        PREFIX_STOPS,
    ),
    "uv/glue": (
        Claim("MAM matches full tuning with 0.5 % of the parameters: no more than 1 point below (margin ours)",
              "§4.6, table 2", Within(_method("mam"), _method("full"), MATCHES)),
        Claim("prefix, LoRA and adapter are competitive too: no more than 1 point below (margin ours)",
              "§4.2, table 2", Both(tuple(Within(_method(m), _method("full"), MATCHES) for m in EXISTING))),
    ),
}  # fmt: skip
