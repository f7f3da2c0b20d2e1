"""Train every job of a file, one after the other; each process that test_several launches runs this script."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deltune.cli.train import exit_with_launcher
from deltune.train.config import RunConfig
from deltune.train.run import train

if __name__ == "__main__":
    exit_with_launcher()
    for job in json.loads(Path(sys.argv[1]).read_text()):
        train(RunConfig.from_flat(**job["spec"]), job["output"], progress=False, device="cpu", sharding=job["sharded"])
