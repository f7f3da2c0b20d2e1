"""Bytes: refuses a method whose tensors would not fit, before any is allocated, and measures the peak of some work."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel

from ..anatomy.offloading import loaded_devices, offloaded_tensors
from ..anatomy.skeleton import base_tensors
from ..anatomy.types import Anatomy
from ..errors import DeltuneError
from ..files import number_of_bytes
from .counting import count_resolved, format_bytes
from .resolve import ResolvedMethod
from .spec import Method

LIMIT_VARIABLE = "DELTUNE_MEMORY_LIMIT"
"""The environment variable that sets a limit in place of the free memory: a number of bytes, or as in 8GiB."""

NEGLIGIBLE_BYTES = 4 << 20
"""A method that needs at most this is attached without reading the free memory, which takes longer than attaching."""


def needed_bytes(anatomy: Anatomy, resolved: ResolvedMethod, scalar_bytes: int, copies: int = 1) -> int:
    """Return the bytes that a resolved method allocates.

    These are the parameters, the positions of masked ones, and the dense tensors that masked entries are drawn from and
    computed in. The model's own tensors, those of its head and those that the method selects, count once: their size
    does not depend on the method's arguments, and sharding or another optimizer trains them in less than Adam takes.
    """
    shared = resolved.shared_tensors(folded=False).values()
    added = sum(spec.numel for specs in shared for spec in specs.values())
    dense = masked = 0
    for edit in resolved.edits:
        of_place = sum(spec.numel for spec in edit.own_tensors(folded=False).values())
        if edit.mask is None:
            added += of_place
        else:  # a forward pass computes in dense tensors, whatever the mask keeps
            dense += of_place
            masked += edit.mask.count
    in_model = sum(t.numel for t in resolved.selected) + sum(2 * gates.size for gates in resolved.gated)
    in_model += sum(t.numel for t in anatomy.tensors if t.area == "head")
    masked += sum(mask.count for _, mask in resolved.masked)
    added += masked
    return scalar_bytes * (copies * added + dense + in_model) + 8 * masked  # a position is an int64


def check_memory(
    model: PreTrainedModel, anatomy: Anatomy, resolved: ResolvedMethod, method: Method, copies: int = 1
) -> None:
    """Check that a resolved method fits in memory.

    The limit is DELTUNE_MEMORY_LIMIT where it is set. Otherwise it is what is free on the model's devices, and on the
    CPU for a model on the meta device.
    """
    if not resolved.edits and all(tensor.is_meta for tensor in base_tensors(model)):
        return  # the model's own tensors take no memory there
    needed = needed_bytes(anatomy, resolved, 8, copies)
    if needed <= NEGLIGIBLE_BYTES and not os.environ.get(LIMIT_VARIABLE, "").strip():
        return
    if not any(tensor.dtype == torch.float64 for tensor in base_tensors(model)):
        needed = needed_bytes(anatomy, resolved, 4, copies)
    limit, source = _limit({device for _, _, device in loaded_devices(model, offloaded_tensors(model))})
    if limit is None or needed <= limit:
        return
    count = count_resolved(anatomy, resolved, "number", 1)
    use = "loading them" if copies == 1 else "training them, with their gradients and the two moments of Adam,"
    raise DeltuneError(
        f"{method!r} has {count.trained:,} trained scalars on {anatomy.model}, and {use} takes "
        f"{format_bytes(needed)} of memory: {format_bytes(limit)} {source}. Give smaller sizes, or set another "
        f"limit in the environment variable {LIMIT_VARIABLE}",
        "deltune.fit finds sizes for a budget",
    )


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the greatest number of bytes in use at once during some work, beyond those in use before it.

    They are counted by the device's allocator. On a CPU the profiler sees every allocation and release, those inside
    kernels too. What nobody can reach any more is released first, or it would be released during the work.
    """
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        work()
        return torch.accelerator.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints when it starts and stops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate((change for _, change in changes), initial=0))


def parse_bytes(text: str, option: str) -> int:
    """Return the number of bytes that an option says."""
    try:
        return number_of_bytes(text)
    except ValueError as error:
        raise DeltuneError(f"{option}={text!r}: {error}") from None


def _limit(devices_of_model: set[torch.device]) -> tuple[int | None, str]:
    """Return the bytes that may be used, None where they are not known, and where the number comes from."""
    if stated := os.environ.get(LIMIT_VARIABLE, "").strip():
        return parse_bytes(stated, LIMIT_VARIABLE), f"is the limit of {LIMIT_VARIABLE}"
    devices = devices_of_model - {torch.device("meta")} or {torch.device("cpu")}
    free = [_free_on_device(device) for device in devices]
    names = ", ".join(sorted(map(str, devices)))
    return (None if None in free else sum(f for f in free if f is not None)), f"is free ({names})"


def _free_on_device(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device, or None where they are not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    limits = [psutil.virtual_memory().available, _free_in_process(), _free_in_cgroup()]
    return min((limit for limit in limits if limit is not None), default=None)


def _free_in_process() -> int | None:
    """Return what the process's limit on its address space (ulimit -v) leaves, or None without a limit."""
    process = psutil.Process()
    if not hasattr(process, "rlimit"):  # Linux alone has it
        return None
    soft, _ = process.rlimit(psutil.RLIMIT_AS)
    return None if soft == psutil.RLIM_INFINITY else max(0, soft - process.memory_info().vms)


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
