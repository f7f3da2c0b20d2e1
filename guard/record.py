"""Digests of all that the library computes: one checkout's are recorded, and another checkout's compared with them.

Lean rewrites passes, handle and anatomy. After each of its slices these digests are equal bit for bit, or the exception
stands in EXCEPTIONS with its reason. Models, methods and batches come from the law tables of the checkout from before
the first cut (`--tables`), so that both sides run the same; digests of different machines cannot be compared.

    git worktree add ../before <commit before the first cut>
    python guard/record.py --source ../before/src --tables ../before --output before.json
    python guard/record.py --source src --tables ../before --output after.json
    python guard/record.py --compare before.json after.json
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import copy
import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

EXCEPTIONS: dict[str, str] = {
    "reparameterise": "shared tensors have other names, and get their random values in another order",
    "unipelt(length=2, rank=2, bottleneck=4): saved": "shared tensors have other names in files",
}
"""Parts of keys (`family: method: quantity`) whose digests may differ, and why."""

Digests = dict[str, str]


def tables(name: str) -> Any:
    """A module of the law tables, which were in `tests/laws` before the moves."""
    for folder in ("tables", "laws"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"tests.{folder}.{name}")
    raise SystemExit("there are no law tables in the checkout that --tables names")


def digest(values: Mapping[str, Any]) -> str:
    """Digest tensors and plain values in their order."""
    import torch

    made = hashlib.sha256()
    for name, value in values.items():
        made.update(name.encode())
        if isinstance(value, torch.Tensor):
            made.update(f"{value.dtype}{tuple(value.shape)}".encode())
            made.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            made.update(repr(value).encode())
    return made.hexdigest()[:16]


def attempt(work: Callable[[], str]) -> str:
    """The digest, or the kind of error that was raised in its place."""
    try:
        return work()
    except Exception as error:
        return f"raises {type(error).__name__}"


def cell(family: Any, text: str) -> Digests:
    """Everything of one method on one family."""
    import torch

    import deltune

    made = tables("specimens")

    model = made.build(family, made.main_role(family))
    inputs = made.batch(model)
    bare = digest(made.run(model, inputs))
    try:
        torch.manual_seed(3)
        tuned = deltune.attach(model, text, name="a")
    except deltune.DeltuneError as error:
        return {"attach": f"raises {type(error).__name__}", "bare": bare}
    found: Digests = {"bare": bare, "count": repr(counts(tuned)), "method": str(tuned.method)}
    found["start"] = attempt(lambda: digest(made.run(model, inputs)))
    made.stir(tuned)

    def gradients() -> str:
        model.zero_grad()
        outputs = made.forward(model, inputs)
        made.loss(outputs).backward()
        grads = {str(i): p.grad for i, p in enumerate(tuned.trainable_parameters())}
        return digest(outputs | grads)

    def steps() -> str:
        model.train()
        optimizer = torch.optim.AdamW(tuned.trainable_parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            made.loss(made.forward(model, inputs)).backward()
            optimizer.step()
        model.eval()
        return digest({str(i): p for i, p in enumerate(tuned.trainable_parameters())})

    found["gradients"] = attempt(gradients)
    found["steps"] = attempt(steps)
    model.eval().zero_grad()
    found["tuned"] = attempt(lambda: digest(made.run(model, inputs)))

    def disabled() -> str:
        with tuned.disable():
            return digest(made.run(model, inputs))

    found["disabled"] = attempt(disabled)
    found["saved"], folder = saved(tuned)
    found["mixed"] = attempt(lambda: mixed(model, tuned, inputs))
    found["threads"] = attempt(lambda: threads(model, tuned, inputs))
    if made.main_role(family) in ("causal", "seq2seq"):
        found["generated"] = attempt(lambda: generated(model, inputs))
    found["copied"] = attempt(lambda: digest(made.run(copy.deepcopy(model), inputs)))

    def loaded() -> str:
        other = made.build(family, made.main_role(family))
        deltune.load(other, folder)
        return digest(made.run(other, inputs))

    found["loaded"] = attempt(loaded)

    def merged() -> str:
        other = made.build(family, made.main_role(family))
        deltune.load(other, folder).merge()
        return digest(dict(other.state_dict()) | made.run(other, inputs))

    found["merged"] = attempt(merged)
    found["peft"] = attempt(lambda: exported(tuned))
    tuned.detach()
    found["detached"] = attempt(lambda: digest(made.run(model, inputs)))
    return found


def counts(tuned: Any) -> tuple[int, ...]:
    count = tuned.count()
    return (count.method, count.head, count.training_only, count.stored)


def saved(tuned: Any) -> tuple[str, str]:
    """Digest the files of a delta, without what names its time, its place or its version."""
    from safetensors.torch import load_file

    folder = tempfile.mkdtemp()
    try:
        tuned.save(folder)
        tensors = load_file(Path(folder, "delta.safetensors"))
        return digest(dict(sorted(tensors.items()))), folder
    except Exception as error:
        return f"raises {type(error).__name__}", folder


def exported(tuned: Any) -> str:
    from safetensors.torch import load_file

    import deltune

    with tempfile.TemporaryDirectory() as folder:
        deltune.export(tuned.model, folder, format="peft")
        return digest(dict(sorted(load_file(Path(folder, "adapter_model.safetensors")).items())))


def mixed(model: Any, tuned: Any, inputs: Mapping[str, Any]) -> str:
    """Rows with this delta, none and another one: outputs and gradients."""
    import torch

    import deltune

    made = tables("specimens")

    torch.manual_seed(4)
    other = deltune.attach(model, "lora(rank=2) + layernorm", name="b")
    made.stir(other, seed=5)
    try:
        outputs: dict[str, Any] = {}
        for number, names in enumerate((["a", "b"], ["b", "a"], [None, "a"])):
            model.zero_grad()
            with tuned.rows(names):
                given = made.forward(model, inputs)
                sum(v[v.isfinite()].square().sum() for v in given.values() if v.is_floating_point()).backward()
            outputs |= {f"{number} {name}": value for name, value in given.items()}
            outputs |= {f"{number} grad {i}": p.grad for i, p in enumerate(tuned.trainable_parameters())}
        return digest(outputs)
    finally:
        model.zero_grad()
        tuned.use("a")
        tuned.detach("b")


def threads(model: Any, tuned: Any, inputs: Mapping[str, Any]) -> str:
    """Passes with the delta and without it beside each other."""
    made = tables("specimens")

    def off() -> str:
        with tuned.disable():
            return digest(made.run(model, inputs))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(off if i % 2 else lambda: digest(made.run(model, inputs))) for i in range(8)]
        return " ".join(sorted({future.result() for future in futures}))


def generated(model: Any, inputs: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    if not model.config.is_encoder_decoder:
        plain = {name: value[:1] for name, value in plain.items()}
    return digest(
        {
            "cached": model.generate(**plain, **options),
            "recomputed": model.generate(**plain, **options, use_cache=False),
            "beams": model.generate(**plain, **options, num_beams=2),
        }
    )


def record(source: str, checkout: str, output: str, part: str, every: int) -> None:
    sys.path[:0] = [str(Path(source).resolve()), str(Path(checkout).resolve())]
    import torch

    import deltune

    assert Path(deltune.__file__).resolve().is_relative_to(Path(source).resolve()), deltune.__file__
    FAMILIES = tables("families").FAMILIES
    ROWS = tables("methods").ROWS

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    number, of = map(int, part.split("/"))
    cells = [(family, row.text) for family in FAMILIES.values() for row in ROWS]
    chosen = [(family, text) for family, text in cells if zlib.crc32(f"{family.name}: {text}".encode()) % every == 0]
    cells = chosen[number - 1 :: of]
    found: dict[str, Digests] = {}
    began = time.monotonic()
    for done, (family, text) in enumerate(cells, 1):
        found[f"{family.name}: {text}"] = cell(family, text)
        if done % 20 == 0 or done == len(cells):
            left = (time.monotonic() - began) / done * (len(cells) - done)
            print(f"{done} of {len(cells)} cells, {left / 60:.0f} min left", file=sys.stderr, flush=True)
    Path(output).write_text(json.dumps(found, indent=0))


def compare(before: str, after: str) -> int:
    """Print where the digests differ, by quantity; 1 if one of them has no reason."""
    old, new = (
        {f"{c}: {q}": v for c, qs in json.loads(Path(p).read_text()).items() for q, v in qs.items()}
        for p in (before, after)
    )
    differing = [key for key in old if old[key] != new.get(key)]  # cells of new methods are in the later one only
    open_ones = [key for key in differing if not any(part in key for part in EXCEPTIONS)]
    for key in open_ones:
        print(f"{key}: {old.get(key, 'nothing')} -> {new.get(key, 'nothing')}")
    print(f"{len(old)} digests, {len(differing)} differ, {len(open_ones)} of them without a reason")
    print(dict(Counter(key.rpartition(": ")[2] for key in open_ones)))
    return 1 if open_ones else 0


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="folder with the package")
    parser.add_argument("--tables", help="checkout whose tests/tables (once tests/laws) has families and methods")
    parser.add_argument("--output")
    parser.add_argument("--part", default="1/1", help="K/N: every Nth cell, from the Kth on")
    parser.add_argument("--every", type=int, default=1, help="take about one cell of so many, the same ones always")
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        sys.exit(compare(*options.compare))
    record(options.source, options.tables, options.output, options.part, options.every)
