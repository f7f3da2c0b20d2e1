"""`deltune.fit`: solves the sizes written as ? in a method for a budget, a number of scalars or a share ("0.5%")."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial

from transformers import PreTrainedConfig, PreTrainedModel

from ..anatomy.inspection import check_model_or_config
from ..errors import DeltuneError, excerpt
from .counting import acts_at_vocabulary, anatomy_to_count, base_size, count_resolved
from .parser import MAX_INTEGER, explain_arguments, fits_type, parse_percentage
from .registry import parse
from .resolve import resolve
from .spec import Method, printed_as

MAX_STEPS = 1_000
"""Steps in which sizes are lowered to a budget; where the count grows evenly with the sizes, a few are enough."""


@dataclass(frozen=True)
class FitResult:
    """A method with its sizes solved."""

    method: Method  # the method
    count: int  # its scalars
    budget: int  # the budget in scalars

    @property
    def left(self) -> int:
        """The scalars of the budget that are not used."""
        return self.budget - self.count


@explain_arguments
def fit(
    model: PreTrainedModel | PreTrainedConfig,
    method: str,
    budget: int | str,
    denominator: str | int = "model",
    weights: Sequence[float] | None = None,
) -> Method:
    """Solve the sizes of a method that are written as ? so that it fits a budget.

    The cost of the terms without ? comes first. The rest is shared between the ? equally or by `weights`, and each size
    is rounded down to a whole number of at least 1. What is left then raises sizes by one, the cheapest first. The
    result is never over the budget. Example: `fit(model, "prefix(length=?) + layernorm", "0.5%")`.

    Args:
        model: A live model or a configuration.
        method: An expression with a ? in place of each size to solve.
        budget: A number of scalars, or a share of the denominator such as "0.5%".
        denominator: What the share is of, as in `count`.
        weights: A positive number for each ?, by which the budget is shared.

    Returns:
        The method with every ? solved. It prints with these sizes, also where they are the defaults.

    Raises:
        DeltuneError: There is no ?, the budget is too small for sizes of 1, or an argument cannot be read.
    """
    return solve(model, method, budget, denominator, weights).method


def solve(
    model: PreTrainedModel | PreTrainedConfig,
    method: str,
    budget: int | str | Method,
    denominator: str | int = "model",
    weights: Sequence[float] | None = None,
) -> FitResult:
    """Solve sizes as `fit` does, and return the count and the budget too."""
    check_model_or_config(model, "fit")
    anatomy_of = cache(partial(anatomy_to_count, model))

    def cost(candidate: Method) -> int:
        anatomy = anatomy_of(acts_at_vocabulary(candidate))
        return count_resolved(anatomy, resolve(anatomy, candidate, lambda: base_size(model)[1]), "number", 1).method

    budget_count = cost(budget) if isinstance(budget, Method) else budget_scalars(model, budget, denominator)
    pieces = _split_at_question_marks(method)
    slots = len(pieces) - 1
    if weights is not None and not _weights_are_valid(weights, slots):
        raise DeltuneError(f"weights={excerpt(weights)}: give {slots} positive numbers, one for each ?")

    def method_with(sizes: Sequence[int]) -> Method:
        return parse(_text_with(pieces, sizes))

    def is_shown(slot: int) -> bool:
        """Whether the shortest expression has the size, which it has not where that is the default."""
        try:
            other = method_with([size + (i == slot) for i, size in enumerate(sizes)])
        except DeltuneError:
            return False
        return repr(other).count("=") == repr(solved).count("=")

    def cost_at(*sizes: int) -> int:
        return cost(method_with(sizes))

    def takes(slot: int, size: int) -> bool:
        try:
            return cost_at(*(size if i == slot else smallest for i in range(slots))) > 0
        except DeltuneError:
            return False

    def largest(slot: int, size: int) -> int:
        """Return the largest size up to `size` that the method accepts there; a mask keeps no more than there is."""
        for near in (size, size - 1):  # some sizes have to be even
            if near >= smallest and takes(slot, near):
                return near
        fits, too_large = smallest, min(size, MAX_INTEGER + 1)  # larger ones are not parsed
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            fits, too_large = (middle, too_large) if takes(slot, middle) else (fits, middle)
        return fits

    smallest, least = _smallest_sizes(cost_at, slots)
    if least > budget_count:
        raise DeltuneError(
            f"a budget of {budget_count:,} is too small: with every ? at {smallest}, {method} has {least:,} scalars; "
            "fewer layers (layers=) or sites (at=) take fewer, or another method does"
        )
    sizes_with = [
        [[size if i == j else smallest for j in range(slots)] for size in range(smallest, smallest + 3)]
        for i in range(slots)
    ]
    unit_costs = [_unit_cost(cost_at, sizes) for sizes in sizes_with]
    if without_effect := [str(i) for i, unit in enumerate(unit_costs, 1) if not unit]:
        raise DeltuneError(f"? number {' and '.join(without_effect)} of {method} changes no count, so give it a value")
    shares = [Fraction(weight) for weight in weights or [1] * slots]  # exact, however large the budget is
    free = budget_count - (least - smallest * sum(unit_costs))
    sizes = [max(smallest, free * share / sum(shares) // step) for share, step in zip(shares, unit_costs, strict=True)]
    sizes = [largest(slot, size) for slot, size in enumerate(sizes)]
    for _ in range(MAX_STEPS):  # a size at the smallest can cost more than its share
        if cost_at(*sizes) <= budget_count or max(sizes) == smallest:
            break
        largest_slot = max((i for i in range(slots) if sizes[i] > smallest), key=lambda i: unit_costs[i] * sizes[i])
        sizes[largest_slot] -= 1
    remaining = budget_count - cost_at(*sizes)
    for i in sorted(range(slots), key=lambda i: unit_costs[i]):
        if remaining >= unit_costs[i]:
            increase = largest(i, sizes[i] + remaining // unit_costs[i]) - sizes[i]
            sizes[i], remaining = sizes[i] + increase, remaining - increase * unit_costs[i]
    solved = method_with(sizes)
    if (count := cost(solved)) > budget_count:
        raise DeltuneError(f"the count of {method} does not grow evenly with its ?: give a value instead of the ?")
    if not all(is_shown(slot) for slot in range(slots)):
        nodes = _summands(ast.parse(" ".join(_text_with(pieces, sizes).split()), mode="eval").body)
        terms = [printed_as(term, ast.unparse(node)) for term, node in zip(solved.terms, nodes, strict=True)]
        solved = sum(terms[1:], terms[0])
    return FitResult(solved, count, budget_count)


def _summands(node: ast.expr) -> list[ast.expr]:
    """Return the terms of a sum, in order; an expression that is no sum is one."""
    return [*_summands(node.left), *_summands(node.right)] if isinstance(node, ast.BinOp) else [node]


def _smallest_sizes(cost_at: Callable[..., int], slots: int) -> tuple[int, int]:
    """Return the smallest sizes and their count: 1, or 2 where 1 is refused (a mask on a product needs two)."""
    try:
        return 1, cost_at(*[1] * slots)
    except DeltuneError as refused:
        try:
            return 2, cost_at(*[2] * slots)
        except DeltuneError:
            raise refused from None


def _unit_cost(cost_at: Callable[..., int], sizes: Sequence[Sequence[int]]) -> int:
    """Return what the second sizes cost more than the first; if refused, half of what the third do: some are even."""
    try:
        return cost_at(*sizes[1]) - cost_at(*sizes[0])
    except DeltuneError as refused:
        try:
            return (cost_at(*sizes[2]) - cost_at(*sizes[0])) // 2
        except DeltuneError:
            raise refused from None


def _weights_are_valid(weights: object, slots: int) -> bool:
    """Whether there is a positive number for each ?."""
    if not isinstance(weights, list | tuple) or len(weights) != slots:
        return False
    return all(fits_type(float, weight) and weight > 0 for weight in weights)


def budget_scalars(model: PreTrainedModel | PreTrainedConfig, budget: int | str, denominator: str | int) -> int:
    """Return the budget as a number of scalars."""
    number = budget if isinstance(budget, int) and budget is not True else None
    text = budget.replace(",", "").strip() if isinstance(budget, str) else ""
    if (share := parse_percentage(text)) is not None:
        number = int(base_size(model, denominator)[1] * share)
    elif re.fullmatch(r"[-+]?[0-9]{1,30}", text):
        number = int(text)
    if number is None or abs(number) > 10**30:
        raise DeltuneError(f"budget={excerpt(budget)}: give a number of scalars or a share such as '0.5%'")
    if number < 1:
        raise DeltuneError(f"budget={budget!r} is {number} scalars; give at least 1")
    return number


def check_open(method: str) -> None:
    """Refuse an expression that is no method of any model, whatever size each ? stands for."""
    pieces = _split_at_question_marks(method) if "?" in method else [method]
    _smallest_sizes(lambda *sizes: len(parse(_text_with(pieces, sizes)).terms), len(pieces) - 1)


def _text_with(pieces: Sequence[str], sizes: Sequence[int]) -> str:
    return "".join(piece + str(size) for piece, size in zip(pieces, [*sizes, ""], strict=True))


def _split_at_question_marks(method: str) -> list[str]:
    """Split an expression at its question marks; those inside quotes are left alone."""
    if not isinstance(method, str):
        raise DeltuneError(
            f"fit takes an expression (text) with ? for the sizes to solve, not a {type(method).__name__}"
        )
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
