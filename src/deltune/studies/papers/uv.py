"""The studies of "Towards a Unified View of Parameter-Efficient Transfer Learning" (He et al. 2022), at two scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...tasks.registry import TASKS
from ..claims.claims import Beats, Best, Both, Claim, Falls, Fewer, Rises, Within
from ..claims.comparisons import EVERY, LARGEST, SMALLEST
from ..report.figure_spec import Scatter, Table
from ..scales import Choice, StudySetup, Wanted, choices, crossed, joined
from ..study import Study
from .published import UV_TABLE2, UV_TABLE3, UV_TABLE5, UV_TABLE6

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


METRIC = ("rouge2", "bleu", "exact", "entity_f1", "accuracy")
SHOWN = {"paper": ("rouge1", "rouge2", "rougeL", "rougeLsum", "bleu"), "small": ("exact", "per", "entity_f1")}
SIGNS = "g2p_us_to_gb"

SMALLER = (
    "A BART with one layer on either side that says English words in American learns their British sounds (1,200 "
    "words, scored by exact match, greedy), and an encoder of two layers learns the entities of CoNLL04: both are far "
    "smaller than the paper's models and tasks. Prefixes are not made by an MLP."
)
LARGE = (
    "LoRA's scale is 4, which the paper's search found on XSum (where s is not what is compared). Validation data of "
    "XSum are the hub's, cut to 1,600."
)
WRITTEN = {
    "full": "full tuning", "bitfit": "BitFit", "prompt": "prompt", "prefix": "prefix", "adapter": "adapter",
    "lora": "LoRA", "mam": "MAM", "xsum": "XSum", "wmt16_en_ro": "en-ro", SIGNS: "g2p", "sick": "SICK",
    "conll04": "CoNLL04",
    "sst2": "SST-2", "mnli": "MNLI", "lora_ffn": "LoRA (FFN)", "parallel_adapter_ffn": "PA (FFN)",
    "pa_attention+pa_ffn": "PA (attention) + PA (FFN)", "prefix+lora_ffn": "prefix + LoRA (FFN)",
    "lora s=4": "LoRA, s = 4", "lora s=1": "LoRA, s = 1", "pa s=1": "PA", "spa s=4": "scaled PA, s = 4",
    "spa learned": "scaled PA, s learned", "parallel_adapter": "parallel adapter", "ffn": "FFN",
    "multi_head_parallel_adapter": "multi-head PA", "prefix ungated": "prefix without gate",
}  # fmt: skip


def _wanted(
    place: StudySetup,
    name: str,
    chosen: Callable[[str], Sequence[Choice]],
    tasks: Sequence[str],
    seeds: tuple[int, ...] = (0, 1, 2),
) -> Wanted:
    """chosen: the choices on a model of these: large (the papers'), g2p, encoder."""
    if place.small:
        grids = {SIGNS: ("g2p-en-us-bart", "g2p"), "conll04": ("minilm-d128", "encoder"),
                 "sst2": ("minilm-d128", "encoder")}  # fmt: skip
        return joined(*(
            crossed(place, name, {model: model}, (task,), chosen(kind), seeds=seeds)
            for task, (model, kind) in grids.items() if task in tasks
        ))  # fmt: skip
    models = {"xsum": ("bart-large", "facebook/bart-large", "uv_xsum"),
              "wmt16_en_ro": ("mbart-large", "facebook/mbart-large-cc25", "uv_enro")}  # fmt: skip
    return joined(*(
        crossed(place, name, {label: model}, (task,), chosen("large"), {"protocol": protocol}, seeds)
        for task, (label, model, protocol) in models.items() if task in tasks
    ))  # fmt: skip


BOTH, SMALL_BOTH = ("xsum", "wmt16_en_ro"), (SIGNS, "conll04")


def _tasks(place: StudySetup) -> tuple[str, ...]:
    return SMALL_BOTH if place.small else BOTH


def _prefix(length: int, kind: str, gate: bool = True) -> str:
    """The paper makes prefixes by an MLP, of the width that its code has."""
    return f"prefix(length={length}{', reparameterise=800' if kind == 'large' else ''}{'' if gate else ', gate=False'})"


def _pa(site: str, rank: int) -> str:
    return f"parallel_adapter(at={site!r}, rank={rank})"


def _sa(site: str, rank: int) -> str:
    return f"Modification({site!r}, Bottleneck({rank}), 'sequential')"


def _lora(site: str, rank: int, scale: float = 4) -> str:
    return f"lora(rank={rank}, scale={scale:g}{', at=' + repr('ffn') if site == 'ffn' else ''})"


def _mam(length: int, rank: int, kind: str, scale: float = 4) -> str:
    return f"{_prefix(length, kind)} + scaled_parallel_adapter(rank={rank}, scale={scale:g})"


def _chosen(of: Mapping[Any, str], *axes: str) -> list[Choice]:
    """A choice for each expression, by its labels on the axes."""
    return [Choice(dict(zip(axes, labels, strict=True)), {"method": method}) for labels, method in of.items()]


def budget(place: StudySetup) -> Study:
    """UV figures 2 and 4. Budgets are nominal shares; the figure shows the exact ones."""

    def chosen(kind: str) -> list[Choice]:
        if kind == "large":
            ranks = {"0.5": (30, 30, 15), "3.6": (200, 300, 100), "9": (512, 750, 256)}
            prompt, low, mam = 200, "0.1", _mam(30, 512, kind)
        elif kind == "g2p":
            ranks = {"0.4": (4, 4, 2), "3.3": (32, 48, 16), "10": (96, 144, 48)}
            prompt, low, mam = 16, "0.3", _mam(16, 64, kind)
        else:
            ranks = {"0.05": (4, 4, 2), "0.4": (32, 32, 16), "1.5": (128, 128, 64)}
            prompt, low, mam = 10, "0.03", _mam(16, 64, kind)
        largest = list(ranks)[-1]
        found = {("full", "100"): "full", ("bitfit", low): _bitfit(kind), ("prompt", low): f"prompt(length={prompt})"}
        for share, (length, rank, lora) in ranks.items():
            found["prefix", share] = _prefix(length, kind)
            found["adapter", share] = _sa("ffn", rank)
            found["lora", share] = _lora("attention", lora)
        found["mam", largest] = mam
        return _chosen(found, "method", "budget")

    return Study(
        "uv/budget",
        "How do scores grow with the share of tuned parameters, and is full tuning reached? (UV figures 2 and 4)",
        _wanted(place, "uv/budget", chosen, _tasks(place)),
        (
            Scatter(
                title="Score against parameters (UV figures 2 and 4)", y=METRIC, panels="task", written=WRITTEN,
                levels={"full tuning": {"method": "full"}},
            ),
            Table(title="The numbers", groups="method", rows="budget", metric=METRIC, written=WRITTEN, average=False),
        ),
        METRIC,
        (SMALLER if place.small else LARGE) + " Points of the figure are read off budgets of our own: it prints none.",
    )  # fmt: skip


def _bitfit(kind: str) -> str:
    return "bitfit(which='linear')" if kind != "large" else "bitfit"


def insertion(place: StudySetup) -> Study:
    """UV table 3."""

    def chosen(kind: str) -> list[Choice]:
        rank = {"large": 200, "g2p": 32, "encoder": 16}[kind]
        found = {("attention", "prefix"): _prefix(rank, kind)}
        for site in ("attention", "ffn"):
            found[site, "sequential"], found[site, "parallel"] = _sa(site, rank), _pa(site, rank)
        return _chosen(found, "site", "insertion")

    return Study(
        "uv/insertion",
        "Sequential or parallel insertion, at attention and at the FFN? (UV table 3)",
        _wanted(place, "uv/insertion", chosen, _tasks(place)),
        (
            Table(
                title="Forms of insertion (UV table 3)", groups="site", rows="insertion", columns=("task", "metric"),
                metric=SHOWN[place.scale], average=False, written={**WRITTEN, "prefix": "prefix (for comparison)"},
                order={"insertion": ("prefix", "sequential", "parallel")}, paper={} if place.small else UV_TABLE3,
            ),
        ),
        METRIC,
        SMALLER if place.small else LARGE,
    )  # fmt: skip


def representation(place: StudySetup) -> Study:
    """UV figure 5 and table 4."""

    def chosen(kind: str) -> list[Choice]:
        sizes = {
            "large": {"0.1": 30, "3": 200, "9": 512}, "g2p": {"0.4": 4, "3": 32, "10": 96},
            "encoder": {"0.05": 4, "0.4": 32, "1.5": 128},
        }[kind]  # fmt: skip
        tiny, *_, largest = sizes
        found = {
            ("attention", "prefix ungated", tiny): _prefix(sizes[tiny], kind, gate=False),
            ("attention", "multi_head_parallel_adapter", tiny): f"multi_head_parallel_adapter(length={sizes[tiny]})",
        }
        for share, size in sizes.items():
            found["attention", "prefix", share] = _prefix(size, kind)
            for site in ("attention", "ffn"):
                found[site, "parallel_adapter", share] = _pa(site, size)
        for site, factor in (("attention", 2), ("ffn", 5)):
            for share in (tiny, largest):
                found[site, "lora", share] = _lora(site, max(1, sizes[share] // factor))
        return _chosen(found, "site", "method", "budget")

    return Study(
        "uv/representation",
        "Which is better modified, attention or FFN, with a large budget and with a tiny one? (UV figure 5, table 4)",
        _wanted(place, "uv/representation", chosen, _tasks(place)),
        (
            Scatter(
                title="Attention or FFN (UV figure 5)", y=METRIC, panels="task", series=("site", "method"),
                written=WRITTEN,
            ),
            _by_site("A tiny budget and larger ones (UV table 4)", METRIC),
        ),
        METRIC,
        (SMALLER if place.small else LARGE)
        + " Budgets are nominal: lengths and ranks are equal at both sites, so that the exact shares differ.",
    )  # fmt: skip


def _by_site(title: str, metric: tuple[str, ...]) -> Table:
    return Table(
        title=title, groups="method", rows="site", columns=("task", "budget"), metric=metric, average=False,
        written=WRITTEN,
    )  # fmt: skip


def composition(place: StudySetup) -> Study:
    """UV table 5."""

    def chosen(kind: str) -> list[Choice]:
        rank, lora = {"large": (512, 102), "g2p": (64, 14), "encoder": (20, 4)}[kind]

        def scaled(scale: object) -> str:
            return f"scaled_parallel_adapter(rank={rank}, scale={scale!r})"

        return choices({
            "lora s=4": _lora("ffn", lora, 4), "lora s=1": _lora("ffn", lora, 1), "pa s=1": _pa("ffn", rank),
            "spa s=4": scaled(4), "spa learned": scaled("learned"),
        })  # fmt: skip

    return Study(
        "uv/composition",
        "Does scaling Δh help, and need the scale be learned? (UV table 5)",
        _wanted(place, "uv/composition", chosen, SMALL_BOTH if place.small else ("xsum",)),
        (_methods("Compositions (UV table 5)", place, UV_TABLE5, "xsum"),),
        METRIC,
        (SMALLER if place.small else "s = 4 for both, as printed.") + " The learned scale starts at 1.",
    )


def _methods(title: str, place: StudySetup, paper: Mapping[tuple[str, ...], float], task: str = "") -> Table:
    """task: the only one at paper scale."""
    shown = tuple(name for name in SHOWN[place.scale] if not task or place.small or name in TASKS[task].metrics)
    return Table(
        title=title, columns=("task", "metric"), metric=shown, average=False, written=WRITTEN,
        paper={} if place.small else paper,
    )  # fmt: skip


def integration(place: StudySetup) -> Study:
    """UV table 6."""

    def chosen(kind: str) -> list[Choice]:
        length, short, rank, large, lora, prompt = {
            "large": (200, 30, 512, 1024, 102, 200), "g2p": (32, 8, 64, 128, 14, 16),
            "encoder": (16, 4, 20, 40, 4, 10),
        }[kind]  # fmt: skip
        pfeiffer = {"large": 600, "g2p": 80, "encoder": 24}[kind]
        return choices({
            "full": "full", "bitfit": _bitfit(kind), "prompt": f"prompt(length={prompt})",
            "prefix": _prefix(length, kind), "adapter": f"adapter(style='pfeiffer', rank={pfeiffer})",
            "lora_ffn": _lora("ffn", lora), "parallel_adapter_ffn": _pa("ffn", large),
            "pa_attention+pa_ffn": f"{_pa('attention', short)} + {_pa('ffn', rank)}",
            "prefix+lora_ffn": f"{_prefix(short, kind)} + {_lora('ffn', lora)}", "mam": _mam(short, rank, kind),
        })  # fmt: skip

    return Study(
        "uv/integration",
        "Do combinations of the favourable choices match full tuning? (UV table 6)",
        _wanted(place, "uv/integration", chosen, _tasks(place)),
        (_methods("All methods and combinations (UV table 6)", place, UV_TABLE6),),
        METRIC,
        SMALLER if place.small else LARGE + " The prompt has 200 vectors: the paper prints 0.1 % and no length.",
    )


def full(place: StudySetup) -> Study:
    """UV table 12."""

    def chosen(kind: str) -> list[Choice]:
        small, large, larger, lora = {"large": (200, 512, 1024, 102), "g2p": (16, 64, 128, 14),
                                      "encoder": (8, 32, 96, 6)}[kind]  # fmt: skip
        shares = {"large": ("3", "8", "12", "6.1"), "g2p": ("1.6", "6.6", "13", "6.6"),
                  "encoder": ("0.1", "0.4", "1.1", "0.4")}[kind]  # fmt: skip
        at = dict(zip((small, large, larger), shares, strict=False))
        found = {}
        for size in (small, large, larger):
            for site in ("attention", "ffn"):
                if site == "ffn" or size != larger:
                    found[site, "adapter", at[size]] = _sa(site, size)
                    found[site, "parallel_adapter", at[size]] = _pa(site, size)
            if size != larger:
                found["attention", "prefix", at[size]] = _prefix(size, kind)
        found["attention", "lora", shares[3]] = _lora("attention", 200 if kind == "large" else max(1, small // 2))
        found["ffn", "lora", shares[3]] = _lora("ffn", lora)
        return _chosen(found, "site", "method", "budget")

    tasks = _tasks(place)
    return Study(
        "uv/full",
        "All methods at attention and FFN with several bottlenecks (UV table 12)",
        _wanted(place, "uv/full", chosen, tasks),
        (
            _by_site("Bottlenecks (UV table 12)", METRIC),
            Scatter(title="Score against parameters", y=METRIC, panels="task", series=("site", "method"),
                    written=WRITTEN),
        ),
        METRIC,
        (SMALLER if place.small else LARGE)
        + " Budgets are nominal shares by bottleneck; table 12's numbers are not set beside ours, for its shares "
        "differ by site at one bottleneck.",
    )  # fmt: skip


def glue(place: StudySetup) -> Study:
    """UV table 2."""
    tasks = ("sick" if place.small else "mnli", "sst2")

    def chosen(sizes: tuple[int, int, int, int, int]) -> list[Choice]:
        mam, rank, prefix, lora, adapter = sizes
        return choices({
            "full": "full", "bitfit": "bitfit" if not place.small else "bitfit(which='linear')",
            "prefix": f"prefix(length={prefix})", "lora": f"lora(rank={lora}, scale=2)",
            "adapter": f"parallel_adapter(rank={adapter})", "mam": f"mam(length={mam}, rank={rank}, scale=2)",
        })  # fmt: skip

    options: dict[str, Any] = {"max_train_rows": 1500} if place.small else {"protocol": "uv_glue"}
    model = {"minilm-d128": "minilm-d128"} if place.small else {"roberta-base": "FacebookAI/roberta-base"}
    sizes = (4, 4, 8, 4, 8) if place.small else (16, 16, 32, 16, 32)
    seeds = (0, 1, 2) if place.small else (0, 1, 2, 3, 4)
    return Study(
        "uv/glue",
        "Do the methods match full tuning on understanding with 0.5 % of the parameters? (UV table 2)",
        crossed(place, "uv/glue", model, tasks, chosen(sizes), options, seeds),
        (
            Table(title="Understanding (UV table 2)", written=WRITTEN, order={"task": tasks},
                  paper={} if place.small else UV_TABLE2),
        ),
        "accuracy",
        "An encoder of two layers and 1,500 rows of each task; SICK in place of MNLI, of which it learns nothing from "
        "so few (validation loss 1.10, a guess's)."
        if place.small
        else "The mean of 5 seeds; the paper has their median, and BitFit's numbers from elsewhere. The labels of "
        "GLUE's tests are hidden: give --data-root with folders whose test split is the validation split.",
    )  # fmt: skip


UV_STUDIES: Mapping[str, Callable[[StudySetup], Study]] = {
    "uv/budget": budget, "uv/insertion": insertion, "uv/representation": representation,
    "uv/composition": composition, "uv/integration": integration, "uv/full": full, "uv/glue": glue,
}  # fmt: skip
