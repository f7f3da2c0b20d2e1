"""Methods of a model that must know of its deltas: they stand in the instance until the last delta is taken off."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..anatomy.skeleton import HANDLE_NAME
from ..errors import DeltuneError, error_from_problems
from .pass_manager import PassManager


class ModelMethod:
    """Stands as a method of the model."""

    of_live_model = True

    def __init__(self, passes: PassManager, method: str) -> None:
        self.passes, self.method = passes, method
        self.before: Any = None

    def install(self) -> None:
        self.before = self.passes.model.__dict__.get(self.method)
        self.passes.model.__dict__[self.method] = self

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
        model = self.passes.model
        return getattr(type(model), self.method).__get__(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def remove(self) -> None:
        attributes = self.passes.model.__dict__
        if attributes.get(self.method) is self:
            if self.before is None:
                del attributes[self.method]
            else:
                attributes[self.method] = self.before

    @contextmanager
    def _standing(self, name: str | None) -> Iterator[Any]:
        """The tensors of one delta, or of none, in the model's slots while no pass runs; gives the handle."""
        passes = self.passes
        with passes.changing(self.method):
            try:
                passes.state.stand(name)
                yield passes.model._modules[HANDLE_NAME]
            finally:
                passes.settle(passes.assigned())


class Refused(ModelMethod):
    """Changes modules or sizes, which no delta can follow."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.method == "resize_token_embeddings" and self._asks_only(args, kwargs):
            return self.passes.model.get_input_embeddings()
        raise DeltuneError(
            f"{self.method} changes modules that attached deltas were made for: detach() them first (or merge() the "
            f"one in use), call {self.method}, and attach again"
        )

    def _asks_only(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the embeddings keep their size."""
        arguments = inspect.signature(self.original).bind(*args, **kwargs).arguments
        embeddings: Any = self.passes.model.get_input_embeddings()
        same = arguments.get("new_num_tokens") in (None, len(embeddings.weight))
        return same and arguments.get("pad_to_multiple_of") is None


class SavePretrained(ModelMethod):
    """Writes the base as it was before attaching. The deltas' own numbers are in the file too, under `deltune.`, since
    a Trainer's checkpoints are written so; transformers leaves them out when it loads the file."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self.original).bind(*args, **kwargs)
        with self._standing(None) as handle:
            self.passes.state.give(handle.base_labels)
            if bound.arguments.get("state_dict") is not None:
                bound.arguments["state_dict"] = self.passes.state.at_rest(bound.arguments["state_dict"])
            result = self.original(*bound.args, **bound.kwargs)
        warnings.warn(
            "save_pretrained wrote the base model as it was before attaching: a delta is saved with tuned.save(folder) "
            "and loaded with deltune.load(model, folder); merge() first to save one model with its weights",
            stacklevel=2,
        )
        return result


class LoadStateDict(ModelMethod):
    """Puts every tensor where it was saved, whichever delta was in use then and is now."""

    def __call__(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        with self._standing(self.passes.state.standing_in(state_dict)):
            self._check(state_dict, strict)
            return self.original(state_dict, strict=strict, assign=assign)

    def _check(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        """Check names and shapes before anything is loaded; torch does so afterwards."""
        here = self.passes.model.state_dict()
        problems = []
        if strict:
            problems += [f"{name} is missing" for name in here if name not in state_dict]
            problems += [f"{name} is not in this model" for name in state_dict if name not in here]
        for name, value in state_dict.items():
            shape, own = (getattr(tensor, "shape", None) for tensor in (value, here.get(name)))
            if shape is not None and own is not None and shape != own:
                problems.append(f"{name} has shape {tuple(shape)}, the model's has {tuple(own)}")
        if problems:
            raise error_from_problems(
                "load_state_dict wants the state dict of this model with its deltas (a base's own is loaded with "
                "strict=False; deltas are loaded with deltune.load)",
                problems,
            )


class Generate(ModelMethod):
    """Generates in one long pass, whose rows are the prompts that it is given."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.method != "generate" and self.passes.assignment() is not self.passes.in_use:
            raise DeltuneError(
                f"{self.method} runs its passes in a thread of its own, which rows() and disable() do not reach: use "
                "generate, or use() one delta for the whole model"
            )
        return self.passes.generate(self.original, args, kwargs)


METHODS: dict[str, type[ModelMethod]] = {
    **dict.fromkeys(("generate", "generate_batch"), Generate),
    "load_state_dict": LoadStateDict,
    "save_pretrained": SavePretrained,
    **dict.fromkeys(
        (
            "resize_token_embeddings", "resize_position_embeddings", "prune_heads", "set_input_embeddings",
            "set_output_embeddings", "add_adapter", "load_adapter",
        ),
        Refused,
    ),
}  # fmt: skip
"""What stands as which method, where the model's class has it."""
