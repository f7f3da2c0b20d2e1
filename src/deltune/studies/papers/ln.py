"""The studies of "Parameter-Efficient Tuning on Layer Normalization" (Qi et al. 2022), each at two scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from ..claims.claims import AllOf, Beats, Best, Between, Claim, FewerParameters, InEach, Within
from ..claims.comparisons import RANK, RATE, score
from ..claims.selectors import EVERY, FLOOR, LARGEST, SMALLEST
from ..jobs.job import Outcome, term_change_job, timing_job
from ..jobs.store import JobRecord
from ..report.figure_spec import Bars, HeatMap, Scatter, TableSpec
from ..scales import StudySetup, Values, cross_product, join_plans, method_variants
from ..study import CellPlan, PlannedCell, Records, Study
from .published import LN_TABLE1, LN_TABLE2, LN_TABLE5
from .questions import QUESTIONS

LN_TUNING, BITFIT, MAM, PREFIX_LN = ({"method": name} for name in ("layernorm", "bitfit", "mam", "prefix_layernorm"))
THREE_VECTORS, PREFIX, ADAPTER, LORA, FULL = (
    {"method": name} for name in ("three_vectors", "prefix", "adapter", "lora", "full")
)

NOT_THREE_VECTORS = {"task": ("commonsense_qa", "social_iqa")}
"""Tasks to which 3V cannot be applied (LN table 1, note)."""

TEXT_SIZES = {"method": ("adapter_text", "prefix_text", "mam_text", "prefix_layernorm_text")}
"""Methods with the sizes of the text, where a table's percentages give others; claims are about the tables'."""

CHANGE = score("change", "", title="mean absolute change")
TRAIN = score("train", "% of full tuning's", lower=True, title="time of a training step")
INFERENCE = score("inference", "% of full tuning's", lower=True, title="time of inference")
EFFICIENT = (LN_TUNING, BITFIT, ADAPTER, PREFIX, LORA, MAM)
EFFICIENT_NAMES = tuple(method["method"] for method in EFFICIENT)
DECODERS = {"kind": ("causal-lm",)}


def _with_norms_beats(with_norms: str, without: str) -> Beats:
    return Beats({"method": with_norms}, {"method": without})


ONE_LAYER = "Of the four layers of the model here one alone counts as close to the output."
LN_CLAIMS: dict[str, tuple[Claim, ...]] = {
    "ln/nlu": (
        Claim(
            "LN-tuning beats BitFit with half the parameters",
            "abstract, §3.2, table 1",
            AllOf((
                Beats(LN_TUNING, BITFIT), FewerParameters(LN_TUNING, BITFIT, ratio=0.5, depends_on_depth=True),
            )),
            miniature="Here the norm of the embeddings is one of five, so that LN-tuning trains 0.56 times as many "
            "parameters as BitFit; on BERT-base, where it is one of 25, they are 0.46 times as many. The number of "
            "layers decides that, so that the score alone counts.",
        ),
        Claim("full tuning and MAM are superior to the other earlier methods and to LN-tuning", "§3.2, table 1",
              AllOf(tuple(Beats(one, other) for one in (FULL, MAM) for other in (ADAPTER, PREFIX, LORA, BITFIT,
                                                                                 LN_TUNING)))),
        Claim("3V and BitFit are the poorest of the earlier methods", "§3.2, table 1",
              AllOf(tuple(Beats(other, one) for one in (THREE_VECTORS, BITFIT)
                          for other in (FULL, ADAPTER, PREFIX, LORA, MAM))), exclude=NOT_THREE_VECTORS),
        Claim("LN-tuning needs larger learning rates than other methods", "footnote 2",
              AllOf(tuple(Beats(LN_TUNING, other, measurement=RATE) for other in (ADAPTER, PREFIX, LORA, BITFIT))),
              untestable="The rates that are tried differ: they are four around the usual one of each method."),
        Claim("LN-tuning beats 3V", "§3.2, table 1", Beats(LN_TUNING, THREE_VECTORS), exclude=NOT_THREE_VECTORS),
        Claim("LN-tuning is inferior to methods with over 0.3 % of the parameters: adapter, prefix, LoRA, MAM",
              "§3.2, table 1", AllOf(tuple(Beats(other, LN_TUNING) for other in (ADAPTER, PREFIX, LORA, MAM))),
              miniature="Here these methods train 0.09 % to 0.19 % of the parameters."),
        Claim("prefix + LN beats MAM with fewer parameters", "§1, table 1",
              AllOf((Beats(PREFIX_LN, MAM), FewerParameters(PREFIX_LN, MAM))),
              contradiction="With the sizes of appendix A MAM trains fewer parameters (0.27 % of BERT-base and 0.35 % "
              "of BERT-large) than prefix + LN (0.30 % and 0.38 %)."),
        Claim("prefix + LN is the best of the parameter-efficient methods", "abstract, table 1",
              Best(PREFIX_LN, "method", exclude=("full", "head", "three_vectors")), exclude=TEXT_SIZES),
        Claim("adapter and prefix are comparable at equal parameters: within 1 point (margin ours)", "§3.2, table 1",
              Within(ADAPTER, PREFIX, 1.0, both=True)),
    ),
    "ln/nlg": (
        Claim("LN-tuning ranks better than BitFit", "§3.2, table 2", Beats(LN_TUNING, BITFIT, measurement=RANK),
              exclude=TEXT_SIZES,
              untestable="The model here has no biases, so that BitFit adds them and trains five times as many "
              "parameters as LN-tuning, in the paper twice as many."),
        Claim("prefix-tuning ranks better than MAM", "§3.2, table 2", Beats(PREFIX, MAM, measurement=RANK),
              exclude=TEXT_SIZES),
        Claim("prefix + LN ranks better than MAM with fewer parameters", "§1, table 2",
              AllOf((Beats(PREFIX_LN, MAM, measurement=RANK), FewerParameters(PREFIX_LN, MAM))), exclude=TEXT_SIZES,
              repeats="ln/nlu"),
        Claim("prefix + LN ranks best of the parameter-efficient methods", "abstract, table 2",
              Best(PREFIX_LN, "method", exclude=("full",), measurement=RANK), exclude=TEXT_SIZES, repeats="ln/nlu"),
        Claim("LN-tuning is nearer to adapter and MAM than in understanding: less than 2.5 ranks behind their mean, "
              "the distance of the ranks in table 1", "§3.2, tables 1 and 2",
              Within(LN_TUNING, {"method": ("adapter", "mam")}, 2.5, measurement=RANK), exclude=TEXT_SIZES,
              untestable="The distance in understanding is of the paper's models, and other models were run here."),
        Claim("full tuning ranks best of all", "table 2", Best(FULL, "method", measurement=RANK), exclude=TEXT_SIZES,
              contradiction="The printed ranks, 2.43 for full tuning and 3.43 for prefix + LN, do not follow from the "
              "rounded means of the fourteen columns, which give 2.71 and 2.46; ranks taken in each run would explain "
              "it."),
    ),
    "ln/time": (
        Claim("LN-tuning takes the least time in training in all architectures", "§3.3, figure 2",
              InEach(Best(LN_TUNING, "method", measurement=TRAIN)), exclude=TEXT_SIZES),
        Claim("LN-tuning, BitFit and full tuning take similar time in inference: within 5 % (margin ours)",
              "§3.3, figure 4", AllOf(tuple(Within(LN_TUNING, other, 5.0, both=True, measurement=INFERENCE)
                                           for other in (BITFIT, FULL)))),
        Claim("LN-tuning is faster in inference than the methods that insert something", "§3.3, figure 4",
              AllOf(tuple(Beats(LN_TUNING, other, measurement=INFERENCE) for other in (ADAPTER, PREFIX, MAM)))),
        Claim("MAM takes about as long as full tuning in inference: within 10 % (margin ours)",
              "ethics statement of the Unified View",
              Within(MAM, FULL, 10.0, both=True, measurement=INFERENCE)),
        Claim("MAM typically takes the longest of the parameter-efficient methods, in training and in inference",
              "appendix B, figures 2 and 4",
              AllOf(tuple(Beats(other, MAM, measurement=time)
                          for time in (TRAIN, INFERENCE) for other in (LN_TUNING, BITFIT, ADAPTER, PREFIX, LORA)))),
        Claim("all parameter-efficient methods train in less than 90 % of full tuning's time on BERT",
              "appendix B, figure 2",
              InEach(AllOf(tuple(Between(method, TRAIN, high=90.0) for method in EFFICIENT))), exclude=DECODERS,
              miniature="Here MiniLM d256 and MiniLM-L6 stand for BERT."),
        Claim("all parameter-efficient methods train in less than 80 % of full tuning's time on BERT-large",
              "appendix B, figure 2",
              AllOf(tuple(Between({**method, "model": LARGEST}, TRAIN, high=80.0) for method in EFFICIENT)),
              exclude=DECODERS, miniature="Here MiniLM-L6 stands for BERT-large.",
              untestable="The paper has this for BERT-large alone, which has 335 million parameters, and less "
              "than 90 % for BERT-base, which has 110 million. The larger model here has 23 million."),
        Claim("parameter-efficient methods save more of the training time of decoders than of encoders",
              "appendix B, figure 2",
              Beats({"method": EFFICIENT_NAMES, "kind": "causal-lm", "model": EVERY},
                    {"method": EFFICIENT_NAMES, "kind": "classification", "model": EVERY}, measurement=TRAIN)),
        Claim("adapter-tuning trains faster than prefix-tuning", "appendix B, figure 2",
              Beats(ADAPTER, PREFIX, measurement=TRAIN)),
        Claim("adapter-tuning is faster than prefix-tuning in inference, generation aside", "appendix B, figure 4",
              Beats(ADAPTER, PREFIX, measurement=INFERENCE), exclude=DECODERS),
    ),
    "ln/terms": (
        Claim("terms change more close to the output than close to the input, whether gain or bias", "§4, figure 3",
              InEach(Beats({"layers": "near output", "module": EVERY}, {"layers": "near input", "module": EVERY},
                           measurement=CHANGE), axes=("term",)), untestable=ONE_LAYER),
        Claim("close to the output the gain changes more than the bias", "§4, figure 3",
              Beats({"layers": "near output", "term": "gain", "module": EVERY},
                    {"layers": "near output", "term": "bias", "module": EVERY}, measurement=CHANGE),
              untestable=ONE_LAYER),
        Claim("terms change more where there are more data: SST-2 > SICK > CB", "§4, figure 3", AllOf((
            Beats({"task": "sst2"}, {"task": "sick"}, measurement=CHANGE),
            Beats({"task": "sick"}, {"task": "cb"}, measurement=CHANGE),
        )), untestable="Here a task with more rows is also trained for more steps: 375, 189 and 39."),
        Claim("terms change more for answers and entities than for “binary classification”: SST-2, SICK and CB",
              "§4, figure 3",
              Beats({"task": ("commonsense_qa", "broad_twitter")}, {"task": ("sst2", "sick", "cb")},
                    measurement=CHANGE),
              contradiction="Of the tasks that the paper calls binary SICK and CB have three classes.",
              untestable="Here SST-2 is trained for 375 steps and CSQA for 57, and steps decide how far terms change."),
    ),
    "ln/ablation": (
        Claim("all ablated methods lose, on either model: LN-tuning has nothing superfluous", "§5, table 5",
              InEach(Best({"method": "all"}, "method", exclude=("gain+bias",)), axes=("model",))),
        Claim("bias alone beats gain alone, on either model", "§5, table 5",
              InEach(Beats({"method": "bias"}, {"method": "gain"}), axes=("model",))),
        Claim("the norm of attention alone beats that of the FFN alone", "§5",
              Beats({"method": "attention norm"}, {"method": "ffn norm"}),
              contradiction="The sentence contradicts its table: table 5 has 75.0 and 73.6 for the norms of the FFN "
              "alone, on either model, and 74.6 and 73.3 for those of attention alone."),
        Claim("leaving out layers costs more than leaving out modules", "§5, table 5",
              Beats({"method": ("attention norm", "ffn norm")}, {"method": ("lower half", "upper half")})),
        Claim("in the smaller model the lower half beats the upper half", "§5, table 5",
              Beats({"method": "lower half", "model": SMALLEST}, {"method": "upper half", "model": SMALLEST})),
        Claim("in the larger model the upper half beats the lower half", "§5, table 5",
              Beats({"method": "upper half", "model": LARGEST}, {"method": "lower half", "model": LARGEST}),
              untestable="The paper has this for BERT-large alone, which has 335 million parameters, and the "
              "reverse for BERT-base, which has 110 million. The larger model here has 11 million."),
    ),
    "ln/unified": (
        Claim("layernorm added to a method at attention gains", "abstract of v3 (2)", AllOf((
            _with_norms_beats("prefix+layernorm", "prefix"),
            _with_norms_beats("adapter_attention+layernorm", "adapter_attention"),
        ))),
        Claim("layernorm added to a method at the FFN loses", "abstract of v3 (2)",
              _with_norms_beats("adapter_ffn", "adapter_ffn+layernorm")),
        Claim("layernorm added to MAM, at attention and the FFN, loses", "abstract of v3 (2)",
              _with_norms_beats("mam", "mam+layernorm")),
        Claim("prefix + adapter at attention + layernorm is the best", "abstract of v3 (1)",
              Best({"method": "prefix+adapter_attention+layernorm"}, "method", exclude=("full",))),
    ),
}  # fmt: skip


BERT_MODELS = {"bert-base": "google-bert/bert-base-uncased", "bert-large": "google-bert/bert-large-uncased"}
PROTOCOLS = {"bert-base": "ln_nlu", "bert-large": "ln_nlu_large"}
NLU = ("conll04", "broad_twitter", "sick", "snli", "sst2", "cb", "commonsense_qa", "social_iqa")
SMALL_NLU = ("conll04", "broad_twitter", "sst2", "cb")
SMALL_TWO = ("sst2", "conll04")
"""Tasks that small encoders learn from 1,000 rows; on SICK they stay at chance."""
CHOICE = ("commonsense_qa", "social_iqa")
SCORE = ("entity_f1", "accuracy")
SMALLER = "The models are small encoders that were distilled from MiniLM-L6, and they see a part of the data."
SEARCHED = (
    f"{SMALLER} Each method has the learning rate that validates best on each model and task, of four and of further "
    "ones while the best is at an edge: all are tried under the first seed, and the best two under the second."
)

NAMES = {
    "full": "FT", "adapter": "Adapter", "prefix": "Prefix", "lora": "LoRA", "mam": "MAM", "three_vectors": "3V",
    "bitfit": "BitFit", "layernorm": "LN", "prefix_layernorm": "Prefix+LN", "conll04": "CoNLL04",
    "broad_twitter": "Twitter", "sick": "SICK", "snli": "SNLI", "sst2": "SST-2", "cb": "CB", "commonsense_qa": "CSQA",
    "social_iqa": "SocIQA", "bert-base": "BERT-base", "bert-large": "BERT-large", "gpt2-medium": "GPT-2-medium",
    "minilm-d128": "MiniLM d128", "minilm-d192": "MiniLM d192", "minilm-d256": "MiniLM d256", "minilm": "MiniLM-L6",
    "e2e_nlg": "E2E", "samsum": "SAMSum", "dart": "DART", "all": "LN, whole", "gain": "only gain", "bias": "only bias",
    "ffn norm": "only FFN", "attention norm": "only MHA", "lower half": "only lower half",
    "upper half": "only upper half", "rouge1_pltrdy": "R-1", "rouge2_pltrdy": "R-2", "rougeL_pltrdy": "R-L",
    "rougeL_coco": "ROUGE-L",
    "stories260k": "stories 260k", "stories260k-llama": "stories 260k", "train": "training step, % of full tuning",
    "inference": "inference, % of full tuning", "forward": "forward alone, % of full tuning",
    "step_seconds": "training step (s)", "forward_seconds": "forward pass (s)", "inference_seconds": "inference (s)",
    "adapter_text": "Adapter, sizes of the text", "prefix_text": "Prefix, sizes of the text",
    "mam_text": "MAM, sizes of the text", "prefix_layernorm_text": "Prefix+LN, sizes of the text",
    "near output": "layers close to the output", "near input": "layers close to the input",
    "classification": "encoders", "causal-lm": "decoders", "prefix+layernorm": "prefix + LN",
    "adapter_attention": "adapter at attention", "adapter_attention+layernorm": "adapter at attention + LN",
    "adapter_ffn": "adapter at the FFN", "adapter_ffn+layernorm": "adapter at the FFN + LN",
    "mam+layernorm": "MAM + LN", "prefix+adapter_attention+layernorm": "prefix + adapter at attention + LN",
}  # fmt: skip


def methods(adapter: int, prefix: int, lora: int, mam: tuple[int, int]) -> dict[str, str]:
    """Return the methods of tables 1 and 2."""
    length, rank = mam
    return {
        "full": "full", "adapter": f"scaled_parallel_adapter(rank={adapter}, bias=True)",
        "prefix": f"prefix(length={prefix})", "lora": f"lora(rank={lora})",
        "mam": f"mam(length={length}, rank={rank})", "three_vectors": "three_vectors",
        "bitfit": "bitfit(which='linear')", "layernorm": "layernorm",
        "prefix_layernorm": f"prefix_layernorm(length={prefix})",
    }  # fmt: skip


SIZES: Mapping[str, dict[str, str]] = {
    "bert-base": {**methods(16, 16, 10, (16, 16)), "mam_text": "mam(length=8, rank=8)"},
    "bert-large": {**methods(24, 24, 11, (24, 24)), "mam_text": "mam(length=8, rank=16)"},
    "minilm-d128": {**methods(8, 8, 4, (8, 8)), "mam_text": "mam(length=4, rank=4)"},
}
"""Sizes by the rule of `published.RULE`; `published.CHOICES` has the reasons."""
TABLE1_METHODS = tuple(methods(16, 16, 10, (16, 16)))


def nlu(setup: StudySetup) -> Study:
    """Return the study of LN table 1."""
    models = ("minilm-d128",) if setup.small else tuple(BERT_MODELS)
    tasks = SMALL_NLU if setup.small else NLU
    return Study(
        "ln/nlu",
        QUESTIONS["ln/nlu"],
        join_plans(*(_nlu(setup, "ln/nlu", model, tasks, SIZES[model]) for model in models)),
        (
            TableSpec(
                title="Language understanding (LN table 1)", groups="model", metric=SCORE, rank=True,
                where={"method": TABLE1_METHODS}, order={"method": TABLE1_METHODS, "task": tasks}, display_names=NAMES,
                published=LN_TABLE1,
            ),
            _both_sizes(("mam", "mam_text"), groups="model", metric=SCORE, order={"task": tasks}),
            Scatter(
                title="Score against parameters", panels="task", y=SCORE, series=("method", "model"),
                display_names=NAMES,
                reference_lines={"full tuning": {"method": "full"}},
            ),
        ),
        SCORE,
        f"{SEARCHED} There are four of the paper's eight tasks, and one model, so that nothing is seen of what "
        "depends on a model's size."
        if setup.small
        else "",
    )  # fmt: skip


def _both_sizes(methods: tuple[str, ...], **fields: Any) -> TableSpec:
    """Return the table of methods whose sizes in the text and in the paper's table differ, a row for each."""
    order = {**fields.pop("order", {}), "method": methods}
    return TableSpec(title="By the table's percentage and by the text's size", where={"method": methods}, order=order,
                     display_names=NAMES, **fields)  # fmt: skip


