"""The studies of the paper of APET (Su et al. 2023, on the impact of model scaling), each at two scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...training.config import RunConfig
from ..claims.claims import Alike, Beats, Both, Claim, Falls, Rises, Shrinks, Within
from ..claims.comparisons import EVERY, LARGEST, SMALLEST, Where
from ..claims.measurements import RELATIVE, STEPS, threshold
from ..engine.jobs import run_job, transfer_job
from ..engine.outcomes import Cell
from ..report.figure_spec import Bars, Curves, Heat, Table
from ..scales import SEEDS, SMALL, Choice, StudySetup, Wanted, choices, crossed, joined, small_scale_rate
from ..study import Rows, Study, Want
from ..thresholds import Climb, bracketed, powers, searched

PARITY = 1.0
"""Points within which two scores count as the same performance."""

METHODS = ("prompt", "bitfit", "lora", "adapter")
LOW, HIGH = threshold("low"), threshold("high")


def _pairs(model: object) -> tuple[Where, Where]:
    """Sources of the target's own type, and of others, on average."""
    return (
        {"pair": "same type", "task": EVERY, "model": model},
        {"pair": "other type", "task": EVERY, "model": model},
    )


AP_CLAIMS: dict[str, tuple[Claim, ...]] = {
    "ap/gap": (
        Claim("the gap between the best and the worst method shrinks as models grow", "§4.2, figures 1 and 3",
              Shrinks("method", "model", {"method": METHODS})),
        Claim("on the largest model every method matches full tuning: no more than 1 point below", "§4.2, figures 1, 3",
              Both(tuple(Within({"method": m, "model": LARGEST}, {"method": "full", "model": LARGEST}, PARITY)
                         for m in METHODS))),
        Claim("full tuning's lead over every method shrinks as models grow", "§4.2, figure 3",
              Both(tuple(Falls("model", {"method": "full"}, less={"method": m}) for m in METHODS))),
    ),
    "ap/structure": (
        Claim("at equal N the gap between structures shrinks as models grow", "§5.2, figure 5",
              Shrinks("structure", "model")),
        Claim("at equal N all structures are within 1 point of each other on the largest model", "§5.2, figure 5",
              Alike("structure", PARITY, {"model": LARGEST})),
        Claim("on the largest model the groups, with different N, are within 1 point of each other", "§5.2, figure 5",
              Alike("group", PARITY, {"model": LARGEST, "structure": EVERY})),
    ),
    "ap/convergence": (
        Claim("adjacent parameters converge in fewer steps than discrete ones", "§5.2, figure 6",
              Beats({"structure": "adjacent"}, {"structure": "discrete"}, reading=STEPS)),
        Claim("both end at the same performance: within 1 point", "§5.2, figure 6",
              Within({"structure": "adjacent"}, {"structure": "discrete"}, PARITY, both=True)),
    ),
    "ap/thresholds": (
        Claim("larger models reach full tuning with fewer parameters: the high threshold falls", "§5.3, figure 7",
              Falls("model", reading=HIGH)),
        Claim("larger models need more parameters to leave chance: the low threshold rises", "§5.3, figure 7",
              Rises("model", reading=LOW)),
        Claim("low thresholds of all methods lie in one range: within a factor of 10, the widest that is printed",
              "§5.3, figure 7", Alike("method", 1.0, reading=LOW)),
    ),
    "ap/all": (
        Claim("on the largest model adjacent parameters match full tuning in every group: no more than 1 point below",
              "appendix D, table 2",
              Within({"structure": "adjacent", "group": EVERY, "model": LARGEST},
                     {"structure": "full", "group": EVERY, "model": LARGEST}, PARITY)),
        Claim("the lead of full tuning over adjacent parameters shrinks as models grow", "appendix D, table 2",
              Falls("model", {"structure": "full", "group": EVERY}, less={"structure": "adjacent", "group": EVERY})),
    ),
    "ap/transfer": (
        Claim("tuned parameters transfer better within a type of tasks than between types, on small and large models",
              "appendix E, figure 9", Both((
                  Beats(*_pairs(SMALLEST), reading=RELATIVE), Beats(*_pairs(LARGEST), reading=RELATIVE))),
              off={"target": ("nq_open",)}),  # the only task of its type
        Claim("larger models do not transfer better between types: less than 5 % of the original a decade",
              "appendix E, figure 9",
              Falls("model", {"pair": "other type", "task": EVERY}, margin=5.0, reading=RELATIVE)),
    ),
}  # fmt: skip


