"""Run, report, compare, measure, tune and verify: one command for all numbers of this project.

    python -m benchmark run --env-ids Hopper-v4 HalfCheetah-v4 --num-seeds 5 --workers 2 \\
        --command "python ppo_continuous_action.py --total-timesteps 1000000"
    python -m benchmark report runs/benchmark --output runs/report
    python -m benchmark speed --command "python ppo_continuous_action.py --env-id HalfCheetah-v4"
"""

import signal
import sys

import tyro

from benchmark.compare import compare
from benchmark.report import report
from benchmark.run import run
from benchmark.speed import speed
from benchmark.tune import tune
from benchmark.verify import verify

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # what a verb has started ends with it
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    verbs = {verb.__name__: verb for verb in (run, report, compare, speed, tune, verify)}
    tyro.extras.subcommand_cli_from_dict(verbs, prog="python -m benchmark", description=__doc__)
