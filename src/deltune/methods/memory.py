"""Refuses a method whose tensors would not fit in the free memory, before any of it is allocated."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..anatomy.types import Anatomy
from ..errors import DeltuneError
from .counting import base_size, count_resolved, kept_shapes, total_numel, trained_shapes
from .resolve import ResolvedMethod, resolve
from .spec import Method

LIMIT_VARIABLE = "DELTUNE_MEMORY_LIMIT"
"""The environment variable that sets a limit in place of the free memory: a number of bytes, or as in 8GiB."""

UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}


def needed_bytes(anatomy: Anatomy, resolved: ResolvedMethod, scalar_bytes: int) -> int:
    """Return the bytes that attaching a resolved method allocates.

    These are the parameters, the positions of masked ones, and the dense tensors that masked entries are drawn from and
    computed in.

    Args:
        anatomy: The model's anatomy.
        resolved: The resolved method.
        scalar_bytes: The bytes of a trained scalar: 4, or 8 in a float64 model.
    """
    shared: dict[tuple[str, str], int] = {}
    tied: dict[str, int] = {}
    dense = masked = 0
    for edit in resolved.edits:
        modification, place = edit.modification, edit.place
        tied[edit.tied] = total_numel(modification.compose.tied(place.widths))
        if edit.mask is None:
            dense += total_numel(trained_shapes(modification, place))
            shared[edit.term, place.group] = total_numel(modification.form.shared(place.widths))
        else:  # a forward pass computes in dense tensors, whatever the mask keeps
            dense += total_numel(kept_shapes(modification, place))
            masked += edit.mask.count
    trained_whole = sum(t.numel for t in resolved.selected) + sum(2 * gates.size for gates in resolved.gated)
    trained_whole += sum(t.numel for t in anatomy.tensors if t.area == "head")
    masked += sum(mask.count for _, mask in resolved.masked)
    scalars = dense + trained_whole + masked + sum(shared.values()) + sum(tied.values())
    return scalar_bytes * scalars + 8 * masked  # a position is an int64


def resolve_within_memory(model: PreTrainedModel, anatomy: Anatomy, method: Method) -> ResolvedMethod:
    """Resolve a method on a live model, and check that there is memory for it.

    Raises:
        DeltuneError: As `resolve` and `check_memory`.
    """
    resolved = resolve(anatomy, method, lambda: base_size(model)[1])
    check_memory(model, anatomy, resolved, method)
    return resolved


def check_memory(model: PreTrainedModel, anatomy: Anatomy, resolved: ResolvedMethod, method: Method) -> None:
    """Check that a resolved method fits in memory.

    The limit is DELTUNE_MEMORY_LIMIT where it is set. Otherwise it is what is free on the model's devices, and on the
    CPU for a model on the meta device.

    Raises:
        DeltuneError: The method does not fit; the message has its exact count.
    """
    wide = any(p.dtype == torch.float64 for p in model.parameters())
    needed = needed_bytes(anatomy, resolved, 8 if wide else 4)
    limit, source = _limit(model)
    if limit is None or needed <= limit:
        return
    count = count_resolved(anatomy, resolved, "number", 1)
    raise DeltuneError(
        f"{method!r} has {count.trained:,} trained scalars on {anatomy.model}, and attaching it takes "
        f"{_format_bytes(needed)} of memory: {_format_bytes(limit)} {source}. Give smaller sizes (deltune.fit finds "
        f"them for a budget), or set another limit in the environment variable {LIMIT_VARIABLE}"
    )


def _limit(model: PreTrainedModel) -> tuple[int | None, str]:
    """Return the bytes that may be used, None where they are not known, and where the number comes from."""
    if stated := os.environ.get(LIMIT_VARIABLE, "").strip():
        return _parse_limit(stated), f"is the limit of {LIMIT_VARIABLE}"
    devices = {p.device for p in model.parameters()} - {torch.device("meta")} or {torch.device("cpu")}
    free = [_free_on_device(device) for device in devices]
    names = ", ".join(sorted(map(str, devices)))
    return (None if None in free else sum(f for f in free if f is not None)), f"is free ({names})"


def _parse_limit(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Z]{0,3})", text.upper())
    if match is None or match[2] not in UNITS:
        raise DeltuneError(f"{LIMIT_VARIABLE}={text!r}: give a number of bytes, or one with a unit such as 8GiB")
    return int(float(match[1]) * UNITS[match[2]])


def _free_on_device(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device, or None where they are not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    limits = [_free_physical(), _free_in_process(), _free_in_cgroup()]
    return min((limit for limit in limits if limit is not None), default=None)


def _free_physical() -> int | None:
    """Return the memory that Linux says is available; on other systems all memory of the machine."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _free_in_process() -> int | None:
    """Return what the process's limit on its address space (ulimit -v) leaves, or None without a limit."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY:
            return None
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return max(0, soft - pages * os.sysconf("SC_PAGE_SIZE"))
    except (ImportError, OSError, ValueError, IndexError):
        return None


def _free_in_cgroup() -> int | None:
    """Return what the memory limit of a container (cgroup v2 or v1) leaves, or None; its file cache can be freed."""
    for folder, limit, usage, cache in CGROUP_FILES:
        try:
            maximum, used = (int((folder / name).read_text()) for name in (limit, usage))
            cached = [line.split()[1] for line in (folder / "memory.stat").read_text().splitlines() if cache in line]
            return max(0, maximum - used + sum(map(int, cached)))
        except (OSError, ValueError, IndexError):  # no such group, or no limit: "max"
            continue
    return None


CGROUP_FILES = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "active_file "),  # inactive_file too
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
)
"""For cgroup v2 and v1: the folder, the files of limit and usage, and the line of the cache that can be freed."""


def _format_bytes(size: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.1f} {unit}" if unit != "bytes" else f"{size:,} bytes"
        size /= 1024
    return f"{size:,.1f} TiB"
