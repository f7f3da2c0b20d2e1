"""The studies of "Parameter-Efficient Tuning on Layer Normalization" (Qi et al. 2022), each at two scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from ...training.config import RunConfig
from ..claims.claims import Beats, Best, Both, Claim, Fewer, Within
from ..claims.comparisons import EVERY, LARGEST, SMALLEST
from ..claims.measurements import RANK, score
from ..engine.jobs import Job, term_change_job, timing_job
from ..engine.outcomes import Outcome
from ..engine.store import JobRecord
from ..report.figure_spec import Bars, Heat, Scatter, Table
from ..scales import SEEDS, StudySetup, Values, Wanted, choices, crossed, joined
from ..study import Rows, Study, Want
from .published import LN_TABLE1, LN_TABLE2, LN_TABLE5

LN, BITFIT, MAM, UNION = ({"method": name} for name in ("layernorm", "bitfit", "mam", "prefix_layernorm"))
THREE, PREFIX, ADAPTER, LORA, FULL = (
    {"method": name} for name in ("three_vectors", "prefix", "adapter", "lora", "full")
)

NO_THREE = {"task": ("commonsense_qa", "social_iqa")}
"""Table 1's note: 3V cannot be applied to these."""

CHANGE = score("change", "mean absolute change")
TRAIN, INFERENCE = (score(name, "% of full tuning's time", lower=True) for name in ("train", "inference"))


def _added(with_norms: str, without: str) -> Beats:
    return Beats({"method": with_norms}, {"method": without})


