"""The other sides of a whole run on chats: PEFT with Trainer, or with TRL's SFTTrainer and its packing.

    python -m benchmarks.whole_language_peft trainer|trl MODEL DATA OUTPUT --epochs 1 --seed 0 --length 256

DATA: a folder of train.jsonl, validation.jsonl, test.jsonl with prompt and completion. The loss of the test rows is
written to OUTPUT/found.json.
"""

from __future__ import annotations

import json
from typing import Any

import peft
import transformers

from .whole_peft import begin

RATE, ROWS = 1e-3, 16
"""Learning rate and rows of a step, as our side has them."""


def main() -> None:
    options, data = begin(__doc__, 1, ("trainer", "trl"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    values: dict[str, Any] = dict(
        output_dir=str(options.output), num_train_epochs=options.epochs, per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS, learning_rate=RATE, seed=options.seed, eval_strategy="epoch",
        save_strategy="epoch", report_to="none", disable_tqdm=True, use_cpu=True, activation_checkpointing=False,
    )  # fmt: skip
    trainer: Any
    if options.kind == "trl":
        import trl

        arguments = trl.SFTConfig(**values, max_length=options.length, packing=True, eval_packing=False)
        trainer = trl.SFTTrainer(
            model, arguments, train_dataset=data["train"], eval_dataset=data["validation"],
            processing_class=tokenizer, peft_config=lora,
        )  # fmt: skip
        trainer.train()
        test = trl.SFTTrainer(
            trainer.model, arguments, train_dataset=data["test"], eval_dataset=data["test"], processing_class=tokenizer
        )
        metrics = test.evaluate()
    else:

        def encode(row: dict[str, str]) -> dict[str, Any]:
            prompt = tokenizer(row["prompt"])["input_ids"]
            answer = tokenizer(row["completion"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
            ids = (prompt + answer)[: options.length]
            return {"input_ids": ids, "labels": ([-100] * len(prompt) + answer)[: options.length]}

        encoded = data.map(encode, remove_columns=["prompt", "completion"])
        trainer = transformers.Trainer(
            peft.get_peft_model(model, lora), transformers.TrainingArguments(**values), train_dataset=encoded["train"],
            eval_dataset=encoded["validation"], processing_class=tokenizer,
            data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
        )  # fmt: skip
        trainer.train()
        metrics = trainer.evaluate(encoded["test"])
    (options.output / "found.json").write_text(json.dumps(metrics), encoding="utf-8")


if __name__ == "__main__":
    main()
