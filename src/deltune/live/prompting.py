"""Prompt vectors around a stack: rows before its input embeddings, and everything that counts tokens made to agree.

Encoder or decoder alone: the rows' outputs are removed before pooler, head and loss. Encoder of an encoder-decoder: the
decoder attends to the rows' outputs (Lester et al. 2021), so they stay and its mask grows. With a cache the rows enter
once, with the first tokens; later steps only see longer masks and positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..anatomy.values import Anatomy
from ..compat import remove_hooks
from ..errors import DeltuneError
from .assignment import form, parameter_names
from .edits import Edit
from .passes import Passes
from .positions import first_position, unused
from .uses import Use, by_row

Prompts = list[tuple[Use, list[Edit]]]
"""The prompts of each use."""


@dataclass
class PromptPass:
    """What a prompt did at the entry of a stack, for its positions and its exit.

    Attributes:
        prompts: The prompts of each use.
        added: Rows that the pass has before its tokens: those of the longest prompt, or none after the first step.
        total: The pass's length with them.
        order: Where its positions read, if not rows first and then tokens.
        shifts: Whether the rows have positions, and move those of the text on.
    """

    prompts: list[tuple[Use, list[Edit]]]
    added: int
    total: int
    shifts: bool
    order: torch.Tensor | None = None


class TokenTap:
    """The prompt edits in use at one model's first stack.

    Every row of a batch has as many rows before its tokens as the longest prompt has; those that its own prompt lacks
    are masked. Before a pass they are put in order: what is masked stands at the left of a causal stack, like padding,
    and at the right of any other, so that a row sees what it would see alone.
    """

    def __init__(self, passes: Passes, anatomy: Anatomy, path: str) -> None:
        model = passes.model
        stack = anatomy.stacks[0]
        self.passes = passes
        self.causal = stack.causal
        self.words = model.get_submodule(stack.words or "")
        self.positions = model.get_submodule(stack.positions) if stack.positions else None
        # families count the places of a row, those of padding at its left included, or what its mask shows
        self.counts_shown = self.positions is not None and "attention_mask" in parameter_names(self.positions)
        self.entry = model.get_submodule(path)
        self.arguments = parameter_names(self.entry)
        self.numbered = "position_ids" in self.arguments
        self.decoder: nn.Module | None = None
        self.exits: list[nn.Module] = []
        if len(anatomy.stacks) > 1:
            self.decoder = model.get_submodule(anatomy.stacks[1].entry)
            self.decoder_arguments = parameter_names(self.decoder)
        else:  # inside first: a pooler may follow
            self.exits = [model.get_submodule(path) for path in dict.fromkeys((stack.container, stack.entry))]

    def install(self) -> None:
        self.entry.register_forward_pre_hook(self.before, with_kwargs=True)
        if self.positions is not None:
            self.positions.register_forward_pre_hook(self.of_the_text)
            self.positions.register_forward_hook(self.without_positions)
        if self.decoder is not None:
            self.decoder.register_forward_pre_hook(self.before_decoder, with_kwargs=True)
        for module in self.exits:
            module.register_forward_hook(self.trim)

    def remove(self) -> None:
        for module in (self.entry, self.positions, self.decoder, *self.exits):
            remove_hooks(module, self)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace token ids by embeddings with the rows in front, and lengthen masks and positions."""
        prompts = self.passes.assignment().prompts
        if not prompts:
            return None
        arguments = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        embeds = arguments.get("inputs_embeds")
        if embeds is None:
            embeds = self.words(arguments["input_ids"])
        batch, tokens = embeds.shape[:2]
        there, length = _there(prompts, batch, embeds.device), _longest(prompts)
        cache = arguments.get("past_key_values")
        seen = int(cache.get_seq_length()) if cache is not None else 0
        added = length if seen == 0 else 0
        this = PromptPass(prompts, added, added + tokens, _shifts(prompts))
        if added:
            rows = [(use, torch.cat([edit.tensors()["rows"] for edit in edits])) for use, edits in prompts]
            embeds = torch.cat([by_row(rows, batch, at_end=True)[0].to(embeds.dtype), embeds], dim=1)
            _lengthen_cache(cache, added)
        arguments |= {"input_ids": None, "inputs_embeds": embeds}
        mask = arguments.get("attention_mask")
        repeats = added and not this.shifts  # without a mask, repeated positions are taken for packed sequences
        if mask is None and (there is not None or repeats):
            own = tokens if seen == 0 else seen - length + tokens
            mask = torch.ones(batch, own, dtype=torch.long, device=embeds.device)
        mask = _mask(mask, cache, seen, there, length, added)
        arguments["attention_mask"], order = self.arranged(mask, there, length)
        if arguments.get("token_type_ids") is not None and added:
            arguments["token_type_ids"] = F.pad(arguments["token_type_ids"], (added, 0))
        if self.numbered:
            numbers = self.position_ids(arguments.get("position_ids"), seen, tokens, there, embeds, this, mask)
            arguments["position_ids"] = numbers
        elif there is not None and self.causal and self.positions is not None:
            raise DeltuneError("prompts of different lengths in one batch need position_ids, which this model lacks")
        this.order = order if added else None
        if this.order is not None:
            arguments["inputs_embeds"] = _reordered(embeds, this.order)
            for name in ("position_ids", "token_type_ids"):
                if arguments.get(name) is not None:
                    arguments[name] = _reordered(arguments[name].expand(batch, -1), this.order)
        self.check_length(seen, this)
        self.passes.notes().prompt = this
        return (), {name: value for name, value in arguments.items() if name in kwargs or value is not None}

    def arranged(self, mask: Any, there: torch.Tensor | None, length: int) -> tuple[Any, torch.Tensor | None]:
        """A mask of rows and text in the order of the pass, and where each of its positions reads (B, l + n); None
        where they stand as they are. In a causal stack rows then stand between left padding and text, and a sliding
        window reaches them as it would without padding."""
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return mask, None
        if there is None and not self.causal:
            return mask, None
        hidden = torch.zeros_like(mask, dtype=torch.bool)
        if there is not None:
            hidden[:, :length] = ~there
        if self.causal:
            hidden[:, length:] = mask[:, length:].cumsum(1) == 0
        if not torch.compiler.is_compiling() and not hidden.any():  # a traced pass cannot branch on what a mask holds
            return mask, None
        order = (hidden != self.causal).to(torch.uint8).argsort(dim=1, stable=True)
        return mask.gather(1, order), order

    def position_ids(
        self,
        numbers: torch.Tensor | None,
        seen: int,
        tokens: int,
        there: torch.Tensor | None,
        embeds: torch.Tensor,
        this: PromptPass,
        mask: Any,
    ) -> Any:
        """Positions of rows and text; None where the family's own counting already gives them."""
        if numbers is None and this.shifts and there is None:
            return None
        length, device, first = _longest(this.prompts), embeds.device, first_position(self.positions)
        padding: torch.Tensor | int = 0
        if numbers is None:  # as the family counts a row alone
            if self.counts_shown and this.shifts:
                return (mask.cumsum(1) * mask - 1)[:, -this.total :]
            if self.causal and isinstance(mask, torch.Tensor) and mask.dim() == 2:
                padding = (mask[:, length:].cumsum(1) == 0).sum(1, keepdim=True)
            start = first + seen - (length if seen else 0)
            numbers = torch.arange(start, start + tokens, device=device)[None]
        if not this.shifts:
            rows = torch.full((numbers.shape[0], length), first, device=device)
            return torch.cat([rows, numbers], dim=1) if this.added else numbers
        own = length if there is None else there.sum(1, keepdim=True)
        shifted = numbers + own
        if not this.added:
            return shifted
        rows = (torch.arange(length, device=device) - (length - own)).clamp(min=0) + first + padding
        return torch.cat([rows.expand(shifted.shape[0], -1), shifted], dim=1)

    def this_pass(self) -> PromptPass | None:
        """The pass under way, where it has rows before its tokens."""
        this = self.passes.notes().prompt
        return this if this is not None and this.added else None

    def of_the_text(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """positions="none" where the family counts by itself: it looks up the text's positions alone."""
        this = self.this_pass()
        if this is None or this.shifts or self.numbered:
            return None
        tokens = this.total - this.added  # it is given a tensor of the tokens' shape, or the shape itself
        shape = args[0][:, :tokens] if isinstance(args[0], torch.Tensor) else torch.Size((args[0][0], tokens))
        return shape, *args[1:]

    def without_positions(self, module: nn.Module, args: Any, output: torch.Tensor) -> Any:
        """positions="none": the rows get no position; where the family counts by itself, the text gets its own."""
        this = self.this_pass()
        if this is None or this.shifts:
            return None
        if self.numbered and this.order is not None:
            return output.masked_fill((this.order < this.added)[..., None], 0.0)
        text = output[..., this.added :, :] if self.numbered else output
        whole = torch.cat([text.new_zeros(*text.shape[:-2], this.added, text.shape[-1]), text], dim=-2)
        if this.order is None:
            return whole
        return _reordered(whole.expand(this.order.shape[0], -1, -1), this.order)

    def before_decoder(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The decoder's view of the encoder grows with the rows."""
        prompts = self.passes.assignment().prompts
        if not prompts:
            return None
        arguments = {**dict(zip(self.decoder_arguments, args, strict=False)), **kwargs}
        mask, states = arguments.get("encoder_attention_mask"), arguments.get("encoder_hidden_states")
        length = _longest(prompts)
        there = None if states is None else _there(prompts, states.shape[0], states.device)
        if mask is None and there is not None:
            assert states is not None
            mask = torch.ones(states.shape[0], states.shape[1] - length, dtype=torch.long, device=states.device)
        if mask is None:
            return None
        longer = _mask(mask, None, 0, there, length, length)
        return (), {**arguments, "encoder_attention_mask": self.arranged(longer, there, length)[0]}

    def trim(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Outputs without the rows."""
        this = self.this_pass()
        if this is None:
            return None
        if isinstance(output, tuple):
            return tuple(_trimmed(value, this) for value in output)
        for name, value in output.items():
            output[name] = _trimmed(value, this)
        return output

    def check_length(self, seen: int, this: PromptPass) -> None:
        """Rows and text must fit the position table."""
        if self.positions is None or not this.shifts:
            return
        rows, needed = self.positions.get_parameter("weight").shape[0] - unused(self.positions), seen + this.total
        length = _longest(this.prompts)
        if needed > rows:
            raise DeltuneError(
                f"{needed - length} tokens and a prompt of {length} take {needed} positions, and this "
                f"model has {rows}; shorten the text or the prompt, or use prompt(positions='none')"
            )


def _longest(prompts: Prompts) -> int:
    """The length of the longest prompt."""
    return max(sum(form(edit).length for edit in edits) for _, edits in prompts)


def _shifts(prompts: Prompts) -> bool:
    return all(form(edit).positions == "shift" for _, edits in prompts for edit in edits)


def _there(prompts: Prompts, size: int, device: torch.device) -> torch.Tensor | None:
    """Which of the rows (size, l) are a prompt's; None: all."""
    ones = [(use, torch.ones(sum(form(e).length for e in edits), 1, device=device)) for use, edits in prompts]
    there = by_row(ones, size, at_end=True)[1]
    return None if there is None or bool(there.all()) else there


def _trimmed(value: Any, this: PromptPass) -> Any:
    if isinstance(value, tuple):
        return tuple(_trimmed(v, this) for v in value)
    if not isinstance(value, torch.Tensor) or value.dim() not in (3, 4) or value.shape[-2] != this.total:
        return value
    if this.order is not None:  # back to rows first, before they go
        value = _reordered(value, this.order.argsort(1), value.dim() - 2)
        value = _reordered(value, this.order.argsort(1), 3) if value.dim() == 4 else value
    return value[..., this.added :, this.added :] if value.dim() == 4 else value[:, this.added :]


def _mask(mask: Any, cache: Any, seen: int, there: torch.Tensor | None, length: int, added: int) -> Any:
    """A padding mask (B, n), or prepared masks (B, 1, q, k) alone or by layer type, with the rows visible."""
    if isinstance(mask, dict):
        return {name: _mask(value, cache, seen, there, length, added) for name, value in mask.items()}
    if mask is None:
        return None
    shown = True if mask.dtype == torch.bool else 1 if mask.dim() == 2 else 0.0
    longer = F.pad(mask, (length, 0), value=shown)
    if mask.dim() == 2:
        return longer if there is None else torch.cat([there.to(mask.dtype), mask], dim=1)
    if there is not None:
        raise DeltuneError(
            "prompts of different lengths in one batch need a mask (B, n), not one prepared for each query; "
            "generate without cache_implementation='static'"
        )
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    if any(getattr(layer, "is_sliding", False) for layer in getattr(cache, "layers", ())):
        raise DeltuneError(
            "a prompt and a cache of fixed size do not go together in a model with sliding windows: the masks that "
            "generate prepares do not know the prompt's rows; generate without cache_implementation='static'"
        )
    if not added:
        return _for_fixed_cache(mask, longer, hidden, cache, seen)
    top = torch.full_like(longer[..., :1, :], hidden).expand(*longer.shape[:-2], added, -1).clone()
    among = torch.ones(added, added, dtype=torch.bool, device=mask.device).tril()
    top[..., :added] = top[..., :added].masked_fill(among, shown)
    return torch.cat([top, longer], dim=-2)


def _reordered(values: torch.Tensor, order: torch.Tensor, along: int = 1) -> torch.Tensor:
    """values (B, ...) with its axis `along` read in an order (B, l + n) of its own for each row."""
    shape = [1] * values.dim()
    shape[0], shape[along] = order.shape
    return values.gather(along, order.reshape(shape).expand([*values.shape[:along], -1, *values.shape[along + 1 :]]))


def _for_fixed_cache(mask: torch.Tensor, longer: torch.Tensor, hidden: Any, cache: Any, seen: int) -> torch.Tensor:
    """A mask prepared for a cache of fixed size (q, k) has the rows' columns already, but its padding stands where the
    text would be without them: it moves to the right, and what is not written yet stays hidden. The mask of a sliding
    window counts backwards from the last token and stays."""
    layers = getattr(cache, "layers", ())
    if mask.shape[-1] not in {layer.max_cache_len for layer in layers if not getattr(layer, "is_sliding", False)}:
        return mask
    queries, keys = mask.shape[-2:]
    unwritten = torch.arange(keys, device=mask.device) > torch.arange(seen, seen + queries, device=mask.device)[:, None]
    return longer[..., :keys].masked_fill(unwritten, hidden)


def _lengthen_cache(cache: Any, length: int) -> None:
    """Room for the rows in a cache of fixed size that is still empty."""
    for layer in getattr(cache, "layers", ()):
        if getattr(layer, "max_cache_len", None) and not getattr(layer, "is_sliding", False):
            layer.max_cache_len += length
            layer.is_initialized = False  # it was allocated for less; the first write does it again
