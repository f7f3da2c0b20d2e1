"""The studies of the paper of APET (Su et al. 2023, on the impact of model scaling), each at two scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from ...train import RunConfig
from ..claims.claims import AllOf, AllWithin, Beats, Between, Claim, Falls, GapShrinks, InEach, Rises, Within
from ..claims.comparisons import AFTER_LOW, STEPS, ZERO_SHOT, threshold
from ..claims.selectors import EVERY, LARGEST, SMALLEST, CellSelector
from ..jobs.job import Cell, Job, run_job, transfer_job
from ..report.figure_spec import Bars, Curves, HeatMap, TableSpec
from ..scales import (
    FIRST_RATES,
    LONG,
    SEEDS,
    SLICES,
    SMALL_OPTIONS,
    StudySetup,
    Values,
    Variant,
    choose_rates,
    cross_product,
    join_plans,
    method_variants,
)
from ..study import SEED_PLACEHOLDER, CellPlan, PlannedCell, Records, Study
from .published import AP_TABLE2
from .questions import QUESTIONS
from .thresholds import ThresholdGrid, plan_thresholds, powers_of_two, threshold_outcome

PARITY = 1.0
"""Points within which two scores count as the same performance."""

METHODS = ("prompt", "bitfit", "lora", "adapter")
LARGE_ENOUGH = {"family": ("BERT",)}
"""Left out of claims about models of tens of billions of parameters, which only T5 has."""
T5_XXL_ALONE = (
    "The paper has this for models of tens of billions of parameters, shown on T5-xxl (11 billion), and noticeable "
    "differences on small ones. The largest model here has {} million."
)
LOW, HIGH = threshold("low"), threshold("high")


def _pairs(model: object) -> tuple[CellSelector, CellSelector]:
    """Return selectors of sources of the target's own type, and of others, on average."""
    return (
        {"pair": "same type", "task": EVERY, "model": model},
        {"pair": "other type", "task": EVERY, "model": model},
    )


