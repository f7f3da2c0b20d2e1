"""The studies of "Towards a Unified View of Parameter-Efficient Transfer Learning" (He et al. 2022), at two scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...train import TASKS
from ..claims.claims import (
    AllOf,
    Beats,
    Best,
    Between,
    Claim,
    DropsLess,
    Falls,
    FewerParameters,
    InEach,
    Rises,
    Within,
)
from ..claims.comparisons import TIME
from ..claims.selectors import EVERY, LARGEST, SECOND_SMALLEST, SMALLEST
from ..report.figure_spec import Scatter, TableSpec
from ..scales import StudySetup, Variant, cross_product, join_plans, method_variants
from ..study import CellPlan, Study
from .published import (
    PROTOTYPES_IN,
    UV_TABLE2,
    UV_TABLE3,
    UV_TABLE4_BY_BUDGET,
    UV_TABLE5,
    UV_TABLE6,
    UV_TABLE12_BY_BUDGET,
)
from .questions import QUESTIONS

LORA_SCALES = (1, 2, 4)
"""The scales that are tried for LoRA, in this order until one is no better on validation (§A.1; which ones is ours)."""

MATCHES = 1.0
"""Points below full tuning that still count as its performance (ours)."""

FULL = {"method": "full", "budget": EVERY}
EXISTING = ("adapter", "prefix", "lora")
PROTOTYPES = ("pa_attention", "pa_ffn")
"""The parallel adapters of table 6's sum alone, which that table leaves out."""


TABLE12_SHARES = {
    "large": ("2.4 to 3.6", "6.1 to 9.2", "12.3", "6.1 to 7.2"), "g2p": ("1.6", "6.6", "13", "6.6"),
    "encoder": ("0.1", "0.4", "1.1", "0.4"),
}  # fmt: skip
"""Kind of model -> the nominal shares of table 12's three bottlenecks, and of LoRA."""


def _at(site: str, method: str, budget: Any = LARGEST) -> dict[str, Any]:
    return {"site": site, "method": method, "budget": budget}


def _labelled(name: str) -> dict[str, Any]:
    return {"method": name}


BARE_PREFIX = (
    "The prefixes here are trained without the paper's MLP, and on g2p they stay at an exact match of 14 to 17 %, "
    "whatever their length."
)
FFN_WINS = Claim(
    "the same method at the FFN always beats it at attention",
    "§4.4, figure 5, table 12",
    InEach(AllOf(tuple(Beats(_at("ffn", m), _at("attention", m)) for m in ("parallel_adapter", "lora")))),
)
FFN_WINS_AT_EACH_SIZE = Claim(
    "the same method at the FFN always beats it at attention, whatever the bottleneck",
    "§4.4, table 12",
    InEach(AllOf(tuple(
        Beats({"site": "ffn", "method": m}, {"site": "attention", "method": m})
        for m in ("adapter", "parallel_adapter", "lora")
    ))),
    exclude={"budget": tuple(shares[2] for shares in TABLE12_SHARES.values())},  # these are at the FFN alone
    repeats="uv/representation",
)  # fmt: skip
ANY_FFN_WINS = Claim(
    "any method at the FFN beats all methods at attention at a large budget, in all cases",
    "§4.4, figure 5",
    InEach(AllOf(tuple(
        Beats(_at("ffn", m), _at("attention", other))
        for m in ("parallel_adapter", "lora") for other in ("parallel_adapter", "lora", "prefix")
    ))),
)  # fmt: skip
FFN_GROWS = Claim(
    "the FFN uses a larger budget better than attention does",
    "§4.4, figure 5, table 4",
    Rises(
        "budget",
        {"site": "ffn", "method": "parallel_adapter"},
        minus={"site": "attention", "method": "parallel_adapter"},
    ),
)
PREFIX_STOPS = Claim(
    "prefix-tuning does not keep improving with more parameters: less than 1 point from the fewest to the most (margin "
    "ours)",
    "§4.4, figure 5, table 12",
    Falls("budget", {"site": "attention", "method": "prefix"}, margin=1.0),
    untestable=BARE_PREFIX,
)
MAM_TIME = Claim(
    "MAM takes 100 % to 150 % of full tuning's training time on every task",
    "ethics statement",
    InEach(Between(_labelled("mam"), TIME, low=100.0, high=150.0)),
)

