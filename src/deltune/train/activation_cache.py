"""A cache on disk of what the frozen layers of a model compute for each row, so that they run once and not every epoch.

Activations are stored without padding, memory-mapped, in a file named by its content, within a limit on the folder. If
the layers above read only the first or the last token of a row, only that token is stored, and the row is cut to it.
Which tokens are needed, and that a pass from cached activations gives what a whole pass gives, is found out by trying
it on a few rows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..anatomy.quantization import quantization_of
from ..compat import NAME_SETTINGS
from ..errors import DeltuneError
from ..files import CACHE_VARIABLE, atomic_open, cache_folder
from ..runtime import sharding
from ..runtime.attach import tuned
from ..runtime.padding import eval_mode, padding_side
from .frozen_layers import FrozenLayers
from .tasks import token_cache
from .tasks.base import InferenceContext, autocast
from .tasks.encoding import EncodedRows, Row, collate, count_tokens, non_padding_mask

VERSION = 1
"""Part of the name of a file; raised when the same content gives other activations."""

PROBE_ROWS = 4
"""The number of rows that are tried."""

TOLERANCES = {"fp32": 1e-3, "bf16": 3e-2}
"""How far apart logits may be, as a share of the largest: rounding stays below, another input goes beyond it."""

SAFETENSORS_TYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The names of types in a safetensors file."""

OTHER_SETTINGS = ("id2label", "label2id", "problem_type", "architectures", *NAME_SETTINGS)
"""Settings of a model's configuration that do not change what its frozen layers compute."""

TokensRead = Literal["first", "last", "all"]
"""Which tokens of a row the layers above the frozen ones read."""

Activations = Mapping[str, torch.Tensor]
"""By the name of a forward argument: the activations of its tokens, in the shape (tokens, layer boundaries, width)."""

TokenShapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""By the name of a forward argument: the type of its activations, and their shape for one token."""

logger = logging.getLogger("deltune")


@dataclass(frozen=True)
class CachedRows(EncodedRows):
    """Rows whose batches have the cached activations among their inputs; a row taken alone has none.

    Attributes:
        states: The activations of all rows, one row after the other.
        starts: By the name of a forward argument: where each row begins in its activations, and the end.
        reads: Which tokens of a row are left.
    """

    states: Activations | None = None
    starts: Mapping[str, Sequence[int]] | None = None
    reads: TokensRead = "all"

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """Return several rows with their activations."""
        assert self.states is not None and self.starts is not None
        rows = [_cut_row(row, self.reads) for row in super().__getitems__(indices)]
        for row, i in zip(rows, indices, strict=True):
            row["states"] = {
                name: t[self.starts[name][i] : self.starts[name][i + 1]] for name, t in self.states.items()
            }
        return rows


def with_cached_activations(
    frozen_layers: FrozenLayers, context: InferenceContext, encoded: Mapping[str, EncodedRows], max_gib: float
) -> dict[str, EncodedRows]:
    """Return the splits with the activations of the frozen layers, read from disk or computed now by one pass.

    If activations cannot be cached, the splits are returned as they are, and the log says why.
    """
    folder = cache_folder()
    if folder is None or not max_gib:
        return _uncached(encoded, f"{CACHE_VARIABLE}=off" if folder is None else "trunk_cache=0")
    if quantization_of(frozen_layers.model):
        return _uncached(encoded, "the weights are quantised, so that training computes other products than evaluation")
    folder = folder / token_cache.ACTIVATIONS
    probed = _probe(frozen_layers, context, encoded["train"])
    if isinstance(probed, str):
        return _uncached(encoded, probed)
    reads, shapes = probed
    key = _content_key(frozen_layers, context.precision)
    files = {split: _CacheFile(folder, key, frozen_layers, rows, reads, shapes) for split, rows in encoded.items()}
    size = sum(file.size for file in files.values())
    if size > max_gib * 2**30:
        raise DeltuneError(
            f"the activations of the frozen layers take {size / 2**30:.3g} GiB, but trunk_cache={max_gib:g} allows "
            f"less: give trunk_cache={math.ceil(size / 2**30)}, or trunk_cache=0 to run these layers in every pass"
        )

    def write_missing() -> str | None:
        """Write the files that are missing, and return what prevents it.

        A cache saves time and changes no number, so no run may fail because of it.
        """
        try:
            for split, file in files.items():
                with token_cache.exclusive_creation(file.path):
                    if file.read() is None:
                        file.write(frozen_layers, context, encoded[split])
                    elif context.on_progress is not None:
                        context.on_progress(len(encoded[split]))
        except OSError as error:
            return f"no activations can be written ({error})"
        token_cache.evict_old_files(folder, ".safetensors", [file.path for file in files.values()], max_gib * 2**30)
        return None

    if (problem := sharding.broadcast_from_main(write_missing)) is not None:
        return _uncached(encoded, problem)
    cached = {split: file.attach_to(encoded[split]) for split, file in files.items()}
    readable = {split: rows for split, rows in cached.items() if rows is not None}
    if len(readable) < len(files):
        return _uncached(encoded, f"another program removed activations from {folder}")
    logger.info("the activations of the frozen layers are cached: %.3g MiB in %s", size / 2**20, folder)
    return readable


def _uncached(encoded: Mapping[str, EncodedRows], reason: str) -> dict[str, EncodedRows]:
    logger.info("the frozen layers run in every pass: %s", reason)
    return dict(encoded)


class _CacheFile:
    """The file with the activations of one split: its name by content, its size, and where each row begins in it."""

    def __init__(
        self,
        folder: Path,
        key: str,
        frozen_layers: FrozenLayers,
        encoded: EncodedRows,
        reads: TokensRead,
        shapes: TokenShapes,
    ) -> None:
        self.reads, self.shapes = reads, shapes
        content = hashlib.sha256(json.dumps([key, reads, [[n, str(s)] for n, s in shapes.items()]]).encode())
        lengths: dict[str, list[int]] = {name: [] for name in shapes}
        for row in encoded.rows:
            of_labels = {name: _is_of_labels(frozen_layers, name, row) for name in shapes}
            for name, labels in of_labels.items():
                lengths[name].append(sum(_sequence_lengths(row, labels, reads)))
            for field in sorted(_token_fields(row, any(of_labels.values()))):
                content.update(f"{field} {count_tokens(row[field])} ".encode() + _flatten(row[field]).tobytes())
        self.starts = {name: [0, *itertools.accumulate(rows)] for name, rows in lengths.items()}
        self.path = folder / f"{content.hexdigest()[: token_cache.NAME_LENGTH]}.safetensors"

    def header(self) -> dict[str, dict[str, Any]]:
        """Return the header of the file: of each argument the type, the shape, and where its bytes are."""
        tensors, start = {}, 0
        for name, (dtype, token_shape) in self.shapes.items():
            shape = [self.starts[name][-1], *token_shape]
            stop = start + math.prod(shape) * dtype.itemsize
            tensors[name] = {"dtype": SAFETENSORS_TYPES[dtype], "shape": shape, "data_offsets": [start, stop]}
            start = stop
        return tensors

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return max(tensor["data_offsets"][1] for tensor in self.header().values())

    def read(self) -> dict[str, torch.Tensor] | None:
        """Return the activations memory-mapped, or None if there is no file, or one that cannot be read."""
        if not self.path.is_file():
            return None
        try:
            tensors = load_file(self.path)
            os.utime(self.path)
        except (OSError, SafetensorError):
            return None
        shapes = {name: tensor["shape"] for name, tensor in self.header().items()}
        return tensors if {name: list(t.shape) for name, t in tensors.items()} == shapes else None

    def attach_to(self, encoded: EncodedRows) -> EncodedRows | None:
        """Return the rows with their activations, or None if these cannot be read."""
        states = self.read()
        if states is None:
            return None
        facts = {field.name: getattr(encoded, field.name) for field in fields(encoded)}
        rows = CachedRows(**facts, states=states, starts=self.starts, reads=self.reads)
        rows.__dict__["lengths"] = encoded.lengths  # lengths of the whole rows, by which batches are ordered
        return rows

    def write(self, frozen_layers: FrozenLayers, context: InferenceContext, encoded: EncodedRows) -> None:
        """Compute the activations of a split in one pass, and write the file whole or not at all.

        safetensors' own writer needs all tensors in memory at once; here batches are written one by one.
        """
        tensors = self.header()
        header = json.dumps(tensors).encode()
        header += b" " * (-len(header) % 8)
        begin = 8 + len(header)
        with atomic_open(self.path, token_cache.TEMPORARY_PREFIX) as file:
            file.write(len(header).to_bytes(8, "little") + header)

            def write_batch(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
                rows = [encoded.rows[i] for i in indices]
                by_row = _split_by_row(frozen_layers, rows, batch, self.reads, frozen_layers.states(batch))
                for i, states in zip(indices, by_row, strict=True):
                    for name, values in states.items():
                        token_bytes = values[0].numel() * values.itemsize
                        file.seek(begin + tensors[name]["data_offsets"][0] + self.starts[name][i] * token_bytes)
                        file.write(_to_bytes(values))

            context.for_each_batch(encoded, write_batch)


def _probe(
    frozen_layers: FrozenLayers, context: InferenceContext, encoded: EncodedRows
) -> str | tuple[TokensRead, TokenShapes]:
    """Find out on a few rows which tokens are read, and the types and shapes; or return why nothing can be cached.

    In training mode, with the same draws of dropout, logits from activations must equal the logits of a whole pass.
    """
    if padding_side(context.model) is None:
        return "padding changes the answers of this model"
    order = sorted(range(len(encoded)), key=encoded.lengths.__getitem__)
    rows = [encoded.rows[i] for i in {order[int(at)] for at in np.linspace(0, len(order) - 1, PROBE_ROWS)}]
    model, device = context.model, next(context.model.parameters()).device

    def make_batch(some_rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(device) for name, tensor in collate(context.tokenizer, model, some_rows).items()}

    def logits_of(forward: Callable[[], Any]) -> torch.Tensor:
        model.train()
        torch.manual_seed(0)
        try:
            logits: torch.Tensor = forward().logits.float()
        finally:
            model.eval()
        return logits

    batch = make_batch(rows)
    if "attention_mask" not in batch:
        return "without an attention_mask, tokens cannot be told from padding"
    with eval_mode(model), torch.no_grad(), torch.random.fork_rng(), autocast(device, context.precision):
        expected = logits_of(lambda: frozen_layers.examine(batch))
        if not frozen_layers.kept_states:
            return "each of these layers computes something besides its hidden state that layers above read"
        states = frozen_layers.states(batch)
        of_labels = any(_is_of_labels(frozen_layers, name, rows[0]) for name in states)
        only_all = frozen_layers.boundary.above or of_labels
        candidates: tuple[TokensRead, ...] = ("all",) if only_all else ("first", "last", "all")
        for reads in candidates:
            by_row = _split_by_row(frozen_layers, rows, batch, reads, states)
            cut = make_batch([{**_cut_row(r, reads), "states": s} for r, s in zip(rows, by_row, strict=True)])
            try:
                logits = logits_of(lambda: model(**cut))  # noqa: B023
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):
                continue  # a cut row is refused by every model family in its own way
            if _close(logits, expected, non_padding_mask(batch, of_labels), TOLERANCES[context.precision]):
                return reads, {name: (t.dtype, tuple(t.shape[2:])) for name, t in states.items()}
    return "a pass from their activations alone does not give what a whole pass gives"


def _close(logits: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor, tolerance: float) -> bool:
    """Return whether logits agree; logits of every token are compared at tokens that are not padding."""
    if logits.shape != expected.shape:
        return False
    if logits.dim() == 3 and logits.shape[:2] == mask.shape:
        logits, expected = logits[mask], expected[mask]
    return bool((logits - expected).abs().max() <= tolerance * expected.abs().max())


def _split_by_row(
    frozen_layers: FrozenLayers,
    rows: Sequence[Row],
    batch: Mapping[str, torch.Tensor],
    reads: TokensRead,
    states: Activations,
) -> list[dict[str, torch.Tensor]]:
    """Split the activations of a batch, (B, n, layer boundaries, width), by row and drop padding."""
    by_row: list[dict[str, torch.Tensor]] = [{} for _ in rows]
    for name, padded in states.items():
        labels = _is_of_labels(frozen_layers, name, rows[0])
        lengths = [_sequence_lengths(row, labels, "all") for row in rows]
        sequences = padded[non_padding_mask(batch, labels)].split([n for of_row in lengths for n in of_row])
        remaining: Iterator[torch.Tensor] = (sequence[_kept_tokens(reads)] for sequence in sequences)
        for row, of_row in zip(by_row, lengths, strict=True):
            row[name] = torch.cat([next(remaining) for _ in of_row])
    return by_row


def _kept_tokens(reads: TokensRead) -> slice:
    """Return the tokens of a sequence that are stored."""
    return {"all": slice(None), "first": slice(0, 1), "last": slice(-1, None)}[reads]


def _is_of_labels(frozen_layers: FrozenLayers, argument: str, row: Row) -> bool:
    """Return whether an argument holds activations of the labels' tokens, which a decoder reads in training."""
    return frozen_layers.is_decoder_argument(argument) and isinstance(row.get("labels"), list)


