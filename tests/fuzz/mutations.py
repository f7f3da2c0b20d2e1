"""Seeded mutations of folders with deltas: of JSON, of safetensors and torch files, of links and kinds of files.

A mutation takes a random generator and a folder, and spoils the folder in place. A seed makes the same folder again.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Mutation = Callable[[Random, Path], None]

NUMBERS = (0, -1, 1, 2, 3, 7, 10**6, 99_999_999, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308,
           float("nan"),
           float("inf"))  # fmt: skip
HOSTILE = (None, True, False, "", "x", "\x00", "../..", "/etc/passwd", "a" * 5000, "\u202e", [], {}, [[]], [{}],
           {"": {}},
           [None], {"x": None}, *NUMBERS)  # fmt: skip
METHODS = (
    "prefix(length=99999999)", "prefix(length=10**9)", "prefix(length=1000000000000000000000000)",
    "lora(rank=99999999)",
    "prompt(length=99999999)", "adapter(rank=99999999)", "multi_head_parallel_adapter(length=99999999, own_down=True)",
    "apet(lora(rank=99999999), parameters=5)", "apet(prefix(length=99999999), parameters='90%')",
    "apet(layernorm, parameters=99999999999999)", "apet(lora(rank=99999999), parameters=9, pattern='adjacent')",
    "lora(rank=0)", "lora(rank=-3)", "lora()" + " + lora()" * 3000, "+".join(["layernorm"] * 2000), "(" * 500 + "lora",
    "lora(layers=(0,))", "lora(layers=(99,))", "diff_pruning(sparsity=0.999999)", "three_vectors + three_vectors",
    "full",
    "__import__('os').system('true')", "lora(rank=2, at=('query',)*9)",
    "prefix(length=2, reparameterise=99999999999999)",
    "apet(" * 60 + "lora" + ", parameters=3)" * 60, "-" * 3000 + "1", "lora(scale=1e308)", "lora(scale=1e999)",
    f"prefix(length={'9' * 4000})", f"prefix(length={'9' * 5000})", "prompt(length=3, init_from=(1, -5, 10**9))",
    "lora \x00",
    f"lora(scale={'9' * 400})", "lora(layers='lower half')", "ia3", "bitfit",
)  # fmt: skip


# -- JSON -------------------------------------------------------------------------------------------------------------


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value inside a JSON value stands."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, item in inside for path in paths(item, (*at, key)))]


def replaced(value: Any, path: Sequence[Any], new: Any) -> Any:
    """A copy of a JSON value with another one at a path."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def removed(value: Any, path: Sequence[Any]) -> Any:
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = removed(value[path[0]], path[1:])
    return copy


def mutated(random: Random, value: Any) -> Any:
    """A JSON value with one to three of its values replaced, removed, doubled, nested or renamed."""
    for _ in range(random.choice((1, 1, 2, 3))):
        if not isinstance(value, dict | list) or not value:
            return random.choice(HOSTILE)
        first = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
        path = (first, *random.choice(paths(value[first])))
        there = value
        for key in path:
            there = there[key]
        kind = random.randrange(8)
        if kind <= 2:
            value = replaced(value, path, random.choice(HOSTILE))
        elif kind == 3:
            value = removed(value, path)
        elif kind == 4:
            value = replaced(value, path, [there] * random.choice((0, 1, 2, 50)))
        elif kind == 5 and isinstance(there, dict):
            value = replaced(value, path, {str(random.choice(HOSTILE))[:50]: v for v in there.values()})
        elif kind == 6 and isinstance(there, int | float) and not isinstance(there, bool):
            value = replaced(value, path, random.choice(NUMBERS))
        elif kind == 7 and isinstance(there, str):
            value = replaced(
                value, path, random.choice((there[::-1], there * 3, there[:-1], there.upper(), there + "\n"))
            )
        else:
            value = replaced(value, path, {"x": there})
    return value


def json_values(name: str) -> Mutation:
    def change(random: Random, folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(mutated(random, value)), encoding="utf-8", errors="surrogatepass")

    return change


def json_text(name: str) -> Mutation:
    """Not the values but the text: cut, bits flipped, nested beyond every depth, of another encoding, huge."""

    def change(random: Random, folder: Path) -> None:
        path = folder / name
        raw = path.read_bytes()
        kind = random.randrange(7)
        if kind == 0:
            raw = raw[: random.randrange(len(raw))]
        elif kind == 1:
            raw = flipped(random, raw)
        elif kind == 2:
            raw = nested(random.choice((10, 150, 1000, 100_000))).encode()
        elif kind == 3:
            deep = nested(random.choice((10, 150, 1000, 100_000)), *random.choice((("[", "]"), ('{"a":', "}"))))
            raw = raw.rstrip()[:-1] + b', "deep": ' + deep.replace(":}", ":1}").encode() + b"}"
        elif kind == 4:
            value = json.loads(raw)
            key = random.choice(list(value))
            raw = json.dumps({**value, key: "@"}).replace('"@"', nested(random.choice((20, 500, 50_000)))).encode()
        elif kind == 5:
            raw = raw.decode().encode(random.choice(("utf-16", "utf-32", "utf-8-sig")))
        else:
            raw = random.choice((b"", b"null", b"3", b"\xff", b'{"a": ' + b"9" * 6000 + b"}", b" " * 1_000_000, b"{}"))
        path.write_bytes(raw)

    return change