UV_CLAIMS: dict[str, tuple[Claim, ...]] = {
    "uv/budget": (
        Claim("full tuning stays ahead of the existing methods at their largest budget", "§4.2, figure 4",
              AllOf(tuple(Beats(FULL, {"method": m, "budget": LARGEST}) for m in EXISTING))),
        Claim("adapter, prefix and LoRA beat BitFit and prompt tuning", "§4.1, figure 2, table 6",
              AllOf(tuple(Beats({"method": m, "budget": LARGEST}, {"method": low, "budget": EVERY})
                         for m in EXISTING for low in ("bitfit", "prompt")))),
        Claim("MAM matches full tuning: no more than 1 point below (margin ours)", "abstract, figure 2",
              Within({"method": "mam", "budget": LARGEST}, FULL, MATCHES)),
    ),
    "uv/insertion": (
        Claim("parallel beats sequential insertion in all cases, at attention and at the FFN", "§4.3, table 3",
              InEach(AllOf(tuple(
                  Beats({"site": site, "insertion": "parallel"}, {"site": site, "insertion": "sequential"})
                  for site in ("attention", "ffn")
              )))),
        Claim("prefix-tuning, which is parallel, beats sequential insertion at attention", "§4.3, table 3",
              Beats({"site": "attention", "insertion": "prefix"}, {"site": "attention", "insertion": "sequential"}),
              untestable=BARE_PREFIX),
        Claim("the parallel adapter at the FFN is the best of the four", "§4.3, table 3", AllOf(tuple(
            Beats({"site": "ffn", "insertion": "parallel"}, {"site": site, "insertion": insertion})
            for site, insertion in (("ffn", "sequential"), ("attention", "parallel"), ("attention", "sequential"))
        ))),
    ),
    "uv/representation": (
        FFN_WINS,
        ANY_FFN_WINS,
        FFN_GROWS,
        PREFIX_STOPS,
        Claim("at a tiny budget the methods with heads beat those without", "§4.4, table 4", AllOf(tuple(
            Beats(_at("attention", m, SMALLEST), _at(site, "parallel_adapter", SMALLEST))
            for m in ("prefix", "multi_head_parallel_adapter") for site in ("attention", "ffn")
        )), untestable=BARE_PREFIX),
        Claim("at a tiny budget the gate helps the prefix", "§4.4, table 4",
              Beats(_at("attention", "prefix", SMALLEST), _at("attention", "prefix ungated", SMALLEST)),
              untestable=BARE_PREFIX),
        Claim("reducing 200 vectors to 30 costs the prefix less than the parallel adapter at attention: 0.4 against "
              "1.9 BLEU", "§4.4, table 4",
              DropsLess({"site": "attention", "method": "prefix"}, {"site": "attention", "method": "parallel_adapter"},
                        "budget", SECOND_SMALLEST, SMALLEST), printed_in="table 4",
              miniature="Here 32 vectors become 4, and the loss is in points of exact match and entity F1.",
              untestable=BARE_PREFIX),
    ),
    "uv/composition": (
        Claim("scaling helps LoRA: s = 4 beats s = 1", "§4.5, table 5",
              Beats(_labelled("lora s=4"), _labelled("lora s=1"))),
        Claim("scaling helps the parallel adapter: s = 4 beats s = 1", "§4.5, table 5",
              Beats(_labelled("spa s=4"), _labelled("pa s=1"))),
        Claim("LoRA with s = 4 beats the parallel adapter", "§4.5, table 5",
              Beats(_labelled("lora s=4"), _labelled("pa s=1"))),
        Claim("at s = 1 LoRA's advantage is gone: not 0.3 points ahead (it was 0.33)", "§4.5, table 5",
              Within(_labelled("pa s=1"), _labelled("lora s=1"), 0.3)),
        Claim("a learned scale is no better than s = 4: not 0.3 points ahead (margin ours)", "§4.5, table 5",
              Within(_labelled("spa s=4"), _labelled("spa learned"), 0.3)),
        Claim("the scaled parallel adapter is the best", "§4.5, table 5",
              Best(_labelled("spa s=4"), "method", exclude=("spa learned",))),
    ),
    "uv/integration": (
        Claim("MAM is the best of the parameter-efficient methods on both tasks", "§4.6, table 6",
              InEach(Best(_labelled("mam"), "method", exclude=("full", *PROTOTYPES)))),
        Claim("MAM matches full tuning: no more than 1 point below (margin ours)", "§4.6, table 6",
              Within(_labelled("mam"), _labelled("full"), MATCHES), repeats="uv/budget"),
        Claim("prefix + LoRA at the FFN beats both alone", "§4.6, table 6", AllOf((
            Beats(_labelled("prefix+lora_ffn"), _labelled("prefix")),
            Beats(_labelled("prefix+lora_ffn"), _labelled("lora_ffn")),
        ))),
        Claim("parallel adapters at attention and at the FFN together beat both alone, at their sizes", "§4.6, table 6",
              AllOf(tuple(Beats(_labelled("pa_attention+pa_ffn"), _labelled(alone)) for alone in PROTOTYPES)),
              printed_in=PROTOTYPES_IN),
        Claim("MAM has fewer parameters than the parallel adapter with r = 1024 and beats it",
              "our reading of table 6", AllOf((
            Beats(_labelled("mam"), _labelled("parallel_adapter_ffn")),
            FewerParameters(_labelled("mam"), _labelled("parallel_adapter_ffn")),
        )), miniature="Here the parallel adapter has r = 128 on g2p and r = 40 on CoNLL04."),
        Claim("BitFit and prompt tuning lag behind prefix, adapter and LoRA", "§4.1, table 6", AllOf(tuple(
            Beats(_labelled(m), _labelled(low))
            for m in ("prefix", "adapter", "lora_ffn") for low in ("bitfit", "prompt")
        )), repeats="uv/budget"),
        MAM_TIME,
    ),
    "uv/full": (
        Claim("parallel beats sequential insertion at attention and at the FFN, whatever the bottleneck",
              "footnote 11, table 12", InEach(AllOf(tuple(
                  Beats({"site": site, "method": "parallel_adapter"}, {"site": site, "method": "adapter"})
                  for site in ("attention", "ffn")))), repeats="uv/insertion"),
        FFN_WINS_AT_EACH_SIZE,
        replace(PREFIX_STOPS, repeats="uv/representation"),
    ),
    "uv/glue": (
        Claim("MAM matches full tuning with 0.5 % of the parameters on all tasks: no more than 1 point below (margin "
              "ours)", "abstract, §4.6, table 2", InEach(Within(_labelled("mam"), _labelled("full"), MATCHES)),
              miniature="Here MAM trains 0.09 % of the parameters, and SICK stands for MNLI."),
        Claim("prefix, LoRA and adapter are competitive too: no more than 1 point below (margin ours)",
              "§4.2, table 2", AllOf(tuple(Within(_labelled(m), _labelled("full"), MATCHES) for m in EXISTING))),
        replace(MAM_TIME, repeats="uv/integration"),
    ),
}  # fmt: skip