def _nlu(
    setup: StudySetup,
    name: str,
    model: str,
    tasks: tuple[str, ...],
    expressions: Mapping[str, str],
    by_task: Mapping[str, Values] | None = None,
    options: Values | None = None,
) -> CellPlan:
    """Return the cells of methods on understanding.

    At paper scale the options are from the paper's protocol for the model's size; at small scale they are
    `by_task` and `options`.
    """

    def exclude(cell: Mapping[str, Any]) -> bool:
        return cell["method"] == "three_vectors" and cell["task"] in CHOICE

    options = options if setup.small else {"protocol": PROTOCOLS[model]}
    return cross_product(
        setup, name, {model: BERT_MODELS.get(model, model)}, tasks, method_variants(expressions), options,
        exclude=exclude,
        by_task=by_task if setup.small else None,
    )  # fmt: skip


STORIES = {
    "full": "full", "adapter": "scaled_parallel_adapter(rank=4)", "prefix": "prefix(length=8)", "lora": "lora(rank=2)",
    "mam": "mam(length=4, rank=4)", "bitfit": "bitfit(add_missing=True)", "layernorm": "layernorm",
    "prefix_layernorm": "prefix_layernorm(length=8)",
}  # fmt: skip
GPT2 = {
    "full": "full", "adapter": "scaled_parallel_adapter(rank=8)", "prefix": "prefix(length=8)", "lora": "lora(rank=4)",
    "mam": "mam(length=8, rank=8)", "bitfit": "bitfit", "layernorm": "layernorm",
    "prefix_layernorm": "prefix_layernorm(length=8)", "adapter_text": "scaled_parallel_adapter(rank=16)",
    "prefix_text": "prefix(length=16)", "prefix_layernorm_text": "prefix_layernorm(length=16)",
}  # fmt: skip
TABLE2_METHODS = tuple(STORIES)
STORIES_NOTE = (
    "The model writes children's stories. It has 260,032 parameters and a vocabulary of 512 pieces. A run sees 3,200 "
    "rows in batches of 16 at a constant rate, until its validation loss, read every 200 steps, has not fallen twice, "
    "and for 1,600 steps at most. As in the other studies, each method has the learning rate with the lowest "
    "validation loss of four and of further ones while the best is at an edge. Targets and generated texts have up to "
    "96 pieces, enough for 92 % of E2E's training targets and 86 % of DART's. Inputs keep their last 128 pieces: of "
    "100 test rows 59 of DART's are cut. Nearly four of five of DART's rows here come from E2E.\n\n"
    "SAMSum, the second sizes and all but five seeds are left out, as the plan of the long runs says. The model's "
    "norms are RMSNorm, which has no bias, and it has no other biases, so that BitFit adds them: it trains five times "
    "as many parameters as LN-tuning, and in the paper twice as many."
)
NLG = ("e2e_nlg", "samsum", "dart")
SMALL_NLG = ("e2e_nlg", "dart")
NLG_SEEDS = tuple(range(5))
"""Fewer than elsewhere at small scale: a run takes two minutes and a half."""


