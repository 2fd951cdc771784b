"""Play published policies again and compare: `python -m benchmark verify`.

`run --keep-policies` leaves a run's policy beside its table, as <variant>-s<seed>.pt: the run's
policy.pt if it left one, or else the tensors and settings of its checkpoint.pt. The table's .json
has the digests of policy, table and evaluation. A program takes part if `--evaluate FOLDER
--eval-episodes N` plays a policy that lies there under its old name, and prints "eval_episode=0,
episodic_return=1.0" for each episode.

The returns are compared with the recorded ones by the first of these rules that holds. On the
processor and with the versions that the run names, only the first rule counts:

    equal   each return is equal, to the last digit that is told
    close   each return is within 0.01 % or, if that is more, 0.01
    mean    the mean is within the 99.9 % prediction interval of the recorded episodes, as tasks
            with contacts are chaotic: another processor's rounding gives other episodes
"""

import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tyro
from tqdm import tqdm

from benchmark import data, programs
from benchmark.programs import at_least, refuse

LARGEST = 1_000_000  # bytes of a policy
CLOSE = 1e-4  # relative to a return
DIGIT = 0.011  # a little more than one of the last digit that is told
LEVEL = 0.999  # of the prediction interval
OWN = "benchmark.published.novel", "benchmark.published.pusher"  # modules of published runs
RULES = {
    "equal": "equal to the last digit",
    "close": "each return within 0.01 %",
    "mean": "mean within its interval",
}


def cores() -> int:
    """Those that this process may use; macOS tells only how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def digests(table: Path, policy: bytes, evaluation: list) -> dict[str, str]:
    """Of a run's policy, its table and the returns of its policy."""
    contents = {
        "sha256": policy,
        "table_sha256": table.with_suffix(".csv.gz").read_bytes(),
        "evaluation_sha256": json.dumps(evaluation).encode(),
    }
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def keep(run: Path, table: Path) -> str:
    """Write a run's policy beside its committed table, whose .json is `table`, and note the digests
    there. Returns why not, if so."""
    info = json.loads(table.read_text())
    path = next((run / x for x in ("policy.pt", "checkpoint.pt") if (run / x).is_file()), None)
    if not path or not info["evaluation"]:
        return "its policy is not kept: there is none, or it has played no episode"
    content = path.read_bytes()
    if path.name == "checkpoint.pt":
        import torch

        saved = torch.load(path, map_location="cpu", weights_only=True)
        kept = {"args": saved["args"]}
        kept["agent"] = {name: value.clone() for name, value in saved["agent"].items()}  # no views
        plain = str, int, float, bool
        kept |= {name: value for name, value in saved.items() if isinstance(value, plain)}
        packed = io.BytesIO()
        torch.save(kept, packed)
        content = packed.getvalue()
    if len(content) > LARGEST:
        size = f"{len(content) / 1e6:.1f} MB"
        return f"its policy is not kept: {size} are more than {LARGEST / 1e6:g}"
    info["policy"] = {"name": path.name} | digests(table, content, info["evaluation"])
    programs.write_bytes(table.with_suffix(".pt"), content)
    programs.write_json(table, info)
    return ""


def stack(info: dict) -> dict:
    """What the bits of a replay depend on, from a run's json or from `provenance`."""
    versions = info.get("versions") or {}
    found = {name: str(value).partition("+")[0] for name, value in versions.items()}  # 2.13.0+cpu
    hardware = info.get("hardware")
    return found | {"cpu": hardware.get("cpu") if isinstance(hardware, dict) else hardware}


def prediction(returns: np.ndarray, more: int) -> tuple[float, float]:
    """The interval in which the mean of `more` episodes lies with 99.9 %, by Student's t."""
    from scipy.stats import t

    n = len(returns)
    if n < 2:
        return np.nan, np.nan  # one episode says nothing about others
    width = t.ppf(0.5 + LEVEL / 2, n - 1) * returns.std(ddof=1) * np.sqrt(1 / n + 1 / more)
    return float(returns.mean() - width), float(returns.mean() + width)


