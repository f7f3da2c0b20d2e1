"""Inputs of the one forward pass that is traced, by what the model reads: text, images or sounds.

A model of transformers names its main input. Token ids need no more than a length; the sizes of images and sounds stand
in the configuration, and where it leaves the order of their axes open, each order is tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ..compat import parameters_of
from ..errors import DeltuneError

LENGTHS = {"input_ids": 4, "decoder_input_ids": 3}
"""Lengths of the token ids; they differ, so that a cross-attention can be told from a self-attention."""

SAMPLES = 4000
"""Samples of a sound: a quarter of a second at the usual 16 kHz."""

FRAMES = 32
"""Frames of a spectrogram, where the model does not fix their number."""

LONGER = 4
"""Times the lengths, for a model that pools tokens or reads blocks of them, so that a few are too few."""

READABLE = (
    "input_ids", "pixel_values", "input_features", "input_values", "flattened_patches", "inputs", "hidden_states",
)  # fmt: skip
"""The inputs that can be made up, the first that a model takes being its main input. "inputs" are token ids or images,
"flattened_patches" and "hidden_states" are patches."""

GRID = (1, 4, 4)
"""Frames, rows and columns of patches, for a model that is given them in a list with their grid."""


def main_input(model: nn.Module) -> str | None:
    """Return the name of the input that a model reads first, or None where it is none of `READABLE`."""
    accepted = inspect.signature(model.forward).parameters
    main = next((name for name in READABLE if name in accepted), None)
    return None if main == "hidden_states" and "grid_thw" not in accepted else main


def tower_name(model: nn.Module) -> str:
    """Return what a model reads, by the inputs and modalities that its class names: "text", "vision" or "audio"."""
    modalities = getattr(model, "input_modalities", "text")
    words = {modalities} if isinstance(modalities, str) else set(modalities)
    main: str = main_input(model) or getattr(model, "main_input_name", None) or "input_ids"
    if main == "input_ids" and "text" in words:
        return "text"
    return "vision" if main.startswith(("pixel", "flattened")) or words & {"image", "video"} else "audio"


def input_candidates(model: nn.Module) -> list[dict[str, Any]]:
    """Return the inputs that a model may take, to be tried one after another.

    Each is a dictionary from the names of arguments to values, or to functions that make a tensor.
    """
    accepted = inspect.signature(model.forward).parameters
    main = main_input(model)
    if main is None:
        raise DeltuneError(
            f"{type(model).__name__} reads none of {', '.join(READABLE)}; only models of text, images or sounds can be "
            f"inspected, and it takes {', '.join(accepted)}"
        )
    common = _token_ids(model)
    if "use_cache" in accepted:
        common["use_cache"] = False
    if "grid_thw" in accepted and main != "input_ids":
        common["grid_thw"] = partial(torch.tensor, [GRID])
    config = getattr(model, "config", None)
    candidates = [common] if main == "input_ids" else []
    if main == "input_ids" and "bbox" in accepted:  # the boxes of words on a page, in shares of its sides
        candidates.append({**common, "bbox": partial(torch.zeros, 1, LENGTHS["input_ids"], 4)})
    # A model of text and images may do without the images, or not.
    for name in ("hidden_states",) if main == "hidden_states" else READABLE[1:-1]:
        if name in accepted:
            if name == "pixel_values" and "spatial_shapes" in accepted:
                candidates += _listed_patches(common, config)
            inputs = [{**common, name: partial(torch.zeros, *shape)} for shape in _SHAPES[name](config)]
            if name == "pixel_values" and main == "input_ids":
                inputs += _images_in_text(accepted, common, inputs[-1][name].args, config)
            if name == "input_features" and (width := _first_width(model)):  # frames may be joined before it
                inputs.append({**common, name: partial(torch.zeros, 1, FRAMES, width)})
            if f"decoder_{name}" in accepted:
                inputs = [{**one, **_ids(f"decoder_{name}", LENGTHS["decoder_input_ids"])} for one in inputs] + inputs
            if name == "inputs":
                inputs = [_ids(name, LENGTHS["input_ids"]), *inputs]
            candidates += inputs
    if main == "input_ids":
        candidates += [common | ids for ids in _channels_of_ids(accepted, config)]
        candidates += [common | _token_ids(model, LONGER)]
    return candidates


def candidate_tower_inputs(model: nn.Module) -> list[dict[str, Any]]:
    """Return inputs of images or sounds beside text, to be tried one after another on a model of several towers."""
    accepted, config = inspect.signature(model.forward).parameters, getattr(model, "config", None)
    candidates = [c for c in input_candidates(model) if not c.keys().isdisjoint(READABLE[1:-1])]
    images = [c for c in candidates if "pixel_values" in c]
    if images and "image_grid_thw" in accepted:
        shapes = [partial(torch.zeros, *shape) for shape in _patch_shapes(config)]
        grid = partial(torch.tensor, [GRID])
        candidates += [{**images[0], "pixel_values": make, "image_grid_thw": grid} for make in shapes]
    elif images:
        shape = _image_shapes(config)[-1]
        as_list = {**images[0], "pixel_values": partial(torch.zeros, 1, *shape)}  # a row's images
        candidates.append(as_list)
        if "image_sizes" in accepted:
            sizes = partial(torch.tensor, [shape[-2:]])
            candidates += [{**candidate, "image_sizes": sizes} for candidate in (images[-1], as_list)]
    return candidates


def _ids(name: str, *shape: int) -> dict[str, Any]:
    """Return token ids of a shape, the length of a batch of one row first, by the name of the argument."""
    return {name: partial(torch.zeros, 1, *shape, dtype=torch.long)}


def _token_ids(model: nn.Module, times: int = 1) -> dict[str, Any]:
    """Return the token ids that a model takes, with their masks, of lengths that are some times the usual ones."""
    accepted = inspect.signature(model.forward).parameters
    ids: dict[str, Any] = {}
    for name, parameter in accepted.items():
        needed = parameter.default is parameter.empty and name.endswith("_input_ids")  # of a query former
        if name in LENGTHS or needed:
            length = LENGTHS.get(name, LENGTHS["input_ids"]) * times
            ids |= _ids(name, length)
            mask = name.replace("input_ids", "attention_mask")
            if mask in accepted:
                ids[mask] = partial(torch.ones, 1, length, dtype=torch.long)
    return ids


def _channels_of_ids(accepted: Mapping[str, Any], config: Any) -> list[dict[str, Any]]:
    """Return the token ids of models of sounds that have several for each place, one of each codebook."""
    name = "decoder_input_ids" if "decoder_input_ids" in accepted else "input_ids"
    books = _setting(config, "num_codebooks", "num_channels")
    return [_ids(name, LENGTHS[name], number) for number in (books, books + 1)] if isinstance(books, int) else []


def _images_in_text(
    accepted: Mapping[str, Any], common: dict[str, Any], shape: tuple[int, ...], config: Any
) -> list[dict[str, Any]]:
    """Return inputs with several images for each text, and with the places that an image has in the text."""
    images = {**common, "pixel_values": partial(torch.zeros, 1, 1, *shape[1:])}
    if "image_attention_mask" in accepted:
        images["image_attention_mask"] = partial(torch.ones, 1, LENGTHS["input_ids"], 1, dtype=torch.long)
    if "image_embeds_position_mask" not in accepted:
        return [images]
    length = _setting(config, "latent_query_num") or LENGTHS["input_ids"]
    places = {
        **common,
        **_ids("input_ids", length),
        "attention_mask": partial(torch.ones, 1, length, dtype=torch.long),
        "pixel_values": partial(torch.zeros, *shape),
        "image_embeds_position_mask": partial(torch.ones, 1, length, dtype=torch.long),
    }
    return [images, places]


def _first_width(model: nn.Module) -> int | None:
    """Return how many features the first linear of a model reads; None where another module with weights is first."""
    first = next((m for m in model.modules() if any(p is not None for p in parameters_of(m).values())), None)
    return first.in_features if isinstance(first, nn.Linear) else None


def _listed_patches(common: dict[str, Any], config: Any) -> list[dict[str, Any]]:
    """Return the inputs of a model that is given images as lists of patches, with the rows and columns of each."""
    _, rows, columns = GRID
    return [
        {
            **common,
            "pixel_values": partial(torch.zeros, 1, rows * columns, width),
            "pixel_attention_mask": partial(torch.ones, 1, rows * columns, dtype=torch.long),
            "spatial_shapes": partial(torch.tensor, [[rows, columns]]),
        }
        for _, width in _patch_shapes(config)
    ]


def _setting(config: Any, *names: str) -> Any:
    """Return a setting of a configuration, or else of one inside it, by the first of some names that has a value."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    for part in (config, *parts):
        for name in names:
            if (value := getattr(part, name, None)) is not None:
                return value
    return None


