"""APET: which N scalars of a method are trained (AP §5.1; METHODS §4). Drawn on the CPU, in time and memory O(N).

N is split over units in proportion to their size by largest remainder. A unit is one weight, or the two factors of a
product with their shared rank: of those, ranks are drawn first and then entries of both factors within these ranks, so
that every kept scalar can move the output. Draws depend on (seed, name) alone: the same on every device.
For one seed what N keeps is kept by N + 1 too, except where a product opens one more rank: that takes two scalars, so
one of the others is given up (below twice the rank at every other N; along rows at each new rank).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import DeltuneError

Indices = dict[str, np.ndarray]


@dataclass(frozen=True)
class Factor:
    """A tensor of one factor: how many entries each rank has in it, and where they lie.

    Entry j of rank k lies at k * step + j * stride. With `block`, ranks come in blocks of that many whose first ranks
    are `outer` apart: entry j of rank k lies at k % block * step + k // block * outer + j * stride. A formula and no
    table, so that a mask on a huge rank costs what it keeps. `constant`: its entries are added to what the rank
    computes (a bias), so that alone they would leave the rank dead.
    """

    leaf: str
    width: int
    step: int
    stride: int
    block: int = 0
    outer: int = 0
    constant: bool = False

    def positions(self, ranks: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """Flat indices of pairs of a rank and an entry."""
        if self.block:
            return ranks % self.block * self.step + ranks // self.block * self.outer + entries * self.stride
        return ranks * self.step + entries * self.stride


@dataclass(frozen=True)
class MaskUnit:
    """What is drawn at once: a plain weight (`shape`), or a product of two sides that share `rank` ranks."""

    name: str
    shape: tuple[int, ...] = ()
    leaf: str = ""
    rank: int = 0
    down: tuple[Factor, ...] = ()
    up: tuple[Factor, ...] = ()

    @property
    def size(self) -> int:
        if not self.rank:
            return math.prod(self.shape)
        return self.rank * (_width(self.down) + _width(self.up))

    @property
    def least(self) -> int:
        """The fewest scalars that are live: one, or one on each side of a product."""
        return 2 if self.rank else 1


def _width(sides: Sequence[Factor]) -> int:
    return sum(side.width for side in sides)


@dataclass(frozen=True)
class Mask:
    """How many scalars of each unit are kept, and how they lie; drawn when asked for."""

    quotas: tuple[tuple[MaskUnit, int], ...]
    pattern: str
    along: str
    seed: int

    @property
    def count(self) -> int:
        return sum(count for _, count in self.quotas)

    def indices(self) -> Indices:
        """Sorted flat indices by tensor; tensors without any are absent."""
        found: Indices = {}
        for unit, count in self.quotas:
            found |= draw_indices(unit, count, self.pattern, self.along, self.seed)
        return found


def split_budget(units: Sequence[MaskUnit], total: int, needs: Mapping[int, Sequence[int]] | None = None) -> list[int]:
    """`total` over the units in proportion to size by largest remainder; a product gets none or at least two.

    needs: units that act only through others (a gate, a learned scale) -> those others, of which one must get some;
    what such a unit would have got without any of them goes to the units that can be trained.
    Error: more than there is, or fewer than one live set, with the bounds.
    """
    needs = needs or {}
    whole = sum(unit.size for unit in units)
    least = min((unit.least for i, unit in enumerate(units) if i not in needs), default=1)
    if not least <= total <= whole:
        raise DeltuneError(f"parameters={total:,}: this method has {whole:,} scalars here; give {least} to {whole:,}")
    shares = [(unit.size * total // whole, unit.size * total % whole) for unit in units]
    quotas = [share for share, _ in shares]
    order = sorted(range(len(units)), key=lambda i: (-shares[i][1], i))
    for i in order[: total - sum(quotas)]:
        quotas[i] += 1
    lonely = [i for i in order if 0 < quotas[i] < units[i].least]
    while len(lonely) > 1:  # two products with one scalar each make one with two
        quotas[lonely.pop(0)] += 1
        quotas[lonely.pop()] -= 1
    for i in lonely:
        quotas[i] = 0
    dead = [i for i, others in needs.items() if quotas[i] and not any(quotas[j] for j in others)]
    for i in dead:
        quotas[i] = 0
    _place_left(units, quotas, total - sum(quotas), order, needs, lonely)
    return quotas


def _place_left(
    units: Sequence[MaskUnit],
    quotas: list[int],
    left: int,
    order: Sequence[int],
    needs: Mapping[int, Sequence[int]],
    closed: Sequence[int],
) -> None:
    """Give what is left to units that can be trained, in their order; `closed` ones come last."""
    for last in (False, True, True):
        for i in order:
            room = units[i].size - quotas[i]
            live = any(quotas[j] for j in needs[i]) if i in needs else last or i not in closed
            if left and live and room and quotas[i] + left >= units[i].least:
                more = min(left, room)
                quotas[i], left = quotas[i] + more, left - more
    if left:  # one scalar is left over and nobody else can be opened: take one more from another
        i = next(i for i in (*closed, *order) if not quotas[i] and i not in needs)
        giver = next((j for j in order if quotas[j] > units[j].least), None)
        if giver is None:
            raise DeltuneError(
                f"parameters={sum(quotas) + left:,}: every product takes two scalars; give one more or less"
            )
        quotas[giver], quotas[i] = quotas[giver] - 1, left + 1


def draw_indices(unit: MaskUnit, count: int, pattern: str, along: str, seed: int) -> Indices:
    """The flat indices that a unit keeps, by tensor, `count` in all.

    discrete: uniform without replacement. adjacent: consecutive whole rows (along="rows") or columns, the last ragged.
    """
    stream = _Stream(seed, unit.name)
    if not unit.rank:
        return {unit.leaf: _plain(unit.shape, count, pattern, along, stream)}
    if count == unit.size:
        entries = {side.leaf: _entries(side, unit.rank) for side in (*unit.down, *unit.up)}
        return {leaf: np.sort(index) for leaf, index in entries.items()}
    return _product(unit, count, pattern, along, stream)


def _plain(shape: tuple[int, ...], count: int, pattern: str, along: str, stream: _Stream) -> np.ndarray:
    size = math.prod(shape)
    if pattern == "discrete":
        return np.sort(stream.distinct(size, count))
    rows, columns = (1, size) if len(shape) < 2 else (shape[0], size // shape[0])
    if len(shape) < 2 or along == "rows":
        return _run(size, columns if rows > 1 else 1, count, stream)
    index = _run(size, rows, count, stream)  # position in column-major order
    return np.sort(index % rows * columns + index // rows)


def _run(size: int, block: int, count: int, stream: _Stream) -> np.ndarray:
    """`count` consecutive positions from the start of a random block on; past the end it grows backwards."""
    start = int(stream.number(0) % (size // block)) * block
    start = min(start, size - count)
    return np.arange(start, start + count, dtype=np.int64)


def _product(unit: MaskUnit, count: int, pattern: str, along: str, stream: _Stream) -> Indices:
    wide, up_width = _width(unit.down), _width(unit.up)
    by_rank = pattern == "adjacent" and along == "rows"
    ranks = min(unit.rank, -(-count // (wide + up_width)) if by_rank else count // 2)
    if pattern == "adjacent":  # from a random rank on; past the end it grows backwards
        start = int(stream.number(0) % unit.rank)
        after = min(ranks, unit.rank - start)
        chosen = np.concatenate(
            [np.arange(start, start + after), np.arange(start - 1, start - 1 - (ranks - after), -1)]
        )
    else:
        chosen = stream.distinct(unit.rank, ranks)
    if by_rank:
        return _whole_ranks(unit, chosen, count, wide, up_width)
    down = min(max(round(count * wide / (wide + up_width)), ranks), ranks * wide, count - ranks)
    down = max(down, count - ranks * up_width)
    kept: dict[str, list[np.ndarray]] = {}
    for sides, part in ((unit.down, down), (unit.up, count - down)):
        if pattern == "adjacent":
            rank, entry = _columns(sides, ranks, part, stream)
        else:
            rank, entry = _scattered(sides, ranks, part, stream)
        _place(kept, sides, chosen[rank], entry)
    return {leaf: np.sort(np.concatenate(index)) for leaf, index in kept.items()}


def _columns(sides: Sequence[Factor], ranks: int, part: int, stream: _Stream) -> tuple[np.ndarray, np.ndarray]:
    """Ranks and entries of whole columns of a product's side: every chosen rank, entry after entry."""
    width = _width(sides)
    first = min(int(stream.number(width) % width), _varying(sides) - 1) * ranks  # no rank has a constant alone
    flat = min(first, width * ranks - part) + np.arange(part)
    return flat % ranks, flat // ranks