AP_CLAIMS: dict[str, tuple[Claim, ...]] = {
    "ap/gap": (
        Claim("the gap between the best and the worst method shrinks as models grow", "§4.2, figures 1 and 3",
              GapShrinks("method", "model", {"method": METHODS}),
              printed_range="largest gap from 6 % to 4 % on T5 and from 11 % to 6 % on BERT, smallest gap from 4 % to "
              "0 % and from 2 % to 1 %"),
        Claim("on the largest model every method matches full tuning: no more than 1 point below (margin ours)",
              "§4.2, figures 1, 3",
              AllOf(tuple(Within({"method": m, "model": LARGEST}, {"method": "full", "model": LARGEST}, PARITY)
                         for m in METHODS)), exclude=LARGE_ENOUGH, untestable=T5_XXL_ALONE.format(23)),
        Claim("full tuning's lead over every method shrinks as models grow", "§4.2, figure 3",
              AllOf(tuple(Falls("model", {"method": "full"}, minus={"method": m}) for m in METHODS))),
    ),
    "ap/structure": (
        Claim("at equal N the gap between structures shrinks as models grow", "§5.2, figure 5",
              GapShrinks("structure", "model")),
        Claim("at equal N all structures are within 1 point of each other on the largest model (margin ours)",
              "§5.2, figure 5",
              AllWithin("structure", PARITY, {"model": LARGEST}),
              untestable="The paper has this for its larger models, above all T5-xxl (11 billion parameters). "
              "The larger model here has 11 million, fewer than the paper's smallest (BERT-small, 29 million)."),
        Claim("on the largest model the groups, with different N, are within 1 point of each other (margin ours)",
              "§5.2, figure 5",
              AllWithin("group", PARITY, {"model": LARGEST, "structure": EVERY}), exclude=LARGE_ENOUGH,
              untestable=T5_XXL_ALONE.format(11)),
    ),
    "ap/convergence": (
        Claim("adjacent parameters converge in fewer steps than discrete ones", "§5.2, figure 6",
              Beats({"structure": "adjacent"}, {"structure": "discrete"}, measurement=STEPS)),
        Claim("on the largest model both end at the same performance: within 1 point (margin ours)", "§5.2, figure 6",
              Within({"structure": "adjacent", "model": LARGEST}, {"structure": "discrete", "model": LARGEST}, PARITY,
                     both=True),
              untestable="The paper has this for its larger models, and figure 6 shows T5-xxl (11 billion "
              "parameters). The larger model here has 11 million."),
    ),
    "ap/thresholds": (
        Claim("larger models always reach full tuning with fewer parameters: the high threshold falls",
              "§5.3, figure 7", InEach(Falls("model", measurement=HIGH))),
        Claim("larger models need more parameters to leave chance, on all tasks: the low threshold rises",
              "§5.3, figure 7", InEach(Rises("model", measurement=LOW))),
        Claim("low thresholds of all methods lie in one range on the same model, whatever the task: within a factor of "
              "10, the widest that is printed", "§5.3, figure 7", InEach(AllWithin("method", 1.0, measurement=LOW)),
              printed_range="7,900 to 8,500 on T5-xxl, 800 to 7,900 on T5-small, 800 to 3,200 on BERT-large, 400 to "
              "1,600 on BERT-small"),
        Claim("right after the low threshold methods reach 80 % to 90 % of full tuning's performance",
              "§5.3, figure 7", Between({"method": ("adjacent", "discrete")}, AFTER_LOW, 80.0, 90.0)),
    ),
    "ap/all": (
        Claim("on the largest model adjacent parameters match full tuning in every group: no more than 1 point below "
              "(margin ours)", "§5.3, table 2",
              AllOf(tuple(Within({"structure": "adjacent", "group": group, "model": LARGEST},
                                 {"structure": "full", "group": "full", "model": LARGEST}, PARITY)
                          for group in METHODS)), exclude=LARGE_ENOUGH,
              contradiction="What table 2 misses is a margin of ours: the paper says “almost”, and means over T5-xxl's "
              "eleven tasks lie up to 2.0 points below full tuning's.",
              untestable=T5_XXL_ALONE.format(11)),
        Claim("the lead of full tuning over adjacent parameters shrinks as models grow", "our reading of table 2",
              Falls("model", {"structure": "full", "group": EVERY}, minus={"structure": "adjacent", "group": EVERY})),
    ),
    "ap/transfer": (
        Claim("tuned parameters transfer better within a type of tasks than between types, on small and large models",
              "appendix E, figure 9", InEach(AllOf((
                  Beats(*_pairs(SMALLEST), measurement=ZERO_SHOT), Beats(*_pairs(LARGEST), measurement=ZERO_SHOT))),
                  axes=("target",)),
              exclude={"target": ("nq_open",)}),  # the only task of its type
        Claim("larger models do not transfer better between types: the largest by less than 5 points of correlation "
              "more than the smallest (margin ours)", "appendix E, figure 9",
              Falls("model", {"pair": "other type", "task": EVERY}, margin=5.0, measurement=ZERO_SHOT)),
    ),
}  # fmt: skip


SENTIMENT, INFERENCE, PARAPHRASE = ("sst2", "imdb", "rotten_tomatoes"), ("mnli", "qnli", "rte"), ("mrpc", "qqp")
CLASSES = (*SENTIMENT, *INFERENCE, *PARAPHRASE)
GENERATED = ("nq_open", "samsum", "multi_news")
GROUPS = ("prompt", "bitfit", "lora", "adapter")
PATTERNS = ("adjacent", "discrete", "uniform")
"""How scalars are drawn. The paper's "discrete" does not say what becomes of those without a partner in a product: as
"discrete" all of them can change the output, as "uniform" chance alone decides."""
THE_PAPERS = ("adjacent", "discrete")
MINILM = "MiniLM"


