"""Solving the sizes written as ? for a budget, or for another method's count (how the papers compare methods)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from ..anatomy.observe import inspect
from ..errors import DeltuneError
from .catalogue import parse
from .counting import base_size, count_plan
from .elements import Method
from .planning import plan


@dataclass(frozen=True)
class Fit:
    """A method with its sizes solved: its count, the budget, and what is left of it."""

    method: Method
    count: int
    budget: int

    @property
    def left(self) -> int:
        return self.budget - self.count


def fit(
    model: PreTrainedModel | PreTrainedConfig,
    method: str,
    budget: int | str,
    denominator: str | int = "model",
    weights: Sequence[float] | None = None,
) -> Method:
    """The method with every ? solved, for example fit(model, "prefix(length=?) + layernorm", "0.5%").

    What the terms without ? cost comes first; the rest is shared equally between the ?, or by `weights`, each rounded
    down to whole sizes of at least 1; what is left then raises sizes by one, the cheapest that still fits first.
    budget: a number of scalars, or a share of the denominator such as "0.5%". Never over budget.
    Errors: no ?, a budget too small for sizes of 1 (with what they need), a budget that cannot be read.
    """
    return solve(model, method, budget, denominator, weights).method


def solve(
    model: PreTrainedModel | PreTrainedConfig,
    method: str,
    budget: int | str | Method,
    denominator: str | int = "model",
    weights: Sequence[float] | None = None,
) -> Fit:
    """The same with its count and what is left; a Method as budget is matched in count."""
    anatomy = inspect(model)

    def cost(wanted: Method) -> int:
        return count_plan(anatomy, plan(anatomy, wanted, lambda: base_size(model)[1]), "number", 1).method

    wanted = cost(budget) if isinstance(budget, Method) else _scalars(model, budget, denominator)
    pieces = _pieces(method)
    slots = len(pieces) - 1
    if weights is not None and (len(weights) != slots or not all(0 < w < math.inf for w in weights)):
        raise DeltuneError(f"weights={list(weights)}: give {slots} positive numbers, one for each ?")

    def made(sizes: Sequence[int]) -> Method:
        text = "".join(piece + str(size) for piece, size in zip(pieces, [*sizes, ""], strict=True))
        return parse(text)

    def cost_at(*sizes: int) -> int:
        return cost(made(sizes))

    def takes(slot: int, size: int) -> bool:
        try:
            return cost_at(*(size if i == slot else small for i in range(slots))) > 0
        except DeltuneError:
            return False

    def largest(slot: int, size: int) -> int:
        """The largest size up to `size` that the method takes there (a mask keeps no more than there is)."""
        if takes(slot, size):
            return size
        return small + bisect_left(range(small + 1, size), True, key=lambda tried: not takes(slot, tried))

    small, least = _smallest(cost_at, slots)
    if least > wanted:
        raise DeltuneError(
            f"a budget of {wanted:,} is too small: with every ? at {small}, {method} has {least:,} scalars"
        )
    units = [cost_at(*(small + (i == j) for j in range(slots))) - least for i in range(slots)]
    if idle := [str(i) for i, unit in enumerate(units, 1) if not unit]:
        raise DeltuneError(f"? number {' and '.join(idle)} of {method} changes no count, so give it a value")
    shares = [1.0] * slots if weights is None else list(weights)
    free = wanted - (least - small * sum(units))
    sizes = [max(small, int(free * s / sum(shares) // u)) for s, u in zip(shares, units, strict=True)]
    sizes = [largest(slot, size) for slot, size in enumerate(sizes)]
    while cost_at(*sizes) > wanted:  # the smallest size where a share was less
        over = max((i for i in range(slots) if sizes[i] > small), key=lambda i: units[i] * sizes[i])
        sizes[over] -= 1
    left = wanted - cost_at(*sizes)
    for i in sorted(range(slots), key=lambda i: units[i]):
        if left >= units[i]:
            more = largest(i, sizes[i] + left // units[i]) - sizes[i]
            sizes[i], left = sizes[i] + more, left - more * units[i]
    solved = made(sizes)
    return Fit(solved, cost(solved), wanted)


def _smallest(cost_at: Callable[..., int], slots: int) -> tuple[int, int]:
    """The smallest sizes and their count: 1, or 2 where one alone is refused (a mask on a product needs two)."""
    try:
        return 1, cost_at(*[1] * slots)
    except DeltuneError as refused:
        try:
            return 2, cost_at(*[2] * slots)
        except DeltuneError:
            raise refused from None


def _scalars(model: PreTrainedModel | PreTrainedConfig, budget: int | str, denominator: str | int) -> int:
    text = str(budget).replace(",", "").strip()
    try:
        number = int(base_size(model, denominator)[1] * float(text[:-1]) / 100) if text.endswith("%") else int(text)
    except (ValueError, OverflowError):
        raise DeltuneError(f"budget={budget!r}: give a number of scalars or a share such as '0.5%'") from None
    if number < 1:
        raise DeltuneError(f"budget={budget!r} is {number} scalars; give at least 1")
    return number


def _pieces(method: str) -> list[str]:
    """The expression cut at its question marks, those inside quotes left alone."""
    if not isinstance(method, str):
        raise DeltuneError("fit wants an expression with ? for the sizes to solve, as a text")
    pieces, quote = [""], ""
    for character in method:
        if character in "'\"":
            quote = "" if quote == character else quote or character
        if character == "?" and not quote:
            pieces.append("")
        else:
            pieces[-1] += character
    if len(pieces) == 1:
        raise DeltuneError(f"{method!r} leaves no size open; write ? for the sizes to solve, as in prefix(length=?)")
    return pieces
