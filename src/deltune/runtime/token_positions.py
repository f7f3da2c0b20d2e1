"""Finds at which tokens modifications act that do not act at all of them, once for each pass of a stack.

A pass that continues a cache goes on where the rows of the cache were invoked; the cache itself says which were, so
that this lives as long as the text. What `generate` adds to a text is never searched for a sequence, with a cache as
without one, and the ends of a text are those of what it began with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import DeltuneError
from ..methods.forms.base import TEXT
from ..methods.positions import chosen_tokens
from .cached_prompts import self_attention_cache
from .forward_pass import ForwardPass
from .pass_manager import ModuleHook, PassManager
from .prompts import texts_of_rows
from .row_assignment import name_arguments, parameter_names

_MARK = "deltune_invoked"
"""The attribute of a cache that has which of its rows (B,) were invoked, by the sequence."""


class TokensHook(ModuleHook):
    """Finds, before a stack runs, which of its tokens the modifications in use act at."""

    def __init__(self, passes: PassManager, path: str) -> None:
        super().__init__(passes, path)
        self.arguments, self.causal = parameter_names(self.module), passes.anatomy.stacks[0].causal

    def install(self) -> None:
        self.module.register_forward_pre_hook(self.before, with_kwargs=True)
        self.module.register_forward_hook(self.after, with_kwargs=True)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give the pass which tokens (B, n) each choice of positions has."""
        needed = self.passes.assignment().positions
        if not needed:
            return
        arguments = name_arguments(self.arguments, args, kwargs)
        ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        tokens: torch.Tensor = arguments["inputs_embeds"] if ids is None else ids
        cache = self_attention_cache(arguments.get("past_key_values"))
        before, size = int(cache.get_seq_length()) if cache is not None else 0, tokens.shape[1]
        if how := texts_of_rows(arguments, mask, before, size):
            raise DeltuneError(
                f"a row of this batch holds several texts ({how}), and {needed[0]!r} chooses tokens of one: train with "
                "one text in a row (packing=False, padding_free=False, a collator that pads)"
            )
        this_pass = self.passes.current_pass()
        generation = _generation(this_pass)
        begun = None if generation is None else generation.text
        if generation is not None and begun is None:
            generation.text = size
        text = size  # how many of the tokens are of a text that may be searched, and not what generate has added
        if begun is not None and (size == 1 or not before):
            text = 0 if before else begun
        for positions in needed:
            if positions == TEXT:
                if before:
                    raise DeltuneError(
                        "a delta in use attends to all tokens of a text, of which a cache lacks the hidden states: "
                        "generate with use_cache=False"
                    )
                visible = _shown(mask, tokens)[:, None, :].expand(-1, size, -1)
                this_pass.facts[TEXT] = visible.tril() if self.causal else visible
                continue
            if isinstance(positions, str):
                if before and begun is not None and size > 1:
                    raise DeltuneError(
                        f"{positions!r} chooses the ends of a text, and generate reads several tokens at once after "
                        "the first ones: leave prefill_chunk_size and the assistant out"
                    )
                shown = _shown(mask, tokens)[:, :text]
                chosen = torch.zeros_like(shown) if before else chosen_tokens(positions, None, shown)
                this_pass.facts[positions] = F.pad(chosen, (0, size - text))
                continue
            if ids is None:
                raise DeltuneError(f"inputs_embeds do not say which tokens are {positions}, from which on a delta acts")
            chosen = chosen_tokens(positions, ids[:, :text], torch.ones_like(ids[:, :text], dtype=torch.bool))
            chosen = torch.cat([chosen, chosen.any(1, keepdim=True).expand(-1, size - text)], 1)
            known = getattr(cache, _MARK, {}).get(positions) if before else None
            if known is not None and len(known) != len(chosen):
                raise DeltuneError(
                    f"the cache has {len(known)} rows of which it knows whether they have {positions}, and this pass "
                    f"has {len(chosen)}: begin with a new cache"
                )
            this_pass.facts[positions] = chosen if known is None else chosen | known[:, None]

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Let the cache say which of its rows were invoked."""
        facts = self.passes.current_pass().facts
        invoked = {positions: chosen[:, -1] for positions, chosen in facts.items() if isinstance(positions, tuple)}
        for positions in self.passes.assignment().positions:
            facts.pop(positions, None)
        if not invoked:
            return
        passed = name_arguments(self.arguments, args, kwargs).get("past_key_values")
        caches = [passed, *(output if isinstance(output, tuple) else output.values())]
        cache = next((self_attention_cache(one) for one in caches if hasattr(one, "get_seq_length")), None)
        if cache is not None:
            setattr(cache, _MARK, getattr(cache, _MARK, {}) | invoked)


def _generation(this_pass: ForwardPass) -> ForwardPass | None:
    """Return the pass of `generate` that a pass of the same model is a step of."""
    one: ForwardPass | None = this_pass
    while one is not None and one.owner is this_pass.owner:
        if one.generates:
            return one
        one = one.enclosing
    return None


def _shown(mask: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return which tokens (B, n) of a pass that begins a text are no padding."""
    rows, size = tokens.shape[:2]
    mask = next(iter(mask.values())) if isinstance(mask, dict) else mask  # one for each type of layer
    if mask is None:
        return torch.ones(rows, size, dtype=torch.bool, device=tokens.device)
    if not isinstance(mask, torch.Tensor):
        raise DeltuneError(f"a mask of the type {type(mask).__name__} does not say which tokens are the ends of a text")
    if mask.dim() == 4:  # prepared for each query, which sees its own token unless that is padding
        itself = mask.diagonal(dim1=-2, dim2=-1)[:, 0]
        mask = (itself if itself.dtype == torch.bool else itself == 0).expand(rows, -1)
    return mask[:, :size].bool()
