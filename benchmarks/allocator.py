"""What the C library does with freed memory, the same for all who are compared."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h."""


def keep_memory() -> None:
    """Let this process keep what it frees, where its C library (glibc) can be told so.

    Otherwise large tensors are given back to the kernel and asked of it again, page by page, in every step: a tenth of
    full tuning's time with its hundreds of megabytes of gradients, and more or less in one process than in the next, as
    its heap happens to lie. No number of rounds averages that out.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