SENTIMENT, INFERENCE, PARAPHRASE = ("sst2", "imdb", "rotten_tomatoes"), ("mnli", "qnli", "rte"), ("mrpc", "qqp")
CLASSES = (*SENTIMENT, *INFERENCE, *PARAPHRASE)
GENERATED = ("nq_open", "samsum", "multi_news")
GROUPS = ("prompt", "bitfit", "lora", "adapter")
SERIES = "MiniLM"


@dataclass(frozen=True)
class Sized:
    """A model, and how many scalars each group trains on it, in the order of GROUPS."""

    hub: str
    sizes: tuple[int, int, int, int]


@dataclass(frozen=True)
class Family:
    """Models by size, ascending, and the methods of the four groups on them."""

    models: Mapping[str, Sized]
    methods: Mapping[str, str]
    words: bool = False

    @property
    def ends(self) -> tuple[str, str]:
        smallest, *_, largest = self.models
        return smallest, largest

    @property
    def attention(self) -> str:
        """T5's decoder attends to its encoder too: the paper's sizes are of self-attention alone."""
        return ", attention='self'" if self.words else ""

    @property
    def everything(self) -> str:
        """All that APET may draw from: masked vectors, low rank, adapters (AP eq. 14 to 16), more than any group."""
        return (
            "Modification('attention', Vector()) + Modification('ffn', Vector()) + "
            f"lora(rank=16, scale=2{self.attention}) + adapter(rank=24{self.attention})"
        )

    def twins(self, model: str) -> list[Choice]:
        """Each group's method, and two drawings of as many scalars from everything."""
        return [
            Choice({"group": group, "structure": pattern}, {"method": method})
            for group, n in zip(GROUPS, self.models[model].sizes, strict=True)
            for pattern, method in (
                ("itself", self.methods[group]),
                *((p, f"apet({self.everything}, parameters={n}, pattern={p!r})") for p in ("adjacent", "discrete")),
            )
        ]


def _methods(prompt: int, bitfit: str, more: str = "") -> dict[str, str]:
    """AP §B.2."""
    return {
        "prompt": f"prompt(length={prompt})", "bitfit": bitfit, "lora": f"lora(rank=8, scale=2{more})",
        "adapter": f"adapter(rank=24, bias=True{more})",
    }  # fmt: skip


