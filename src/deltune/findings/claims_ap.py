"""What the paper of APET (Su et al. 2023, on the impact of model scaling) claims, study by study.

Margins are ours: the paper says "almost". Of several families of models each needs its axis "family", else the largest
model is the largest of all.
"""

from __future__ import annotations

from .cells import EVERY, LARGEST, SMALLEST, Where
from .claims import Alike, Beats, Both, Claim, Falls, Rises, Shrinks, Within
from .readings import RELATIVE, STEPS, threshold

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