LN_CLAIMS: dict[str, tuple[Claim, ...]] = {
    "ln/nlu": (
        Claim(
            "LN-tuning beats BitFit with half the parameters",
            "abstract, §3.2, table 1",
            Both((Beats(LN, BITFIT), Fewer(LN, BITFIT, ratio=0.5))),
        ),
        Claim("LN-tuning beats 3V", "§3.2, table 1", Beats(LN, THREE), off=NO_THREE),
        Claim("LN-tuning is inferior to methods with over 0.3 % of the parameters: adapter, prefix, LoRA, MAM",
              "§3.2, table 1", Both(tuple(Beats(other, LN) for other in (ADAPTER, PREFIX, LORA, MAM)))),
        Claim("prefix + LN beats MAM with fewer parameters", "§1, table 1",
              Both((Beats(UNION, MAM), Fewer(UNION, MAM)))),
        Claim("prefix + LN is the best of the parameter-efficient methods", "abstract, table 1",
              Best(UNION, "method", but=("full", "head", "three_vectors"))),
        Claim("adapter and prefix are comparable at equal parameters: within 1 point (margin ours)", "§3.2, table 1",
              Within(ADAPTER, PREFIX, 1.0, both=True)),
    ),
    "ln/nlg": (
        Claim("LN-tuning ranks better than BitFit", "§3.2, table 2", Beats(LN, BITFIT, reading=RANK)),
        Claim("prefix-tuning ranks better than MAM", "§3.2, table 2", Beats(PREFIX, MAM, reading=RANK)),
        Claim("prefix + LN ranks better than MAM with fewer parameters", "§1, table 2",
              Both((Beats(UNION, MAM, reading=RANK), Fewer(UNION, MAM)))),
        Claim("prefix + LN ranks best of the parameter-efficient methods", "abstract, table 2",
              Best(UNION, "method", but=("full",), reading=RANK)),
        Claim("full tuning ranks best of all", "table 2", Best(FULL, "method", reading=RANK)),
    ),
    "ln/time": (
        Claim("LN-tuning takes the least time in training", "§3.3, figure 2", Best(LN, "method", reading=TRAIN)),
        Claim("LN-tuning, BitFit and full tuning take similar time in inference: within 5 % (margin ours)",
              "§3.3, figure 4", Both(tuple(Within(LN, other, 5.0, both=True, reading=INFERENCE)
                                           for other in (BITFIT, FULL)))),
        Claim("LN-tuning is faster in inference than the methods that insert something", "§3.3, figure 4",
              Both(tuple(Beats(LN, other, reading=INFERENCE) for other in (ADAPTER, PREFIX, MAM)))),
        Claim("MAM takes the longest of the parameter-efficient methods in training", "appendix B, figure 2",
              Both(tuple(Beats(other, MAM, reading=TRAIN) for other in (LN, BITFIT, ADAPTER, PREFIX, LORA)))),
        Claim("every parameter-efficient method trains in less than 90 % of full tuning's time", "appendix B, figure 2",
              Both(tuple(Beats(method, FULL, margin=10.0, reading=TRAIN)
                         for method in (LN, BITFIT, ADAPTER, PREFIX, LORA, MAM)))),
        Claim("adapter-tuning trains faster than prefix-tuning", "appendix B, figure 2",
              Beats(ADAPTER, PREFIX, reading=TRAIN)),
    ),
    "ln/terms": (
        Claim("terms change more close to the output than close to the input", "§4, figure 3",
              Beats({"layers": "near output", "term": EVERY, "module": EVERY},
                    {"layers": "near input", "term": EVERY, "module": EVERY}, reading=CHANGE)),
        Claim("close to the output the gain changes more than the bias", "§4, figure 3",
              Beats({"layers": "near output", "term": "gain", "module": EVERY},
                    {"layers": "near output", "term": "bias", "module": EVERY}, reading=CHANGE)),
        Claim("terms change more where there are more data: SST-2 > SICK > CB", "§4, figure 3", Both((
            Beats({"task": "sst2"}, {"task": "sick"}, reading=CHANGE),
            Beats({"task": "sick"}, {"task": "cb"}, reading=CHANGE),
        ))),
        Claim("terms change more for answers and entities than for two classes", "§4, figure 3",
              Beats({"task": ("commonsense_qa", "broad_twitter")}, {"task": ("sst2", "sick", "cb")}, reading=CHANGE)),
    ),
    "ln/ablation": (
        Claim("every ablated method loses: LN-tuning has nothing superfluous", "§5, table 5",
              Best({"method": "all"}, "method", but=("gain+bias",))),
        Claim("bias alone beats gain alone", "§5, table 5", Beats({"method": "bias"}, {"method": "gain"})),
        Claim("the norm of attention alone beats that of the FFN alone (table 5 itself says the reverse)", "§5",
              Beats({"method": "attention norm"}, {"method": "ffn norm"})),
        Claim("leaving out layers costs more than leaving out modules", "§5, table 5",
              Beats({"method": ("attention norm", "ffn norm")}, {"method": ("lower half", "upper half")})),
        Claim("in the smaller model the lower half beats the upper half", "§5, table 5",
              Beats({"method": "lower half", "model": SMALLEST}, {"method": "upper half", "model": SMALLEST})),
        Claim("in the larger model the upper half beats the lower half", "§5, table 5",
              Beats({"method": "upper half", "model": LARGEST}, {"method": "lower half", "model": LARGEST})),
    ),
    "ln/unified": (
        Claim("layernorm added to a method at attention gains", "abstract of v3 (2)", Both((
            _added("prefix+layernorm", "prefix"), _added("adapter_attention+layernorm", "adapter_attention"),
        ))),
        Claim("layernorm added to a method at the FFN loses", "abstract of v3 (2)",
              _added("adapter_ffn", "adapter_ffn+layernorm")),
        Claim("layernorm added to MAM, at attention and the FFN, loses", "abstract of v3 (2)",
              _added("mam", "mam+layernorm")),
        Claim("prefix + adapter at attention + layernorm is the best", "abstract of v3 (1)",
              Best({"method": "prefix+adapter_attention+layernorm"}, "method", but=("full",))),
    ),
}  # fmt: skip