def _image_shapes(config: Any) -> list[tuple[int, ...]]:
    channels = _setting(config, "num_channels", "in_channels", "in_chans") or 3
    size = _setting(config, "image_size", "input_size") or 224
    size = tuple(size.values()) if isinstance(size, dict) else size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = _setting(config, "num_frames")
    images: list[tuple[int, ...]] = [(1, channels, height, width)]
    return [(1, frames, channels, height, width), *images] if frames else images


def _patch_shapes(config: Any) -> list[tuple[int, ...]]:
    channels, size = _setting(config, "in_channels", "num_channels") or 3, _setting(config, "patch_size") or 14
    frames = _setting(config, "temporal_patch_size") or 1
    count = GRID[0] * GRID[1] * GRID[2]
    return [(count, channels * frames * size * size), (count, channels * size * size)]


def _feature_shapes(config: Any) -> list[tuple[int, ...]]:
    bins = _setting(config, "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel") or 80
    positions = _setting(config, "max_source_positions")
    frames = 2 * positions if positions else FRAMES  # a first convolution halves them
    return [(1, bins, frames), (1, frames, bins), (1, FRAMES, bins)]


def _value_shapes(config: Any) -> list[tuple[int, ...]]:
    bins, length = _setting(config, "num_mel_bins"), _setting(config, "max_length")
    sound: list[tuple[int, ...]] = [(1, SAMPLES)]
    return [(1, length, bins), *sound] if bins and length else sound


def _flattened_shapes(config: Any) -> list[tuple[int, ...]]:
    """Return the shapes of patches in a row, each after the numbers of its row and column."""
    width = _setting(config, "patch_embed_hidden_size") or 768
    return [(1, GRID[1] * GRID[2], width + 2)]


_SHAPES: dict[str, Callable[[Any], list[tuple[int, ...]]]] = {
    "pixel_values": _image_shapes, "input_features": _feature_shapes, "input_values": _value_shapes,
    "flattened_patches": _flattened_shapes, "hidden_states": _patch_shapes, "inputs": _image_shapes,
}  # fmt: skip
"""By main input, a function from the configuration to the shapes to try."""
