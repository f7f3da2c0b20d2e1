"""Percentiles of latencies, for the page of a server, its metrics and the load generator alike."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the least value that at least a share of all values does not exceed (the nearest rank).

    Args:
        ordered: The values, the least first; at least one.
        share: The share, from 0 to 1.
    """
    rank = math.ceil(round(share * len(ordered), 9))  # 0.07 * 100 is a little more than 7
    return ordered[max(rank, 1) - 1]
