"""What the C library does with freed memory, the same for all who are compared."""

from __future__ import annotations

import ctypes
import platform

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h."""


def keep_memory() -> None:
    """Let this process keep what it frees, where its C library is glibc, which can be told so.

    Otherwise large tensors are given back to the kernel and asked of it again, page by page, in every step, and more or
    less often in one process than in the next, as its heap happens to lie: two processes that did the same full tuning
    of the base encoder (340 MB of gradients) differed by up to 7 %, and by up to 3 % where both kept it (four runs of
    eight rounds each). No number of rounds averages that out.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        accepted = library.mallopt(MMAP_MAX, 0) and library.mallopt(TRIM_THRESHOLD, 2**31 - 1)
        assert accepted, "mallopt refused"
