"""Replacements for methods of the model, and of models inside it, that must take deltas into account.

They are set on the instances until the last delta is detached.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn
from transformers.utils import SAFE_WEIGHTS_NAME

from ..anatomy.skeleton import HANDLE_NAME, base_modules
from ..compat import buffers_of, parameters_of, submodules_of
from ..errors import DeltuneError, error_from_problems
from ..files import explain_write_errors
from .model_state import claim_modules
from .offloading import refuse_offloaded
from .pass_manager import PassManager, choose_here
from .row_assignment import each_name
from .sharding import refuse_sharded

CHECKPOINT = re.compile(r"checkpoint-\d+")
"""The names of a Trainer's checkpoints."""


class ModelMethod:
    """Replaces a method of the tuned model, or of a model inside it."""

    of_live_model = True

    def __init__(self, passes: PassManager, path: str, method: str) -> None:
        self.passes, self.path, self.method = passes, path, method
        self.model: Any = passes.model.get_submodule(path)
        self.before: Any = None

    def install(self) -> None:
        self.before = self.model.__dict__.get(self.method)
        self.model.__dict__[self.method] = self

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return inspect.getdoc(self.original)

    @property
    def original(self) -> Any:
        """The model's own method."""
        if self.before is not None:
            return self.before
        return getattr(type(self.model), self.method).__get__(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def remove(self) -> None:
        attributes = self.model.__dict__
        if attributes.get(self.method) is self:
            if self.before is None:
                del attributes[self.method]
            else:
                attributes[self.method] = self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return plain_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.model, self.method)

    @contextmanager
    def _tensors_placed(self, name: str | None) -> Iterator[Any]:
        """Put the tensors of a delta, or of none, into the model for a block in which no pass runs; give the handle."""
        passes = self.passes
        with passes.exclusive(self.method):
            try:
                passes.state.place_tensors(name)
                yield submodules_of(passes.model)[HANDLE_NAME]
            finally:
                passes.update_model(passes.assignment_of_new_pass())


class Refused(ModelMethod):
    """A method that is refused, because it changes modules or sizes that deltas were made for."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.method == "resize_token_embeddings" and self._keeps_size(args, kwargs):
            return self.model.get_input_embeddings()
        raise DeltuneError(
            f"{self.method} changes modules that the attached deltas were made for: detach() them first (or merge() "
            f"the one in use), call {self.method}, and attach again"
        )

    def _keeps_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call leaves the size of the embeddings as it is."""
        arguments = inspect.signature(self.original).bind(*args, **kwargs).arguments
        embeddings: Any = self.model.get_input_embeddings()
        same = arguments.get("new_num_tokens") in (None, len(embeddings.weight))
        return same and arguments.get("pad_to_multiple_of") is None