def flipped(random: Random, raw: bytes, low: int = 0, high: int | None = None) -> bytes:
    """With one to eight of its bits the other way."""
    changed = bytearray(raw)
    for _ in range(random.choice((1, 1, 2, 8))):
        changed[random.randrange(low, high or len(raw))] ^= 1 << random.randrange(8)
    return bytes(changed)


# -- safetensors ------------------------------------------------------------------------------------------------------


def sealed(folder: Path, sealing: str = "") -> None:
    """Give a changed delta.safetensors the checksum that fits it, and by choice the shapes ("shapes") in delta.json."""
    facts = json.loads((folder / "delta.json").read_text())
    facts["sha256"] = hashlib.sha256((folder / "delta.safetensors").read_bytes()).hexdigest()
    if sealing == "shapes":
        facts["tensors"] = {n: list(t.shape) for n, t in load_file(folder / "delta.safetensors").items()}
    (folder / "delta.json").write_text(json.dumps(facts))


def changed_tensors(random: Random, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with one of them of other values, another type or shape, gone, doubled or renamed."""
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    name = random.choice(sorted(changed))
    if indices := [n for n in sorted(changed) if n.endswith("index")]:
        name = random.choice((name, *indices))
    changed[name] = CHANGES[random.choice(sorted(CHANGES))](random, changed[name])
    kind = random.randrange(6)
    if kind == 0:
        changed.pop(random.choice(sorted(changed)))
    elif kind == 1:
        changed[random.choice(("more", "edit.0", "base.x", "\x00", "a" * 3000))] = torch.zeros(2)
    elif kind == 2:
        changed[name + "_"] = changed.pop(name)
    return changed


def _filled(random: Random, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return tensor
    value = random.choice((float("nan"), float("inf"), -float("inf")))
    flat = (tensor if tensor.is_floating_point() else tensor.float()).flatten()
    flat[random.randrange(len(flat))] = value
    return flat.view(tensor.shape)


def _positions(random: Random, tensor: torch.Tensor) -> torch.Tensor:
    """Integers that are no positions: negative, far out of range, twice, in another order."""
    if tensor.is_floating_point() or not tensor.numel():
        return tensor
    kind = random.randrange(4)
    if kind == 0:
        return tensor.flip(0)
    if kind == 1:
        return tensor[:1].expand(tensor.shape).contiguous() if tensor.dim() else tensor
    changed = tensor.flatten()
    changed[random.randrange(len(changed))] = random.choice((-1, -5, 10**6, 2**40, 2**62, -(2**62)))
    return changed.view(tensor.shape)


CHANGES: dict[str, Callable[[Random, torch.Tensor], torch.Tensor]] = {
    "filled": _filled,
    "positions": _positions,
    "scalar": lambda r, t: torch.zeros((), dtype=t.dtype),
    "more axes": lambda r, t: t[None],
    "flat": lambda r, t: t.flatten(),
    "turned": lambda r, t: t.T.contiguous() if t.dim() == 2 else t,
    "empty": lambda r, t: t.new_zeros(random_shape(r)),
    "shorter": lambda r, t: t[: max(0, len(t) - 1)].contiguous() if t.dim() else t,
    "longer": lambda r, t: torch.cat([t, t]) if t.dim() else t,
    "type": lambda r, t: t.to(r.choice(
        (torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64, torch.float64,
        torch.uint8)
    )),
}  # fmt: skip


def random_shape(random: Random) -> tuple[int, ...]:
    return random.choice(((0,), (10**9, 0), (0, 10**9), (0, 2**40), (0, 0), (10**6, 0, 10**6)))


def tensors_of_delta(random: Random, folder: Path) -> None:
    """Tensors changed, with a checksum (and by chance shapes) that fit them."""
    path = folder / "delta.safetensors"
    save_file(changed_tensors(random, load_file(path)), path)
    sealed(folder, random.choice(("", "shapes", "shapes")))


def bytes_of(name: str, seal: bool = False) -> Mutation:
    """A safetensors file cut, with bits flipped, with a header that lies about its length or about what follows."""

    def change(random: Random, folder: Path) -> None:
        path = folder / name
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header, data = raw[8 : 8 + length], raw[8 + length :]
        kind = random.randrange(6)
        if kind == 0:
            raw = raw[: random.randrange(len(raw))]
        elif kind == 1:
            raw = flipped(random, raw, 0, 8 + length)
        elif kind == 2:
            raw = flipped(random, raw, 8 + length)
        elif kind == 3:
            lie = random.choice((0, 1, length - 1, length + 1, len(raw), 10**8 - 1, 10**8, 2**31, 2**63, 2**64 - 1))
            raw = struct.pack("<Q", lie) + raw[8:]
        elif kind == 4:
            header = json.dumps(mutated(random, json.loads(header))).encode()
            raw = struct.pack("<Q", len(header)) + header + data
        else:
            header = random.choice(
                (b"[" * 100_000, b'{"a":' * 100_000, b"{}", b"null", b" " * 3_000_000, b"{" + header)
            )
            raw = struct.pack("<Q", len(header)) + header + data
        path.write_bytes(raw)
        if (seal or random.random() < 0.7) and (folder / "delta.json").exists():
            sealed(folder)

    return change


# -- the method and the file system -----------------------------------------------------------------------------------


def method_of_delta(random: Random, folder: Path) -> None:
    """Another method than the tensors are of, such as one of a size that nothing could hold."""
    facts = json.loads((folder / "delta.json").read_text())
    text = random.choice((*METHODS, facts["explicit"].replace("2", random.choice(("3", "99999999", "-2", "2e9")))))
    facts["explicit"] = text
    if random.random() < 0.7:
        facts["method"] = text
    (folder / "delta.json").write_text(json.dumps(facts))


def linked(*names: str) -> Mutation:
    """In place of a file: a link that leads out, into nothing or to itself; a folder; a pipe."""

    def change(random: Random, folder: Path) -> None:
        path = folder / random.choice(names)
        outside = folder.parent / f"outside-{folder.name}-{path.name}"
        kind = random.randrange(5)
        if kind == 0:
            os.replace(path, outside)
            path.symlink_to(outside)
            return
        path.unlink()
        if kind == 1:
            path.symlink_to(folder / "nothing")
        elif kind == 2:
            path.symlink_to(path)
        elif kind == 3:
            path.mkdir()
        else:
            os.mkfifo(path)

    return change


DELTA: dict[str, Mutation] = {
    "values of delta.json": json_values("delta.json"),
    "text of delta.json": json_text("delta.json"),
    "tensors": tensors_of_delta,
    "bytes": bytes_of("delta.safetensors"),
    "method": method_of_delta,
    "links": linked("delta.json", "delta.safetensors"),
}
WEIGHTS = {
    "values of delta.json": 6, "text of delta.json": 3, "tensors": 6, "bytes": 4, "method": 3, "links": 1,
}  # fmt: skip


def spoil(seed: int, folder: Path, mutations: Mapping[str, Mutation], weights: Mapping[str, int]) -> str:
    """One mutation of a folder, chosen and made by a seed; its name."""
    random = Random(seed)
    name = random.choices(list(mutations), [weights[n] for n in mutations])[0]
    mutations[name](random, folder)
    return name


# -- foreign folders --------------------------------------------------------------------------------------------------


def files_of(folder: Path, suffix: str) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.endswith(suffix))


def foreign_json(text: bool) -> Mutation:
    def change(random: Random, folder: Path) -> None:
        name = random.choice([n for n in files_of(folder, ".json")])
        (json_text if text else json_values)(name)(random, folder)

    return change


def foreign_options(random: Random, folder: Path) -> None:
    """One option with a value that its kind must mind, or one more option."""
    path = folder / "adapter_config.json"
    options = json.loads(path.read_text())
    key, value = random.choice(OPTIONS)
    inside = options.get("config")
    (inside if isinstance(inside, dict) and random.random() < 0.8 else options)[key] = value
    path.write_text(json.dumps(options))


OPTIONS: tuple[tuple[str, Any], ...] = (
    ("r", 0), ("r", -1), ("r", "8"), ("r", 10**12), ("lora_alpha", "8"), ("lora_alpha", None), ("lora_alpha",
    float("nan")),
    ("lora_alpha", 1e308), ("lora_alpha", [8]), ("lora_dropout", 2), ("lora_dropout", "0.1"), ("lora_dropout", -1),
    ("alpha_pattern", {"(a+)+$": 3}), ("alpha_pattern", {"(": 3}), ("alpha_pattern", {"(.*)*.*(.*)*x": 3}),
    ("alpha_pattern", {".*": "x"}), ("alpha_pattern", [1]), ("alpha_pattern", "x"), ("alpha_pattern", {".*": None}),
    ("alpha_pattern", {"(?:(?:.*.*)*.*)*z": 3}), ("rank_pattern", {".*": -1}), ("rank_pattern", 3), ("use_rslora",
    "no"),
    ("target_modules", 3), ("target_modules", "(((" ), ("peft_type", "LOHA"), ("peft_type", None), ("peft_type",
    ["LORA"]),
    ("peft_type", {}), ("config", None), ("config", "pfeiffer"), ("config", {"architecture": "union"}), ("config", []),
    ("config", {"architecture": "union", "configs": 3}), ("config", {"architecture": "union", "configs": [3]}),
    ("architecture", "lora"), ("architecture", "prefix_tuning"), ("architecture", []), ("alpha", None), ("alpha", "x"),
    ("leave_out", 3), ("leave_out", [[]]), ("leave_out", "x"), ("leave_out", [0, 1]), ("prefix_length", 10**12),
    ("prefix_length", None), ("prefix_length", "x"), ("scaling", "x"), ("scaling", None), ("scaling", [1]),
    ("non_linearity", None), ("non_linearity", 3), ("attn_matrices", 3), ("attn_matrices", [3]), ("name", None),
    ("name", "../x"), ("name", 3), ("name", "("), ("mh_adapter", "x"), ("reduction_factor", 0), ("dropout", "x"),
    ("dropout", 5), ("num_virtual_tokens", 10**12), ("model_type", None), ("model_type", []), ("version", None),
    ("task_type", []), ("modules_to_save", 3), ("original_ln_before", "x"), ("residual_before_ln", []), ("flat", []),
    ("ln_before", "x"), ("is_parallel", 3), ("bias", []), ("init_lora_weights", []), ("label2id", 3),
)  # fmt: skip


def foreign_tensors(random: Random, folder: Path) -> None:
    for_safetensors = files_of(folder, ".safetensors")
    name = random.choice(for_safetensors or files_of(folder, ".bin"))
    path = folder / name
    if for_safetensors:
        save_file(changed_tensors(random, load_file(path)), path)
    else:
        torch.save(changed_tensors(random, torch.load(path, weights_only=True)), path)


def foreign_bytes(random: Random, folder: Path) -> None:
    if names := files_of(folder, ".safetensors"):
        bytes_of(random.choice(names))(random, folder)
        return
    path = folder / random.choice(files_of(folder, ".bin"))
    raw = path.read_bytes()
    path.write_bytes(raw[: random.randrange(len(raw))] if random.random() < 0.3 else flipped(random, raw))


def foreign_pickles(random: Random, folder: Path) -> None:
    """The tensors as torch's file, and there what is no plain tensor of the size that the file has."""
    for name in (*files_of(folder, ".safetensors"), *files_of(folder, ".bin")):
        path = folder / name
        changed: dict[str, Any] = (
            load_file(path) if name.endswith(".safetensors") else torch.load(path, weights_only=True)
        )
        first = sorted(changed)[0]
        kind = random.randrange(8)
        if kind == 0:
            changed[first] = torch.zeros(1).expand(10**6, 10**6)
        elif kind == 1:
            changed[first] = changed[first].to_sparse()
        elif kind == 2:
            changed[first] = {"x": changed[first]}
        elif kind == 3:
            changed[first] = torch.empty(10**6, 10**6, device="meta")
        elif kind == 4:
            changed = {i: tensor for i, tensor in enumerate(changed.values())}
        elif kind == 5:
            changed[first] = Exploding()
        elif kind == 6:
            changed[first] = (
                torch.nn.Parameter(changed[first]) if changed[first].is_floating_point() else changed[first]
            )
        path.unlink()
        new = {"adapter_model": "adapter_model.bin", "adapter": "pytorch_adapter.bin",
               "model_head": "pytorch_model_head.bin"}.get(path.stem, path.name)  # fmt: skip
        torch.save(changed, folder / new, _use_new_zipfile_serialization=random.random() < 0.8)


class Exploding:
    """What unpickling would run."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('a pickle ran')",))


def foreign_links(random: Random, folder: Path) -> None:
    linked(*files_of(folder, ".json"), *files_of(folder, ".safetensors"), *files_of(folder, ".bin"))(random, folder)


FOREIGN: dict[str, Mutation] = {
    "values of JSON": foreign_json(False),
    "text of JSON": foreign_json(True),
    "options": foreign_options,
    "tensors": foreign_tensors,
    "bytes": foreign_bytes,
    "pickles": foreign_pickles,
    "links": foreign_links,
}
FOREIGN_WEIGHTS = {
    "values of JSON": 5, "text of JSON": 2, "options": 5, "tensors": 5, "bytes": 3, "pickles": 2, "links": 1,
}  # fmt: skip