@dataclass
class Replay:
    """A run whose policy is played again."""

    run: data.Run
    own_stack: bool  # made on this processor, with these versions
    rule: str = ""  # the first one that held; empty if none did
    faults: list[str] = field(default_factory=list)

    def play(self, folders: tuple[Path, ...], modules: tuple[str, ...]):
        """Play the policy as often as its table says, and compare. The script must lie in the
        working folder, and in no folder that is verified, which may come from elsewhere."""
        info = self.run.info
        content = self.run.place.with_suffix(".pt").read_bytes()
        for name, found in digests(self.run.place, content, info["evaluation"]).items():
            if found != info["policy"][name]:
                self.faults.append(f"another {name} than when the policy was kept")
        env_id = info["args"]["env_id"]
        module = env_id.rpartition(":")[0]
        if module not in ("", "envpool", *modules):
            raise ValueError(f"--modules {module} lets that module's code run")
        words = shlex.split(info["command"])
        script = Path(words[programs.script_at(words)]).resolve()
        strange = any(script.is_relative_to(folder.resolve()) for folder in folders)
        if strange or not script.is_relative_to(Path.cwd()) or not script.is_file():
            raise ValueError(f"its program {script} is not one of this folder")
        with TemporaryDirectory() as folder:
            Path(folder, Path(info["policy"]["name"]).name).write_bytes(content)
            programs.write_json(Path(folder, "run.json"), info)
            command = [sys.executable, str(script), "--evaluate", folder, "--env-id", env_id]
            command += ["--eval-episodes", str(len(self.run.evaluation))]
            variables = {"OMP_NUM_THREADS": "1"} | os.environ
            with open(f"{folder}/log.txt", "w+") as log:
                how = {"stdout": log, "stderr": log, "env": variables}
                code = subprocess.run(command, stdin=subprocess.DEVNULL, **how).returncode
            log = Path(folder, "log.txt")
            if code:
                raise ValueError(f"{programs.how_it_ended(code)}: {programs.last_word(log)}")
            self.judge(np.array(programs.played_returns(log.read_text(errors="replace"))))

    def judge(self, returns: np.ndarray):
        """Note the rule by which these returns equal the recorded ones, or the first difference."""
        recorded = self.run.evaluation
        if len(returns) != len(recorded):
            self.faults.append(f"{len(returns)} episodes were played, {len(recorded)} recorded")
            return
        if np.array_equal(returns, recorded, equal_nan=True):
            self.rule = "equal"
            return
        if not self.own_stack:
            near = np.abs(returns - recorded) <= CLOSE * np.abs(recorded) + DIGIT
            low, high = prediction(recorded, len(returns))
            if near.all() or low <= returns.mean() <= high:
                self.rule = "close" if near.all() else "mean"
                return
        first = int(np.flatnonzero(returns != recorded)[0])
        self.faults.append(
            f"episode {first} was {recorded[first]:,.2f} and is {returns[first]:,.2f}; the mean of "
            f"{len(returns)} was {recorded.mean():,.2f} and is {returns.mean():,.2f}"
        )


def show(env_id: str, replays: list[Replay]):
    """Print a line for an environment, and one for each fault."""
    counts = Counter("fault" if replay.faults else replay.rule for replay in replays)
    parts = [f"{counts[rule]} {words}" for rule, words in RULES.items() if counts[rule]]
    parts += [f"{counts['fault']} DIFFER"] if counts["fault"] else []
    episodes = sum(len(replay.run.evaluation) for replay in replays)
    tqdm.write(f"{env_id}: {len(replays)} policies, {episodes} episodes: {', '.join(parts)}")
    for replay in replays:
        for fault in replay.faults:
            tqdm.write(f"  {replay.run.algorithm} seed {replay.run.seed}: {fault}")
    sys.stdout.flush()


def verify(
    folders: tyro.conf.Positional[tuple[Path, ...]],
    env_ids: tuple[str, ...] = (),
    modules: tuple[str, ...] = OWN,
    workers: int = 0,
):
    """Play the policies kept beside committed tables again, and compare the returns with the
    tables. A line for each environment says by which rule they agree, and one more names each
    policy that differs. The exit code is 1 if any differs, and 2 if there is none.

    Args:
        folders: folders in which `run --results --keep-policies` has kept policies.
        env_ids: environments to verify (default: all).
        modules: modules of ids like package.module:Env-v0; only the code of these may run.
        workers: number of policies at once (default: as many as there are cores).
    """
    at_least(0, workers=workers)
    workers = workers or cores()
    runs = data.only(data.find(folders), "env_id", env_ids)
    unreadable = [run for run in runs if run.status == "unreadable"]
    ours = stack(programs.provenance([sys.executable, __file__]))
    replays = []
    for run in runs:
        if "policy" in run.info or run.place.with_suffix(".pt").exists():
            made_by = stack(run.info)
            same = len(made_by) > 1 and all(ours.get(name) == made_by[name] for name in made_by)
            replays.append(Replay(run, same))
    if not replays and not unreadable:
        refuse(
            f"no policy is kept in {', '.join(map(str, folders))}: give the command of `run` again "
            "with --results FOLDER --keep-policies, then verify FOLDER (nothing is trained again)"
        )
    print("".join(f"can't be read: {run.reason}\n" for run in unreadable), end="")
    print(f"{len(replays)} policies, some {len(replays) / workers / 6:.1f} minutes", flush=True)
    left = Counter(replay.run.env_id for replay in replays)
    pool = ThreadPoolExecutor(workers)
    jobs = {pool.submit(own.play, folders, modules): own for own in replays}
    with tqdm(total=len(replays), unit=" policies", leave=False, disable=None) as bar, pool:
        for job in as_completed(jobs):
            if error := job.exception():
                jobs[job].faults.append(f"can't be played: {error}")
            env_id = jobs[job].run.env_id
            left[env_id] -= 1
            bar.update()
            if not left[env_id]:
                show(env_id, [own for own in replays if own.run.env_id == env_id])
    bad = sum(bool(replay.faults) for replay in replays)
    strange = sum(not replay.own_stack for replay in replays)
    print(
        f"{len(replays) - bad} of {len(replays)} policies play as their tables say; "
        f"{strange} were made by other versions or on another processor than this; "
        f"{len(runs) - len(unreadable) - len(replays)} runs have no policy"
    )
    if bad or unreadable:
        raise SystemExit(1)