METRIC = ("rouge2", "bleu", "exact", "entity_f1", "accuracy")
SHOWN_METRICS = {"paper": ("rouge1", "rouge2", "rougeL", "rougeLsum", "bleu"), "small": ("exact", "per", "entity_f1")}
SIGNS = "g2p_us_to_gb"

STARTS = "Adapters start with BERT's initialisation, W_up included, and scaled parallel adapters start as LoRA does."
TUNED = (
    "LoRA's scale is tried at 1, 2 and 4 in this order, up to the first that is no better on validation under the "
    f"first seed, for each learning rate (the paper does not print what it tried). {STARTS}"
)
TIME_NOTE = (
    "Training time to converge is the time until a run's validation score has come 95 % of the way to its own best, in "
    "percent of full tuning's."
)
SEARCHED_NOTE = (
    "Each method at each size has the learning rate that validates best on each model and task, of four and of further "
    "ones while the best is at an edge: all are tried under the first seed, and the best two under the second."
)
UNTUNED_SMALL_NOTE = (
    "There are two tasks in place of summaries and translation. In the first, “g2p”, a BART with one layer on either "
    "side, which can write the American pronunciation of a word, learns the British one from 1,200 words. It is scored "
    "by exact match, and by the phoneme error rate beside it. In the second an encoder of two layers learns the "
    f"entities of CoNLL04. {SEARCHED_NOTE} Prefixes are trained directly and not through an MLP."
)
SMALL_NOTE = f"{UNTUNED_SMALL_NOTE} {TUNED}"
PAPER_NOTE = (
    f"{TUNED} Full tuning trains by the settings of its own sources (Lewis et al. 2020, Liu et al. 2020, Liu et al. "
    "2019). Validation data of XSum are the hub's, cut to 1,600."
)
NAMES = {
    "full": "full tuning", "bitfit": "BitFit", "prompt": "prompt", "prefix": "prefix", "adapter": "adapter",
    "lora": "LoRA", "mam": "MAM", "xsum": "XSum", "wmt16_en_ro": "en-ro", SIGNS: "g2p", "sick": "SICK",
    "conll04": "CoNLL04",
    "sst2": "SST-2", "mnli": "MNLI", "lora_ffn": "LoRA (FFN)", "parallel_adapter_ffn": "PA (FFN)",
    "pa_attention": "PA (attention), alone", "pa_ffn": "PA (FFN), alone",
    "pa_attention+pa_ffn": "PA (attention) + PA (FFN)", "prefix+lora_ffn": "prefix + LoRA (FFN)",
    "lora s=4": "LoRA, s = 4", "lora s=1": "LoRA, s = 1", "pa s=1": "PA", "spa s=4": "scaled PA, s = 4",
    "spa learned": "scaled PA, s learned", "parallel_adapter": "parallel adapter", "ffn": "FFN",
    "multi_head_parallel_adapter": "multi-head PA", "prefix ungated": "prefix without gate",
    "minilm-d128": "MiniLM d128", "g2p-en-us-bart": "BART of two layers", "exact": "exact match",
    "bart-large": "BART-large", "mbart-large": "mBART-large", "per": "phoneme error rate",
}  # fmt: skip


