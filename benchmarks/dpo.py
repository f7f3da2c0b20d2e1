"""The memory of TRL's DPO with the disabled delta as the reference, beside that with a second base model.

    python -m benchmarks.dpo [--hidden 512 --layers 12]

Each way trains in a process of its own: three steps of DPOTrainer on a Llama with random weights in float32, `lora` on
all linears, batches of 4 pairs. Printed are the bytes of the base's weights and what the process grew by from before
the models were made: at its peak, as the system counts it. Needs TRL and MiniLM's tokenizer (the extras `peers` and
`demo`).
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 1 << 20
METHOD = "lora(rank=8, at=('query', 'key', 'value', 'output', 'ffn'))"
PAIRS = [
    ("Where is my parcel?", " It is on its way to you.", " I do not know."),
    ("Thanks.", " With pleasure!", " What?"),
]


def save_base(folder: Path, hidden: int, layers: int) -> None:
    """Write a Llama with random weights and a tokenizer into a folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from deltune.models import packaged_minilm

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(packaged_minilm())
    tokenizer.eos_token = tokenizer.sep_token
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(
        "llama", hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=4 * hidden, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def train(folder: Path, second: bool) -> dict[str, float]:
    """Train in this process; return the losses and the memory."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    import deltune

    class DeltaDPOTrainer(DPOTrainer):
        def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
            with tuned.disable():
                return super().compute_ref_log_probs(model, inputs)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS * 8])
    gc.collect()
    before = peak()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    tuned = deltune.attach(model, METHOD)
    arguments = DPOConfig(
        str(folder / "out"), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-3, report_to="none", seed=0,
        disable_tqdm=True, bf16=False, use_cpu=True, save_strategy="no", logging_steps=1,
        precompute_ref_log_probs=not second,
    )  # fmt: skip
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) if second else None
    trainer = (DPOTrainer if second else DeltaDPOTrainer)(
        model=model, ref_model=reference, args=arguments, train_dataset=rows, processing_class=tokenizer
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"weights": weights / MIB, "peak": peak() - before, "loss": losses[-1]}


def peak() -> float:
    """The greatest resident size of this process until now, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure both ways and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--second", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        print(json.dumps(train(options.folder, options.second)))
        return
    with tempfile.TemporaryDirectory() as folder:
        save_base(Path(folder), options.hidden, options.layers)
        for name, flags in (("a second base model", ["--second"]), ("the disabled delta", [])):
            command = [sys.executable, "-m", "benchmarks.dpo", "--folder", folder, *flags]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            values = json.loads(output.splitlines()[-1])
            print(
                f"reference: {name}: base {values['weights']:,.0f} MiB, grew by {values['peak']:,.0f} MiB, "
                f"last loss {values['loss']:.5f}"
            )


if __name__ == "__main__":
    main()