def nlg(setup: StudySetup) -> Study:
    """Return the study of LN table 2."""
    if setup.small:
        # Cut at 32 pieces, BLEU on E2E was below 5 whatever the method was. After 200 steps all runs still improved;
        # by a linear schedule of 2,000 full tuning was best at step 1,200.
        limits = {
            "max_train_rows": 3200,
            "validation_rows": 40,
            "test_rows": 100,
            "max_length": 128,
            "target_length": 96,
        }
        by_task = {"dart": {"metrics": ("bleu", "meteor", "ter", "chrf")}}
        plan_cells = cross_product(
            setup, "ln/nlg", {"stories260k": "stories260k-llama"}, SMALL_NLG,
            method_variants(STORIES),
            {**limits, "batch_size": 16, "steps": 1600, "schedule": "constant", "validate_every": 200, "patience": 2,
             "metric": "loss"},
            by_task=by_task, seeds=NLG_SEEDS,
        )  # fmt: skip
    else:
        plan_cells = cross_product(
            setup, "ln/nlg", {"gpt2-medium": "openai-community/gpt2-medium"}, NLG, method_variants(GPT2),
            {"protocol": "ln_nlg"},
        )  # fmt: skip
    return Study(
        "ln/nlg",
        QUESTIONS["ln/nlg"],
        plan_cells,
        (
            TableSpec(
                title="Generated text (LN table 2); the rank leaves out the loss", metric=(), average=False, rank=True,
                columns=("task", "metric"),
                where={"method": TABLE2_METHODS}, order={"method": TABLE2_METHODS, "task": NLG}, display_names=NAMES,
                published={} if setup.small else LN_TABLE2,
            ),
            *(() if setup.small else (_both_sizes(
                ("adapter", "adapter_text", "prefix", "prefix_text", "prefix_layernorm", "prefix_layernorm_text"),
                columns=("task", "metric"), metric=(), average=False, order={"task": NLG},
            ),)),
        ),
        ("bleu", "rouge2_pltrdy", "rouge2"),
        STORIES_NOTE
        if setup.small
        else "METEOR and the tokenizer of COCO need Java, MoverScore, BERTScore and BLEURT models; they are left out "
        "where these are missing.",
    )  # fmt: skip


