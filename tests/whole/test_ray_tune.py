"""Ray Tune tries rates of a deltune run; each trial's score is the score of the same run in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from deltune.train.run import train

ray = pytest.importorskip("ray", reason="no ray: the extra ray has it")
tune = pytest.importorskip("ray.tune", reason="no ray: the extra ray has it")


@pytest.mark.slow  # a cluster starts a dozen processes
def test_a_search_of_rates(tmp_path: Path) -> None:
    spec = tiny.spec(tmp_path, epochs=1)
    root = str(tmp_path)

    def trial(values: dict[str, Any]) -> None:
        metrics = train(spec.replace(lr=values["lr"]), f"{root}/runs/{values['lr']:g}", progress=False)
        tune.report(dict(metrics.scores["validation"]))

    tuner = tune.Tuner(
        trial,
        param_space={"lr": tune.grid_search([1e-4, 1e-1])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=f"{root}/ray", verbose=0),
    )
    ray.init(num_cpus=1, include_dashboard=False)
    try:
        results = tuner.fit()
    finally:
        ray.shutdown()
    assert not results.errors and len(results) == 2
    for one in results:
        again = train(spec.replace(lr=one.config["lr"]), tmp_path / f"here-{one.config['lr']:g}", progress=False)
        assert one.metrics["loss"] == pytest.approx(again.scores["validation"]["loss"], abs=1e-6)
    assert results.get_best_result().metrics["loss"] == min(one.metrics["loss"] for one in results)
