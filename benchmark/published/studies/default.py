"""A default entropy bonus that costs no robot: the steps of its protocol.

    python benchmark/published/studies/default.py 1          # Ant, to 200k of the 1M schedule
    python benchmark/published/studies/default.py 2 ARM...   # eight tasks, 1M steps
    python benchmark/published/studies/default.py 3 ARM      # ten fresh seeds on two robots

Protocol, written before the first run. Seven arms are weights of the bonus and ways to lower it,
see ARMS; `0` and `0.01` are the two defaults so far. Step 1 has seeds 301 to 305. It keeps the arms
with no loss on Ant-v4 beside weight 0: by the mean training return of the steps from 100k to 200k,
P(better) above 0.35 and p above 0.05 (Mann and Whitney's test, five seeds against five). On Ant
`0.01/dims` is 0.00125, so it is not run twice. Step 2 trains what is left on eight tasks, seeds 301
to 303. It judges by final policies (20 episodes without noise) and by training returns (the last
100 episodes). A winner loses on no task at p < 0.01 in either measure, and has the highest P over
the rest. If no arm does, the default is weight 0. Ten fresh seeds of the winner are reported,
whatever they are.

Added later. In step 2 `0.01/dims` is not run on the pendulums: there it is 0.01, whose ten runs are
published. Step 3, the fresh seeds 311 to 320, begins with the two tasks where its P was below 0.5.

Rows that are in results/default.csv are not made again. Two processes may share the work.
"""

import contextlib
import csv
import fcntl
import importlib.util
import io
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "benchmark/published/results/default.csv"
FIELDS = ["step", "env_id", "arm", "seed", "steps", "training", "early", "final", "deviation"]
SCRIPT = "ppo_continuous_action.py"
FALLS = "scheduled.ent_coef *= remaining\n"
BONUS = "policy_loss - args.ent_coef * entropy +"
FLOOR = "policy_loss - args.ent_coef * (agent.actor_logstd * below).sum() +"
LOSS = f"    loss = {BONUS}"
ARMS = {  # weight, and changes of the script's text
    "0": ("0", []),
    "0.00125": ("0.00125", []),
    "0.003": ("0.003", []),
    "0.01": ("0.01", []),
    # 0.01 over the number of action dimensions: on Ant 0.00125
    "0.01/dims": (
        "0.01",
        [(BONUS, BONUS.replace("entropy +", "entropy / agent.actor_logstd.numel() +"))],
    ),
    # falls to 0 in the first quarter
    "quarter": ("0.01", [(FALLS, "scheduled.ent_coef *= max(4.0 * remaining - 3.0, 0.0)\n")]),
    # only where the deviation is below what it began with
    "below": (
        "0.01",
        [(LOSS, f"    below = agent.actor_logstd < args.log_std_init\n    loss = {FLOOR}")],
    ),
}
TASKS = [
    *("InvertedPendulum-v4", "InvertedDoublePendulum-v4", "Walker2d-v4", "Humanoid-v4"),
    *(f"dm_control/{x}-v0" for x in ("finger-spin", "walker-run", "hopper-hop", "quadruped-walk")),
]


def load_arm(arm: str):
    """The script with an arm's changes, as a module of one name for torch's compile cache."""
    text = (ROOT / SCRIPT).read_text()
    for old, new in ARMS[arm][1]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder = Path(tempfile.mkdtemp())
    (folder / SCRIPT).write_text(text)
    spec = importlib.util.spec_from_file_location("arm", folder / SCRIPT)
    module = sys.modules["arm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(step: int, env_id: str, arm: str, seed: int) -> list:
    """Train, and a row of the table. Step 1 stops after 200k steps."""
    script = load_arm(arm)
    log = script.Run.log

    def log_and_stop(run, metrics):
        run.deviation = metrics["charts/policy_std"]
        log(run, metrics)
        runs.append(run)
        if step == 1 and run.global_step >= 200_000:
            signal.raise_signal(signal.SIGTERM)

    runs = []
    script.Run.log = log_and_stop
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        flags = ["--env-id", env_id, "--seed", str(seed), "--run-dir", str(folder), "--no-cuda"]
        bonus = "--anneal-ent-coef", "--no-adapt-ent-coef", "--ent-coef", ARMS[arm][0]
        args = script.parse_args([*flags, *bonus])
        with contextlib.suppress(SystemExit):
            script.train(args)
        rows = np.loadtxt(folder / "episodes.csv", delimiter=",", skiprows=1)
        early = rows[(rows[:, 0] > 100_000) & (rows[:, 0] <= 200_000), 2].mean()
        final = ""
        if step > 1:
            play = script.parse_args(["--evaluate", str(folder), "--eval-episodes", "20"])
            with contextlib.redirect_stdout(io.StringIO()):
                final = round(float(np.mean(script.evaluate(play))), 3)
        steps = json.loads((folder / "run.json").read_text())["global_step"]
    training = round(float(rows[-100:, 2].mean()), 3)
    return [step, env_id, arm, seed, steps, training, round(early, 3), final, runs[-1].deviation]


def claimed(key: tuple, folder: Path) -> bool:
    """Whether this process is the first to lock a job. The lock lives as long as the process."""
    file = open(folder / "-".join(map(str, key)).replace("/", "_"), "w")  # noqa: SIM115
    LOCKS.append(file)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


LOCKS = []


def main(step: int, arms: list[str]):
    first = arms or [arm for arm in ARMS if arm != "0.01/dims"]
    jobs = [(1, "Ant-v4", arm, seed) for seed in range(301, 306) for arm in first]
    if step > 1:
        seeds, tasks = [(range(301, 304), TASKS), (range(311, 321), TASKS[2:4])][step - 2]
        jobs = [(step, task, arm, seed) for seed in seeds for task in tasks for arm in arms]
        jobs = [job for job in jobs if job[1][:8] != "Inverted" or job[2] != "0.01/dims"]
    if not TABLE.exists():
        TABLE.write_text(",".join(FIELDS) + "\n")
    folder = Path(tempfile.gettempdir()) / f"default-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for key in jobs:
        with open(TABLE) as table:
            ready = {tuple(row[:4]) for row in csv.reader(table)}
        if tuple(map(str, key)) not in ready and claimed(key, folder):
            row = measure(*key)
            with open(TABLE, "a", newline="") as table:
                csv.writer(table).writerow(row)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
