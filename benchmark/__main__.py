"""Run, report, compare, measure and tune: one command for all numbers of this project.

    python -m benchmark run --env-ids Hopper-v4 HalfCheetah-v4 --num-seeds 5 --workers 2 \\
        --command "python ppo_continuous_action.py --total-timesteps 1000000"
    python -m benchmark report runs/benchmark --output runs/report
    python -m benchmark compare runs/before runs/after
    python -m benchmark speed --command "python ppo_continuous_action.py --env-id HalfCheetah-v4"
    python -m benchmark tune --command "python ppo.py --total-timesteps 50000" \\
        --env-ids CartPole-v1 --search "learning-rate log 1e-5 1e-2" --study runs/tune
"""

import contextlib
import functools
import io
import sys

import tyro

from benchmark.compare import compare
from benchmark.report import report
from benchmark.run import run
from benchmark.speed import speed
from benchmark.tune import tune


def main():
    def later(verb):
        """The verb with its arguments, to be called when these are known to be right."""
        return functools.wraps(verb)(lambda *args, **kwargs: lambda: verb(*args, **kwargs))

    verbs = {verb.__name__: later(verb) for verb in (run, report, compare, speed, tune)}
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            call = tyro.extras.subcommand_cli_from_dict(
                verbs, prog="python -m benchmark", description=__doc__
            )
    except SystemExit as end:
        if not end.code:
            raise
        lines = [line.strip("│ ") for line in errors.getvalue().splitlines()]  # tyro's framed text
        said = " ".join(line for line in lines[1:] if line.strip("─╰╯"))
        print(f"benchmark: {said}", file=sys.stderr)
        raise SystemExit(2) from None
    call()


if __name__ == "__main__":
    main()