def _plan(
    setup: StudySetup,
    name: str,
    variants: Callable[[str], Sequence[Variant]],
    tasks: Sequence[str],
) -> CellPlan:
    """Return the cells of a study; `variants` gives those for a kind of model: large (the papers'), g2p, encoder."""
    if setup.small:
        grids = {SIGNS: ("g2p-en-us-bart", "g2p"), "conll04": ("minilm-d128", "encoder"),
                 "sst2": ("minilm-d128", "encoder")}  # fmt: skip
        return join_plans(*(
            cross_product(setup, name, {model: model}, (task,), variants(kind))
            for task, (model, kind) in grids.items() if task in tasks
        ))  # fmt: skip
    models = {"xsum": ("bart-large", "facebook/bart-large", "uv_xsum"),
              "wmt16_en_ro": ("mbart-large", "facebook/mbart-large-cc25", "uv_enro")}  # fmt: skip
    return join_plans(*(
        cross_product(setup, name, {label: model}, (task,), variants("large"), {"protocol": protocol})
        for task, (label, model, protocol) in models.items() if task in tasks
    ))  # fmt: skip


PAPER_TASKS, SMALL_TASKS = ("xsum", "wmt16_en_ro"), (SIGNS, "conll04")


def _tasks(setup: StudySetup) -> tuple[str, ...]:
    return SMALL_TASKS if setup.small else PAPER_TASKS


