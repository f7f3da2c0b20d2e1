"""Prompt tuning: puts trained rows before a stack's input embeddings, and adapts masks, positions and outputs.

Encoder or decoder alone: the rows' outputs are removed before pooler, head and loss. Encoder of an encoder-decoder: the
decoder attends to the rows' outputs (Lester et al. 2021), so they stay and its mask grows. With a cache the rows enter
once, with the first tokens; later steps only see longer masks and positions. Rows of the batch that hold several texts
are refused, since the rows stand before the first alone. Prefixes that take up positions, as in PEFT, shift the
positions of tokens in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..anatomy.types import Anatomy
from ..compat import parameters_of
from ..errors import DeltuneError
from .cached_prompts import Identity, counted_columns, enter_stack, leave_stack, self_attention_cache
from .modules import Edit
from .pass_manager import ModuleHook, PassManager
from .row_assignment import name_arguments, parameter_names, prompt_form
from .rows import DeltaRows, forward_with, stack_by_row

Prompts = list[tuple[DeltaRows, list[Edit]]]
"""The prompts of each group of rows."""


@dataclass
class PromptPass:
    """The prompts put before the tokens in one pass, by which positions are shifted and outputs cut."""

    identity: Identity  # which rows of the batch have which prompts
    length: int  # the length of the longest prompt
    is_present: torch.Tensor | None  # which of the rows before the tokens belong to a prompt, (B, l), or None if all do
    shifts: bool  # whether the rows take up positions, so that positions of the text are shifted
    added: int  # the number of rows before the tokens: the length of the longest prompt, or 0 after the first step
    before: int  # the number of tokens in the cache
    tokens: int  # the number of new tokens
    cache: Any  # the cache that the caller gave, or None
    order: torch.Tensor | None = None  # for each position what it holds, where rows and tokens were reordered

    @property
    def total(self) -> int:
        """The number of rows and new tokens."""
        return self.added + self.tokens


class PromptHook(ModuleHook):
    """Applies the prompts in use at the first stack of a model.

    Every row of a batch has as many rows before its tokens as the longest prompt has; those that its own prompt lacks
    are masked. Before a pass they are put in order: what is masked stands at the left of a causal stack, like padding,
    and at the right of any other, so that a row sees what it would see alone.
    """

    def __init__(self, passes: PassManager, path: str) -> None:
        super().__init__(passes, path)
        model, anatomy = passes.model, passes.anatomy
        stack = anatomy.stacks[0]
        self.causal = stack.causal
        self.words = model.get_submodule(stack.words or "")
        self.positions = model.get_submodule(stack.positions) if stack.positions else None
        # families count the places of a row, with padding at its left, or what its mask shows
        self.counts_shown = self.positions is not None and "attention_mask" in parameter_names(self.positions)
        self.arguments = parameter_names(self.module)
        self.numbered = "position_ids" in self.arguments
        self.decoder: nn.Module | None = None
        self.exits: list[nn.Module] = []
        if len(anatomy.stacks) > 1:
            self.decoder = model.get_submodule(anatomy.stacks[1].entry)
            self.decoder_arguments = parameter_names(self.decoder)
        else:  # inside first: a pooler may follow
            self.exits = [model.get_submodule(path) for path in dict.fromkeys((stack.container, stack.entry))]
        self.others = (self.positions, self.decoder, *self.exits)

    def install(self) -> None:
        self.module.register_forward_pre_hook(self.before, with_kwargs=True)
        if self.positions is not None:
            self.positions.register_forward_pre_hook(self.before_positions, with_kwargs=True)
            self.positions.register_forward_hook(self.after_positions)
        if self.decoder is not None:
            self.decoder.register_forward_pre_hook(self.before_decoder, with_kwargs=True)
        for module in self.exits:
            module.register_forward_hook(self.after_stack)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace token ids by embeddings with the rows in front, and lengthen masks and positions."""
        prompts = self.passes.assignment().prompts
        if not prompts:
            return None
        arguments = name_arguments(self.arguments, args, kwargs)
        embeds = arguments.get("inputs_embeds")
        if embeds is None:
            embeds = self.words(arguments["input_ids"])
        batch, tokens = embeds.shape[:2]
        if state := next((name for name in STATES if arguments.get(name) is not None), None):
            raise DeltuneError(
                f"a prompt cannot be continued with {state}, which does not say how many tokens it has read: generate "
                "with use_cache=False, which reads the whole text in each step, or choose another method"
            )
        length, identity = _longest(prompts), self.passes.assignment().prompt_identity
        cache = self_attention_cache(arguments.get("past_key_values"))
        columns = counted_columns(cache, identity, length)
        is_present = _presence(prompts, batch, embeds.device)
        shifts = all(prompt_form(edit).positions == "shift" for _, edits in prompts for edit in edits)
        added, before = (0, columns - length) if columns else (length, 0)
        prompt_pass = PromptPass(identity, length, is_present, shifts, added, before, tokens, cache)
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        by_token = [name for name, value in arguments.items() if added and _is_by_token(name, value, (batch, tokens))]
        if added:
            rows = [(group, torch.cat([edit.tensors()["rows"] for edit in edits])) for group, edits in prompts]
            embeds = torch.cat([stack_by_row(rows, batch, at_end=True)[0].to(embeds.dtype), embeds], dim=1)
            arguments |= {name: F.pad(arguments[name], (added, 0)) for name in by_token}
        arguments |= {"input_ids": None, "inputs_embeds": embeds}
        repeats = added and not shifts  # without a mask, repeated positions are taken for packed sequences
        if mask is None and (is_present is not None or repeats):
            mask = torch.ones(batch, before + tokens, dtype=torch.long, device=embeds.device)
        longer = self.lengthened(mask, prompt_pass)
        _refuse_packed(arguments, mask, before, tokens)
        arguments["attention_mask"], order = self.arrange(longer, is_present, length)
        if self.numbered:
            positions = arguments["position_ids"] = self.position_ids(positions, prompt_pass, longer, embeds.device)
        elif is_present is not None and self.causal and self.positions is not None:
            raise DeltuneError("prompts of different lengths in one batch need position_ids, which this model lacks")
        prompt_pass.order = order if added else None
        if prompt_pass.order is not None:
            arguments["inputs_embeds"] = _reordered(embeds, prompt_pass.order)
            for name in (*by_token, *(["position_ids"] if positions is not None else [])):
                lead = arguments[name].shape[:-2]
                values = arguments[name].expand(*lead, batch, -1)
                arguments[name] = values.gather(-1, prompt_pass.order.expand(*lead, batch, -1))
        self.check_length(columns, prompt_pass)
        if added:
            _lengthen_cache(cache, added)
        enter_stack(cache, identity, length, columns)
        this_pass = self.passes.current_pass()
        this_pass.prompt = prompt_pass
        for positions in self.passes.assignment().positions:
            chosen = this_pass.facts[positions]
            longer = F.pad(chosen, (added, 0) * (chosen.dim() - 1))  # `TEXT` has an axis for what sees, too
            if (order := prompt_pass.order) is not None:
                for axis in range(1, chosen.dim()):
                    at_axis = order if chosen.dim() == 2 else order.unsqueeze(3 - axis)
                    longer = longer.gather(axis, at_axis.expand_as(longer))
            this_pass.facts[positions] = longer
        kept = {"input_ids", *kwargs} & {*self.arguments, *kwargs}  # some families have no default for the token ids
        return (), {name: value for name, value in arguments.items() if name in kept or value is not None}

    def lengthened(self, mask: Any, prompt_pass: PromptPass, slides: bool = False) -> Any:
        """A mask with columns for the rows, and, where it has one for each query, with queries for those added."""
        if mask is None:
            return None
        if isinstance(mask, dict):  # prepared for each type of layer by `generate`, or by a model around the stack
            return {name: self.lengthened(value, prompt_pass, name != "full_attention") for name, value in mask.items()}
        length, added, is_present = prompt_pass.length, prompt_pass.added, prompt_pass.is_present
        text, layers = prompt_pass.before + prompt_pass.tokens, getattr(prompt_pass.cache, "layers", ())
        sizes = [getattr(layer, "max_cache_len", 0) for layer in layers]
        fixed = max(sizes, default=0)  # of a cache that has room for so many tokens from the beginning
        if not isinstance(mask, torch.Tensor):
            _refuse_mask(f"an attention mask of the type {type(mask).__name__} cannot be lengthened by its rows")
        if mask.dim() == 2:
            if mask.shape[1] != text and not text < mask.shape[1] <= fixed:
                _refuse_mask(
                    f"the attention mask has {mask.shape[1]} columns for {text} tokens of text (one for each token in "
                    "the cache and each new one; the rows of the prompt have none)"
                )
            return _with_rows(mask, is_present, length)
        if is_present is not None:
            _refuse_mask("where rows have different prompts it needs a mask (B, n), not one prepared for each query")
        if slides or any(getattr(layer, "is_sliding", False) for layer in layers):
            window = _window(self.module)
            if fixed or length + text > window:
                _refuse_mask(
                    "a mask that was prepared for sliding windows does not know its rows"
                    + ("" if fixed else f" ({length} rows and {text} tokens are more than a window of {window})")
                )
        if not self.causal and mask.shape[-2] > 1:
            _refuse_mask(
                "a mask for each query of a stack that is not causal does not say what its rows see; pass a mask (B, n)"
            )
        keys = fixed + added if fixed else length + text
        if mask.shape[-1] not in (keys, keys - length):
            _refuse_mask(f"the attention mask has {mask.shape[-1]} columns for {text} tokens of text")
        shown, hidden = (True, False) if mask.dtype == torch.bool else (0.0, torch.finfo(mask.dtype).min)
        longer = F.pad(mask, (length, 0), value=shown)[..., :keys]
        if not added or mask.shape[-2] == 1 != text:
            return longer
        top = torch.full_like(longer[..., :1, :], hidden).expand(*longer.shape[:-2], added, -1).clone()
        among = torch.ones(added, added, dtype=torch.bool, device=mask.device).tril()
        top[..., :added] = top[..., :added].masked_fill(among, shown)
        return torch.cat([top, longer], dim=-2)

    def arrange(self, mask: Any, is_present: torch.Tensor | None, length: int) -> tuple[Any, torch.Tensor | None]:
        """A mask of rows and text in the order of the pass, and where each of its positions reads (B, l + n); None
        where they stand as they are. In a causal stack rows then stand between left padding and text, and a sliding
        window reaches them as it would without padding."""
        if not _is_padding(mask):
            return mask, None
        if is_present is None and not self.causal:
            return mask, None
        hidden = torch.zeros_like(mask, dtype=torch.bool)
        if is_present is not None:
            hidden[:, :length] = ~is_present
        if self.causal:
            hidden[:, length:] = mask[:, length:].cumsum(1) == 0
        if not torch.compiler.is_compiling() and not hidden.any():  # a traced pass cannot branch on what a mask holds
            return mask, None
        order = (hidden != self.causal).to(torch.uint8).argsort(dim=1, stable=True)
        return mask.gather(1, order), order

    def position_ids(
        self, position_ids: torch.Tensor | None, prompt_pass: PromptPass, mask: Any, device: torch.device
    ) -> Any:
        """Positions of rows and text; None where the family's own counting already gives them."""
        length, is_present, first = prompt_pass.length, prompt_pass.is_present, first_position(self.positions)
        if position_ids is None and prompt_pass.shifts and prompt_pass.added and is_present is None:
            return None
        if position_ids is None:  # as the family counts a row alone
            if self.counts_shown and prompt_pass.shifts and mask is not None:
                return (mask.cumsum(1) * mask - 1)[:, -prompt_pass.total :]
            start = first + prompt_pass.before
            position_ids = torch.arange(start, start + prompt_pass.tokens, device=device)[None]
        if not prompt_pass.shifts:
            rows = torch.full((position_ids.shape[0], length), first, device=device)
            return torch.cat([rows, position_ids], dim=1) if prompt_pass.added else position_ids
        own_length = length if is_present is None else is_present.sum(1, keepdim=True)
        if not prompt_pass.added:
            return position_ids + own_length
        start_of_text = position_ids[..., :1]
        if self.causal and _is_padding(mask):  # after the padding at the left
            shown = mask[:, length:].argmax(1, keepdim=True)
            lead = position_ids.shape[:-2]
            start_of_text = position_ids.expand(*lead, len(shown), -1).gather(-1, shown.expand(*lead, -1, -1))
        rows = start_of_text + (torch.arange(length, device=device) - (length - own_length)).clamp(min=0)
        shifted = (position_ids + own_length).expand(*rows.shape[:-1], -1)
        return torch.cat([rows.expand(*shifted.shape[:-1], -1), shifted], dim=-1)

    def before_positions(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """positions="none" where the family counts by itself: it looks up the text's positions alone."""
        prompt_pass = self.passes.current_pass().prompt
        if prompt_pass is None or prompt_pass.shifts or self.numbered:
            return None
        positions = kwargs.get("position_ids")
        if not prompt_pass.added:  # a later step: the cache that the family counts has the rows too
            if positions is not None:
                return args, {**kwargs, "position_ids": positions - prompt_pass.length}
            return (args[0], args[1] - prompt_pass.length, *args[2:]), kwargs
        tokens = prompt_pass.tokens
        if positions is not None:
            kwargs = {**kwargs, "position_ids": positions[..., :tokens]}
        if args[0] is not None:  # a tensor of the tokens' shape, or the shape itself
            shape = args[0][:, :tokens] if isinstance(args[0], torch.Tensor) else torch.Size((args[0][0], tokens))
            args = (shape, *args[1:])
        return args, kwargs

    def after_positions(self, module: nn.Module, args: Any, output: torch.Tensor) -> Any:
        """positions="none": the rows get no position; where the family counts by itself, the text gets its own."""
        prompt_pass = self.passes.current_pass().prompt
        if prompt_pass is None or prompt_pass.shifts or not prompt_pass.added:
            return None
        if self.numbered and prompt_pass.order is not None:
            return output.masked_fill((prompt_pass.order < prompt_pass.added)[..., None], 0.0)
        text = output[..., prompt_pass.added :, :] if self.numbered else output
        whole = torch.cat([text.new_zeros(*text.shape[:-2], prompt_pass.added, text.shape[-1]), text], dim=-2)
        if prompt_pass.order is None:
            return whole
        return _reordered(whole.expand(prompt_pass.order.shape[0], -1, -1), prompt_pass.order)

    def before_decoder(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Lengthen the mask through which the decoder attends to the encoder by the rows."""
        prompts = self.passes.assignment().prompts
        arguments = name_arguments(self.decoder_arguments, args, kwargs)
        mask, states = arguments.get("encoder_attention_mask"), arguments.get("encoder_hidden_states")
        length = _longest(prompts)
        is_present = None if states is None or not prompts else _presence(prompts, states.shape[0], states.device)
        if mask is None and is_present is not None:
            assert states is not None
            mask = torch.ones(states.shape[0], states.shape[1] - length, dtype=torch.long, device=states.device)
        if mask is None:
            return None
        if (prompts and mask.dim() != 2) or (states is not None and states.shape[1] != length + mask.shape[-1]):
            have = "no states" if states is None else f"{states.shape[1]} states"
            raise DeltuneError(
                f"the decoder is given {have} of the encoder and a mask of the shape {tuple(mask.shape)} for them: "
                f"pass encoder_outputs that were computed with the delta in use, whose prompt has {length} rows, and a "
                "mask (B, n) of the text alone"
            )
        if not prompts:
            return None
        longer = _with_rows(mask, is_present, length)
        return (), {**arguments, "encoder_attention_mask": self.arrange(longer, is_present, length)[0]}

    def after_stack(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Remove the rows from the outputs."""
        prompt_pass = self.passes.current_pass().prompt
        if prompt_pass is not None and module is self.module:
            caches = [prompt_pass.cache, *(output if isinstance(output, tuple) else output.values())]
            cache = next((self_attention_cache(one) for one in caches if hasattr(one, "get_seq_length")), None)
            leave_stack(cache, prompt_pass.identity, prompt_pass.length)
        if prompt_pass is None or not prompt_pass.added:
            return None
        if isinstance(output, tuple):
            values = [_without_prompt(value, prompt_pass) for value in output]
            return type(output)(*values) if hasattr(output, "_fields") else tuple(values)
        for name, value in output.items():
            output[name] = _without_prompt(value, prompt_pass)
        return output

    def check_length(self, cached_tokens: int, prompt_pass: PromptPass) -> None:
        """Raise an error if rows and text do not fit into the position table."""
        if self.positions is None or not prompt_pass.shifts:
            return
        rows, needed, length = position_count(self.positions), cached_tokens + prompt_pass.total, prompt_pass.length
        if needed > rows:
            raise DeltuneError(
                f"{needed - length} tokens and a prompt of {length} take {needed} positions, and this "
                f"model has {rows}; shorten the text or the prompt, or use prompt(positions='none')"
            )


def check_takes_prompts(model: PreTrainedModel, anatomy: Anatomy) -> None:
    """Check that vectors can stand before the tokens, and that the decoder of an encoder-decoder can be shown them."""
    if "per_layer_inputs" in parameter_names(model.get_submodule(anatomy.stacks[0].entry)):
        raise DeltuneError(
            f"a prompt cannot be attached to {type(model).__name__}: each of its layers reads the token ids again, and "
            "the rows of a prompt have none. Choose a method that adds no tokens, such as a prefix, lora or layernorm"
        )
    if len(anatomy.stacks) < 2:
        return
    decoder = model.get_submodule(anatomy.stacks[1].entry)
    if "encoder_attention_mask" not in parameter_names(decoder):
        raise DeltuneError(
            f"a prompt cannot be attached to {type(model).__name__}: {type(decoder).__name__} has no argument "
            "encoder_attention_mask, the mask that a prompt before the encoder's tokens lengthens. Choose a method "
            "that adds no tokens, such as a prefix, lora or layernorm"
        )


def _longest(prompts: Prompts) -> int:
    return max([0, *(sum(prompt_form(edit).length for edit in edits) for _, edits in prompts)])


def _presence(prompts: Prompts, size: int, device: torch.device) -> torch.Tensor | None:
    """Which of the rows (size, l) belong to a prompt, or None if all do."""
    ones = [
        (group, torch.ones(sum(prompt_form(e).length for e in edits), 1, device=device)) for group, edits in prompts
    ]
    is_present = stack_by_row(ones, size, at_end=True)[1]
    return None if is_present is None or bool(is_present.all()) else is_present


def _without_prompt(value: Any, prompt_pass: PromptPass) -> Any:
    if isinstance(value, tuple):
        return tuple(_without_prompt(v, prompt_pass) for v in value)
    if not isinstance(value, torch.Tensor) or value.dim() not in (3, 4) or value.shape[-2] != prompt_pass.total:
        return value
    if prompt_pass.order is not None:  # back to rows first, before they go
        value = _reordered(value, prompt_pass.order.argsort(1), value.dim() - 2)
        value = _reordered(value, prompt_pass.order.argsort(1), 3) if value.dim() == 4 else value
    return value[..., prompt_pass.added :, prompt_pass.added :] if value.dim() == 4 else value[:, prompt_pass.added :]


def _window(stack: nn.Module) -> int:
    """The number of tokens that the layers with a sliding window of a stack see, or with one of chunks; 0: unknown."""
    config = getattr(stack, "config", None)
    window: int = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None) or 0
    return window


def _with_rows(mask: torch.Tensor, is_present: torch.Tensor | None, length: int) -> torch.Tensor:
    """A mask (B, n) with a column for each of the rows before it."""
    if is_present is None:
        return F.pad(mask, (length, 0), value=1)
    return torch.cat([is_present.to(mask.dtype), mask], dim=1)


def _refuse_mask(why: str) -> NoReturn:
    raise DeltuneError(
        f"a prompt cannot be put before this text: {why}. In training, leave the mask to the tokenizer; in generation, "
        "leave out cache_implementation='static' or choose a method that adds no tokens, such as a prefix or lora"
    )


def _is_padding(mask: Any) -> bool:
    """Whether a mask hides padding alone, (B, n)."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 2


def _is_by_token(name: str, value: Any, shape: tuple[int, int]) -> bool:
    """Whether an argument has a number for each token, such as its type; the rows get 0."""
    is_other = name not in ("input_ids", "attention_mask", "position_ids")
    return is_other and isinstance(value, torch.Tensor) and value.shape == shape and not value.is_floating_point()


def texts_of_rows(arguments: Mapping[str, Any], mask: Any, begin: int, tokens: int) -> str | None:
    """Return what says that rows hold several texts each, or None where each has one.

    A mask for each query says itself what each text sees.
    """
    positions = arguments.get("position_ids")
    how = next((name for name in PACKED if arguments.get(name) is not None), None)
    if how is None and positions is not None and tokens > 1:
        if torch.compiler.is_compiling():  # which cannot branch on what positions hold
            how = "position_ids without an attention_mask, in a compiled pass" if mask is None else None
        elif mask is None or _is_padding(mask):
            shown = None if mask is None else mask[:, begin : begin + tokens].bool()
            how = "position_ids that begin again" if _begin_again(positions, shown) else None
    return how


def _refuse_packed(arguments: Mapping[str, Any], mask: Any, begin: int, tokens: int) -> None:
    """Raise an error if a row holds several texts: the prompt would stand before the first of them only."""
    if how := texts_of_rows(arguments, mask, begin, tokens):
        raise DeltuneError(
            f"a row of this batch holds several texts ({how}), as packing and padding-free collators make them, and a "
            "prompt stands before the first alone: train with one text in a row (packing=False, padding_free=False, a "
            "collator that pads), or choose a prefix, which every text of a row sees"
        )


STATES = ("cache_params", "mems", "state", "past_buckets_states")
"""Arguments for what earlier passes have read, beside a cache of keys and values."""

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")
"""Arguments that say where the texts of a row begin."""


def _begin_again(positions: torch.Tensor, shown: torch.Tensor | None) -> bool:
    """Whether positions, (B, n) or (axes, B, n), belong to several texts, as transformers sees them."""
    is_spatial = positions.dim() == 3 and positions.shape[0] != 4  # of 4 axes, the first numbers the tokens
    if positions.dim() == 3:
        positions = positions.amax(0) if is_spatial else positions[0]
    if shown is None and not is_spatial:
        return bool((positions.diff(dim=1) != 1).any())
    shown = torch.ones_like(positions, dtype=torch.bool) if shown is None else shown
    positions = positions.expand(shown.shape)
    first = positions.gather(1, shown.to(torch.uint8).argmax(1, keepdim=True))
    return bool((((positions <= first) & shown).sum(1) > 1).any())


def _reordered(values: torch.Tensor, order: torch.Tensor, along: int = 1) -> torch.Tensor:
    """values (B, ...) with its axis `along` read in an order (B, l + n) of its own for each row."""
    shape = [1] * values.dim()
    shape[0], shape[along] = order.shape
    return values.gather(along, order.reshape(shape).expand([*values.shape[:along], -1, *values.shape[along + 1 :]]))


def _lengthen_cache(cache: Any, length: int) -> None:
    """Make room for the rows in a cache of fixed size that is still empty."""
    for layer in getattr(cache, "layers", ()):
        if getattr(layer, "max_cache_len", None) and not getattr(layer, "is_sliding", False):
            layer.max_cache_len += length
            layer.is_initialized = False  # the first write allocates it again, with the new length


class PositionHook(ModuleHook):
    """Shifts the positions of one stack's tokens by the length of the prefixes in use.

    If the model has a position table, the table is read from a later row on, however the family counts positions;
    otherwise position_ids are increased.
    """

    def __init__(self, passes: PassManager, path: str) -> None:
        super().__init__(passes, path)
        stack = next(s for s in passes.anatomy.stacks if s.entry == path)
        self.stack, self.arguments = stack.name, parameter_names(self.module)
        self.table = passes.model.get_submodule(stack.positions) if stack.positions else None
        self.others = (self.table,)

    def install(self) -> None:
        self.module.register_forward_pre_hook(self.before, with_kwargs=True)
        if self.table is not None:
            # first, as a prompt's hook may put its rows before what is looked up
            self.table.register_forward_hook(self.looked_up, with_kwargs=True, prepend=True)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Shift position_ids; with a position table only check that it is long enough."""
        shifts = self.passes.assignment().shifts.get(self.stack)
        if not shifts:
            return None
        arguments = name_arguments(self.arguments, args, kwargs)
        tokens = arguments["input_ids"] if arguments.get("input_ids") is not None else arguments["inputs_embeds"]
        cache = arguments.get("past_key_values")
        cached_tokens = int(cache.get_seq_length()) if cache is not None else 0
        if self.table is not None:
            self.passes.current_pass().batch_size = tokens.shape[0]
            if self.passes.assignment().explicit_positions:  # the caller has checked them
                return None
            self.check(self.table, cached_tokens + tokens.shape[1], max(shift for _, shift in shifts))
            return None
        positions = arguments.get("position_ids")
        if positions is None:
            positions = torch.arange(cached_tokens, cached_tokens + tokens.shape[1], device=tokens.device)[None]
        for group, shift in shifts:
            if group.rows is not None:
                positions = positions.expand(*positions.shape[:-2], tokens.shape[0], -1)
            by_row = positions.movedim(-2, 0)  # beside the rows there may be several axes of positions
            positions = group.replace(by_row, group.select(by_row) + shift).movedim(0, -2)
        return (), {**arguments, "position_ids": positions}

    def looked_up(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> Any:
        """Return what the table gives when it is read from the shifted row on."""
        shifts = self.passes.assignment().shifts.get(self.stack)
        if not shifts:
            return None
        weight = parameters_of(module)["weight"]
        assert weight is not None
        for group, shift in shifts:
            moved = forward_with(module, {"weight": weight[shift:]}, *args, **kwargs)
            if group.rows is not None:  # the table may have been read once for all rows, (n, d) or (1, n, d)
                output = output.expand(self.passes.current_pass().batch_size, *output.shape[-2:])
            output = group.replace(output, group.select(moved.expand(output.shape)))
        return output

    def check(self, table: nn.Module, tokens: int, longest: int) -> None:
        """Raise an error if the table does not have the shifted positions."""
        rows = position_count(table)
        if tokens + longest > rows:
            raise DeltuneError(
                f"with shift_positions, {tokens} tokens and a prefix of {longest} take {tokens + longest} positions, "
                f"and this model has {rows}; shorten the text or the prefix, or leave shift_positions out"
            )


def position_count(table: nn.Module) -> int:
    """Return how many positions a table has."""
    return table.get_parameter("weight").shape[0] - unused_position_rows(table)


def first_position(table: nn.Module | None) -> int:
    """Return the position_id of the first token; RoBERTa's positions begin after the row of padding."""
    if table is None or hasattr(table, "offset"):
        return 0
    return unused_position_rows(table)


def unused_position_rows(table: Any) -> int:
    """Return the number of table rows before the first position: BART's and OPT's offset, RoBERTa's padding."""
    padding = getattr(table, "padding_idx", None)
    return int(getattr(table, "offset", 0 if padding is None else padding + 1))