TIMING_BLOCKS = 9
"""The rounds of one timing are divided into so many blocks, which stand for seeds: what varies is the clock. Over three
blocks hardly any difference could be decided. A block of a small timing is the median of seven rounds."""
PHASES = {"step": "train", "forward": "forward", "inference": "inference"}


def time(setup: StudySetup) -> Study:
    """Return the study of LN figures 2 and 4."""

    def timed_methods(methods: Mapping[str, str]) -> dict[str, str]:
        """Leave out 3V, which the paper does not time, and second sizes."""
        return {n: method for n, method in methods.items() if n != "three_vectors" and not n.endswith("_text")}

    without = timed_methods(SIZES["bert-base"])
    if setup.small:
        timed = {"minilm-d256": ("classification", without), "minilm": ("classification", without),
                 "stories260k-llama": ("causal-lm", STORIES)}  # fmt: skip
        models = {name: name for name in timed}
        options: dict[str, Any] = {"rows": 16, "tokens": 48, "repeats": 63}
    else:
        models = {**BERT_MODELS, "gpt2-medium": "openai-community/gpt2-medium"}
        larger = timed_methods(SIZES["bert-large"])
        timed = {"bert-base": ("classification", without), "bert-large": ("classification", larger),
                 "gpt2-medium": ("causal-lm", timed_methods(GPT2))}  # fmt: skip
        options = {"rows": 32, "tokens": 128, "repeats": 30}
    setup.check(models.values(), ())
    jobs = {
        model: timing_job(models[model], expressions, setup.roots, kind=kind, **options)
        for model, (kind, expressions) in timed.items()
    }

    def plan_cells(records: Records) -> list[PlannedCell]:
        return [
            PlannedCell({"kind": kind, "model": model, "method": method, "seed": seed}, jobs[model])
            for model, (kind, expressions) in timed.items()
            for method in expressions
            for seed in range(TIMING_BLOCKS)
        ]

    def bars(phase: str, title: str) -> Bars:
        return Bars(
            title=title, groups="model", bars="method", y=phase, lower=True, display_names=NAMES,
            order={"method": tuple(without)}, reference_lines={"full tuning": 100.0},
        )  # fmt: skip

    return Study(
        "ln/time",
        QUESTIONS["ln/time"],
        plan_cells,
        (
            bars("train", "Training step (LN figure 2)"),
            bars("inference", "Inference (LN figure 4)"),
            bars("forward", "Forward pass alone: what no training can do without"),
            TableSpec(
                title="Seconds", groups="model", columns=("metric",), average=False, display_names=NAMES, lower=True,
                metric=("step_seconds", "forward_seconds", "inference_seconds"), order={"method": tuple(without)},
            ),
        ),
        "train",
        "The methods take turns, so that noise is the same to all; ratios to full tuning are of one round. Batches of "
        "random tokens without padding; the paper took times from the logs of whole runs, whose batch sizes differ by "
        f"method. The rounds are divided into {TIMING_BLOCKS} blocks, which stand in the place of seeds: what varies "
        "between them is the clock. There are no test rows."
        + (" On small models and a CPU the fixed costs of each operation weigh more." if setup.small else ""),
        timing,
        lower=True,
        repetition="block",
    )  # fmt: skip