BERTS = {"bert-base": "google-bert/bert-base-uncased", "bert-large": "google-bert/bert-large-uncased"}
PROTOCOLS = {"bert-base": "ln_nlu", "bert-large": "ln_nlu_large"}
NLU = ("conll04", "broad_twitter", "sick", "snli", "sst2", "cb", "commonsense_qa", "social_iqa")
SMALL_NLU = ("conll04", "broad_twitter", "sst2", "cb")
SMALL_TWO = ("sst2", "conll04")
"""What small encoders learn from 1,000 rows; on SICK they stay at chance."""
CHOICE = ("commonsense_qa", "social_iqa")
SCORE = ("entity_f1", "accuracy")
DISTILLED = (
    "Small encoders distilled from MiniLM-L6, sub-samples of the data, and one learning rate a method (scales.RATES) "
    "instead of a search."
)

WRITTEN = {
    "full": "FT", "adapter": "Adapter", "prefix": "Prefix", "lora": "LoRA", "mam": "MAM", "three_vectors": "3V",
    "bitfit": "BitFit", "layernorm": "LN", "prefix_layernorm": "Prefix+LN", "conll04": "CN04",
    "broad_twitter": "Twitter", "sick": "SICK", "snli": "SNLI", "sst2": "SST-2", "cb": "CB", "commonsense_qa": "CSQA",
    "social_iqa": "SocIQA", "bert-base": "BERT-base", "bert-large": "BERT-large", "gpt2-medium": "GPT-2-medium",
    "minilm-d128": "MiniLM d128", "minilm-d192": "MiniLM d192", "minilm-d256": "MiniLM d256", "minilm": "MiniLM-L6",
    "e2e_nlg": "E2E", "samsum": "SAMSum", "dart": "DART", "all": "LN, whole", "gain": "only gain", "bias": "only bias",
    "ffn norm": "only FFN", "attention norm": "only MHA", "lower half": "only lower half",
    "upper half": "only upper half", "rouge1_pltrdy": "R-1", "rouge2_pltrdy": "R-2", "rougeL_pltrdy": "R-L",
    "stories260k": "stories 260k", "train": "training step, % of full tuning",
    "inference": "inference, % of full tuning", "forward": "forward alone, % of full tuning",
}  # fmt: skip


def methods(adapter: int, prefix: int, lora: int, mam: tuple[int, int]) -> dict[str, str]:
    """The methods of tables 1 and 2, by rank or length."""
    length, rank = mam
    return {
        "full": "full", "adapter": f"scaled_parallel_adapter(rank={adapter}, bias=True)",
        "prefix": f"prefix(length={prefix})", "lora": f"lora(rank={lora})",
        "mam": f"mam(length={length}, rank={rank})", "three_vectors": "three_vectors",
        "bitfit": "bitfit(which='linear')", "layernorm": "layernorm",
        "prefix_layernorm": f"prefix_layernorm(length={prefix})",
    }  # fmt: skip


SIZES: Mapping[str, dict[str, str]] = {
    "bert-base": methods(16, 16, 8, (8, 8)),
    "bert-large": methods(24, 24, 8, (8, 16)),
    "minilm-d128": methods(8, 8, 4, (4, 4)),
}
"""The paper gives no rank of LoRA; its .33 % is no whole rank. Here it is 8."""


def nlu(place: StudySetup) -> Study:
    """LN table 1."""
    models = ("minilm-d128",) if place.small else tuple(BERTS)
    tasks = SMALL_NLU if place.small else NLU
    return Study(
        "ln/nlu",
        "Does tuning only the norms compete with other ways to tune few parameters? (LN table 1)",
        joined(*(_nlu(place, "ln/nlu", model, tasks, SIZES[model]) for model in models)),
        (
            Table(
                title="Language understanding (LN table 1)", groups="model", metric=SCORE, rank=True,
                order={"method": tuple(SIZES["bert-base"]), "task": tasks}, written=WRITTEN, paper=LN_TABLE1,
            ),
            Scatter(
                title="Score against parameters", panels="task", y=SCORE, series=("method", "model"), written=WRITTEN,
                levels={"full tuning": {"method": "full"}},
            ),
        ),
        SCORE,
        f"{DISTILLED} Four of the eight tasks on one model: what depends on the model's size is not seen."
        if place.small
        else "LoRA has rank 8: the paper gives none, and its 0.33 % is no whole rank.",
    )  # fmt: skip


