"""Families of models, groups of methods and types of tasks of the paper of APET, and what takes their place here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .scales import Choice

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