def _sequence_lengths(row: Row, labels: bool, reads: TokensRead) -> list[int]:
    """Count the stored tokens of each sequence of a row: its labels, its input, or each of its choices."""
    ids = row["labels"] if labels else row["input_ids"]
    return [len(sequence) if reads == "all" else 1 for sequence in (ids if not isinstance(ids[0], int) else [ids])]


def _token_fields(row: Row, labels: bool) -> list[str]:
    """Name the fields of a row that have a value for each token of its input, and its labels if they are read."""
    fields = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
    return [name for name in row if name in fields or (labels and name == "labels")]


def _cut_row(row: Row, reads: TokensRead) -> Row:
    """Return a copy of a row with the tokens that are read."""
    if reads == "all":
        return dict(row)
    tokens = _kept_tokens(reads)
    cut = {
        name: row[name][tokens] if isinstance(row[name][0], int) else [choice[tokens] for choice in row[name]]
        for name in _token_fields(row, labels=False)
    }
    return {**row, **cut}


def _flatten(values: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a list of integers, or a list of such lists, as one array in which each list follows its length."""
    nested = [values] if isinstance(values[0], int) else values
    return np.fromiter(itertools.chain.from_iterable([len(part), *part] for part in nested), dtype=np.int64)


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _content_key(frozen_layers: FrozenLayers, precision: str) -> str:
    """Digest everything but the rows that activations depend on: tensors, configuration, precision and versions."""
    content = hashlib.sha256()
    model, anatomy = frozen_layers.model, frozen_layers.anatomy
    settings = {name: value for name, value in model.config.to_dict().items() if name not in OTHER_SETTINGS}
    boundaries = sorted(frozen_layers.kept_states.items())
    facts = [VERSION, transformers.__version__, type(model).__name__, precision, boundaries, settings]
    content.update(json.dumps(facts, sort_keys=True, default=str).encode())
    layers = len(frozen_layers.boundary.layers)
    for tensor in anatomy.tensors:
        if tensor.area not in ("head", "pooler", "vocabulary") and (tensor.layer or 0) < layers:
            content.update(tensor.name.encode() + _to_bytes(tuned(model).attached.state.base_value(tensor.name)))
    return content.hexdigest()
