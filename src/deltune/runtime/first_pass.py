"""A first pass of a stack, before each, for edits that read the hidden states with which it ends.

Both passes continue the same text, so a first pass has a cache of its own. It goes with the cache of the caller, and
what chooses, cuts or repeats the rows of the one does so with the other. In a decoder what the first pass says of a
token does not depend on later ones, so that generating with a cache gives what it gives without one.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from ..compat import call_class
from ..errors import DeltuneError
from ..methods.forms.base import FIRST_PASS
from .pass_manager import ModuleHook, PassManager
from .prompts import STATES
from .row_assignment import name_arguments, parameter_names

_MARK = "deltune_first_pass"
"""The attribute of a cache that is the cache of the first passes of the same text."""

_IN_BOTH = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices", "reset")
"""The methods of a cache that act on both."""


class FirstPassHook(ModuleHook):
    """Runs a stack once, before it runs, where an edit in use reads the hidden states of that pass."""

    def __init__(self, passes: PassManager, path: str) -> None:
        super().__init__(passes, path)
        self.arguments = parameter_names(self.module)

    def install(self) -> None:
        self.module.register_forward_pre_hook(self.before, with_kwargs=True)
        self.module.register_forward_hook(self.after, with_kwargs=True)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give the pass the hidden states (B, n, d) of a first pass; in that one they have the width 0."""
        this_pass = self.passes.current_pass()
        facts = this_pass.facts
        running = FIRST_PASS in facts and not facts[FIRST_PASS].shape[-1]  # others are of a compiled pass that failed
        if running or not self.passes.assignment().reads_first_pass:
            return
        arguments = name_arguments(self.arguments, args, kwargs)
        if state := next((name for name in STATES if arguments.get(name) is not None), None):
            raise DeltuneError(
                f"a first pass cannot read {state}, which the pass after it continues: generate with use_cache=False, "
                "which reads the whole text in each step, or choose another method"
            )
        cache = arguments.get("past_key_values")
        if cache is not None:
            arguments["past_key_values"] = _cache_of_first_pass(cache)
        tokens = next(arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None)
        facts[FIRST_PASS] = torch.empty(*tokens.shape[:2], 0, device=tokens.device)
        try:
            with torch.no_grad():
                output = call_class(module, (), arguments)
        except BaseException:
            del facts[FIRST_PASS]  # a compiled pass outlives its error
            raise
        facts[FIRST_PASS] = output[0]
        this_pass.first_cache = _cache_in(output) if cache is None else None

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forget the first pass; a cache that the stack has made keeps the first pass's."""
        this_pass = self.passes.current_pass()
        first = this_pass.facts.get(FIRST_PASS)
        if first is None or not first.shape[-1]:
            return
        del this_pass.facts[FIRST_PASS]
        made, this_pass.first_cache = this_pass.first_cache, None
        if made is not None and (cache := _cache_in(output)) is not None:
            _join(cache, made)


def _cache_in(output: Any) -> Any:
    """Return the cache in an output of a stack, or None."""
    values = output if isinstance(output, tuple) else output.values()
    return next((value for value in values if hasattr(value, "get_seq_length")), None)


def _cache_of_first_pass(cache: Any) -> Any:
    """Return the cache of the first passes of the text that a cache holds; a new one for a new text."""
    length, first = int(cache.get_seq_length()), getattr(cache, _MARK, None)
    if not length:
        for name in (_MARK, *_IN_BOTH):
            cache.__dict__.pop(name, None)
        first = copy.deepcopy(cache)
        _join(cache, first)
    elif first is None or int(first.get_seq_length()) != length:
        raise DeltuneError(
            f"the cache passed as past_key_values holds {length} tokens, of which no first pass with this delta is "
            "kept: begin with a new cache, and use the delta (and rows()) with all of its text"
        )
    return first


def _join(cache: Any, first: Any) -> None:
    """Let a cache keep the cache of the first passes, and change both together."""
    setattr(cache, _MARK, first)
    for name in _IN_BOTH:
        if hasattr(cache, name):
            setattr(cache, name, partial(_in_both, cache, first, name))


def _in_both(cache: Any, first: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    getattr(type(first), name)(first, *args, **kwargs)
    return getattr(type(cache), name)(cache, *args, **kwargs)
