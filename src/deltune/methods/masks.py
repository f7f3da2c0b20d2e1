"""Draws by seed which N scalars of a method are trained (APET §5.1), on the CPU in time and memory O(N).

N is split over groups in proportion to their size by largest remainder. A group is one weight, or the two factors of a
product with the rank that they share: there, ranks are drawn first and then entries of both factors within these ranks,
so that every chosen scalar can change the output; only the pattern "uniform" draws all entries of a product alike.
Draws depend on (seed, name) alone and are the same on every device.
For one seed, what N chooses N + 1 chooses too, except where a product opens one more rank: that takes two scalars, so
that one of the others is given up (below twice the rank at every other N; along rows at each new rank). No library
draws nested masks, so this is our own code.
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
    """A tensor on one side of a product: how many entries each rank has in it, and where they lie.

    Entry j of rank k lies at k * step + j * stride. With `block`, ranks come in blocks of that many whose first ranks
    are `outer` apart: entry j of rank k lies at k % block * step + k // block * outer + j * stride. As this is a
    formula and no table, a mask on a huge rank costs what it keeps.
    """

    leaf: str  # the name of the tensor
    width: int  # the entries of each rank
    step: int  # the distance between ranks
    stride: int  # the distance between entries of a rank
    block: int = 0  # the ranks in a block; 0 without blocks
    outer: int = 0  # the distance between blocks
    # whether its entries are added to what the rank computes (a bias), so that a rank with nothing else would have no
    # effect
    constant: bool = False

    def positions(self, ranks: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """Return the flat indices of pairs of a rank and an entry."""
        if self.block:
            return ranks % self.block * self.step + ranks // self.block * self.outer + entries * self.stride
        return ranks * self.step + entries * self.stride


@dataclass(frozen=True)
class MaskGroup:
    """What a mask is drawn on at once: a plain weight, or a product of two sides that share ranks."""

    name: str  # the name that seeds the draw
    shape: tuple[int, ...] = ()  # the shape of a plain weight
    leaf: str = ""  # the name of a plain weight
    rank: int = 0  # the shared rank of a product; 0 for a plain weight
    down: tuple[Factor, ...] = ()  # the factors below the rank
    up: tuple[Factor, ...] = ()  # the factors above the rank

    @property
    def size(self) -> int:
        """All scalars of the group."""
        if not self.rank:
            return math.prod(self.shape)
        return self.rank * (_total_width(self.down) + _total_width(self.up))

    @property
    def min_scalars(self) -> int:
        """The fewest scalars that can be trained: one, or one on each side of a product."""
        return 2 if self.rank else 1


def _total_width(sides: Sequence[Factor]) -> int:
    return sum(side.width for side in sides)


@dataclass(frozen=True)
class Mask:
    """A mask as the number of scalars of each group; the indices are drawn when they are needed."""

    quotas: tuple[tuple[MaskGroup, int], ...]  # the groups with their numbers of scalars
    pattern: str  # "discrete", "uniform" or "adjacent"
    along: str  # "rows" or "columns"
    seed: int  # the seed of the draw

    @property
    def count(self) -> int:
        """The scalars that the mask keeps."""
        return sum(count for _, count in self.quotas)

    def indices(self) -> Indices:
        """Return sorted flat indices by tensor; tensors without any are left out."""
        indices: Indices = {}
        for group, count in self.quotas:
            indices |= draw_indices(group, count, self.pattern, self.along, self.seed)
        return indices


@dataclass(frozen=True)
class RowMask:
    """A mask that keeps whole rows of a matrix, one for each chosen token."""

    name: str  # the name of the matrix
    rows: tuple[int, ...]  # the numbers of the rows
    width: int  # the entries of a row

    @property
    def count(self) -> int:
        """The scalars that the mask keeps."""
        return len(self.rows) * self.width

    def indices(self) -> Indices:
        """Return sorted flat indices, by the name of the matrix."""
        rows = np.array(sorted(self.rows), dtype=np.int64)
        return {self.name: (rows[:, None] * self.width + np.arange(self.width)).reshape(-1)}


def split_budget(
    groups: Sequence[MaskGroup], total: int, depends_on: Mapping[int, Sequence[int]] | None = None
) -> list[int]:
    """Split a number of scalars over groups in proportion to their sizes, by largest remainder."""
    depends_on = depends_on or {}
    available = sum(group.size for group in groups)
    minimum = min((group.min_scalars for i, group in enumerate(groups) if i not in depends_on), default=1)
    if not minimum <= total <= available:
        raise DeltuneError(
            f"parameters={total:,}: this method has {available:,} scalars here; give {minimum} to {available:,}"
        )
    shares = [(group.size * total // available, group.size * total % available) for group in groups]
    quotas = [share for share, _ in shares]
    order = sorted(range(len(groups)), key=lambda i: (-shares[i][1], i))
    for i in order[: total - sum(quotas)]:
        quotas[i] += 1
    too_small = [i for i in order if 0 < quotas[i] < groups[i].min_scalars]
    while len(too_small) > 1:  # two products with one scalar each make one with two
        quotas[too_small.pop(0)] += 1
        quotas[too_small.pop()] -= 1
    for i in too_small:
        quotas[i] = 0
    idle = [i for i, others in depends_on.items() if quotas[i] and not any(quotas[j] for j in others)]
    for i in idle:
        quotas[i] = 0
    _place_remainder(groups, quotas, total - sum(quotas), order, depends_on, too_small)
    return quotas


def _place_remainder(
    groups: Sequence[MaskGroup],
    quotas: list[int],
    remaining: int,
    order: Sequence[int],
    depends_on: Mapping[int, Sequence[int]],
    too_small: Sequence[int],
) -> None:
    """Give the remaining scalars to groups that can be trained, in the order of `order`; `too_small` ones come last."""
    already_open = [i for i in order if i in depends_on or i not in too_small]
    for i in (*already_open, *order, *order):  # twice, since what opens at the end brings what depends on it to life
        room = groups[i].size - quotas[i]
        is_live = i not in depends_on or any(quotas[j] for j in depends_on[i])
        if remaining and is_live and room and quotas[i] + remaining >= groups[i].min_scalars:
            added = min(remaining, room)
            quotas[i], remaining = quotas[i] + added, remaining - added
    if remaining:  # one scalar is left over and nobody else can be opened: take one more from another
        i = next(i for i in (*too_small, *order) if not quotas[i] and i not in depends_on)
        donor = next((j for j in order if quotas[j] > groups[j].min_scalars), None)
        if donor is None:
            raise DeltuneError(
                f"parameters={sum(quotas) + remaining:,}: every product takes two scalars; give one more or less"
            )
        quotas[donor], quotas[i] = quotas[donor] - 1, remaining + 1


def draw_indices(group: MaskGroup, count: int, pattern: str, along: str, seed: int) -> Indices:
    """Return the flat indices that a group keeps, by tensor, `count` in all.

    Pattern "discrete" draws entries without replacement, in a product so that each has a partner on the other side.
    "uniform" draws every entry with equal probability, partner or not. "adjacent" takes consecutive whole rows
    (along="rows") or columns, the last of them in part.
    """
    stream = _RandomStream(seed, group.name)
    if not group.rank:
        return {group.leaf: _draw_plain(group.shape, count, pattern, along, stream)}
    if count == group.size:
        entries = {side.leaf: _all_positions(side, group.rank) for side in (*group.down, *group.up)}
        return {leaf: np.sort(index) for leaf, index in entries.items()}
    if pattern == "uniform":
        return _draw_uniform(group, count, stream)
    return _draw_product(group, count, pattern, along, stream)


def _draw_uniform(group: MaskGroup, count: int, stream: _RandomStream) -> Indices:
    """Return entries of a product without regard to their ranks."""
    sides = (*group.down, *group.up)
    width = _total_width(sides)
    flat = stream.distinct(group.size, count)
    positions: dict[str, list[np.ndarray]] = {}
    _add_positions(positions, sides, flat // width, flat % width)
    return {leaf: np.sort(np.concatenate(index)) for leaf, index in positions.items()}


def _draw_plain(shape: tuple[int, ...], count: int, pattern: str, along: str, stream: _RandomStream) -> np.ndarray:
    size = math.prod(shape)
    if pattern in ("discrete", "uniform"):
        return np.sort(stream.distinct(size, count))
    rows, columns = (1, size) if len(shape) < 2 else (shape[0], size // shape[0])
    if len(shape) < 2 or along == "rows":
        return _consecutive(size, columns if rows > 1 else 1, count, stream)
    index = _consecutive(size, rows, count, stream)  # position in column-major order
    return np.sort(index % rows * columns + index // rows)


def _consecutive(size: int, block: int, count: int, stream: _RandomStream) -> np.ndarray:
    """Return `count` consecutive positions from the start of a random block; past the end it grows backwards."""
    start = int(stream.number(0) % (size // block)) * block
    start = min(start, size - count)
    return np.arange(start, start + count, dtype=np.int64)


def _draw_product(group: MaskGroup, count: int, pattern: str, along: str, stream: _RandomStream) -> Indices:
    down_width, up_width = _total_width(group.down), _total_width(group.up)
    by_rank = pattern == "adjacent" and along == "rows"
    ranks = min(group.rank, -(-count // (down_width + up_width)) if by_rank else count // 2)
    if pattern == "adjacent":  # from a random rank on; past the end it grows backwards
        start = int(stream.number(0) % group.rank)
        after = min(ranks, group.rank - start)
        chosen = np.concatenate(
            [np.arange(start, start + after), np.arange(start - 1, start - 1 - (ranks - after), -1)]
        )
    else:
        chosen = stream.distinct(group.rank, ranks)
    if by_rank:
        return _draw_whole_ranks(group, chosen, count, down_width, up_width)
    down = min(max(round(count * down_width / (down_width + up_width)), ranks), ranks * down_width, count - ranks)
    down = max(down, count - ranks * up_width)
    positions: dict[str, list[np.ndarray]] = {}
    for sides, part in ((group.down, down), (group.up, count - down)):
        if pattern == "adjacent":
            rank, entry = _draw_columns(sides, ranks, part, stream)
        else:
            rank, entry = _draw_scattered(sides, ranks, part, stream)
        _add_positions(positions, sides, chosen[rank], entry)
    return {leaf: np.sort(np.concatenate(index)) for leaf, index in positions.items()}


def _draw_columns(
    sides: Sequence[Factor], ranks: int, part: int, stream: _RandomStream
) -> tuple[np.ndarray, np.ndarray]:
    """Return ranks and entries of whole columns of a product's side: every chosen rank, entry after entry."""
    width = _total_width(sides)
    first = min(int(stream.number(width) % width), _varying_width(sides) - 1) * ranks  # no rank has a constant alone
    flat = min(first, width * ranks - part) + np.arange(part)
    return flat % ranks, flat // ranks


