"""Write the table of default learning rates in docs/studies/choosing.md from the committed results of own/defaults.

`python docs/hooks/defaults.py` writes it.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "studies" / "choosing.md"
TABLE = re.compile(r"(?<=<!-- defaults -->\n).*?(?=<!-- end -->)", re.DOTALL)
TASKS = {"sst2": "SST-2", "conll04": "CoNLL04", "g2p_us_to_gb": "g2p", "tickets": "tickets", "sick": "SICK"}

Cells = dict[tuple[str, str], tuple[float, float]]
"""Method and task -> the learning rate, and the mean of the test scores, in points."""


@cache
def measured() -> tuple[Cells, Cells]:
    """Return the scores at the default rates, and those at the best ones, of the tasks whose rates are all tried."""
    from deltune.methods.registry import default_learning_rate
    from deltune.studies.jobs.store import read_results
    from deltune.studies.own import METRIC, OWN_STUDIES
    from deltune.studies.scales import StudySetup

    records = {record.name: record for record in read_results(ROOT / "results", ["own/defaults"])}
    scores: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    rates: dict[tuple[str, str, str], float] = {}
    outcomes = OWN_STUDIES["own/defaults"](StudySetup("small", runs=False)).outcomes(records)
    waiting = {tuple(one.cell[axis] for axis in ("rate", "method", "task")) for one in outcomes if one.waiting}
    not_whole = {task for rate, _, task in waiting if rate == "best"}
    for one in outcomes:
        key = one.cell["rate"], one.cell["method"], one.cell["task"]
        if key in waiting or key[2] in not_whole:
            continue
        rates[key] = one.spec.get("lr") or default_learning_rate(one.spec["method"])
        name = next((name for name in METRIC if name in one.scores), "")
        scores[key].append(100 * one.scores[name] if name else 0.0)  # 0 of a run that diverged
    cells = {key: (rates[key], statistics.fmean(values)) for key, values in scores.items()}
    default, best = ({key[1:]: cell for key, cell in cells.items() if key[0] == rate} for rate in ("default", "best"))
    return default, best


def table() -> str:
    """Return the table: what a method reaches at its default rate, and in brackets at a better one."""
    from deltune.methods.registry import default_learning_rate
    from deltune.studies.own import DEFAULTS, SIZES

    default, best = measured()
    tasks = [task for task in TASKS if any(of == task for _, of in best)]
    lines = [f"| method | rate | {' | '.join(TASKS[task] for task in tasks)} |", f"|---|---|{'---|' * len(tasks)}"]
    for method in (*DEFAULTS, "lora, all linears"):
        cells = []
        for key in ((method, task) for task in tasks):
            text = f"{default[key][1]:.1f}" if key in default else "–"
            if key in best and (key not in default or best[key][0] != default[key][0]):
                text += f" ({best[key][1]:.1f} at {best[key][0]:g})"
            cells.append(text)
        rate = default_learning_rate(SIZES.get(method, (method,))[0], 320)
        lines.append(f"| `{method}` | {rate:g} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def with_table(page: str) -> str:
    """Return the page with the table as it is now."""
    return TABLE.sub(lambda match: table(), page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
