"""The device of a run and the precision that it computes in, from "auto" or a name."""

from __future__ import annotations

import torch

from ..errors import DeltuneError, unknown_name


def resolve_device(name: str = "auto") -> torch.device:
    """Return the device of a name.

    Args:
        name: "auto" (the accelerator if there is one, else the CPU), or a device such as "cpu", "cuda", "cuda:1" or
            "mps".

    Raises:
        DeltuneError: This machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type)
    names = ["auto", "cpu"]
    if accelerator is not None:
        names += [accelerator.type, *(f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count()))]
    if name not in names:
        raise DeltuneError(unknown_name("device", name, names, "this machine"))
    return torch.device(name)


def resolve_precision(name: str, device: torch.device) -> str:
    """Return "fp32" or "bf16".

    Args:
        name: "fp32", "bf16", or "auto": bf16 on an accelerator that supports it, else fp32. A CPU emulates bf16 and is
            slower with it.
        device: The device of the run.

    Raises:
        DeltuneError: bf16 is asked for, and the device does not support it.
    """
    supported = device.type == "cpu" or _supports_bf16(device)
    if name == "bf16" and not supported:
        raise DeltuneError(
            f"the device {device} does not support precision bf16: give fp32, or auto, which is bf16 where that is "
            "supported"
        )
    if name == "auto":
        return "bf16" if supported and device.type != "cpu" else "fp32"
    return name


def _supports_bf16(device: torch.device) -> bool:
    """Whether an accelerator computes in bfloat16 without emulation."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        ones = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        return bool((ones @ ones).isfinite().all())
    except (RuntimeError, TypeError, AssertionError):
        return False