def timing(planned: PlannedCell, record: JobRecord) -> Outcome:
    """Return one block of a method's rounds, in percent of full tuning's time in the same round."""
    if record.result is None:
        return Outcome(planned.cell, record.spec, error=record.error or "no result")
    turns = record.result["turns"]
    method_turns, full_turns = turns[planned.cell["method"]], turns["full"]
    scores: dict[str, float] = {}
    for phase, name in PHASES.items():
        rounds = slice(planned.cell["seed"], None, TIMING_BLOCKS)
        times, full_times = method_turns["turns"][phase][rounds], full_turns["turns"][phase][rounds]
        scores[name] = 100 * median(a / b for a, b in zip(times, full_times, strict=True))
        scores[f"{phase}_seconds"] = median(times)
    count = {"percent": method_turns["percent"]}
    extra = {"kept": method_turns["kept"], "parameters": method_turns.get("parameters")}
    return Outcome(planned.cell, record.spec, scores, count, extra=extra)


LAYER_NAMES = {"None": "embeddings", **{str(layer): str(layer + 1) for layer in range(24)}}
"""How layers are shown: counted from 1, as in the paper."""


def terms(setup: StudySetup) -> Study:
    """Return the study of LN figure 3."""
    tasks = ("commonsense_qa", "broad_twitter", "sst2", "sick", "cb")
    model = "minilm-d256" if setup.small else "bert-large"
    by_task: dict[str, Values] = {
        "sst2": {"max_train_rows": 2000}, "cb": {"epochs": 3}, "commonsense_qa": {"max_train_rows": 300},
    }  # fmt: skip
    runs = _nlu(setup, "ln/terms", model, tasks, {"layernorm": "layernorm"}, by_task, {"lr": 3e-2})

    def plan_cells(records: Records) -> list[PlannedCell]:
        return [
            replace(
                planned,
                cell={axis: label for axis, label in planned.cell.items() if axis != "method"},
                job=None if planned.job is None else term_change_job(planned.job),
            )
            for planned in runs(records)
            if FLOOR not in planned.cell
        ]

    return Study(
        "ln/terms",
        QUESTIONS["ln/terms"],
        plan_cells,
        (HeatMap(title="Mean absolute change of gain and bias (LN figure 3)", entries="changes", panels="task",
              order={"task": tasks}, display_names={**NAMES, **LAYER_NAMES, "value": "mean absolute change",
                                              "gain": "gain", "bias": "bias", "ffn": "FFN"}),),
        "change",
        f"{SMALLER} All tasks have one learning rate, 0.03, so that tasks are compared and not rates. The model has "
        "four layers. It sees 2,000 rows of SST-2, 1,000 of SICK and 200 of CB, which keeps the order of the paper's "
        "sizes, but 300 of CommonsenseQA and 1,000 of Broad Twitter." if setup.small else "",
    )  # fmt: skip