@dataclass(frozen=True)
class SizedModel:
    """A model, and the N of each group on it in the order of `GROUPS`: the paper's, where it is known."""

    hub_id: str
    sizes: tuple[int, int, int, int]
    prompt: int | None = None
    """The length of its prompt, where it is not the family's."""
    bitfit: int | None = None
    """N of BitFit here, where the paper's number cannot be had."""


@dataclass(frozen=True)
class ModelFamily:
    """Models of one family (such as T5), the method expression of each group on them, and how they answer.

    Attributes:
        models: The models by size, ascending.
        methods: Group -> its method on these models.
        answers_in_words: Whether the models answer classification tasks by generating label words.
    """

    models: Mapping[str, SizedModel]
    methods: Mapping[str, str]
    answers_in_words: bool = False

    @property
    def smallest_and_largest(self) -> tuple[str, str]:
        smallest, *_, largest = self.models
        return smallest, largest

    @property
    def attention(self) -> str:
        """The argument for self-attention alone: the paper's sizes are without T5's cross-attention."""
        return ", attention='self'" if self.answers_in_words else ""

    @property
    def everything(self) -> str:
        """The sum that APET draws from (AP eq. 14 to 16); it has more scalars than any group."""
        return (
            f"Modification('attention', Vector()) + Modification('ffn', Vector()) + {self.methods['prompt']} + "
            f"lora(rank=16, scale=2{self.attention}) + adapter(rank=24{self.attention})"
        )

    def methods_of(self, model: str) -> dict[str, str]:
        """Return the method of each group on a model."""
        prompt = self.models[model].prompt
        return {**self.methods, **({} if prompt is None else {"prompt": f"prompt(length={prompt})"})}

    def drawn(self, n: int, pattern: str, seed: object = SEED_PLACEHOLDER) -> str:
        """Return the method that trains N scalars of `everything`; the mask is drawn by the seed of the run."""
        return f"apet({self.everything}, parameters={n}, pattern={pattern!r}, seed={seed})"

    def variants_of_equal_size(self, model: str) -> list[Variant]:
        """Return each group's method, and selections from `everything` with as many parameters as it has."""
        prompt, bitfit, *others = self.models[model].sizes
        return [
            Variant({"group": group, "structure": pattern}, {"method": method})
            for group, n in zip(GROUPS, (prompt, self.models[model].bitfit or bitfit, *others), strict=True)
            for pattern, method in (
                ("itself", self.methods_of(model)[group]),
                *((pattern, self.drawn(n, pattern)) for pattern in PATTERNS),
            )
        ]


BITFIT_OF_BERT = "bitfit(which='attention') + bitfit(which='norm') + Modification('ffn_down', Vector())"
"""The paper's 7 d of each layer: all biases but the FFN's inner one."""


def _methods(prompt: int, bitfit: str, more: str = "") -> dict[str, str]:
    """Return the methods of the four groups (AP §B.2)."""
    return {
        "prompt": f"prompt(length={prompt})", "bitfit": bitfit, "lora": f"lora(rank=8, scale=2{more})",
        "adapter": f"adapter(rank=24, bias=True{more})",
    }  # fmt: skip


PAPER_FAMILIES = {
    "T5": ModelFamily(
        {
            "t5-small": SizedModel("google/t5-v1_1-small", (51_200, 121_216, 229_376, 803_584), bitfit=101_376),
            "t5-base": SizedModel("google/t5-v1_1-base", (76_800, 270_208, 589_824, 1_807_488), bitfit=273_408),
            "t5-xxl": SizedModel("google/t5-v1_1-xxl", (409_600, 2_444_644, 6_291_456, 19_269_888), bitfit=2_850_816),
        },
        _methods(100, "bitfit(add_missing=True)", ", attention='self'"),
        answers_in_words=True,
    ),
    "BERT": ModelFamily(
        {
            "bert-small": SizedModel("prajjwal1/bert-small", (25_600, 14_336, 65_536, 200_896), prompt=50),
            "bert-base": SizedModel("google-bert/bert-base-uncased", (76_800, 64_512, 294_912, 903_744)),
            "bert-large": SizedModel("google-bert/bert-large-uncased", (102_400, 172_032, 786_432, 2_409_600)),
        },
        _methods(100, BITFIT_OF_BERT),
    ),
}
SMALL_FAMILIES = {
    MINILM: ModelFamily(
        {
            "minilm-d128": SizedModel("minilm-d128", (1_280, 3_072, 8_192, 25_184)),
            "minilm-d192": SizedModel("minilm-d192", (1_920, 6_720, 18_432, 56_592)),
            "minilm-d256": SizedModel("minilm-d256", (2_560, 11_776, 32_768, 100_544)),
            "minilm": SizedModel("minilm", (3_840, 26_112, 73_728, 225_936)),
        },
        _methods(10, "bitfit"),
    )
}
"""The series of shared encoders; a prompt of 100 would be longer than what they read."""