def _scattered(sides: Sequence[Factor], ranks: int, part: int, stream: _Stream) -> tuple[np.ndarray, np.ndarray]:
    """One entry for every chosen rank, none of them a constant, and the rest anywhere within these ranks."""
    width, varying = _width(sides), _varying(sides)
    rank = np.arange(ranks)
    entry = stream.numbers(width, ranks) % width
    entry = np.where(entry < varying, entry, entry % varying)
    anchors = np.sort(rank * width + entry)
    drawn = stream.distinct(ranks * width, min(ranks * width, part))
    rest = drawn[~np.isin(drawn, anchors)][: part - ranks]
    flat = np.concatenate([anchors, rest])
    return flat // width, flat % width


def _varying(sides: Sequence[Factor]) -> int:
    """Entries a rank whose effect depends on the input; constants come after them."""
    return sum(side.width for side in sides if not side.constant)


def _whole_ranks(unit: MaskUnit, chosen: np.ndarray, count: int, wide: int, up_width: int) -> Indices:
    """Consecutive whole ranks, the last one ragged but with both sides live."""
    kept: dict[str, list[np.ndarray]] = {}
    full, left = len(chosen) - 1, count - (len(chosen) - 1) * (wide + up_width)
    short = 1 if left == 1 else 0  # a lone scalar is dead: one of the rank before joins it
    for position, rank in enumerate(chosen):
        have = left + short if position == full else wide + up_width - (short if position == full - 1 else 0)
        down = min(max(round(have * wide / (wide + up_width)), 1), wide, have - 1)
        down = max(down, have - up_width)
        for sides, part in ((unit.down, down), (unit.up, have - down)):
            _place(kept, sides, np.full(part, rank), np.arange(part))
    return {leaf: np.sort(np.concatenate(index)) for leaf, index in kept.items()}