ABLATIONS = {
    "all": "layernorm", "gain": "layernorm(terms='gain')", "bias": "layernorm(terms='bias')",
    "ffn norm": "layernorm(of='ffn')", "attention norm": "layernorm(of='attention')",
    "lower half": "layernorm(layers='lower half')", "upper half": "layernorm(layers='upper half')",
}  # fmt: skip


def ablation(setup: StudySetup) -> Study:
    """Return the study of LN table 5."""
    models = ("minilm-d128", "minilm-d256") if setup.small else tuple(BERT_MODELS)
    tasks = SMALL_TWO if setup.small else NLU
    return Study(
        "ln/ablation",
        QUESTIONS["ln/ablation"],
        join_plans(*(_nlu(setup, "ln/ablation", model, tasks, ABLATIONS) for model in models)),
        (
            TableSpec(
                title="Terms, modules and layers (LN table 5)", groups="model", metric=SCORE, display_names=NAMES,
                order={"method": tuple(ABLATIONS), "task": tasks}, published=LN_TABLE5,
            ),
        ),
        SCORE,
        f"{SEARCHED} The models have 2 and 4 layers, so that half of the smaller one is one layer." if setup.small
        else "Here the norms of the embeddings belong to the whole method and to its terms, not to halves and modules."
       ,
    )  # fmt: skip