RELABEL = {
    **{label: "1" for label in ("positive", "entailment", "duplicate", "equivalent", "true")},
    **{label: "0" for label in (
        "negative", "neutral", "contradiction", "not_entailment", "not_duplicate", "not_equivalent", "false"
    )},
}  # fmt: skip
"""Positive, entailment, duplicate and true become 1, the other labels 0 (AP §E)."""

LABELS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(SENTIMENT, ("negative", "positive")),
    **dict.fromkeys(("qnli", "rte"), ("entailment", "not_entailment")),
    **dict.fromkeys(("mnli", "sick"), ("entailment", "neutral", "contradiction")),
    "mrpc": ("not_equivalent", "equivalent"), "qqp": ("not_duplicate", "duplicate"),
}  # fmt: skip


METRIC = ("accuracy", "answer_f1", "rougeL")

NAMES = {
    "full": "full tuning", "prompt": "Prompt", "bitfit": "BitFit", "lora": "LoRA", "adapter": "Adapter",
    "itself": "the method", "discrete": "discrete, all live", "uniform": "discrete, uniform",
    "denominator_size": "parameters of the model", "low of the mean": "low", "high of the mean": "high",
    "sst2": "SST-2", "imdb": "IMDB", "rotten_tomatoes": "Rotten Tomatoes", "mnli": "MNLI", "qnli": "QNLI",
    "rte": "RTE", "mrpc": "MRPC", "qqp": "QQP", "sick": "SICK", "nq_open": "NQ-Open", "samsum": "SAMSum",
    "multi_news": "Multi-News", "N": "trained parameters", "minilm": "MiniLM-L6", "minilm-d128": "MiniLM d128",
    "minilm-d192": "MiniLM d192", "minilm-d256": "MiniLM d256", "t5-small": "T5-small", "t5-base": "T5-base",
    "t5-xxl": "T5-xxl", "bert-small": "BERT-small", "bert-base": "BERT-base", "bert-large": "BERT-large",
}  # fmt: skip
NOTE = (
    "T5 is v1.1: the paper does not say which. Full tuning has a rate of 5e-5 (none is printed), every run 3 epochs "
    "(no number of steps is printed) but where steps are the question."
)
ALL_MODELS_NOTE = (
    "Four encoders of 4 to 23 million parameters, the smaller ones distilled from the largest, where the paper goes to "
    "11 billion: a trend over less than one power of ten says nothing of the paper's range."
)
COMPARED_NOTE = (
    "Two encoders of 4 and 11 million parameters, distilled from one model, where the paper goes to 11 billion: a "
    "trend over a factor of 2.5 says nothing of the paper's range."
)
DRAWN_NOTE = (
    "“Adjacent” parameters are consecutive whole rows of the weights. “Discrete, all live” are single numbers drawn at "
    "random, each with a partner on the other side of its product, so that all of them can change the output."
)
UNIFORM_NOTE = "“Discrete, uniform” are drawn without regard to partners, so that some of them have no effect."
STEPS_NOTE = (
    "Steps to converge are those up to the first validation at which a run has come 95 % of the way from the lowest "
    "score of the compared curves to the lower of their bests. A difference of 1 doubling is twice as many steps."
)
THRESHOLDS_NOTE = (
    "Thresholds are read from a monotone (isotonic) fit over all N. The low one is the smallest N at which Matthews' "
    "correlation on test rows is higher than a guess has in 95 % of cases; the high one is the smallest N at most 1 "
    "point below full tuning (margin ours). Claims compare the fits of single seeds; the figure marks the fit of their "
    "mean, with an interval of 95 % from resampled seeds."
)
POOLING_NOTE = (
    "3,400 rows for 320 steps. The distilled encoders hand on the first token to their heads; MiniLM-L6 has no trained "
    "pooler, so that its head reads the mean of the hidden states."
)
SHORT_NOTE = (
    "The runs of ap/convergence train on SST-2 for 378 steps, and their validation scores are flat only after about "
    "200. Shorter runs show which method learns fast."
)
SEARCHED_NOTE = (
    "A method's learning rate is the one that validates best on each model and task, of four and of further ones while "
    "the best is at an edge: all are tried under the first seed, and the best two under the second."
)