def _place(kept: dict[str, list[np.ndarray]], sides: Sequence[Factor], ranks: np.ndarray, entries: np.ndarray) -> None:
    """Flat indices of (rank, entry) pairs, the sides' tensors laid end to end."""
    start = 0
    for side in sides:
        here = (entries >= start) & (entries < start + side.width)
        if here.any():
            kept.setdefault(side.leaf, []).append(side.positions(ranks[here], entries[here] - start))
        start += side.width


def _entries(side: Factor, rank: int) -> np.ndarray:
    """All positions of a side."""
    return side.positions(np.arange(rank)[:, None], np.arange(side.width)[None]).reshape(-1)


class _Stream:
    """Numbers that depend on (seed, name) and a position alone."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self.keys = np.frombuffer(digest, dtype=np.uint64)

    def numbers(self, start: int, count: int) -> np.ndarray:
        """Non-negative numbers for the positions start ... start + count - 1."""
        with np.errstate(over="ignore"):
            return (_mixed(np.arange(start, start + count, dtype=np.uint64), self.keys[0]) >> np.uint64(1)).astype(
                np.int64
            )

    def number(self, position: int) -> int:
        return int(self.numbers(position, 1)[0])

    def distinct(self, size: int, count: int) -> np.ndarray:
        """The first `count` values of a fixed permutation of 0 ... size - 1: nested in `count`, memory O(count).

        A four-round Feistel network on the smallest even number of bits that holds `size`; values beyond it walk on.
        """
        half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        mask = np.uint64((1 << half) - 1)
        values = np.arange(count, dtype=np.uint64)
        beyond = np.ones(count, dtype=bool)
        with np.errstate(over="ignore"):
            while beyond.any():
                left, right = values[beyond] >> np.uint64(half), values[beyond] & mask
                for key in self.keys:
                    left, right = right, left ^ (_mixed(right, key) & mask)
                values[beyond] = (left << np.uint64(half)) | right
                beyond = values >= np.uint64(size)
        return values.astype(np.int64)


def _mixed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """splitmix64's finaliser, keyed."""
    z = (values + key) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
