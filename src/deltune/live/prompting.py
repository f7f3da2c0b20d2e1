"""Prompt vectors around a stack: rows before its input embeddings, and everything that counts tokens made to agree.

Encoder or decoder alone: the rows' outputs are removed before pooler, head and loss. Encoder of an encoder-decoder: the
decoder attends to the rows' outputs (Lester et al. 2021), so they stay and its mask grows. With a cache the rows enter
once, with the first tokens; later steps only see longer masks and positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..anatomy.trace import observing
from ..anatomy.values import Anatomy
from ..errors import DeltuneError
from ..mathematics.stacks import Prompt
from .edits import Edit
from .positions import first_position, unused
from .uses import Use, by_row, single


class TokenTap:
    """The prompt edits in use at one model's first stack.

    Every row of a batch has as many rows before its tokens as the longest prompt has; those that its own prompt lacks
    are masked. Before a pass they are put in order: what is masked stands at the left of a causal stack, like padding,
    and at the right of any other, so that a row sees what it would see alone.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, path: str) -> None:
        stack = anatomy.stacks[0]
        self.active: list[tuple[Use, list[Edit]]] = []
        self.added = 0  # rows that the pass under way has before its tokens
        self.total = 0  # its length with them
        self.order: torch.Tensor | None = None  # where its positions read, if not rows first and then tokens
        self.causal = stack.causal
        self.words = model.get_submodule(stack.words or "")
        self.positions = model.get_submodule(stack.positions) if stack.positions else None
        entry = model.get_submodule(path)
        self.arguments = list(signature(entry.forward).parameters)
        self.numbered = "position_ids" in self.arguments
        self.handles = [entry.register_forward_pre_hook(self.before, with_kwargs=True)]
        if self.positions is not None:
            self.handles.append(self.positions.register_forward_pre_hook(self.of_the_text))
            self.handles.append(self.positions.register_forward_hook(self.without_positions))
        if len(anatomy.stacks) > 1:
            decoder = model.get_submodule(anatomy.stacks[1].entry)
            self.decoder_arguments = list(signature(decoder.forward).parameters)
            self.handles.append(decoder.register_forward_pre_hook(self.before_decoder, with_kwargs=True))
        else:
            for path in dict.fromkeys((stack.container, stack.entry)):  # inside first: a pooler may follow
                module = model.get_submodule(path)
                self.handles.append(module.register_forward_hook(self.trim))

    def serve(self, uses: Sequence[Use]) -> None:
        found = [(u, [e for e in u.delta.all_edits() if e.place.target.side == "tokens"]) for u in uses]
        self.active = [(use, edits) for use, edits in found if edits]
        self.added = 0
        if len({form(edit).positions for _, edits in self.active for edit in edits}) > 1 and not single(uses):
            raise DeltuneError("prompts with positions='shift' and with positions='none' cannot be in one batch")

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    @property
    def length(self) -> int:
        """Of the longest prompt."""
        return max((_length(edits) for _, edits in self.active), default=0)

    @property
    def shifts(self) -> bool:
        return all(form(edit).positions == "shift" for _, edits in self.active for edit in edits)

    def there(self, size: int, device: torch.device) -> torch.Tensor | None:
        """Which of the rows (size, l) are a prompt's; None: all."""
        ones = [(use, torch.ones(_length(edits), 1, device=device)) for use, edits in self.active]
        found = by_row(ones, size, at_end=True)[1]
        return None if found is None or bool(found.all()) else found

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace token ids by embeddings with the rows in front, and lengthen masks and positions."""
        if not self.active:
            return None
        if observing():
            for _, edits in self.active:
                for edit in edits:
                    edit.mark()
            return None
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        embeds = given.get("inputs_embeds")
        if embeds is None:
            embeds = self.words(given["input_ids"])
        batch, tokens = embeds.shape[:2]
        there = self.there(batch, embeds.device)
        cache = given.get("past_key_values")
        seen = int(cache.get_seq_length()) if cache is not None else 0
        self.added = self.length if seen == 0 else 0
        self.total = self.added + tokens
        if self.added:
            rows = [(use, torch.cat([edit.tensors()["rows"] for edit in edits])) for use, edits in self.active]
            embeds = torch.cat([by_row(rows, batch, at_end=True)[0].to(embeds.dtype), embeds], dim=1)
            _lengthen_cache(cache, self.added)
        given |= {"input_ids": None, "inputs_embeds": embeds}
        mask = given.get("attention_mask")
        repeats = self.added and not self.shifts  # without a mask, repeated positions are taken for packed sequences
        if mask is None and (there is not None or repeats):
            own = tokens if seen == 0 else seen - self.length + tokens
            mask = torch.ones(batch, own, dtype=torch.long, device=embeds.device)
        mask = self.mask(mask, cache, seen, there)
        given["attention_mask"], order = self.arranged(mask, there)
        if given.get("token_type_ids") is not None and self.added:
            given["token_type_ids"] = F.pad(given["token_type_ids"], (self.added, 0))
        if self.numbered:
            given["position_ids"] = self.position_ids(given.get("position_ids"), seen, tokens, there, embeds)
        elif there is not None and self.causal and self.positions is not None:
            raise DeltuneError("prompts of different lengths in one batch need position_ids, which this model lacks")
        self.order = order if self.added else None
        if self.order is not None:
            given["inputs_embeds"] = _reordered(embeds, self.order)
            for name in ("position_ids", "token_type_ids"):
                if given.get(name) is not None:
                    given[name] = _reordered(given[name].expand(batch, -1), self.order)
        self.check_length(seen)
        return (), {name: value for name, value in given.items() if name in kwargs or value is not None}

    def arranged(self, mask: Any, there: torch.Tensor | None) -> tuple[Any, torch.Tensor | None]:
        """A mask of rows and text in the order of the pass, and where each of its positions reads (B, l + n); None
        where they stand as they are. In a causal stack rows then stand between left padding and text, and a sliding
        window reaches them as it would without padding."""
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return mask, None
        hidden = torch.zeros_like(mask, dtype=torch.bool)
        if there is not None:
            hidden[:, : self.length] = ~there
        if self.causal:
            hidden[:, self.length :] = mask[:, self.length :].cumsum(1) == 0
        if not hidden.any():
            return mask, None
        order = (hidden != self.causal).to(torch.uint8).argsort(dim=1, stable=True)
        return mask.gather(1, order), order

    def mask(self, mask: Any, cache: Any, seen: int, there: torch.Tensor | None) -> Any:
        """A padding mask (B, n), or prepared masks (B, 1, q, k) alone or by layer type, with the rows visible."""
        if isinstance(mask, dict):
            return {name: self.mask(value, cache, seen, there) for name, value in mask.items()}
        if mask is None:
            return None
        shown = True if mask.dtype == torch.bool else 1 if mask.dim() == 2 else 0.0
        longer = F.pad(mask, (self.length, 0), value=shown)
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
        if not self.added:
            return _for_fixed_cache(mask, longer, hidden, cache, seen)
        top = torch.full_like(longer[..., :1, :], hidden).expand(*longer.shape[:-2], self.added, -1).clone()
        among = torch.ones(self.added, self.added, dtype=torch.bool, device=mask.device).tril()
        top[..., : self.added] = top[..., : self.added].masked_fill(among, shown)
        return torch.cat([top, longer], dim=-2)

    def position_ids(
        self, given: torch.Tensor | None, seen: int, tokens: int, there: torch.Tensor | None, embeds: torch.Tensor
    ) -> Any:
        """Positions of rows and text; None where the family's own counting already gives them."""
        if given is None and self.shifts and there is None:
            return None
        length, device, first = self.length, embeds.device, first_position(self.positions)
        if given is None:
            start = first + seen - (length if seen else 0)
            given = torch.arange(start, start + tokens, device=device)[None]
        if not self.shifts:
            rows = torch.full((given.shape[0], length), first, device=device)
            return torch.cat([rows, given], dim=1) if self.added else given
        own = length if there is None else there.sum(1, keepdim=True)
        shifted = given + own
        if not self.added:
            return shifted
        rows = (torch.arange(length, device=device) - (length - own)).clamp(min=0) + first
        return torch.cat([rows.expand(shifted.shape[0], -1), shifted], dim=1)

    def of_the_text(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """positions="none" where the family counts by itself: it looks up the text's positions alone."""
        if not self.active or self.shifts or not self.added or observing() or self.numbered:
            return None
        tokens = self.total - self.added  # it is given a tensor of the tokens' shape, or the shape itself
        shape = args[0][:, :tokens] if isinstance(args[0], torch.Tensor) else torch.Size((args[0][0], tokens))
        return shape, *args[1:]

    def without_positions(self, module: nn.Module, args: Any, output: torch.Tensor) -> Any:
        """positions="none": the rows get no position; where the family counts by itself, the text gets its own."""
        if not self.active or self.shifts or not self.added or observing():
            return None
        if self.numbered and self.order is not None:
            return output.masked_fill((self.order < self.added)[..., None], 0.0)
        text = output[..., self.added :, :] if self.numbered else output
        whole = torch.cat([text.new_zeros(*text.shape[:-2], self.added, text.shape[-1]), text], dim=-2)
        if self.order is None:
            return whole
        return _reordered(whole.expand(self.order.shape[0], -1, -1), self.order)

    def before_decoder(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The decoder's view of the encoder grows with the rows."""
        if not self.active or observing():
            return None
        given = {**dict(zip(self.decoder_arguments, args, strict=False)), **kwargs}
        mask, states = given.get("encoder_attention_mask"), given.get("encoder_hidden_states")
        there = None if states is None else self.there(states.shape[0], states.device)
        if mask is None and there is not None:
            assert states is not None
            mask = torch.ones(states.shape[0], states.shape[1] - self.length, dtype=torch.long, device=states.device)
        if mask is None:
            return None
        return (), {**given, "encoder_attention_mask": self.arranged(self.mask(mask, None, 0, there), there)[0]}

    def trim(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Outputs without the rows."""
        if not self.active or not self.added or observing():
            return None
        if isinstance(output, tuple):
            return tuple(self._trimmed(value) for value in output)
        for name, value in output.items():
            output[name] = self._trimmed(value)
        return output

    def _trimmed(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._trimmed(v) for v in value)
        if not isinstance(value, torch.Tensor) or value.dim() not in (3, 4) or value.shape[-2] != self.total:
            return value
        if self.order is not None:  # back to rows first, before they go
            value = _reordered(value, self.order.argsort(1), value.dim() - 2)
            value = _reordered(value, self.order.argsort(1), 3) if value.dim() == 4 else value
        return value[..., self.added :, self.added :] if value.dim() == 4 else value[:, self.added :]

    def check_length(self, seen: int) -> None:
        """Rows and text must fit the position table."""
        if self.positions is None or not self.shifts:
            return
        rows, needed = self.positions.get_parameter("weight").shape[0] - unused(self.positions), seen + self.total
        if needed > rows:
            raise DeltuneError(
                f"{needed - self.length} tokens and a prompt of {self.length} take {needed} positions, and this "
                f"model has {rows}; shorten the text or the prompt, or use prompt(positions='none')"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "added": 0, "total": 0, "order": None}


def form(edit: Edit) -> Prompt:
    assert isinstance(edit.modification.form, Prompt)
    return edit.modification.form


def _length(edits: Sequence[Edit]) -> int:
    return sum(form(edit).length for edit in edits)


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