def _families(setup: StudySetup) -> Mapping[str, ModelFamily]:
    return SMALL_FAMILIES if setup.small else PAPER_FAMILIES


def _note(setup: StudySetup, models: str = COMPARED_NOTE) -> str:
    return f"{models} {SEARCHED_NOTE}" if setup.small else NOTE


def _plan(
    setup: StudySetup,
    name: str,
    label: str,
    model: str,
    tasks: Sequence[str],
    variants: Sequence[Variant],
    **options: Any,
) -> CellPlan:
    """Return the cells of variants on one model of a family."""
    family = _families(setup)[label]
    options = options if setup.small else {"protocol": "ap", **options}
    by_task = {task: {"answer": "words"} for task in tasks if family.answers_in_words and task in CLASSES}
    return cross_product(
        setup, name, {model: family.models[model].hub_id}, tasks,
        variants, options,
        labels={"family": label}, by_task=by_task,
    )  # fmt: skip


def gap(setup: StudySetup) -> Study:
    """Return the study of AP figures 1 and 3."""
    plans = []
    for label, family in _families(setup).items():
        tasks = ("sst2",) if setup.small else (*CLASSES, *(GENERATED if family.answers_in_words else ()))
        limits = {**SLICES["sentences"], **LONG} if setup.small else {}
        variants = {model: method_variants({"full": "full", **family.methods_of(model)}) for model in family.models}
        plans += [_plan(setup, "ap/gap", label, model, tasks, variants[model], **limits) for model in family.models]
    return Study(
        "ap/gap",
        QUESTIONS["ap/gap"],
        join_plans(*plans),
        (
            *(
                Curves(
                    title=f"{label}: score against the model's size (AP figure 3)", where={"family": label},
                    x="denominator_size", y=METRIC, average_over=() if setup.small else ("task",), log=True, gap=True,
                    display_names=NAMES, order={"method": ("full", *GROUPS)},
                )
                for label in _families(setup)
            ),
            _table("The numbers", "method"),
        ),
        METRIC,
        _note(setup, ALL_MODELS_NOTE) + (f" SST-2 alone, {POOLING_NOTE}" if setup.small else ""),
    )  # fmt: skip


def _table(title: str, rows: str, columns: tuple[str, ...] = ("task",), **more: Any) -> TableSpec:
    return TableSpec(
        title=title,
        groups="model",
        rows=rows,
        columns=columns,
        metric=METRIC,
        average=False,
        display_names=NAMES,
        **more,
    )