def _nlu(
    place: StudySetup,
    name: str,
    model: str,
    tasks: tuple[str, ...],
    several: Mapping[str, str],
    by_task: Mapping[str, Values] | None = None,
    **small: Any,
) -> Wanted:
    """Methods on understanding, by the paper's protocol for the model's size; by_task, small: at small scale."""

    def off(cell: Mapping[str, Any]) -> bool:
        return cell["method"] == "three_vectors" and cell["task"] in CHOICE

    given = small if place.small else {"protocol": PROTOCOLS[model]}
    return crossed(
        place, name, {model: BERTS.get(model, model)}, tasks, choices(several), given, off=off,
        by_task=by_task if place.small else None,
    )  # fmt: skip


STORIES = {
    "full": "full", "adapter": "scaled_parallel_adapter(rank=4)", "prefix": "prefix(length=8)", "lora": "lora(rank=2)",
    "mam": "mam(length=4, rank=4)", "bitfit": "bitfit(add_missing=True)", "layernorm": "layernorm",
    "prefix_layernorm": "prefix_layernorm(length=8)",
}  # fmt: skip
GPT2 = {
    "full": "full", "adapter": "scaled_parallel_adapter(rank=8)", "prefix": "prefix(length=8)", "lora": "lora(rank=4)",
    "mam": "mam(length=8, rank=8)", "bitfit": "bitfit", "layernorm": "layernorm",
    "prefix_layernorm": "prefix_layernorm(length=8)",
}  # fmt: skip
NLG = ("e2e_nlg", "samsum", "dart")


def nlg(place: StudySetup) -> Study:
    """LN table 2."""
    if place.small:
        few = {"max_train_rows": 800, "validation_rows": 40, "test_rows": 60, "max_length": 64, "target_length": 32}
        by_task: dict[str, Values] = {
            "e2e_nlg": {"metrics": ("bleu", "nist", "rougeL", "cider")}, "dart": {"metrics": ("bleu", "ter", "chrf")},
            "samsum": {"max_length": 96},
        }  # fmt: skip
        wanted = crossed(
            place, "ln/nlg", {"stories260k": "stories260k-llama"}, NLG, choices(STORIES),
            {**few, "batch_size": 8, "steps": 60, "validate_every": 30, "metric": "loss"}, by_task=by_task,
        )  # fmt: skip
    else:
        wanted = crossed(
            place, "ln/nlg", {"gpt2-medium": "openai-community/gpt2-medium"}, NLG, choices(GPT2),
            {"protocol": "ln_nlg"},
        )  # fmt: skip
    return Study(
        "ln/nlg",
        "The same for generated text (LN table 2)",
        wanted,
        (
            Table(
                title="Generated text (LN table 2)", columns=("task", "metric"), metric=(), average=False, rank=True,
                order={"method": tuple(GPT2), "task": NLG}, written=WRITTEN,
                paper={} if place.small else LN_TABLE2,
            ),
        ),
        ("bleu", "rouge2_pltrdy", "rouge2"),
        "A model of stories with 260,032 parameters and 512 tokens, 60 steps a task: its texts are bad under every "
        "method, so that ranks say which method learns fast and little of the paper's. It has RMSNorm, hence no bias "
        "in its norms, and no biases: BitFit adds them. Without METEOR, whose start alone takes longer than a run."
        if place.small
        else "Prefix and adapter have l = r = 8, which gives the printed percentages; the text says 16. METEOR needs "
        "Java; MoverScore, BERTScore and BLEURT need models and are left out without them. The printed third task is "
        "left out of the comparison: the table calls it WebNLG, the text DART.",
    )  # fmt: skip


BLOCKS = len(SEEDS)
"""Parts of the rounds of one timing that stand for seeds: what varies is the clock."""
WHATS = {"step": "train", "forward": "forward", "inference": "inference"}