def _prefix(length: int, kind: str, gate: bool = True) -> str:
    """Return a prefix; for large models reparameterised by an MLP, of the width that the paper's code has."""
    return f"prefix(length={length}{', reparameterise=800' if kind == 'large' else ''}{'' if gate else ', gate=False'})"


def _parallel_adapter(site: str, rank: int) -> str:
    return f"parallel_adapter(at={site!r}, rank={rank}, zero_up=False)"


def _sequential_adapter(site: str, rank: int) -> str:
    return f"Modification({site!r}, Bottleneck({rank}, zero_up=False), 'sequential')"


def _pfeiffer(rank: int) -> str:
    return f"adapter(style='pfeiffer', rank={rank}, zero_up=False)"


def _multi_head_adapter(length: int) -> str:
    return f"multi_head_parallel_adapter(length={length}, zero_up=False)"


def _lora(site: str, rank: int, scale: float) -> str:
    return f"lora(rank={rank}, scale={scale:g}{', at=' + repr('ffn') if site == 'ffn' else ''})"


def _tuned_lora(site: str, rank: int, beside: str = "") -> tuple[str, ...]:
    """Return LoRA with each scale to try, beside another method or alone."""
    return tuple(f"{beside}{_lora(site, rank, scale)}" for scale in LORA_SCALES)


def _mam(length: int, rank: int, kind: str) -> str:
    return f"{_prefix(length, kind)} + scaled_parallel_adapter(rank={rank}, scale=4)"


def _labelled_variants(expressions: Mapping[Any, str | tuple[str, ...]], *axes: str) -> list[Variant]:
    """Return a variant for each expression, by its labels on the axes; of several the best on validation is taken."""
    return [
        Variant(
            dict(zip(axes, labels if len(axes) > 1 else (labels,), strict=True)),
            {"method": method} if isinstance(method, str) else {"method": method[0], "search": {"method": method}},
        )
        for labels, method in expressions.items()
    ]


def budget(setup: StudySetup) -> Study:
    """Return the study of UV figures 2 and 4. Budgets are nominal shares; the figure shows the exact ones."""

    def variants(kind: str) -> list[Variant]:
        if kind == "large":
            ranks = {"0.02": (1, 1, 1), "0.5": (30, 30, 15), "3.6": (200, 300, 100), "9": (512, 750, 256)}
            prompt, low, mam = 200, "0.1", _mam(30, 512, kind)
        elif kind == "g2p":
            ranks = {"0.4": (4, 4, 2), "3.3": (32, 48, 16), "10": (96, 144, 48)}
            prompt, low, mam = 16, "0.3", _mam(16, 64, kind)
        else:
            ranks = {"0.05": (4, 4, 2), "0.4": (32, 32, 16), "1.5": (128, 128, 64)}
            prompt, low, mam = 10, "0.03", _mam(16, 64, kind)
        largest, adapter = list(ranks)[-1], partial(_sequential_adapter, "ffn") if setup.small else _pfeiffer
        expressions: dict[Any, str | tuple[str, ...]] = {
            ("full", "100"): "full",
            ("bitfit", low): _bitfit_expression(kind),
            ("prompt", low): f"prompt(length={prompt})",
        }
        for share, (length, rank, lora) in ranks.items():
            expressions["prefix", share] = _prefix(length, kind)
            expressions["adapter", share] = adapter(rank)
            expressions["lora", share] = _tuned_lora("attention", lora)
        expressions["mam", largest] = mam
        return _labelled_variants(expressions, "method", "budget")

    return Study(
        "uv/budget",
        QUESTIONS["uv/budget"],
        _plan(setup, "uv/budget", variants, _tasks(setup)),
        (
            Scatter(
                title="Score against parameters (UV figures 2 and 4)", y=METRIC, panels="task", display_names=NAMES,
                reference_lines={"full tuning": {"method": "full"}}, leads=True,
            ),
            TableSpec(title="The numbers", groups="method", rows="budget", metric=METRIC, display_names=NAMES,
                      average=False),
        ),
        METRIC,
        (SMALL_NOTE if setup.small else PAPER_NOTE)
        + " Points of the figure are read off budgets of our own: it prints none. "
        + ("The paper's bottleneck of 1 is left out, and the adapter is a sequential one at the FFN." if setup.small
           else "The adapter is Pfeiffer's, as in table 6: the figure does not say which."),
    )  # fmt: skip


