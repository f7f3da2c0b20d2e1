"""The side on which padding leaves a model's answers as they are, measured once for each model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from inspect import signature
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import DeltuneError
from ..templates import as_ids
from .attach import find_tuned

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Side = Literal["right", "left"]

LENGTHS = (14, 5)
"""The numbers of tokens of the two rows that are tried."""

_SIDES: weakref.WeakKeyDictionary[PreTrainedModel, Side | None] = weakref.WeakKeyDictionary()
_PADS_PROMPTS: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


def padding_side(model: PreTrainedModel) -> Side | None:
    """Return the side to pad on so that a model's outputs do not change, whatever its tokenizer's default.

    Nearly all models have the right one: they mask padding, and a decoder's tokens do not attend to what follows. On
    the left a decoder counts positions from the first column unless it is told them. XLNet's classifier reads the last
    column and has the left one. Where padding changes the answers on both sides (FNet, ConvBERT, Funnel), only rows of
    equal length can share a batch.
    """
    if model not in _SIDES:
        _SIDES[model] = (
            "right" if _leaves_answers(model, "right") else "left" if _leaves_answers(model, "left") else None
        )
    return _SIDES[model]


def supports_left_padding(model: PreTrainedModel) -> bool:
    """Return whether `generate` gives the same text for a left-padded prompt as for the prompt alone.

    Some decoders, such as BART's, RWKV and RecurrentGemma, count padding as positions or remember it.
    """
    if model not in _PADS_PROMPTS:
        _PADS_PROMPTS[model] = _leaves_answers(model, "left", generated=True)
    return _PADS_PROMPTS[model]


@contextlib.contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and each of its modules back into the mode that it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def _leaves_answers(model: PreTrainedModel, side: Side, generated: bool = False) -> bool:
    """Try the base model on two rows of different lengths, in one batch and each in a batch of its own."""
    rows, handle = probe_rows(model), find_tuned(model)
    score = _generated_scores if generated else _scores
    with eval_mode(model), contextlib.nullcontext() if handle is None else handle.disable():
        try:
            in_batch = score(model, rows, side)
            alone = [score(model, [row] * len(rows), side)[0] for row in rows]
        except (DeltuneError, torch.OutOfMemoryError):
            raise
        except Exception:  # each family refuses in its own way what it cannot read, such as token ids without boxes
            return True
    tolerance = (1e-3 if model.dtype in (torch.float32, torch.float64) else 3e-2) * max(
        single.abs().max() for single in alone
    )
    for beside_other, single in zip(in_batch, alone, strict=True):
        if single.dim() > 1:  # a score for each token
            beside_other = beside_other[-len(single) :] if side == "left" else beside_other[: len(single)]
        if single.isfinite().all() and not (beside_other - single).abs().max() <= tolerance:
            return False
    return True


def probe_rows(model: PreTrainedModel) -> list[list[int]]:
    """Return two rows of ordinary tokens; of an encoder-decoder with the end, which BART's classifiers look for."""
    config = model.config.get_text_config()
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "decoder_start_token_id")
    special = {token for name in names for token in as_ids(getattr(config, name, None))}
    ordinary = cycle([i for i in range(getattr(config, "vocab_size", 128)) if i not in special][: sum(LENGTHS)])
    end = as_ids(getattr(config, "eos_token_id", None))[:1] if model.config.is_encoder_decoder else ()
    return [[*islice(ordinary, length), *end] for length in LENGTHS]


def _padded(model: PreTrainedModel, rows: list[list[int]], side: Side) -> dict[str, torch.Tensor]:
    pad, width = getattr(model.config.get_text_config(), "pad_token_id", None) or 0, max(map(len, rows))
    inputs = {"input_ids": (rows, pad), "attention_mask": ([[1] * len(row) for row in rows], 0)}
    accepted = signature(model.forward).parameters
    return {
        name: torch.tensor(
            [
                [value] * (width - len(row)) + row if side == "left" else row + [value] * (width - len(row))
                for row in values
            ],
            device=model.device,
        )
        for name, (values, value) in inputs.items()
        if name in accepted
    }


def _scores(model: PreTrainedModel, rows: list[list[int]], side: Side) -> torch.Tensor:
    inputs = _padded(model, rows, side)
    if model.config.is_encoder_decoder and model.can_generate():
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :1]
    try:
        scores: torch.Tensor = model(**inputs)[0]
    except (RuntimeError, ValueError):  # the rows of multiple choice are choices
        scores = model(**{name: tensor[:, None] for name, tensor in inputs.items()})[0]
    return scores.float()


def _generated_scores(model: Any, rows: list[list[int]], side: Side) -> torch.Tensor:
    options = {"max_length": None, "max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False, "num_beams": 1}
    outputs = model.generate(**_padded(model, rows, side), **options, output_logits=True, return_dict_in_generate=True)
    return torch.stack(outputs.logits, dim=1).float()
