"""What must hold for deltas to act: the modules that they were attached to are in the model, and so are its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..anatomy.quantised import plain_numbers
from ..errors import DeltuneError


class Modules:
    """The modules that deltas act at, each by its parent and its name there, with all that they are inside of."""

    def __init__(self, model: nn.Module, paths: Iterable[str]) -> None:
        inside = {path.rsplit(".", n)[0]: None for path in paths if path for n in range(path.count(".") + 1)}
        self.known: list[tuple[str, nn.Module, str, nn.Module]] = []
        for path in inside:
            outer, _, leaf = path.rpartition(".")
            self.known.append((path, model.get_submodule(outer), leaf, model.get_submodule(path)))

    def check(self) -> None:
        """Error: one of them is no longer in the model, or its weight is stored in another way."""
        exporting = torch.compiler.is_compiling()  # torch.export puts tensors without numbers in place of all weights
        for path, parent, leaf, module in self.known:
            weight = module._parameters.get("weight")
            plain = weight is None or exporting or plain_numbers(weight)
            if parent._modules.get(leaf) is not module or not plain:
                raise DeltuneError(
                    f"{path} was replaced or quantised after deltas were attached that act there (quantising, resizing "
                    "and other libraries' adapters do that): detach, change the model, and attach or load again; to "
                    "quantise a tuned model, merge() first"
                )


def refuse_offloaded(model: nn.Module) -> None:
    """Error: accelerate keeps weights of the model elsewhere and brings them only for a module's own call."""
    for path, module in model.named_modules():
        if _offloads(module.__dict__.get("_hf_hook")):
            raise DeltuneError(
                f"weights of {path or type(model).__name__} are offloaded (cpu_offload, disk_offload, or a device_map "
                "with cpu or disk), where deltas cannot reach them: take that off with accelerate.hooks."
                "remove_hook_from_submodules(model), or load the model on devices that hold it"
            )


def refuse_inference_tensors(model: nn.Module) -> None:
    """Error: the model was made inside of torch.inference_mode(), so that nothing trains through its weights."""
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise DeltuneError(
            f"the weights of this {type(model).__name__} were made inside of torch.inference_mode(), and torch cannot "
            "train through such tensors: make or load the model outside of it (attaching, loading a delta and running "
            "the model inside of it are fine)"
        )


def _offloads(hook: Any) -> bool:
    return bool(getattr(hook, "offload", False)) or any(_offloads(one) for one in getattr(hook, "hooks", ()))