def _bitfit_expression(kind: str) -> str:
    return "bitfit(which='linear')" if kind != "large" else "bitfit"


def insertion(setup: StudySetup) -> Study:
    """Return the study of UV table 3."""

    def variants(kind: str) -> list[Variant]:
        rank = {"large": 200, "g2p": 32, "encoder": 16}[kind]
        expressions = {("attention", "prefix"): _prefix(rank, kind)}
        for site in ("attention", "ffn"):
            expressions[site, "sequential"], expressions[site, "parallel"] = (
                _sequential_adapter(site, rank),
                _parallel_adapter(site, rank),
            )
        return _labelled_variants(expressions, "site", "insertion")

    return Study(
        "uv/insertion",
        QUESTIONS["uv/insertion"],
        _plan(setup, "uv/insertion", variants, _tasks(setup)),
        (
            TableSpec(
                title="Forms of insertion (UV table 3)", groups="site", rows="insertion", columns=("task", "metric"),
                metric=SHOWN_METRICS[setup.scale], average=False,
                display_names={**NAMES, "prefix": "prefix (for comparison)"},
                order={"insertion": ("prefix", "sequential", "parallel")}, published={} if setup.small else UV_TABLE3,
            ),
        ),
        METRIC,
        SMALL_NOTE if setup.small else PAPER_NOTE,
    )  # fmt: skip


