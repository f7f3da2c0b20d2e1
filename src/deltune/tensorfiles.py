"""Files of tensors by strangers: what they hold is known and bounded before a number is read. No pickle is run."""

from __future__ import annotations

import math
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file

from .errors import DeltuneError, all_problems

MOST_HEADER = 32 << 20
"""Bytes of the longest safetensors header that is read; one of a hundred thousand tensors has half of that."""

MOST_PICKLE = 1 << 20
"""Bytes of the longest list of tensors in a file of torch.save, enough for some seven thousand tensors."""

MOST_AXES = 8

NUMBERS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' names of the types that numbers are kept in."""

POSITIONS = "I64"
"""The type of positions under a mask."""

_IN_PICKLES = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
               "torch FloatStorage", "torch HalfStorage", "torch BFloat16Storage", "torch DoubleStorage"}  # fmt: skip
"""All that a list of floating-point tensors by name refers to."""

_NAMES = (
    {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
    | {dtype: name for name, dtype in NUMBERS.items()}
    | {torch.int64: POSITIONS}
)


@dataclass(frozen=True)
class TensorFacts:
    """What a file says of one tensor: its type by safetensors' name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def facts_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorFacts]:
    """The facts of tensors that are there already."""
    return {
        name: TensorFacts(_NAMES.get(t.dtype, str(t.dtype).removeprefix("torch.")), tuple(t.shape))
        for name, t in tensors.items()
    }


def header(path: Path) -> dict[str, TensorFacts]:
    """Read the names, types and shapes of a safetensors file, after checking that its bytes can hold them.

    Raises:
        DeltuneError: The file is damaged, is not a safetensors file, or its header is longer than `MOST_HEADER`.
    """
    try:
        with open(path, "rb") as file:
            first = file.read(8)
            size = file.seek(0, 2)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if length > size - 8:
            raise _damaged(path, f"its header would end after byte {length + 8:,}, the file has {size:,}")
        if length > MOST_HEADER:
            raise _damaged(path, f"its header of {length:,} bytes is longer than {MOST_HEADER >> 20} MiB")
        with safetensors.safe_open(path, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
            facts = {name: TensorFacts(s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if long := [name for name, tensor in facts.items() if len(tensor.shape) > MOST_AXES]:
        raise DeltuneError(f"{path}: tensor {long[0][:100]} has more than {MOST_AXES} axes")
    return facts


def load(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file. Its header is expected to have been read.

    Raises:
        DeltuneError: The file cannot be read.
    """
    try:
        return load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def load_numbers(path: Path) -> dict[str, torch.Tensor]:
    """The floating-point tensors of a file of safetensors or of torch.save, none of them empty.

    A file of torch.save is mapped into memory, so that nothing in it can claim more than the file has, and only
    tensors are taken from it (weights_only).

    Raises:
        DeltuneError: The file is damaged, or holds anything but floating-point tensors by name.
    """
    safe = path.suffix == ".safetensors"
    facts = header(path) if safe else {}
    tensors = {} if facts and _strange(facts) else load(path) if safe else _load_torch(path)
    problems = _strange(facts or facts_of(tensors))
    if problems:
        raise all_problems(f"{path} does not hold floating-point tensors only", problems)
    return tensors


def _strange(facts: Mapping[str, TensorFacts]) -> list[str]:
    problems = [
        f"tensor {name[:100]} is of type {tensor.dtype}"
        if tensor.dtype not in NUMBERS
        else f"tensor {name[:100]} is empty"
        for name, tensor in facts.items()
        if tensor.dtype not in NUMBERS or not tensor.numel
    ]
    return problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])


def _load_torch(path: Path) -> dict[str, torch.Tensor]:
    try:
        _check_archive(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except DeltuneError:
        raise
    except Exception as error:  # a broken pickle fails in whichever way it likes
        raise _damaged(path, error, "torch") from error
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise _damaged(path, "it is no dictionary of tensors by name", "torch")
    for name, tensor in tensors.items():
        dense = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not dense or tensor.device.type != "cpu":
            raise _damaged(path, f"{name[:100]} is no dense tensor", "torch")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes() or tensor.dim() > MOST_AXES:
            raise _damaged(path, f"{name[:100]} claims more numbers than the file has", "torch")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _check_archive(path: Path) -> None:
    """Look through a file of torch.save without running it: nothing compressed, and nothing named but tensors."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise _damaged(path, "it is compressed, which torch.save never does", "torch")
        lists = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
        if len(lists) != 1 or lists[0].file_size > MOST_PICKLE:
            raise _damaged(path, f"its list of tensors is longer than {MOST_PICKLE >> 20} MiB or missing", "torch")
        raw = archive.read(lists[0])
    for opcode, argument, _ in pickletools.genops(raw):
        if opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4") and argument not in _IN_PICKLES:
            raise _damaged(path, f"it refers to {str(argument or opcode.name)[:100]!r}", "torch")


def _damaged(path: Path, error: object, kind: str = "safetensors") -> DeltuneError:
    reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
    if kind == "torch":
        return DeltuneError(f"{path} is damaged, or holds more than tensors: {reason}")
    return DeltuneError(
        f"{path} is damaged (bytes are missing, were added or were changed), or is not a safetensors file: {reason}"
    )