def structure(setup: StudySetup) -> Study:
    """Return the study of AP figure 5."""
    tasks = ("sst2",) if setup.small else CLASSES
    plans = [
        _plan(setup, "ap/structure", label, model, tasks, family.variants_of_equal_size(model))
        for label, family in _families(setup).items() for model in _compared_models(setup, family)
    ]  # fmt: skip
    return Study(
        "ap/structure",
        QUESTIONS["ap/structure"],
        join_plans(*plans),
        (
            Bars(
                title="A method and three drawings with as many parameters (AP figure 5)", groups="group",
                bars="structure", y="accuracy", panels="model", average_over=() if setup.small else ("task",),
                display_names=NAMES, order={"group": GROUPS, "structure": ("itself", *PATTERNS)},
            ),
            _table("The numbers", "group", ("task", "structure")),
        ),
        "accuracy",
        "The drawings are from vectors, prompt, low rank and adapters together, whatever the group. "
        f"{DRAWN_NOTE} {UNIFORM_NOTE} {_note(setup)}"
        + (f" Prompts have 10 vectors; SST-2 alone. {SHORT_NOTE}" if setup.small else ""),
    )  # fmt: skip


def _compared_models(setup: StudySetup, family: ModelFamily) -> tuple[str, str]:
    """Return the smallest and the largest model; at small scale a middle one is the largest that is cheap."""
    return ("minilm-d128", "minilm-d256") if setup.small else family.smallest_and_largest


def _drawn_variants(family: ModelFamily, model: str) -> list[Variant]:
    return [
        c
        for c in family.variants_of_equal_size(model)
        if c.labels["group"] == "lora" and c.labels["structure"] != "itself"
    ]


FIGURE_6_RATE = 3e-2
"""The learning rate in the legend of figure 6; appendix C.2 has 3e-4."""


def convergence(setup: StudySetup) -> Study:
    """Return the study of AP figure 6."""
    tasks = ("sst2",) if setup.small else ("sst2", "rte", "mrpc")
    steps: dict[str, Any] = {"steps": 14_000, "validate_every": 500, "lr": FIGURE_6_RATE}
    if setup.small:
        steps = {"epochs": 6, "validate_every": 21}
    plans = [
        _plan(setup, "ap/convergence", label, model, tasks, _drawn_variants(family, model), **steps)
        for label, family in _families(setup).items() for model in _compared_models(setup, family)
    ]  # fmt: skip
    return Study(
        "ap/convergence",
        QUESTIONS["ap/convergence"],
        join_plans(*plans),
        tuple(
            Curves(title=f"{NAMES[task]} (AP figure 6)", y="eval_accuracy", series="structure", panels="model",
                   where={"task": task}, display_names=NAMES)
            for task in tasks
        ),
        "accuracy",
        "As many parameters as LoRA has, drawn from vectors, prompt, low rank and adapters"
        + (". " if setup.small else "; the rate is that of the figure's legend, 3e-2. ")
        + f"{DRAWN_NOTE} {UNIFORM_NOTE} {STEPS_NOTE} {_note(setup)}",
    )  # fmt: skip


def everything(setup: StudySetup) -> Study:
    """Return the study of AP table 2."""
    plans = []
    for label, family in _families(setup).items():
        tasks = ("sst2", "sick") if setup.small else (*CLASSES, *(GENERATED if family.answers_in_words else ()))
        for model in _compared_models(setup, family) if setup.small else family.models:
            variants = [Variant({"group": "full", "structure": "full"}, {"method": "full"})]
            variants += [
                Variant({"group": group, "structure": "adjacent"}, {"method": family.drawn(n, "adjacent")})
                for group, n in zip(GROUPS, family.models[model].sizes, strict=True)
            ]
            limits: dict[str, Any] = {"max_train_rows": 500} if setup.small else {}
            plans.append(_plan(setup, "ap/all", label, model, tasks, variants, **limits))
    return Study(
        "ap/all",
        QUESTIONS["ap/all"],
        join_plans(*plans),
        (_table("All tasks (AP table 2)", "group", order={"group": ("full", *GROUPS)},
                published={} if setup.small else AP_TABLE2),),
        METRIC,
        "Each row trains as many parameters as the method has, adjacent ones: consecutive whole rows of the weights. "
        + _note(setup) + (f" Two of 11 tasks, 500 rows of each. {SHORT_NOTE}" if setup.small else ""),
    )  # fmt: skip


