"""Print which classes of transformers are held against the identity law, and why the others are not."""

from __future__ import annotations

from collections import Counter

from .specimens import entries
from .tables import HIDDEN, LAYERLESS, NORMLESS, REFUSED, UNMADE, looked_up

TABLES = {"not made": UNMADE, "refused by deltune": REFUSED}
HELD = {"held, LoRA elsewhere": HIDDEN, "held, layernorm alone": LAYERLESS, "held, LoRA alone": NORMLESS}


def main() -> None:
    count: Counter[str] = Counter()
    families: dict[str, set[str]] = {}
    for entry in entries():
        places = ((name, looked_up(table, entry)) for name, table in {**TABLES, **HELD}.items())
        name, reason = next(((name, reason) for name, reason in places if reason), ("held", ""))
        count[name] += 1
        families.setdefault(name, set()).add(entry.model_type)
        print(f"{entry.model_type:28}{entry.role:10}{entry.class_name:46}{name}{reason and ': '}{reason}")
    for name, number in count.most_common():
        print(f"{number:5} classes of {len(families[name]):3} families: {name}")


if __name__ == "__main__":
    main()
