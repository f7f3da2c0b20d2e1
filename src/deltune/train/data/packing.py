"""Several texts in one row, none of which sees another: bins, their batch, and a trial of what keeps texts apart.

Positions that begin again keep texts apart in some families, without a mask and without a cache, and in others a mask
for each query does. Which holds for a model, its method included, is found by trying it on two short texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...errors import DeltuneError
from ...runtime.attach import has_sliding_window
from ...runtime.causal_loss import IGNORE_INDEX
from ...runtime.padding import eval_mode, probe_rows
from ...templates import as_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Mask = Literal["none", "bool", "float"]


@dataclass(frozen=True)
class Packing:
    """How rows with several texts are given to a model.

    Attributes:
        mask: No mask, whereupon the model sees by the positions where a text begins; or a mask for each query, which
            sdpa takes as booleans and eager attention as numbers that it adds.
        start: The position of the first token of each text; None for a model without `position_ids`.
        pad: The token for the end of shorter rows.
    """

    mask: Mask
    start: int | None
    pad: int = 0

    def batch(self, bins: Sequence[Sequence[Mapping[str, Any]]], dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments of the model for rows of texts; what a text's first token is, no other text predicts."""
        width = max(sum(len(text["input_ids"]) for text in texts) for texts in bins)
        ids = torch.full((len(bins), width), self.pad)
        labels = torch.full((len(bins), width), IGNORE_INDEX)
        positions, owner = torch.zeros_like(ids), torch.full_like(ids, -1)
        for row, texts in enumerate(bins):
            begin = 0
            for number, text in enumerate(texts):
                place = slice(begin, begin + len(text["input_ids"]))
                ids[row, place] = torch.tensor(text["input_ids"])
                labels[row, place] = torch.tensor(text["labels"])
                labels[row, begin] = IGNORE_INDEX
                positions[row, place] = torch.arange(len(text["input_ids"]))
                owner[row, place] = number
                begin = place.stop
            positions[row, begin:] = torch.arange(width - begin)  # padding is a text of its own
        batch: dict[str, Any] = {"input_ids": ids, "labels": labels, "use_cache": False}
        if self.start is not None:
            batch["position_ids"] = positions + self.start
        if self.mask != "none":
            seen = (owner[:, :, None] == owner[:, None, :]).tril()[:, None]
            hidden = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
            batch["attention_mask"] = seen if self.mask == "bool" else hidden
        return batch


def best_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Put texts into rows of at most `width` tokens, each where the least room is left; return their numbers.

    A longer text has a row of its own, and no text is split.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        best = min((n for n, left in enumerate(room) if left >= lengths[i]), key=room.__getitem__, default=None)
        if best is None:
            bins.append([i])
            room.append(width - lengths[i])
        else:
            bins[best].append(i)
            room[best] -= lengths[i]
    return bins


def choose_packing(model: PreTrainedModel, pad: int | None) -> Packing:
    """Return how texts of one row are kept apart in a model with what is attached to it, by trying."""
    parameters = signature(model.forward).parameters
    token = as_ids(getattr(model.config.get_text_config(), "pad_token_id", None))
    starts = dict.fromkeys([0, *(one + 1 for one in token)]) if "position_ids" in parameters else [None]
    masks: tuple[Mask, ...] = ("none", "bool", "float")
    if has_sliding_window(model):  # which a mask for each query would replace
        masks = ("none",)
    for mask, start in product(masks, starts):
        packing = Packing(mask, start, pad or 0)
        if (mask != "none" or start is not None) and _keeps_apart(model, packing):
            return packing
    raise DeltuneError(
        f"packing: texts in one row of {type(model).__name__} see each other, with positions that begin again and with "
        "a mask for each query; leave packing out"
    )


@torch.no_grad()
def _keeps_apart(model: PreTrainedModel, packing: Packing) -> bool:
    """Try a model on two texts in one row and on each alone, both ways round."""
    device, dtype, texts = next(model.parameters()).device, model.dtype, probe_rows(model)
    rows = [{"input_ids": ids, "labels": ids} for ids in texts]
    with eval_mode(model):
        alone = [
            model(
                input_ids=(ids := torch.tensor([text], device=device)), attention_mask=torch.ones_like(ids)
            ).logits[0].float()
            for text in texts
        ]  # fmt: skip
        try:
            for order in ((0, 1), (1, 0)):
                batch = packing.batch([[rows[i] for i in order], [rows[order[0]]]], dtype)
                del batch["labels"]
                inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
                logits = model(**inputs).logits[0].float()
                packed = logits[-sum(map(len, texts)) :].split([len(texts[i]) for i in order])
                for i, part in zip(order, packed, strict=True):
                    tolerance = (1e-4 if dtype in (torch.float32, torch.float64) else 3e-2) * alone[i].abs().max()
                    if not bool((part - alone[i]).abs().max() <= tolerance):
                        return False
        except torch.OutOfMemoryError:
            raise
        except Exception:  # each family refuses in its own way what it cannot read
            return False
    return True
