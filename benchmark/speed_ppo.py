"""Speed of ppo_continuous_action.py (ppo.py if actions are discrete), compiled and eager, beside
Stable-Baselines3's PPO at the same hyper-parameters (CleanRL's) and beside the bare environment.
Or of ppo_kl_adaptive.py, with one environment and with five, beside the same SB3 and environment.

    python benchmark/speed_ppo.py --env-id HalfCheetah-v4
    python benchmark/speed_ppo.py --env-id CartPole-v1
    python benchmark/speed_ppo.py --script ppo_kl_adaptive --env-id HalfCheetah-v4

In each round, one after the other and each in a process of its own with one thread: the script's
kinds of runs, SB3, and the environment alone with random actions. Of a training the first
iterations are dropped and the next ones timed as they are: ours with logs and at least one
checkpoint, SB3 with its Monitor and no logs. Steps are those of the environment; CPU time is of the
process with its children. The cold start is the wall time from the start of the process to the
second rollout; torch's compile cache is empty in round 1 only. Needs stable_baselines3. Writes
results/speed_<script>-<env-id>.csv, a row per measurement.
"""

import contextlib
import csv
import importlib
import itertools
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Literal

HERE = Path(__file__).resolve().parent
COLUMNS = ("round", "what", "steps", "cpu_seconds", "wall_seconds")
COLUMNS += ("steps_per_cpu_second", "steps_per_wall_second", "cold_start_seconds")
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
PACKAGES = ("torch", "gymnasium", "mujoco", "numpy", "stable_baselines3")
CONTINUOUS = "--log-std-init 0 --no-scale-actions --clip-vloss"
DISCRETE = "--learning-rate 2.5e-4 --update-epochs 4 --no-clip-vloss"
EPISODES = "--episodes-per-batch 5"
OURS = {  # script: kind of run: flags
    "ppo_continuous_action": {"ours_compiled": f"{CONTINUOUS} --compile", "ours_eager": CONTINUOUS},
    "ppo": {"ours_compiled": f"{DISCRETE} --compile", "ours_eager": DISCRETE},
    "ppo_kl_adaptive": {"ours": EPISODES, "ours_5_envs": f"{EPISODES} --num-envs 5"},
}
TOTAL = 1_000_000  # of the whole training, which sets the learning rates; it is cut short


@dataclass
class Args:
    script: Literal["ppo", "ppo_kl_adaptive"] = "ppo"
    """ours; ppo is ppo_continuous_action unless actions are discrete"""
    env_id: str = "HalfCheetah-v4"
    """environment"""
    rounds: int = 5
    """rounds to measure"""
    warmup: int = 2
    """first iterations of every training, dropped"""
    iterations: int | None = None
    """iterations of ours to time; default 12, or 160 if actions are discrete"""
    sb3_iterations: int | None = None
    """iterations of SB3 to time; default 4, or 40 if actions are discrete"""
    output: Path = HERE / "results"
    """folder for the table"""


class Measured(BaseException):
    """Ends a timed training; not an Exception, which it might handle."""


def cpu_seconds() -> float:
    """CPU time of this process and of its children, ended or alive."""
    total = time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    pending = ["self"]
    while pending:
        folder = Path("/proc", pending.pop())
        with contextlib.suppress(OSError):  # it just ended
            if folder.name != "self":
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            for children in folder.glob("task/*/children"):
                pending += children.read_text().split()
    return total


def timed(rollout, steps, job: dict, result: dict):
    """A trainer's `rollout` that notes the time as it begins and ends the training when due.
    `steps` tells the steps done so far from what `rollout` is called with; None doesn't count."""
    calls = itertools.count()

    def wrapper(*args, **kwargs):
        if steps(*args) is None:
            return rollout(*args, **kwargs)
        k = next(calls) - job["warmup"]
        if k == 1 - job["warmup"]:
            result["cold"] = time.time() - job["start"]
        if k in (0, job["amount"]):
            result["marks"] += [(steps(*args), cpu_seconds(), time.perf_counter())]
        if k == job["amount"]:
            raise Measured
        return rollout(*args, **kwargs)

    return wrapper


def train_ours(job: dict, result: dict):
    script = importlib.import_module(job["script"])
    # a[2] is the Run, or None where the rollout only finds the scale of observations
    script.rollout = timed(script.rollout, lambda *a: a[2] and a[2].global_step, job, result)
    flags = OURS[job["script"]][job["what"]].split()
    flags += f"--env-id {job['env_id']} --seed {job['round']} --run-dir {job['folder']}".split()
    flags += f"--no-cuda --total-timesteps {TOTAL}".split()
    flags += f"--checkpoint-interval {min(20, job['amount'])}".split()
    script.train(script.parse_args(flags))