PAPER = {
    "T5": Family(
        {
            "t5-small": Sized("google/t5-v1_1-small", (51_200, 101_376, 229_376, 803_584)),
            "t5-base": Sized("google/t5-v1_1-base", (76_800, 273_408, 589_824, 1_807_488)),
            "t5-xxl": Sized("google/t5-v1_1-xxl", (409_600, 2_850_816, 6_291_456, 19_269_888)),
        },
        _methods(100, "bitfit(add_missing=True)", ", attention='self'"),
        words=True,
    ),
    "BERT": Family(
        {
            "bert-small": Sized("prajjwal1/bert-small", (51_200, 23_552, 65_536, 200_896)),
            "bert-base": Sized("google-bert/bert-base-uncased", (76_800, 102_912, 294_912, 903_744)),
            "bert-large": Sized("google-bert/bert-large-uncased", (102_400, 272_384, 786_432, 2_409_600)),
        },
        _methods(100, "bitfit"),
    ),
}
SMALLER = {
    SERIES: Family(
        {
            "minilm-d128": Sized("minilm-d128", (1_280, 3_072, 8_192, 25_184)),
            "minilm-d192": Sized("minilm-d192", (1_920, 6_720, 18_432, 56_592)),
            "minilm-d256": Sized("minilm-d256", (2_560, 11_776, 32_768, 100_544)),
            "minilm": Sized("minilm", (3_840, 26_112, 73_728, 225_936)),
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
"""AP §E: positive, entailment, duplicate and true become 1, the rest 0."""

LABELS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(SENTIMENT, ("negative", "positive")),
    **dict.fromkeys(("qnli", "rte"), ("entailment", "not_entailment")),
    **dict.fromkeys(("mnli", "sick"), ("entailment", "neutral", "contradiction")),
    "mrpc": ("not_equivalent", "equivalent"), "qqp": ("not_duplicate", "duplicate"),
}  # fmt: skip


METRIC = ("accuracy", "answer_f1", "rougeL")

WRITTEN = {
    "full": "full tuning", "prompt": "Prompt", "bitfit": "BitFit", "lora": "LoRA", "adapter": "Adapter",
    "itself": "the method", "denominator_size": "parameters of the model", "low": "low", "high": "high",
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
SMALL_NOTE = (
    "Encoders of 4 to 23 million parameters of one series, the smaller ones distilled from the largest, where the "
    "paper goes to 11 billion: a trend over less than one power of ten says nothing of the paper's range. One learning "
    "rate a method (scales.RATES)."
)


def _families(place: StudySetup) -> Mapping[str, Family]:
    return SMALLER if place.small else PAPER


def _note(place: StudySetup) -> str:
    return SMALL_NOTE if place.small else NOTE


def _grid(
    place: StudySetup, name: str, label: str, model: str, tasks: Sequence[str], chosen: Sequence[Choice], **options: Any
) -> Wanted:
    """Choices on one model of a family."""
    family = _families(place)[label]
    given = options if place.small else {"protocol": "ap", **options}
    by_task = {task: {"answer": "words"} for task in tasks if family.words and task in CLASSES}
    return crossed(
        place, name, {model: family.models[model].hub}, tasks, [_tamed(place, choice) for choice in chosen], given,
        labels={"family": label}, by_task=by_task,
    )  # fmt: skip


def _tamed(place: StudySetup, choice: Choice) -> Choice:
    """Full tuning at a rate of its own: the protocol's is that of the paper's small methods."""
    if place.small or choice.values["method"] != "full":
        return choice
    return Choice(choice.labels, {**choice.values, "lr": 5e-5})


def gap(place: StudySetup) -> Study:
    """AP figures 1 and 3."""
    parts = []
    for label, family in _families(place).items():
        tasks = ("sst2",) if place.small else (*CLASSES, *(GENERATED if family.words else ()))
        few = {"max_train_rows": 400, "validation_rows": 100, "test_rows": 400} if place.small else {}
        chosen = choices({"full": "full", **family.methods})
        parts += [_grid(place, "ap/gap", label, model, tasks, chosen, **few) for model in family.models]
    return Study(
        "ap/gap",
        "Does the gap between methods shrink as models grow? (AP figures 1 and 3)",
        joined(*parts),
        (
            *(
                Curves(
                    title=f"{label}: score against the model's size (AP figure 3)", where={"family": label},
                    x="denominator_size", y=METRIC, pooled=() if place.small else ("task",), log=True, gap=True,
                    written=WRITTEN, order={"method": ("full", *GROUPS)},
                )
                for label in _families(place)
            ),
            _table("The numbers", "method"),
        ),
        METRIC,
        _note(place) + (" SST-2 alone, 400 rows." if place.small else ""),
    )  # fmt: skip


def _table(title: str, rows: str, columns: tuple[str, ...] = ("task",), **more: Any) -> Table:
    return Table(
        title=title, groups="model", rows=rows, columns=columns, metric=METRIC, average=False, written=WRITTEN, **more
    )


def structure(place: StudySetup) -> Study:
    """AP figure 5."""
    tasks = ("sst2",) if place.small else CLASSES
    parts = [
        _grid(place, "ap/structure", label, model, tasks, family.twins(model))
        for label, family in _families(place).items() for model in _ends(place, family)
    ]  # fmt: skip
    return Study(
        "ap/structure",
        "Does the structure of what is trained matter less as models grow, N being equal? (AP figure 5)",
        joined(*parts),
        (
            Bars(
                title="A method and two drawings with as many parameters (AP figure 5)", groups="group",
                bars="structure", y="accuracy", panels="model", pooled=() if place.small else ("task",),
                written=WRITTEN, order={"group": GROUPS, "structure": ("itself", "adjacent", "discrete")},
            ),
            _table("The numbers", "group", ("task", "structure")),
        ),
        "accuracy",
        "The drawings are from vectors, low rank and adapters together, whatever the group. " + _note(place)
        + (" Prompts have 10 vectors; SST-2 alone." if place.small else ""),
    )  # fmt: skip


def _ends(place: StudySetup, family: Family) -> tuple[str, str]:
    """The smallest and the largest model; at small scale a middle one is the largest that is cheap."""
    return ("minilm-d128", "minilm-d256") if place.small else family.ends


def _drawn(family: Family, model: str, group: str = "lora") -> list[Choice]:
    return [c for c in family.twins(model) if c.labels["group"] == group and c.labels["structure"] != "itself"]


def convergence(place: StudySetup) -> Study:
    """AP figure 6."""
    tasks = ("sst2",) if place.small else ("sst2", "rte", "mrpc")
    steps = {"epochs": 6, "validate_every": 21} if place.small else {"steps": 14_000, "validate_every": 500}
    parts = [
        _grid(place, "ap/convergence", label, model, tasks, _drawn(family, model), **steps)
        for label, family in _families(place).items() for model in _ends(place, family)
    ]  # fmt: skip
    return Study(
        "ap/convergence",
        "Do adjacent parameters converge in fewer steps than discrete ones? (AP figure 6)",
        joined(*parts),
        tuple(
            Curves(title=f"{WRITTEN[task]} (AP figure 6)", y="eval_accuracy", series="structure", panels="model",
                   where={"task": task}, written=WRITTEN)
            for task in tasks
        ),
        "accuracy",
        "As many parameters as LoRA has, drawn from vectors, low rank and adapters. " + _note(place),
    )  # fmt: skip


def everything(place: StudySetup) -> Study:
    """AP table 2."""
    parts = []
    for label, family in _families(place).items():
        tasks = ("sst2", "sick") if place.small else (*CLASSES, *(GENERATED if family.words else ()))
        for model in _ends(place, family) if place.small else family.models:
            chosen = [Choice({"group": "full", "structure": "full"}, {"method": "full"})]
            chosen += [choice for choice in family.twins(model) if choice.labels["structure"] == "adjacent"]
            few = {"max_train_rows": 500} if place.small else {}
            parts.append(_grid(place, "ap/all", label, model, tasks, chosen, **few))
    return Study(
        "ap/all",
        "APET with adjacent parameters on every task, with four numbers of parameters (AP table 2)",
        joined(*parts),
        (_table("All tasks (AP table 2)", "group", order={"group": ("full", *GROUPS)}),),
        METRIC,
        "Rows: as many parameters as the method has. " + _note(place)
        + (" Two of 11 tasks, 500 rows of each." if place.small else ""),
    )  # fmt: skip


def thresholds(place: StudySetup) -> Study:
    """AP figure 7."""
    climbs = []
    tasks = ("sst2",) if place.small else ("sst2", "rte", "mrpc")
    for label, family in _families(place).items():
        for model in _ends(place, family):
            for task in tasks:
                climbs += _climbs(place, label, model, task)
    return Study(
        "ap/thresholds",
        "How many parameters leave chance, and how many reach full tuning? (AP figure 7)",
        searched(climbs),
        tuple(
            Curves(
                title=f"{WRITTEN[task]}: two thresholds (AP figure 7)", where={"task": task}, x="N", y="accuracy",
                panels="model", marks=("low", "high"), log=True, written=WRITTEN,
                levels={"full tuning": {"method": "full"}},
            )
            for task in tasks
        ),
        "accuracy",
        ("600 rows. The head is frozen as drawn, for full tuning too: else N = 0 is above chance. " if place.small
         else "BERT's head is frozen as it was drawn, T5 answers in words. ")
        + "Each seed has a bisection of its own, so that seeds differ in the N that they met; what one seed did not "
        "meet is noted. " + _note(place),
        bracketed,
    )  # fmt: skip


def _climbs(place: StudySetup, label: str, model: str, task: str) -> list[Climb]:
    """LoRA and the adapter under masks, for each seed."""
    family = _families(place)[label]
    rank = 32 if place.small else 64
    inner = {name: f"{name}(rank={rank}{family.attention})" for name in ("lora", "adapter")}
    lora = family.models[model].sizes[2] // 8 * rank  # counts grow with the rank
    sizes = {"lora": powers(lora), "adapter": powers(lora)}  # an adapter's 4dr is LoRA's
    place.check([family.models[model].hub], [task])
    base: dict[str, Any] = {"model": place.model(family.models[model].hub), **place.task(task)}
    base |= {**SMALL, "max_train_rows": 600, "validation_rows": 100} if place.small else {"protocol": "ap"}
    base |= {"answer": "words"} if family.words else {"head": "freeze"}
    cell: Cell = {"family": label, "model": model, "task": task}
    chance = 1 / len(LABELS[task]) if not family.words else 0.0

    def spec(method: str, seed: int) -> RunConfig:
        own = small_scale_rate(method) if place.small else 5e-5 if method == "full" else None
        return RunConfig.from_flat(**{**base, "method": method, "seed": seed, **({} if own is None else {"lr": own})})

    def climb(name: str, seed: int) -> Climb:
        def run(n: int) -> Any:
            return run_job(spec(f"apet({inner[name]}, parameters={n})", seed))

        return Climb({**cell, "method": name, "seed": seed}, sizes[name], run, run_job(spec("full", seed)), chance)

    return [climb(name, seed) for name in inner for seed in SEEDS]


def transfer(place: StudySetup) -> Study:
    """AP figure 9."""
    sources = ("sst2", "imdb", "sick", "qnli", "qqp") if place.small else CLASSES
    targets = ("sst2", "imdb", "sick", "qnli") if place.small else CLASSES
    parts = [
        _transferred(place, label, model, sources, targets)
        for label, family in _families(place).items() for model in _ends(place, family)
    ]  # fmt: skip
    return Study(
        "ap/transfer",
        "Do tuned parameters serve other tasks, of their own type and of others? (AP figure 9)",
        joined(*parts),
        (
            Heat(
                title="Zero-shot on the column's task, in percent of what was trained on it (AP figure 9)", rows="task",
                columns="target", value="accuracy", diagonal=True, panels="model", written=WRITTEN,
                order={"task": sources, "target": targets},
            ),
        ),
        "accuracy",
        "Labels are 1 (positive, entailment, duplicate) and 0 (the rest). Adjacent parameters, as many as LoRA has. "
        + ("QQP is a source alone: no other task of its type is here. " if place.small
           else "Without questions and summaries: what they answer is no label. ") + _note(place),
    )  # fmt: skip


def _transferred(place: StudySetup, label: str, model: str, sources: Sequence[str], targets: Sequence[str]) -> Wanted:
    """Every source's run on every target, itself included."""
    family = _families(place)[label]
    adjacent = [c.values for c in _drawn(family, model) if c.labels["structure"] == "adjacent"]
    relabel = {task: {name: RELABEL[name] for name in LABELS[task]} for task in sources}
    answer = {"answer": "words"} if family.words else {}
    by_task = {task: {**answer, "relabel": relabel[task]} for task in sources}
    given = {} if place.small else {"protocol": "ap"}
    runs = crossed(
        place, "ap/transfer", {model: family.models[model].hub}, sources, [Choice({}, adjacent[0])], given,
        labels={"family": label}, by_task=by_task,
    )  # fmt: skip
    asked = {
        target: {k: v for k, v in {**place.task(target), "relabel": relabel[target]}.items() if k in OTHER}
        for target in targets
    }

    def wanted(rows: Rows) -> list[Want]:
        return [
            Want({**want.cell, "target": target}, transfer_job(RunConfig.from_flat(**want.work.spec), other))
            for want in runs(rows)
            if want.work is not None
            for target, other in asked.items()
        ]

    return wanted


OTHER = ("task", "data_root", "relabel")
"""Fields that say what another task is; the others are the run's own."""

AP_STUDIES: Mapping[str, Callable[[StudySetup], Study]] = {
    "ap/gap": gap, "ap/structure": structure, "ap/convergence": convergence, "ap/thresholds": thresholds,
    "ap/all": everything, "ap/transfer": transfer,
}  # fmt: skip