def _draw_scattered(
    sides: Sequence[Factor], ranks: int, part: int, stream: _RandomStream
) -> tuple[np.ndarray, np.ndarray]:
    """Return one entry for every chosen rank, none of them a constant, and the others anywhere in these ranks."""
    width, varying = _total_width(sides), _varying_width(sides)
    rank = np.arange(ranks)
    entry = stream.numbers(width, ranks) % width
    entry = np.where(entry < varying, entry, entry % varying)
    anchors = np.sort(rank * width + entry)
    drawn = stream.distinct(ranks * width, min(ranks * width, part))
    others = drawn[~np.isin(drawn, anchors)][: part - ranks]
    flat = np.concatenate([anchors, others])
    return flat // width, flat % width


def _varying_width(sides: Sequence[Factor]) -> int:
    """Return the entries of a rank whose effect depends on the input; constants come after them."""
    return sum(side.width for side in sides if not side.constant)


def _draw_whole_ranks(group: MaskGroup, chosen: np.ndarray, count: int, down_width: int, up_width: int) -> Indices:
    """Return consecutive whole ranks; the last is taken in part, with entries on both sides."""
    positions: dict[str, list[np.ndarray]] = {}
    last, in_last = len(chosen) - 1, count - (len(chosen) - 1) * (down_width + up_width)
    borrowed = 1 if in_last == 1 else 0  # a lone scalar is dead: one of the rank before joins it
    for position, rank in enumerate(chosen):
        quota = (
            in_last + borrowed
            if position == last
            else down_width + up_width - (borrowed if position == last - 1 else 0)
        )
        down = min(max(round(quota * down_width / (down_width + up_width)), 1), down_width, quota - 1)
        down = max(down, quota - up_width)
        for sides, part in ((group.down, down), (group.up, quota - down)):
            _add_positions(positions, sides, np.full(part, rank), np.arange(part))
    return {leaf: np.sort(np.concatenate(index)) for leaf, index in positions.items()}


