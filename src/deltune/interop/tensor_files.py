"""Reading tensor files from others safely: contents are checked before they are loaded, and no pickle is run."""

from __future__ import annotations

import math
import os
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load, load_file

from ..errors import DeltuneError, error_from_problems, first_of

MAX_HEADER_BYTES = 32 << 20
"""Size in bytes of the longest safetensors header that is read; one of 100,000 tensors has half of it."""

MAX_READ_BYTES = 256 << 20
"""Size in bytes of the longest file that is read at once. Longer ones are mapped into memory: if such a file is written
over in its place while it is read, and not replaced by another, the system ends the process (SIGBUS)."""

MAX_PICKLE_BYTES = 1 << 20
"""Size in bytes of the longest list of tensors in a file of torch.save, enough for about 7,000 tensors."""

MAX_DIMENSIONS = 8

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of floating-point tensors, by safetensors' names."""

WHOLE_DTYPES = ("I64", "I32", "U8")
"""Types of whole numbers that a file of another library may have, by safetensors' names."""

INDEX_DTYPE = "I64"
"""Type of the indices of masked entries, by safetensors' name."""

_ALLOWED_GLOBALS = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
               "torch FloatStorage", "torch HalfStorage", "torch BFloat16Storage", "torch DoubleStorage"}  # fmt: skip
"""All globals that a pickled dictionary of floating-point tensors refers to."""

_DTYPE_NAMES = (
    {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
    | {dtype: name for name, dtype in FLOAT_DTYPES.items()}
    | {torch.int64: INDEX_DTYPE}
)


@dataclass(frozen=True)
class TensorInfo:
    """The type of a tensor, by safetensors' name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def tensor_infos(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Return the types and shapes of loaded tensors."""
    return {
        name: TensorInfo(_DTYPE_NAMES.get(t.dtype, str(t.dtype).removeprefix("torch.")), tuple(t.shape))
        for name, t in tensors.items()
    }


def read_header(path: Path, raw: bytes | None = None) -> dict[str, TensorInfo]:
    """Read the names, types and shapes of a safetensors file, after checking that its bytes can hold them."""
    try:
        if raw is None:
            with open(path, "rb") as file:
                prefix = file.read(8)
                size = file.seek(0, 2)
        else:
            prefix, size = raw[:8], len(raw)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > size - 8:
            raise _unreadable(path, f"its header would end after byte {length + 8:,}, the file has {size:,}")
        if length > MAX_HEADER_BYTES:
            raise _unreadable(path, f"its header of {length:,} bytes is longer than {MAX_HEADER_BYTES >> 20} MiB")
        if raw is None:
            with safetensors.safe_open(path, "pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
                infos = {name: TensorInfo(s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
        else:
            infos = {name: TensorInfo(t["dtype"], tuple(t["shape"])) for name, t in safetensors.deserialize(raw)}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if too_deep := [name for name, info in infos.items() if len(info.shape) > MAX_DIMENSIONS]:
        raise DeltuneError(f"{path}: tensor {too_deep[0][:100]} has more than {MAX_DIMENSIONS} dimensions")
    return infos


def read_small(path: Path) -> bytes | None:
    """Read a file of at most `MAX_READ_BYTES` at once; None for a longer one, which is better read in parts."""
    try:
        with open(path, "rb") as file:
            return file.read() if os.fstat(file.fileno()).st_size <= MAX_READ_BYTES else None
    except OSError as error:
        raise _unreadable(path, error) from error


def load_tensors(path: Path, raw: bytes | None = None) -> dict[str, torch.Tensor]:
    """Load all tensors of a safetensors file, by name. Call `read_header` first: this function checks nothing."""
    try:
        return load_file(path) if raw is None else load(raw)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def load_float_tensors(path: Path, *, allow_integers: bool = False) -> dict[str, torch.Tensor]:
    """Load the tensors of a file of safetensors or of torch.save that may hold floating-point tensors only.

    With `allow_integers`, a file of safetensors may hold whole numbers and empty tensors too.

    A file of torch.save is mapped into memory, so that nothing in it can claim more than the file has, and only
    tensors are taken from it (weights_only).
    """
    if path.suffix == ".safetensors":  # checked before anything is loaded
        raw = read_small(path)
        _check_float(path, read_header(path, raw), allow_integers)
        return load_tensors(path, raw)
    tensors = _load_torch_file(path)
    _check_float(path, tensor_infos(tensors))
    return tensors


def _check_float(path: Path, infos: Mapping[str, TensorInfo], allow_integers: bool = False) -> None:
    """Raise a DeltuneError for tensors that are empty or not floating-point."""
    allowed = {*FLOAT_DTYPES, *(WHOLE_DTYPES if allow_integers else ())}
    problems = [
        f"tensor {name[:100]} is of type {info.dtype}" if info.dtype not in allowed else f"tensor {name[:100]} is empty"
        for name, info in infos.items()
        if info.dtype not in allowed or not (info.numel or allow_integers)
    ]
    if problems:
        raise error_from_problems(f"{path} does not hold floating-point tensors only", first_of(problems))


def _load_torch_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        _check_torch_archive(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except DeltuneError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise _unreadable(path, error, "torch") from error
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise _unreadable(path, "it does not hold a dictionary of tensors by name", "torch")
    for name, tensor in tensors.items():
        dense = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not dense or tensor.device.type != "cpu":
            raise _unreadable(path, f"{name[:100]} is not a dense tensor", "torch")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes() or tensor.dim() > MAX_DIMENSIONS:
            raise _unreadable(path, f"{name[:100]} claims more numbers than the file has", "torch")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _check_torch_archive(path: Path) -> None:
    """Check, without running its pickle, that a file of torch.save is uncompressed and refers to tensors alone."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise _unreadable(path, "it is compressed, which torch.save never does", "torch")
        lists = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
        if len(lists) != 1 or lists[0].file_size > MAX_PICKLE_BYTES:
            raise _unreadable(
                path, f"its list of tensors is longer than {MAX_PICKLE_BYTES >> 20} MiB or missing", "torch"
            )
        raw = archive.read(lists[0])
    for opcode, argument, _ in pickletools.genops(raw):
        if (
            opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4")
            and argument not in _ALLOWED_GLOBALS
        ):
            raise _unreadable(path, f"it refers to {str(argument or opcode.name)[:100]!r}", "torch")


def _unreadable(path: Path, error: object, kind: str = "safetensors") -> DeltuneError:
    reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
    if kind == "torch":
        return DeltuneError(f"{path} is damaged, or holds more than tensors: {reason}", fault="files")
    return DeltuneError(
        f"{path} is damaged (bytes are missing, were added or were changed), or is not a safetensors file: {reason}",
        fault="files",
    )
