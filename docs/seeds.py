"""Train a configuration with several seeds and print the spread of its test metrics.

python docs/seeds.py CONFIG COUNT [flags of dtrain run]...
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path


def main(config: str, count: str, *flags: str) -> None:
    """Run seeds 0 to ``count`` - 1 into ``runs/seeds/NAME/SEED``, which a second call resumes."""
    folder = Path("runs", "seeds", Path(config).stem)
    values: dict[str, list[float]] = {}
    for seed in range(int(count)):
        place = [f"--set=seed={seed}", f"--run-dir={folder / str(seed)}"]
        done = subprocess.run(
            [sys.executable, "-m", "dtrain", "run", config, *flags, *place, "--json"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        test = json.loads(done.stdout.splitlines()[-1])["metrics"]["test"]
        for name in ("accuracy", "macro_f1", "roc_auc"):
            if name in test:
                values.setdefault(name, []).append(test[name])
        print(f"seed {seed}", *(f"{name} {found[-1]:.4f}" for name, found in values.items()))
    for name, found in values.items():
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        print(
            f"{Path(config).stem}: test {name} mean {statistics.mean(found):.4f}, standard "
            f"deviation {spread:.4f}, min {min(found):.4f}, max {max(found):.4f}, n {len(found)}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