def thresholds(setup: StudySetup) -> Study:
    """Return the study of AP figure 7."""
    tasks = ("sst2",) if setup.small else ("sst2", "rte", "mrpc")
    plans = [
        _plan_thresholds(setup, label, model, task)
        for label, family in _families(setup).items() for model in _compared_models(setup, family) for task in tasks
    ]  # fmt: skip
    return Study(
        "ap/thresholds",
        QUESTIONS["ap/thresholds"],
        join_plans(*plans),
        tuple(
            Curves(
                title=f"{NAMES[task]}: two thresholds (AP figure 7)", where={"task": task}, x="N", y="accuracy",
                panels="model", marks=("low of the mean", "high of the mean"), log=True, display_names=NAMES,
                reference_lines={"full tuning": {"method": "full"}},
            )
            for task in tasks
        ),
        "accuracy",
        ("600 rows. The head is frozen as drawn, for full tuning too: else N = 0 is above chance. " if setup.small
         else "BERT's head is frozen as it was drawn, T5 answers in words. ")
        + f"{THRESHOLDS_NOTE} {DRAWN_NOTE} A run that diverges counts as a guess. " + _note(setup)
        + (f" It is chosen with the most parameters, for every N. {SHORT_NOTE}" if setup.small else ""),
        threshold_outcome,
    )  # fmt: skip


def _plan_thresholds(setup: StudySetup, label: str, model: str, task: str) -> CellPlan:
    """Return the cells of the grids of adjacent and of discrete parameters.

    At small scale the learning rate is the best on validation with the most parameters, for every N.
    """
    family = _families(setup)[label]
    prompt, _, lora, _ = family.models[model].sizes
    sizes = powers_of_two(prompt + 2 * lora)  # the pool has a prompt and LoRA of twice the rank
    setup.check([family.models[model].hub_id], [task])
    base: dict[str, Any] = {"model": family.models[model].hub_id, **setup.task(task)}
    base |= {**SMALL_OPTIONS, "max_train_rows": 600, "validation_rows": 100} if setup.small else {"protocol": "ap"}
    base |= {"answer": "words"} if family.answers_in_words else {"head": "freeze"}
    cell: Cell = {"family": label, "model": model, "task": task}
    first, *_ = SEEDS

    @cache
    def job(method: str, seed: int, lr: float | None) -> Job:
        rate: Values = {} if lr is None else {"lr": lr}
        return run_job(
            RunConfig.from_flat(pooling="model", **{**base, "method": method, "seed": seed, **rate}), setup.roots
        )

    def first_runs(name: str, method: str) -> CellPlan:
        """Return the cell of a method under the first seed."""
        labels = {**cell, "method": name, "N": sizes[-1], "seed": first}
        jobs = [job(method, first, rate.get("lr")) for rate in setup.rates(method)]
        plans = [partial(lambda cells, records: cells, [PlannedCell(labels, one)]) for one in jobs]
        return choose_rates(plans, FIRST_RATES, waits=setup.runs)

    methods = {"full": "full", **{pattern: family.drawn(sizes[-1], pattern, first) for pattern in THE_PAPERS}}
    runs = {name: first_runs(name, method) for name, method in methods.items()}

    def plan_cells(records: Records) -> list[PlannedCell]:
        chosen = {name: plan(records)[0] for name, plan in runs.items()}
        tries = tuple(one for planned in chosen.values() for one in planned.tries)
        for planned in chosen.values():
            if planned.job is None:
                waiting = [{**cell, "method": pattern, "seed": seed} for pattern in THE_PAPERS for seed in SEEDS]
                waiting += [{**cell, "method": "full", "N": 0, "seed": seed} for seed in SEEDS]
                return [replace(planned, cell=labels, tries=tries) for labels in waiting]
        rates = {name: _rate_of(planned, setup) for name, planned in chosen.items()}

        def grid(pattern: str) -> ThresholdGrid:
            def run(n: int, seed: int) -> Job:
                return job(family.drawn(n, pattern, seed), seed, rates[pattern])

            def full(seed: int) -> Job:
                return job("full", seed, rates["full"])

            return ThresholdGrid({**cell, "method": pattern}, sizes, SEEDS, run, full, 1 / len(LABELS[task]), tries)

        return [
            replace(planned, extra={**planned.extra, **chosen[planned.cell["method"]].extra})
            for planned in plan_thresholds([grid(pattern) for pattern in THE_PAPERS])(records)
        ]

    return plan_cells