def time(place: StudySetup) -> Study:
    """LN figures 2 and 4."""
    without = {name: method for name, method in SIZES["bert-base"].items() if name != "three_vectors"}
    if place.small:
        timed = {"minilm-d256": ("classification", without), "minilm": ("classification", without),
                 "stories260k-llama": ("causal-lm", STORIES)}  # fmt: skip
        models = {name: name for name in timed}
        options: dict[str, Any] = {"rows": 16, "tokens": 48, "repeats": 9}
    else:
        models = {**BERTS, "gpt2-medium": "openai-community/gpt2-medium"}
        larger = {name: method for name, method in SIZES["bert-large"].items() if name != "three_vectors"}
        timed = {"bert-base": ("classification", without), "bert-large": ("classification", larger),
                 "gpt2-medium": ("causal-lm", GPT2)}  # fmt: skip
        options = {"rows": 32, "tokens": 128, "repeats": 30}
    place.check(models.values(), ())
    works = {
        model: timing_job(place.model(models[model]), several, kind=kind, **options)
        for model, (kind, several) in timed.items()
    }

    def wanted(rows: Rows) -> list[Want]:
        return [
            Want({"model": model, "method": method, "seed": seed}, works[model])
            for model, (_, several) in timed.items()
            for method in several
            for seed in range(BLOCKS)
        ]

    def bars(what: str, title: str) -> Bars:
        return Bars(
            title=title, groups="model", bars="method", y=what, lower=True, written=WRITTEN,
            order={"method": tuple(without)}, levels={"full tuning": 100.0},
        )  # fmt: skip

    return Study(
        "ln/time",
        "How much time does each method take, full tuning = 100? (LN figures 2 and 4)",
        wanted,
        (
            bars("train", "Training step (LN figure 2)"),
            bars("inference", "Inference (LN figure 4)"),
            bars("forward", "Forward pass alone: what no training can do without"),
            Table(
                title="Seconds", groups="model", columns=("metric",), average=False, written=WRITTEN, lower=True,
                metric=("step_seconds", "forward_seconds", "inference_seconds"), order={"method": tuple(without)},
            ),
        ),
        "train",
        "The methods take turns, so that noise is the same to all; ratios to full tuning are of one round. Batches of "
        "random tokens without padding; the paper took times from the logs of whole runs, whose batch sizes differ by "
        f"method. The {BLOCKS} seeds are thirds of the rounds."
        + (" Small models on a CPU: fixed costs of each operation weigh more." if place.small else ""),
        timings,
        lower=True,
    )  # fmt: skip


def timings(want: Want, row: JobRecord) -> list[Outcome]:
    """One method's third of the rounds, in percent of full tuning's in the same round."""
    if row.result is None:
        return [Outcome(want.cell, row.spec, error=row.error or "no result")]
    turns = row.result["turns"]
    own, full = turns[want.cell["method"]], turns["full"]
    scores: dict[str, float] = {}
    for what, name in WHATS.items():
        rounds = slice(want.cell["seed"], None, BLOCKS)
        mine, whole = own["turns"][what][rounds], full["turns"][what][rounds]
        scores[name] = 100 * median(a / b for a, b in zip(mine, whole, strict=True))
        scores[f"{what}_seconds"] = median(mine)
    count = {"percent": own["percent"]}
    return [Outcome(want.cell, row.spec, scores, count, extra={"kept": own["kept"]})]