def train_sb3(job: dict, result: dict):
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    thunks = [lambda: Monitor(gym.make(job["env_id"], disable_env_checker=True))]
    envs = DummyVecEnv(thunks * (4 if job["discrete"] else 1))
    if job["discrete"]:
        rate = 2.5e-4
        settings = {"n_steps": 128, "batch_size": 128, "n_epochs": 4, "ent_coef": 0.01}
    else:
        rate, envs = 3e-4, VecNormalize(envs, gamma=0.99)
        settings = {"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "ent_coef": 0.0}
        settings["clip_range_vf"] = 0.2
    net = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh}
    model = PPO(
        "MlpPolicy", envs, learning_rate=lambda left: rate * left, gamma=0.99, gae_lambda=0.95,
        clip_range=0.2, vf_coef=0.5, max_grad_norm=0.5, policy_kwargs=net | {"ortho_init": True},
        seed=job["round"], device="cpu", verbose=0, **settings,
    )  # fmt: skip
    rollout = model.collect_rollouts
    model.collect_rollouts = timed(rollout, lambda *_: model.num_timesteps, job, result)
    model.learn(TOTAL)


def step_bare(job: dict, result: dict):
    import gymnasium as gym

    env = gym.make(job["env_id"], disable_env_checker=True)
    env.action_space.seed(job["round"])
    actions = [env.action_space.sample() for _ in range(job["amount"])]
    env.reset(seed=job["round"])
    result["marks"] += [(0, cpu_seconds(), time.perf_counter())]
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    result["marks"] += [(len(actions), cpu_seconds(), time.perf_counter())]


def measure(job: dict):
    """Do one measurement, write its row to result.json in the job's folder."""
    work = {"sb3": train_sb3, "bare": step_bare}.get(job["what"], train_ours)
    result = {"marks": []}
    with contextlib.suppress(Measured):
        work(job, result)
    steps, cpu, wall = (after - before for before, after in zip(*result["marks"], strict=True))
    row = [job["round"], job["what"], steps, round(cpu, 4), round(wall, 4)]
    row += [round(steps / cpu, 1), round(steps / wall, 1), round(result.get("cold", 0), 2) or None]
    Path(job["folder"], "result.json").write_text(json.dumps(dict(zip(COLUMNS, row, strict=True))))


def run_job(job: dict, cache: str) -> dict:
    """Measure in a fresh process; the row of the table."""
    code = "import json, sys; from benchmark.speed_ppo import measure as m; m(json.load(sys.stdin))"
    env = os.environ | ONE_THREAD | {"TORCHINDUCTOR_CACHE_DIR": cache}
    options = {"env": env, "cwd": HERE.parent, "text": True, "capture_output": True}
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(job | {"folder": folder, "start": time.time()})
        done = subprocess.run([sys.executable, "-c", code], input=text, **options)
        if done.returncode or "going on eagerly" in done.stdout:
            raise SystemExit(f"{job['what']} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return json.loads(Path(folder, "result.json").read_text())


def report(rows: list[dict]):
    def line(name: str, digits: str, columns, end: str = ""):
        parts = (f"{median(c):{digits}} ({min(c):{digits}} to {max(c):{digits}})" for c in columns)
        print(f"{name:21}", *(f"{part:29}" for part in parts), end)

    speeds = COLUMNS[5:7]
    of = {}
    for row in rows:
        of.setdefault(row["what"], []).append(row)
    print(
        f"{'median (range), steps':21} {'per CPU-second':29} {'per wall second':29} cold starts, s"
    )
    for what, mine in of.items():
        cold = (f"{row[COLUMNS[7]]:.1f}" for row in mine if row[COLUMNS[7]])
        line(what, ",.0f", ([row[s] for row in mine] for s in speeds), " ".join(cold))
    *kinds, sb3, bare = of
    for ours, other in itertools.product(kinds, (sb3, bare)):
        pairs = list(zip(of[ours], of[other], strict=True))
        line(f"{ours} / {other}", ".2f", ([a[s] / b[s] for a, b in pairs] for s in speeds))
    apart = sum(abs(row["wall_seconds"] / row["cpu_seconds"] - 1) > 0.05 for row in rows)
    print(f"wall and CPU time more than 5 % apart: {apart} of {len(rows)} measurements")


def main(args: Args):
    import gymnasium as gym

    gym.logger.min_level = gym.logger.ERROR  # v4 ids are "out of date", and meant
    discrete = not isinstance(gym.make(args.env_id).action_space, gym.spaces.Box)
    print(*COLUMNS, flush=True)
    ours = args.iterations or (160 if discrete else 12)
    sb3 = args.sb3_iterations or (40 if discrete else 4)
    script = "ppo_continuous_action" if args.script == "ppo" and not discrete else args.script
    amounts = dict.fromkeys(OURS[script], ours)
    amounts |= {"sb3": sb3, "bare": 200_000 if discrete else 20_000}
    job = {"script": script, "env_id": args.env_id, "discrete": discrete, "warmup": args.warmup}
    cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or ["unknown"]
    facts = {"cpu": cpu[0], "cores": os.cpu_count(), "load average before": os.getloadavg()[0]}
    facts |= {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    facts |= {"iterations": f"{args.warmup} dropped, then {ours} of ours, {sb3} of sb3 timed"}

    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for k in range(1, args.rounds + 1):
            for what, amount in amounts.items():
                job |= {"round": k, "what": what, "amount": amount}
                rows.append(run_job(job, cache))
                print(*rows[-1].values(), flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"speed_{args.script}-{args.env_id.replace('/', '-')}.csv"
    with open(path, "w", newline="") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in facts.items())
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    report(rows)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