def representation(setup: StudySetup) -> Study:
    """Return the study of UV figure 5 and table 4."""

    def variants(kind: str) -> list[Variant]:
        sizes = {
            "large": {"0.4 to 0.5": 30, "2.4 to 3.6": 200, "6.1 to 9.2": 512}, "g2p": {"0.4": 4, "3": 32, "10": 96},
            "encoder": {"0.05": 4, "0.4": 32, "1.5": 128},
        }[kind]  # fmt: skip
        tiny, middle, largest = sizes
        expressions: dict[Any, str | tuple[str, ...]] = {
            ("attention", "prefix ungated", tiny): _prefix(sizes[tiny], kind, gate=False),
            **{
                ("attention", "multi_head_parallel_adapter", share): _multi_head_adapter(sizes[share])
                for share in (tiny, middle)
            },
        }
        for share, size in sizes.items():
            expressions["attention", "prefix", share] = _prefix(size, kind)
            for site in ("attention", "ffn"):
                expressions[site, "parallel_adapter", share] = _parallel_adapter(site, size)
        for site, factor in (("attention", 2), ("ffn", 5)):
            for share in (tiny, largest):
                expressions[site, "lora", share] = _tuned_lora(site, max(1, sizes[share] // factor))
        return _labelled_variants(expressions, "site", "method", "budget")

    return Study(
        "uv/representation",
        QUESTIONS["uv/representation"],
        _plan(setup, "uv/representation", variants, _tasks(setup)),
        (
            Scatter(
                title="Attention or FFN (UV figure 5)", y=METRIC, panels="task", series=("site", "method"),
                display_names=NAMES,
            ),
            _site_table("Tiny and larger budgets, in % (UV table 4)", METRIC, setup, UV_TABLE4_BY_BUDGET),
        ),
        METRIC,
        (SMALL_NOTE if setup.small else PAPER_NOTE)
        + " Budgets are nominal: lengths and ranks are equal at both sites, so that the exact shares differ.",
    )  # fmt: skip


def _site_table(
    title: str, metric: tuple[str, ...], setup: StudySetup, paper: Mapping[tuple[str, ...], float]
) -> TableSpec:
    return TableSpec(
        title=title, groups="method", rows="site", columns=("task", "budget"), metric=metric, average=False,
        display_names=NAMES, published={} if setup.small else paper,
    )  # fmt: skip


def composition(setup: StudySetup) -> Study:
    """Return the study of UV table 5."""

    def variants(kind: str) -> list[Variant]:
        rank, lora = {"large": (512, 102), "g2p": (64, 7), "encoder": (20, 4)}[kind]

        def scaled(scale: object) -> str:
            return f"scaled_parallel_adapter(rank={rank}, scale={scale!r})"

        return method_variants({
            "lora s=4": _lora("ffn", lora, 4), "lora s=1": _lora("ffn", lora, 1),
            "pa s=1": _parallel_adapter("ffn", rank),
            "spa s=4": scaled(4), "spa learned": scaled("learned"),
        })  # fmt: skip

    return Study(
        "uv/composition",
        QUESTIONS["uv/composition"],
        _plan(setup, "uv/composition", variants, SMALL_TASKS if setup.small else ("xsum",)),
        (_methods_table("Compositions (UV table 5)", setup, UV_TABLE5, "xsum"),),
        METRIC,
        (f"{UNTUNED_SMALL_NOTE} {STARTS}" if setup.small else "s = 4 for both, as printed.")
        + " Scales are as the rows say. The learned scale starts at 1.",
    )


def _methods_table(title: str, setup: StudySetup, paper: Mapping[tuple[str, ...], float], task: str = "") -> TableSpec:
    """Return a table of all methods; `task` is the only one at paper scale."""
    shown = tuple(name for name in SHOWN_METRICS[setup.scale] if not task or setup.small or name in TASKS[task].metrics)
    return TableSpec(
        title=title, columns=("task", "metric"), metric=shown, average=False, display_names=NAMES,
        published={} if setup.small else paper,
    )  # fmt: skip


def integration(setup: StudySetup) -> Study:
    """Return the study of UV table 6."""

    def variants(kind: str) -> list[Variant]:
        length, short_length, rank, large, lora, prompt = {
            "large": (200, 30, 512, 1024, 102, 200), "g2p": (32, 8, 64, 128, 7, 16),
            "encoder": (16, 4, 20, 40, 4, 10),
        }[kind]  # fmt: skip
        pfeiffer = {"large": 600, "g2p": 80, "encoder": 24}[kind]
        return _labelled_variants({
            "full": "full", "bitfit": _bitfit_expression(kind), "prompt": f"prompt(length={prompt})",
            "prefix": _prefix(length, kind), "adapter": _pfeiffer(pfeiffer),
            "lora_ffn": _tuned_lora("ffn", lora), "parallel_adapter_ffn": _parallel_adapter("ffn", large),
            "pa_attention": _parallel_adapter("attention", short_length), "pa_ffn": _parallel_adapter("ffn", rank),
            "pa_attention+pa_ffn": f"{_parallel_adapter('attention', short_length)} + {_parallel_adapter('ffn', rank)}",
            "prefix+lora_ffn": _tuned_lora("ffn", lora, f"{_prefix(short_length, kind)} + "),
            "mam": _mam(short_length, rank, kind),
        }, "method")  # fmt: skip

    return Study(
        "uv/integration",
        QUESTIONS["uv/integration"],
        _plan(setup, "uv/integration", variants, _tasks(setup)),
        (_methods_table("All methods and combinations (UV table 6)", setup, UV_TABLE6),),
        METRIC,
        f"{SMALL_NOTE} {TIME_NOTE}"
        if setup.small
        else f"{PAPER_NOTE} The prompt has 200 vectors: the paper prints 0.1 % and no length. {TIME_NOTE}",
    )


def full(setup: StudySetup) -> Study:
    """Return the study of UV table 12."""

    def variants(kind: str) -> list[Variant]:
        small, large, larger, at_attention, at_ffn = {
            "large": (200, 512, 1024, 200, 102), "g2p": (16, 64, 128, 25, 7), "encoder": (8, 32, 96, 18, 6),
        }[kind]  # fmt: skip
        shares = TABLE12_SHARES[kind]
        at = dict(zip((small, large, larger), shares, strict=False))
        expressions: dict[Any, str | tuple[str, ...]] = {}
        for size in (small, large, larger):
            for site in ("attention", "ffn"):
                if site == "ffn" or size != larger:
                    expressions[site, "adapter", at[size]] = _sequential_adapter(site, size)
                    expressions[site, "parallel_adapter", at[size]] = _parallel_adapter(site, size)
            if size != larger:
                expressions["attention", "prefix", at[size]] = _prefix(size, kind)
        expressions["attention", "lora", shares[3]] = _tuned_lora("attention", at_attention)
        expressions["ffn", "lora", shares[3]] = _tuned_lora("ffn", at_ffn)
        return _labelled_variants(expressions, "site", "method", "budget")

    tasks = _tasks(setup)
    return Study(
        "uv/full",
        QUESTIONS["uv/full"],
        _plan(setup, "uv/full", variants, tasks),
        (
            _site_table("Bottlenecks, as budgets in % (UV table 12)", METRIC, setup, UV_TABLE12_BY_BUDGET),
            Scatter(title="Score against parameters", y=METRIC, panels="task", series=("site", "method"),
                    display_names=NAMES),
        ),
        METRIC,
        (SMALL_NOTE if setup.small else PAPER_NOTE)
        + " Budgets are nominal shares by bottleneck; the exact ones differ by site.",
    )  # fmt: skip


def glue(setup: StudySetup) -> Study:
    """Return the study of UV table 2."""
    tasks = ("sick" if setup.small else "mnli", "sst2")

    def variants(sizes: tuple[int, int, int, int, int]) -> list[Variant]:
        mam, rank, prefix, lora, adapter = sizes
        return _labelled_variants({
            "full": "full", "bitfit": "bitfit" if not setup.small else "bitfit(which='linear')",
            "prefix": f"prefix(length={prefix})", "lora": _tuned_lora("attention", lora),
            "adapter": _sequential_adapter("ffn", adapter), "mam": f"mam(length={mam}, rank={rank}, scale=2)",
        }, "method")  # fmt: skip

    options: dict[str, Any] = {"max_train_rows": 1500} if setup.small else {"protocol": "uv_glue"}
    model = {"minilm-d128": "minilm-d128"} if setup.small else {"roberta-base": "FacebookAI/roberta-base"}
    sizes = (4, 4, 8, 4, 8) if setup.small else (16, 16, 32, 16, 32)
    seeds = None if setup.small else (0, 1, 2, 3, 4)
    return Study(
        "uv/glue",
        QUESTIONS["uv/glue"],
        cross_product(setup, "uv/glue", model, tasks, variants(sizes), options, seeds),
        (
            TableSpec(title="Understanding (UV table 2)", display_names=NAMES, order={"task": tasks}, median=True,
                  published={} if setup.small else UV_TABLE2),
        ),
        "accuracy",
        "The model is an encoder of two layers that sees 1,500 rows of each task. SICK stands in place of MNLI, of "
        "which the model learns nothing from so few rows (its validation loss stays at 1.10, that of a guess). The "
        "methods train 0.05 % to 0.09 % of the parameters, where MAM has 0.5 % in the paper. The table has medians "
        "over seeds, as in the paper. Claims are about means over seeds, so that their differences are not those of "
        f"the table. {SEARCHED_NOTE} {TUNED} {TIME_NOTE}"
        if setup.small
        else "The table has medians of 5 seeds, as in the paper; claims are about the means of all of them. "
        f"{TUNED} {TIME_NOTE} MAM has s = 2, the released code's for GLUE. BitFit's printed numbers are from "
        "elsewhere. The labels of GLUE's tests are hidden: give --data-root with folders whose test split is the "
        "validation split.",
    )  # fmt: skip


UV_STUDIES: Mapping[str, Callable[[StudySetup], Study]] = {
    "uv/budget": budget, "uv/insertion": insertion, "uv/representation": representation,
    "uv/composition": composition, "uv/integration": integration, "uv/full": full, "uv/glue": glue,
}  # fmt: skip