class SavePretrained(ModelMethod):
    """`save_pretrained`: writes a model that computes what this one does now, so that `from_pretrained` reads it.

    What is in use is merged into the weights of the files, and its deltas are saved beside them. A delta that cannot be
    merged is written alone, with a warning, into a folder that `from_pretrained` refuses. So are the deltas in a
    checkpoint of a Trainer, with all else that trains, for `load_state_dict`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self.original).bind(*args, **kwargs)
        folder, is_main = Path(bound.arguments["save_directory"]), bound.arguments.get("is_main_process", True)
        refuse_sharded(
            self.passes.model,
            "save_pretrained writes whole tensors",
            "tuned.save(folder) on every process writes a delta; for the model call merge(), and give save_pretrained "
            "the state_dict that get_model_state_dict of torch returns with full_state_dict=True",
        )
        handle: Any = submodules_of(self.passes.model)[HANDLE_NAME]
        used = self.passes.assignment_of_new_pass().used
        names = each_name(used.names)
        if not self.path and CHECKPOINT.fullmatch(folder.name):
            if is_main:
                _save_each(handle, names, folder)
                self._save_trained(handle, folder)
            return None
        refuse_offloaded(self.passes.model, "save_pretrained")
        self._refuse_another_state(bound.arguments.get("state_dict"))
        if not names and (folder / "delta").exists():
            raise DeltuneError(f"{folder} holds a delta ({folder / 'delta'}), and none is in use: give another folder")
        values: Mapping[str, Any] = {}
        labels, reason = handle.attached.base_labels, ""
        with self.passes.exclusive("save_pretrained"):
            try:
                if names:
                    merge, labels = handle.attached.compute_merge(names, used.head)
                    if merge.quantized:
                        raise DeltuneError("weights of its base are quantised: tuned.merge(dequantize=True) first")
                    values = merge.weights
            except DeltuneError as error:
                self._refuse_with_a_model(folder, bound.arguments.get("push_to_hub"), error)
                reason = str(error)
        if is_main and not self.path:
            _save_each(handle, names, folder)
        if reason:
            warnings.warn(
                f"{folder} holds the delta alone: deltune.load(model, {str(folder)!r}) loads it, and from_pretrained "
                f"cannot, since {reason}",
                stacklevel=2,
            )
            return None
        with self._tensors_placed(None):
            bound.arguments["state_dict"] = self._merged(handle, bound.arguments.get("state_dict"), values)
            self.passes.state.set_labels(labels)
            return self.original(*bound.args, **bound.kwargs)

    def _refuse_another_state(self, state_dict: Mapping[str, Any] | None) -> None:
        """Refuse a state dict with other values of the deltas than the model has: these would be written."""
        if state_dict is None or self.path:
            return
        here, passed = (self.passes.state.with_base_in_place(one) for one in (self.model.state_dict(), state_dict))
        of_deltas = [name for name in passed if name.startswith(f"{HANDLE_NAME}.")]
        if different := [n for n in of_deltas if n not in here or not _equal_tensors(passed[n], here[n])]:
            raise DeltuneError(
                f"the state_dict for save_pretrained has other values of the delta than the model ({different[0]}), as "
                "an average of steps has: call model.load_state_dict(state_dict) first"
            )

    def _refuse_with_a_model(self, folder: Path, push_to_hub: Any, error: DeltuneError) -> None:
        """Refuse to put a delta alone where something would be read as the model without it."""
        advice = "tuned.save(folder) writes the delta, tuned.push_to_hub the same to the hub"
        if self.path or push_to_hub:
            raise DeltuneError(f"save_pretrained cannot write what is in use: {advice}. {error}") from error
        if (folder / "config.json").exists():
            raise DeltuneError(
                f"{folder} holds a model, which from_pretrained would read without the delta: give another folder "
                f"({advice}). {error}"
            ) from error

    def _merged(self, handle: Any, state_dict: Mapping[str, Any] | None, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the base's tensors with the merged ones in their place, by the names of this part of the model."""
        state, prefix = self.passes.state, f"{self.path}." if self.path else ""
        tensors = state.with_base_in_place(state_dict or self.model.state_dict())
        for name, value in values.items():
            names = (name, *handle.attached.anatomy.tensor(name).aliases)
            keys = {one.removeprefix(prefix) for one in names if one.startswith(prefix)}
            tensors |= dict.fromkeys(keys & tensors.keys(), value)
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{HANDLE_NAME}.")}

    def _save_trained(self, handle: Any, folder: Path) -> None:
        """Write the tensors of all deltas, and those of the base that the user trains beside them."""
        with self._tensors_placed(None):
            base = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            tensors = handle.state_dict(prefix=f"{HANDLE_NAME}.") | base
            tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        with explain_write_errors(folder):
            save_file(tensors, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def _save_each(handle: Any, names: Sequence[str], folder: Path) -> None:
    """Write deltas below a folder."""
    for name in names:
        handle.save(folder / ("delta" if len(names) == 1 else f"delta-{name}"), name)


def _equal_tensors(one: Any, other: Any) -> bool:
    """Return whether two tensors have the same values, on whatever devices."""
    return one.shape == other.shape and bool((one.to(other.device) == other).all())


class LoadStateDict(ModelMethod):
    """`load_state_dict`: puts every tensor where it was saved, whichever delta was in use then and is now."""

    def __call__(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if self.path:
            self._refuse_ambiguous()
        refuse_offloaded(self.passes.model, "load_state_dict")
        with self._tensors_placed(self.passes.state.placed_delta_in(state_dict)):
            self._check(state_dict, strict)
            result = self.original(state_dict, strict=strict, assign=assign)
            result.missing_keys[:] = self._without_a_value(result.missing_keys, state_dict)
            return result

    def _refuse_ambiguous(self) -> None:
        """Raise an error if deltas have their own values for tensors of this part of the model."""
        state, inside = self.passes.state, {module for _, module in base_modules(self.model)}
        owned = {owned: name for name in state.deltas for owned in state.delta(name).owned_tensor_names}
        if tensors := [tensor for tensor in owned if any(module in inside for module, _ in state.slots[tensor])]:
            raise DeltuneError(
                f"load_state_dict of {self.path}: delta {owned[tensors[0]]!r} has its own values for {tensors[0]}, and "
                "the state dict of a part of the model does not say whether it holds those or the base's: call "
                "load_state_dict of the whole model, or detach() first"
            )

    def _without_a_value(self, missing: Iterable[str], state_dict: Mapping[str, Any]) -> list[str]:
        """The missing names, but for the base's if the file is a checkpoint, and other names of tensors there."""
        if any(name.startswith(f"{HANDLE_NAME}.") for name in state_dict):
            return [name for name in missing if name.startswith(f"{HANDLE_NAME}.")]
        tensors = {name: id(tensor) for name, tensor in self.model.named_parameters(remove_duplicate=False)}
        loaded = {tensors[name] for name in tensors.keys() & state_dict.keys()}
        return [name for name in missing if tensors.get(name) not in loaded]

    def _check(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        """Check names and shapes before anything is loaded; torch does so afterwards."""
        expected = self.model.state_dict()
        problems = []
        if strict:
            problems += [f"{name} is missing" for name in expected if name not in state_dict]
            problems += [f"{name} is not in this model" for name in state_dict if name not in expected]
        for name, value in state_dict.items():
            shape, expected_shape = (getattr(tensor, "shape", None) for tensor in (value, expected.get(name)))
            if shape is not None and expected_shape is not None and shape != expected_shape:
                problems.append(f"{name} has shape {tuple(shape)}, the model's has {tuple(expected_shape)}")
        if problems:
            raise error_from_problems(
                "load_state_dict needs the state dict of this model with its deltas (load that of the base model with "
                "strict=False, and deltas with deltune.load)",
                problems,
            )


class Generate(ModelMethod):
    """`generate`: runs as one long pass, whose rows are the prompts."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.method != "generate":
            self._check_batching()
        return self.passes.generate(self.original, args, kwargs, in_threads=self.method != "generate")

    def _check_batching(self) -> None:
        """Refuse continuous batching where it would not give the texts of `generate`."""
        in_use = self.passes.assignment()
        if in_use.rows or in_use is not self.passes.default_assignment:
            raise DeltuneError(
                f"{self.method} runs in a thread of its own, where rows() and disable() do not hold: call generate, or "
                "use() one delta for the whole model"
            )
        others = "call generate, or serve the delta with deltune serve"
        if in_use.prompts:
            raise DeltuneError(
                f"{self.method} packs several texts into a row, and a prompt stands before the first alone: {others}"
            )
        if self.passes.has_prefixes:
            raise DeltuneError(
                f"{self.method} has an attention of its own, which reads no prefix, and a delta that is attached has "
                f"one: {others}"
            )


class StateDict(ModelMethod):
    """`state_dict`: reads the tensors with the delta in use here, while no other thread moves any."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.passes.run_reader(lambda: self.original(*args, **kwargs))


class DeepCopy(ModelMethod):
    """`copy.deepcopy`: copies the model while no other thread moves its tensors. What is in use here is in the copy."""

    def __call__(self, memo: dict[int, Any]) -> Any:
        model = self.passes.model
        copied = self.passes.run_reader(lambda: _copied(model, memo))
        claim_modules(copied)
        choose_here(memo[id(self.passes)])
        return copied


class Reduce(ModelMethod):
    """Pickling: pickles the base model, and beside it the deltas and which are in use here.

    Both are taken from a copy of the model with the same tensors, since pickling itself cannot hold a lock.
    """

    def __call__(self, protocol: Any) -> Any:
        copied: Any = self.passes.run_reader(self._with_the_same_tensors)
        handle: Any = submodules_of(copied)[HANDLE_NAME]
        return put_together, (copied, handle.attached.take_apart())

    def _with_the_same_tensors(self) -> Any:
        model = self.passes.model
        tensors = (t for m in model.modules() for t in (*parameters_of(m).values(), *buffers_of(m).values()))
        return _copied(model, {id(tensor): tensor for tensor in tensors})


def put_together(model: Any, attached: Any) -> Any:
    """Return the model of a pickle, with what was attached to it."""
    attached.attach_to(model)
    return model


def _copied(model: Any, memo: dict[int, Any]) -> Any:
    """Copy a model as copy.deepcopy does, without the replaced `__deepcopy__`."""
    copier = getattr(type(model), "__deepcopy__", None)
    return plain_copy(model, memo) if copier is None else copier(model, memo)


def plain_copy(original: Any, memo: dict[int, Any]) -> Any:
    """Copy an object as copy.deepcopy does for classes without `__deepcopy__`."""
    reduced: Any = object.__reduce_ex__(original, 4)
    make, args, state, *_ = reduced
    copied = memo[id(original)] = make(*args)
    state = copy.deepcopy(state, memo)
    if isinstance(original, nn.Module):
        copied.__setstate__(state)
    else:
        copied.__dict__.update(state)
    return copied


METHODS: dict[str, type[ModelMethod]] = {
    **dict.fromkeys(("generate", "generate_batch"), Generate),
    "load_state_dict": LoadStateDict,
    "state_dict": StateDict,
    "save_pretrained": SavePretrained,
    **dict.fromkeys(
        (
            "resize_token_embeddings", "resize_position_embeddings", "prune_heads", "set_input_embeddings",
            "set_output_embeddings", "add_adapter", "load_adapter",
        ),
        Refused,
    ),
}  # fmt: skip
"""The replacement of each method, for the model and the models inside it whose class has the method."""

WHOLE_MODEL_METHODS: dict[str, type[ModelMethod]] = {"__deepcopy__": DeepCopy, "__reduce_ex__": Reduce}
"""The replacements of methods of the tuned model alone."""
