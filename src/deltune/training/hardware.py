"""The device that a run works on, and the precision that it computes in."""

from __future__ import annotations

import torch

from ..errors import DeltuneError, unknown_name


def resolve_device(asked: str = "auto") -> torch.device:
    """auto: the accelerator where there is one, else the CPU; or one by name, such as cpu, cuda, cuda:1 or mps.

    Error: this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if asked == "auto":
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type)
    known = ["auto", "cpu"]
    if accelerator is not None:
        known += [accelerator.type, *(f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count()))]
    if asked not in known:
        raise DeltuneError(unknown_name("device", asked, known, "this machine"))
    return torch.device(asked)


def resolve_precision(asked: str, where: torch.device) -> str:
    """fp32 or bf16; auto is bf16 on an accelerator that has it, else fp32 (a CPU emulates it, and is slower).

    Error: bf16 on a device that has none.
    """
    able = where.type == "cpu" or _has_bf16(where)
    if asked == "bf16" and not able:
        raise DeltuneError(f"precision bf16 cannot be had on {where}: give fp32, or auto for bf16 where there is any")
    if asked == "auto":
        return "bf16" if able and where.type != "cpu" else "fp32"
    return asked


def _has_bf16(where: torch.device) -> bool:
    """Whether an accelerator computes in bfloat16 itself."""
    if where.type == "cuda":
        with torch.cuda.device(where):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        one = torch.ones(2, 2, dtype=torch.bfloat16, device=where)
        return bool((one @ one).isfinite().all())
    except (RuntimeError, TypeError, AssertionError):
        return False