def terms(place: StudySetup) -> Study:
    """LN figure 3."""
    tasks = ("commonsense_qa", "broad_twitter", "sst2", "sick", "cb")
    model = "minilm-d256" if place.small else "bert-large"
    by_task: dict[str, Values] = {
        "sst2": {"max_train_rows": 2000}, "cb": {"epochs": 3}, "commonsense_qa": {"max_train_rows": 300},
    }  # fmt: skip
    runs = _nlu(place, "ln/terms", model, tasks, {"layernorm": "layernorm"}, by_task)

    def wanted(rows: Rows) -> list[Want]:
        return [
            Want(
                {axis: label for axis, label in want.cell.items() if axis != "method"},
                None if want.work is None else _moved(want.work),
            )
            for want in runs(rows)
        ]

    return Study(
        "ln/terms",
        "Which gains and biases does tuning the norms move, and how far? (LN figure 3)",
        wanted,
        (Heat(title="Mean absolute change of gain and bias (LN figure 3)", over="changes", panels="task",
              order={"task": tasks}, written={**WRITTEN, "value": "mean absolute change", "gain": "gain",
                                              "bias": "bias"}),),
        "change",
        f"{DISTILLED} Four layers. 2,000 rows of SST-2, 1,000 of SICK, 200 of CB, in the paper's order of sizes, but "
        "300 of CommonsenseQA and 1,000 of Broad Twitter." if place.small else "",
    )  # fmt: skip


def _moved(work: Job) -> Job:
    return term_change_job(RunConfig.from_flat(**work.spec))


PARTS = {
    "all": "layernorm", "gain": "layernorm(terms='gain')", "bias": "layernorm(terms='bias')",
    "ffn norm": "layernorm(of='ffn')", "attention norm": "layernorm(of='attention')",
    "lower half": "layernorm(layers='lower half')", "upper half": "layernorm(layers='upper half')",
}  # fmt: skip


def ablation(place: StudySetup) -> Study:
    """LN table 5."""
    models = ("minilm-d128", "minilm-d256") if place.small else tuple(BERTS)
    tasks = SMALL_TWO if place.small else NLU
    return Study(
        "ln/ablation",
        "Is any part of tuning the norms superfluous? (LN table 5)",
        joined(*(_nlu(place, "ln/ablation", model, tasks, PARTS) for model in models)),
        (
            Table(
                title="Terms, modules and layers (LN table 5)", groups="model", metric=SCORE, written=WRITTEN,
                order={"method": tuple(PARTS), "task": tasks}, paper=LN_TABLE5,
            ),
        ),
        SCORE,
        f"{DISTILLED} Models of 2 and 4 layers: half of the smaller one is one layer." if place.small
        else "Here the norms of the embeddings belong to the whole method and to its terms, not to halves and modules."
       ,
    )  # fmt: skip


def unified(place: StudySetup) -> Study:
    """The third version's abstract."""
    r, length = (8, 8) if place.small else (16, 16)
    attention, ffn = (f"scaled_parallel_adapter(at={at!r}, rank={r})" for at in ("attention", "ffn"))
    prefix = f"prefix(length={length})"
    mam = f"mam(length={length}, rank={r})"
    several = {
        "full": "full", "layernorm": "layernorm", "prefix": prefix, "prefix+layernorm": f"{prefix} + layernorm",
        "adapter_attention": attention, "adapter_attention+layernorm": f"{attention} + layernorm",
        "adapter_ffn": ffn, "adapter_ffn+layernorm": f"{ffn} + layernorm", "mam": mam,
        "mam+layernorm": f"{mam} + layernorm",
        "prefix+adapter_attention+layernorm": f"{prefix} + {attention} + layernorm",
    }  # fmt: skip
    tasks = SMALL_TWO if place.small else NLU
    model = "minilm-d128" if place.small else "bert-base"
    return Study(
        "ln/unified",
        "Do methods at attention gain from tuned norms, and do those at the FFN lose? (abstract of the third version)",
        _nlu(place, "ln/unified", model, tasks, several),
        (
            Table(title="Methods with and without tuned norms", metric=SCORE, written=WRITTEN,
                  order={"method": tuple(several), "task": tasks}),
        ),
        SCORE,
        f"{DISTILLED} Sums train at the lowest rate of their terms." if place.small
        else "The third version's text is not public here: sizes are those of table 1.",
    )  # fmt: skip


LN_STUDIES: Mapping[str, Callable[[StudySetup], Study]] = {
    "ln/nlu": nlu, "ln/nlg": nlg, "ln/time": time, "ln/terms": terms, "ln/ablation": ablation, "ln/unified": unified,
}  # fmt: skip
