"""Twenty mistakes that somebody could make in the core, each of which the everyday tests must catch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One mistake: a text that stands exactly once in the library, and what takes its place.

    Attributes:
        name: What is wrong then, in a few words.
        text: The text in the source; it is looked for in every module, so that a module may be moved.
        becomes: What stands there instead.
        reason: Why this would be a bug.
        tests: Where to look first; all everyday tests run where these miss it.
    """

    name: str
    text: str
    becomes: str
    reason: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "counting: indices are not counted",
        "stored=stored + selected + masked + head_size,",
        "stored=stored + selected + head_size,",
        "The file holds an index beside every masked scalar.",
        ("tests/runtime/test_life.py",),
    ),
    Mutation(
        "masks: a draw may leave the range",
        "out_of_range = values >= np.uint64(size)",
        "out_of_range = values > np.uint64(size)",
        "The permutation is of 0 ... size - 1, so `size` itself has to be drawn again.",
        ("tests/methods/test_masks.py",),
    ),
    Mutation(
        "algebra: LoRA's dropout in evaluation",
        "u = F.dropout(u, self.dropout) if self.dropout and at.training else u",
        "u = F.dropout(u, self.dropout) if self.dropout else u",
        "A model in evaluation mode is deterministic.",
        ("tests/runtime/test_running.py::test_dropout_is_drawn_in_training_alone",),
    ),
    Mutation(
        "algebra: prefix heads in the wrong order",
        "t.repeat_interleave(repeat, dim=1).expand(query.shape[0], -1, -1, -1)",
        "t.repeat(1, repeat, 1, 1).expand(query.shape[0], -1, -1, -1)",
        "With grouped key and value heads, neighbouring query heads share one.",
        ("tests/runtime/test_prefix_equation.py",),
    ),
    Mutation(
        "merging: edits of an input in the wrong order",
        """if e.place.target.side not in ("input", "weight")] + of_input[::-1]""",
        """if e.place.target.side not in ("input", "weight")] + of_input""",
        "The last edit of an input is the nearest to the weight.",
        ("tests/runtime/test_sums.py", "tests/runtime/test_rest_of_life.py"),
    ),
    Mutation(
        "prefix: a position bias at the wrong keys",
        "F.pad(bias, (prefix.keys.shape[2], 0))",
        "F.pad(bias, (0, prefix.keys.shape[2]))",
        "The prefix's keys stand before the model's own.",
        ("tests/runtime/test_prefix_equation.py",),
    ),
    Mutation(
        "hooks: outputs that others hold are overwritten",
        "is_plain_inference() and count_forward_hooks(module) == 1",
        "is_plain_inference()",
        "Another hook of the module may have kept its output.",
        ("tests/runtime/test_products.py",),
    ),
    Mutation(
        "rows: rows of one delta are taken for neighbours",
        "rows = tuple(i for i, other in enumerate(use.rows) if other == names)",
        "rows = tuple(range(use.rows.index(names), use.rows.index(names) + use.rows.count(names)))",
        "A delta may have the first and the last row of a batch.",
        ("tests/runtime/test_rows.py",),
    ),
    Mutation(
        "rows: what a shorter prompt lacks is seen",
        "hidden[:, :length] = ~is_present",
        "hidden[:, :length] = False",
        "The rows that only the longest prompt has are no part of the others.",
        ("tests/runtime/test_rows.py",),
    ),
    Mutation(
        "switching: a frozen head trains",
        "return {name: saved.get(name, name not in frozen) for name in parameters}",
        "return {name: saved.get(name, True) for name in parameters}",
        'head="freeze" says that the head is not trained.',
        ("tests/methods/test_masks.py", "tests/methods/test_random_sums.py"),
    ),
    Mutation(
        "saving: an altered file is loaded",
        "if digest != self.facts.sha256:",
        "if not digest:",
        "Values that were changed after saving would be used.",
        ("tests/runtime/test_delta_files.py", "tests/runtime/test_store.py"),
    ),
    Mutation(
        "checkpoints: the learning rate starts again",
        'scheduler.load_state_dict(progress["scheduler"])',
        'dict(progress["scheduler"])',
        "A run that goes on would warm up a second time.",
        (
            "tests/train/test_train.py::test_an_interrupted_run_goes_on_with_the_same_numbers",
            "tests/train/test_kinds.py::test_a_run_goes_on",
        ),
    ),
    Mutation(
        "checkpoints: other dropout after going on",
        'torch.set_rng_state(tensors["cpu"])',
        'tensors["cpu"].clone()',
        "A run that was interrupted would not be the run that was not.",
        (
            "tests/train/test_train.py::test_an_interrupted_run_goes_on_with_the_same_numbers",
            "tests/train/test_kinds.py::test_a_run_goes_on",
        ),
    ),
    Mutation(
        "metrics: the wrong reference is the closest",
        "key=lambda row: (row[0] / max(row[1], 1), row[0])",
        "key=lambda row: row[0]",
        "An error rate is a ratio: few edits of a short reference can be more than many of a long one.",
        ("tests/train/test_metrics.py", "tests/train/test_official_metrics.py"),
    ),
    Mutation(
        "statistics: Bonferroni in place of Holm",
        "values[order] * np.arange(len(values), 0, -1)",
        "values[order] * len(values)",
        "A claim that the evidence decides would be called undecided.",
        ("tests/studies/test_stats.py",),
    ),
    Mutation(
        "gates: fixing them changes the weights",
        "self.delta[index] *= gain",
        "self.delta[index] *= 1",
        "What is computed after the gates are fixed is what was computed before.",
        ("tests/runtime/test_gates.py",),
    ),
    Mutation(
        "frozen layers: they run with dropout",
        "module.training = False",
        "module.training = True",
        "States that are kept must be those that every pass computes.",
        ("tests/train/test_frozen_layers.py", "tests/train/test_activation_cache.py"),
    ),
    Mutation(
        "tokenised rows: training and evaluation share them",
        '"content": f"{content} {split}", "training": split in training}',
        '"content": f"{content} {split}"}',
        "Rows for training hold the answer, and those for evaluation do not.",
        ("tests/train/test_caching.py::test_rows_for_training_are_not_those_for_evaluation",),
    ),
    Mutation(
        "budgets: what is left over is not spent",
        "if remaining >= unit_costs[i]:",
        "if remaining < 0:",
        "A size that could grow within the budget stays smaller.",
        ("tests/methods/test_budget.py",),
    ),
)