def _rate_of(planned: PlannedCell, setup: StudySetup) -> float | None:
    """Return the learning rate of a cell's job; None where the protocol has it."""
    if not setup.small or planned.job is None:
        return None
    return RunConfig.from_canonical(planned.job.spec).optim.rate


def transfer(setup: StudySetup) -> Study:
    """Return the study of AP figure 9."""
    sources = ("sst2", "imdb", "sick", "qnli", "qqp") if setup.small else CLASSES
    targets = ("sst2", "imdb", "sick", "qnli") if setup.small else CLASSES
    plans = [
        _transferred(setup, label, model, sources, targets)
        for label, family in _families(setup).items() for model in _compared_models(setup, family)
    ]  # fmt: skip
    return Study(
        "ap/transfer",
        QUESTIONS["ap/transfer"],
        join_plans(*plans),
        (
            *(
                HeatMap(
                    title=f"{pattern.capitalize()} parameters, zero-shot on the column's task, in percent of what was "
                    "trained on it (AP figure 9)",
                    where={"structure": pattern}, rows="task", columns="target", value="accuracy", diagonal=True,
                    panels="model", display_names={**NAMES, "task": "source"},
                    order={"task": sources, "target": targets},
                )
                for pattern in THE_PAPERS
            ),
        ),
        "accuracy",
        "Labels are 1 (positive, entailment, duplicate) and 0 (the rest). Adjacent and discrete parameters, "
        f"as many as LoRA has. {DRAWN_NOTE} A percentage of an original that is no better than chance says nothing of "
        "transfer. "
        + ("QQP is a source alone: no other task of its type is here. " if setup.small
           else "Without questions and summaries: what they answer is no label. ") + _note(setup),
    )  # fmt: skip


def _transferred(setup: StudySetup, label: str, model: str, sources: Sequence[str], targets: Sequence[str]) -> CellPlan:
    """Return the cells of every source's run on every target, itself included."""
    family = _families(setup)[label]
    drawn = [c for c in _drawn_variants(family, model) if c.labels["structure"] in THE_PAPERS]
    variants = [Variant({"structure": c.labels["structure"]}, c.values) for c in drawn]
    relabel = {task: {name: RELABEL[name] for name in LABELS[task]} for task in sources}
    answer = {"answer": "words"} if family.answers_in_words else {}
    by_task = {task: {**answer, "relabel": relabel[task]} for task in sources}
    options = {} if setup.small else {"protocol": "ap"}
    runs = cross_product(
        setup, "ap/transfer", {model: family.models[model].hub_id}, sources, variants, options,
        labels={"family": label}, by_task=by_task, floors=False,
    )  # fmt: skip
    target_fields = {
        target: {k: v for k, v in {**setup.task(target), "relabel": relabel[target]}.items() if k in TASK_FIELDS}
        for target in targets
    }

    def plan_cells(records: Records) -> list[PlannedCell]:
        return [
            replace(
                planned,
                cell={**planned.cell, "target": target},
                job=None if planned.job is None else transfer_job(planned.job, other),
            )
            for planned in runs(records)
            for target, other in target_fields.items()
        ]

    return plan_cells


TASK_FIELDS = ("task", "relabel")
"""Fields of a spec that name the target task; the others are the run's own."""

AP_STUDIES: Mapping[str, Callable[[StudySetup], Study]] = {
    "ap/gap": gap, "ap/structure": structure, "ap/convergence": convergence, "ap/thresholds": thresholds,
    "ap/all": everything, "ap/transfer": transfer,
}  # fmt: skip
