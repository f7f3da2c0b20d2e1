"""Every study, and the claims of each, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..claims.claims import Claim
from ..claims.decisions import Paper, PaperStatements
from ..own import OWN_CLAIMS, OWN_STUDIES
from ..scales import StudySetup
from ..study import Study
from .apet import AP_CLAIMS, AP_STUDIES
from .ln import LN_CLAIMS, LN_STUDIES
from .printed import PRINTED
from .published import CHOICES, RULE
from .uv import UV_CLAIMS, UV_STUDIES

PAPERS: Mapping[str, Paper] = {
    "ln": Paper(
        "LN",
        "Parameter-Efficient Tuning on Layer Normalization for Pre-trained Language Models",
        "Wang Qi, Yu-Ping Ruan, Yuan Zuo and Taihao Li, 2022, arXiv 2211.08682. Its sections, tables and abstract are "
        "cited as in an anonymous submission to ACL; “abstract of v3” is that of arXiv's third version, of 9 December "
        "2022",
    ),
    "uv": Paper(
        "UV",
        "Towards a Unified View of Parameter-Efficient Transfer Learning",
        "Junxian He, Chunting Zhou, Xuezhe Ma, Taylor Berg-Kirkpatrick and Graham Neubig, ICLR 2022, arXiv 2110.04366",
    ),
    "ap": Paper(
        "AP",
        "Exploring the Impact of Model Scaling on Parameter-Efficient Tuning",
        "Yusheng Su, Chi-Min Chan, Jiali Cheng and others, EMNLP 2023",
    ),
}
"""First part of a study's name -> its paper."""

FIRST = (
    "uv/integration", "uv/full", "uv/glue", "ap/gap", "ap/all", "ln/unified", "ln/nlg", "uv/budget",
    "uv/representation", "ln/nlu",
)  # fmt: skip
"""The studies that `deltune study run all` runs before the others, in this order: the papers' main results."""

CLAIMS: dict[str, tuple[Claim, ...]] = {**LN_CLAIMS, **UV_CLAIMS, **AP_CLAIMS}
"""Name of a study of the papers -> the claims that it decides."""

STUDIES: Mapping[str, Callable[[StudySetup], Study]] = {**LN_STUDIES, **UV_STUDIES, **AP_STUDIES}
"""Name -> the function that builds a study of the papers. Building one loads nothing and does not use the hub."""

ALL_STUDIES: Mapping[str, Callable[[StudySetup], Study]] = {**STUDIES, **OWN_STUDIES}
"""The studies of the papers and our own."""

ALL_CLAIMS: Mapping[str, tuple[Claim, ...]] = {**CLAIMS, **OWN_CLAIMS}
"""The claims of the papers and our own."""


RERUN = (
    "The studies of UV, ln/nlu and ln/unified had one learning rate for each method at first. After their results had "
    "been seen they were run again with rates that are searched for each model, task and method. Of the 79 claims 50 "
    "were decided with one rate for each method, and 40 with searched ones; docs/studies/reproduce.md has the history."
)
"""The small-scale studies that were run again after their results had been seen."""


def paper_statements(study: str) -> PaperStatements:
    """Return what a study's paper claims and prints; empty for a study that is not of the papers."""
    choices = tuple(text for studies, text in CHOICES if study in studies)
    paper = PAPERS.get(study.partition("/")[0]) if study in STUDIES else None
    open_points = (RULE, *choices) if choices else ()
    rerun = RERUN if study in STUDIES else ""
    return PaperStatements(paper, ALL_CLAIMS.get(study, ()), PRINTED.get(study, ()), open_points, rerun)
