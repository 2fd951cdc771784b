"""`python benchmark/published/studies/saturation.py RUNS` prints, for each run of ppo_cma.py on
Humanoid-v4 and each million steps, how many mean actions (%) are near a bound (1 % of the box) or
beyond it."""

import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

print("run", *(f"{k}M" for k in range(1, 11)), sep=",")
for folder in sorted(Path(sys.argv[1]).glob("Humanoid-v4/*/*/run")):
    log = EventAccumulator(str(folder)).Reload()
    if (tag := "charts/saturated_means") in log.Tags()["scalars"]:
        each = ([p.value for p in log.Scalars(tag) if p.step // 1e6 == k] for k in range(10))
        cells = [f"{100 * sum(x) / len(x):.2f}" if len(x) > 1 else "-" for x in each]
        print(folder.parent.name, *cells, sep=",")