def _add_positions(
    positions: dict[str, list[np.ndarray]], sides: Sequence[Factor], ranks: np.ndarray, entries: np.ndarray
) -> None:
    """Add the flat indices of (rank, entry) pairs; entries are counted through the side's tensors one after another."""
    start = 0
    for side in sides:
        in_side = (entries >= start) & (entries < start + side.width)
        if in_side.any():
            positions.setdefault(side.leaf, []).append(side.positions(ranks[in_side], entries[in_side] - start))
        start += side.width


def _all_positions(side: Factor, rank: int) -> np.ndarray:
    """Return the flat indices of all entries of a side."""
    return side.positions(np.arange(rank)[:, None], np.arange(side.width)[None]).reshape(-1)


class _RandomStream:
    """Random numbers that depend on (seed, name) and a position alone."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self.keys = np.frombuffer(digest, dtype=np.uint64)

    def numbers(self, start: int, count: int) -> np.ndarray:
        """Return non-negative numbers for the positions start to start + count - 1."""
        with np.errstate(over="ignore"):
            return (_splitmix(np.arange(start, start + count, dtype=np.uint64), self.keys[0]) >> np.uint64(1)).astype(
                np.int64
            )

    def number(self, position: int) -> int:
        return int(self.numbers(position, 1)[0])

    def distinct(self, size: int, count: int) -> np.ndarray:
        """Return the first `count` values of a fixed permutation of 0 to size - 1, in memory O(count).

        It is a four-round Feistel network on the smallest even number of bits that holds `size`; values out of range
        are mapped again.
        """
        half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        mask = np.uint64((1 << half) - 1)
        values = np.arange(count, dtype=np.uint64)
        out_of_range = np.ones(count, dtype=bool)
        with np.errstate(over="ignore"):
            while out_of_range.any():
                left, right = values[out_of_range] >> np.uint64(half), values[out_of_range] & mask
                for key in self.keys:
                    left, right = right, left ^ (_splitmix(right, key) & mask)
                values[out_of_range] = (left << np.uint64(half)) | right
                out_of_range = values >= np.uint64(size)
        return values.astype(np.int64)


def _splitmix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Apply splitmix64's finaliser with a key."""
    z = (values + key) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
