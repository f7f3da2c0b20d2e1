"""The questions of the papers' studies, apart from the studies, which `deltune study list` need not build."""

from __future__ import annotations

from collections.abc import Mapping

QUESTIONS: Mapping[str, str] = {
    "ln/nlu": "Does tuning only the norms compete with other ways to tune few parameters? (LN table 1)",
    "ln/nlg": "Does tuning only the norms compete for generated text too? (LN table 2)",
    "ln/time": "How much time does each method take, full tuning = 100? (LN figures 2 and 4)",
    "ln/terms": "Which gains and biases does tuning the norms move, and how far? (LN figure 3)",
    "ln/ablation": "Is any part of tuning the norms superfluous? (LN table 5)",
    "ln/unified": (
        "Do methods at attention gain from tuned norms, and do those at the FFN lose? "
        "(abstract of the third version)"
    ),
    "uv/budget": (
        "How do scores grow with the share of tuned parameters, and is full tuning reached? "
        "(UV figures 2 and 4)"
    ),
    "uv/insertion": "Sequential or parallel insertion, at attention and at the FFN? (UV table 3)",
    "uv/representation": (
        "Which is better modified, attention or FFN, with a large budget and with a tiny one? "
        "(UV figure 5, table 4)"
    ),
    "uv/composition": "Does scaling Δh help, and need the scale be learned? (UV table 5)",
    "uv/integration": "Do combinations of the favourable choices match full tuning? (UV table 6)",
    "uv/full": "How do all methods at attention and at the FFN compare, with several bottlenecks? (UV table 12)",
    "uv/glue": "Do the methods match full tuning on understanding with 0.5 % of the parameters? (UV table 2)",
    "ap/gap": "Does the gap between methods shrink as models grow? (AP figures 1 and 3)",
    "ap/structure": "Does the structure of what is trained matter less as models grow, N being equal? (AP figure 5)",
    "ap/convergence": "Do adjacent parameters converge in fewer steps than discrete ones? (AP figure 6)",
    "ap/thresholds": "How many parameters leave chance, and how many reach full tuning? (AP figure 7)",
    "ap/all": (
        "How far does APET with adjacent parameters come on every task, with four numbers of parameters? "
        "(AP table 2)"
    ),
    "ap/transfer": "Do tuned parameters serve other tasks, of their own type and of others? (AP figure 9)",
}  # fmt: skip
"""Name of a study -> its question, with the paper's table or figure."""
