"""What a model reads: the shapes of the inputs that one traced forward pass is given.

A model of transformers names its main input. Token ids need no more than a length; the sizes of images and sounds stand
in the configuration, and where it leaves the order of their axes open, each order is tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import DeltuneError

LENGTHS = {"input_ids": 4, "decoder_input_ids": 3}
"""Lengths of the token ids; they differ, so that a cross-attention can be told from a self-attention."""

SAMPLES = 4000
"""Samples of a sound: a quarter of a second at the usual 16 kHz."""

FRAMES = 32
"""Frames of a spectrogram, where the model does not fix their number."""

READABLE = ("input_ids", "pixel_values", "input_features", "input_values")
"""The inputs that can be made up, the first that a model takes being its main input."""


def main_input(model: nn.Module) -> str | None:
    """Return the name of the input that a model reads first, or None where it is none of `READABLE`."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in READABLE if name in accepted), None)


def input_candidates(model: nn.Module) -> list[dict[str, Any]]:
    """Return the inputs that a model may take, to be tried one after another.

    Args:
        model: A base model of transformers.

    Returns:
        Dictionaries from the names of arguments to functions that make a tensor, or to values.

    Raises:
        DeltuneError: The model reads neither token ids nor images nor sounds.
    """
    accepted = inspect.signature(model.forward).parameters
    main = main_input(model)
    if main is None:
        raise DeltuneError(
            f"{type(model).__name__} reads none of {', '.join(READABLE)}; only models of text, images or sounds can be "
            f"inspected, and it takes {', '.join(accepted)}"
        )
    common: dict[str, Any] = {}
    for name, length in LENGTHS.items():
        if name in accepted:
            common[name] = partial(torch.zeros, 1, length, dtype=torch.long)
            mask = name.replace("input_ids", "attention_mask")
            if mask in accepted:
                common[mask] = partial(torch.ones, 1, length, dtype=torch.long)
    if "use_cache" in accepted:
        common["use_cache"] = False
    candidates = [common] if main == "input_ids" else []
    for name in READABLE[1:]:  # a model of text and images may do without the images, or not
        if name in accepted:
            config = getattr(model, "config", None)
            candidates += [{**common, name: partial(torch.zeros, *shape)} for shape in _SHAPES[name](config)]
    return candidates


def _image_shapes(config: Any) -> list[tuple[int, ...]]:
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    size = getattr(config, "image_size", None) or getattr(config, "input_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = getattr(config, "num_frames", None)
    images: list[tuple[int, ...]] = [(1, channels, height, width)]
    return [(1, frames, channels, height, width), *images] if frames else images


def _feature_shapes(config: Any) -> list[tuple[int, ...]]:
    bins = next(
        (size for name in _BINS if isinstance(size := getattr(config, name, None), int)), 80
    )  # of the spectrogram
    positions = getattr(config, "max_source_positions", None)
    frames = 2 * positions if isinstance(positions, int) else FRAMES  # a first convolution halves them
    return [(1, bins, frames), (1, frames, bins), (1, FRAMES, bins)]


_BINS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_channels")


def _value_shapes(config: Any) -> list[tuple[int, ...]]:
    bins, length = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    sound: list[tuple[int, ...]] = [(1, SAMPLES)]
    return [(1, length, bins), *sound] if isinstance(bins, int) and isinstance(length, int) else sound


_SHAPES: dict[str, Callable[[Any], list[tuple[int, ...]]]] = {
    "pixel_values": _image_shapes, "input_features": _feature_shapes, "input_values": _value_shapes,
}  # fmt: skip
"""By main input, a function from the configuration to the shapes to try."""