def unified(setup: StudySetup) -> Study:
    """Return the study of the third version's abstract."""
    r, length = (8, 8) if setup.small else (16, 16)
    attention, ffn = (f"scaled_parallel_adapter(at={at!r}, rank={r})" for at in ("attention", "ffn"))
    prefix = f"prefix(length={length})"
    mam = f"mam(length={length}, rank={r})"
    expressions = {
        "full": "full", "layernorm": "layernorm", "prefix": prefix, "prefix+layernorm": f"{prefix} + layernorm",
        "adapter_attention": attention, "adapter_attention+layernorm": f"{attention} + layernorm",
        "adapter_ffn": ffn, "adapter_ffn+layernorm": f"{ffn} + layernorm", "mam": mam,
        "mam+layernorm": f"{mam} + layernorm",
        "prefix+adapter_attention+layernorm": f"{prefix} + {attention} + layernorm",
    }  # fmt: skip
    tasks = SMALL_TWO if setup.small else NLU
    model = "minilm-d128" if setup.small else "bert-base"
    return Study(
        "ln/unified",
        QUESTIONS["ln/unified"],
        _nlu(setup, "ln/unified", model, tasks, expressions),
        (
            TableSpec(title="Methods with and without tuned norms", metric=SCORE, display_names=NAMES,
                  order={"method": tuple(expressions), "task": tasks}),
        ),
        SCORE,
        SEARCHED if setup.small
        else "The third version's text is not public here: sizes are those of table 1.",
    )  # fmt: skip


LN_STUDIES: Mapping[str, Callable[[StudySetup], Study]] = {
    "ln/nlu": nlu, "ln/nlg": nlg, "ln/time": time, "ln/terms": terms, "ln/ablation": ablation, "ln/unified": unified,
}  # fmt: skip
