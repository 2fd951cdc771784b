"""Play published policies again and compare: `python -m benchmark verify`.

`run --keep-policies` leaves a run's policy beside its table, <variant>-s<seed>.json and .csv.gz:

    <variant>-s<seed>.pt   the run's policy.pt if it left one, or else the "agent" and the "args" of
                           its checkpoint.pt: tensors and settings, no optimiser

The .json has the digests of policy, table and evaluation, under "policy". A program takes part if
`--evaluate FOLDER --eval-episodes N` plays a policy that lies there under the same name, and prints
"eval_episode=0, episodic_return=1.0" for each episode. Our scripts do.

The returns are compared with the recorded ones by the first of these rules that holds. On the
processor and with the versions that the run names, only the first rule counts:

    equal   each return is equal, to the last digit that is told
    close   each return is within 0.01 % or, if that is more, 0.01
    mean    the mean is within the 99.9 % prediction interval that the recorded episodes give for
            it: tasks with contacts are chaotic, so another processor's rounding gives other
            episodes
"""

import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tyro

from benchmark import data, programs
from benchmark.programs import at_least, refuse
from benchmark.report import must_have, only

LARGEST = 1_000_000  # bytes of a policy
MOST = 25_000_000  # bytes of all policies in a folder
CLOSE = 1e-4  # relative to a return
DIGIT = 0.011  # a little more than one of the last digit that is told
LEVEL = 0.999  # of the prediction interval
RULES = {
    "equal": "equal to the last digit",
    "close": "each return within 0.01 %",
    "mean": "mean within its interval",
}


class NotKept(Exception):
    """Why a run's policy is not kept."""


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def of_evaluation(returns: list) -> str:
    return digest(json.dumps(programs.strict(list(returns))).encode())


# --- keep -----------------------------------------------------------------------------------------


def policy(run: Path) -> tuple[str, bytes]:
    """The name of the file that holds a run's policy, and the bytes to keep of it."""
    own = run / "policy.pt"
    if own.is_file():
        return own.name, own.read_bytes()
    import torch

    path = run / "checkpoint.pt"
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        kept = {"args": saved["args"], "agent": saved["agent"]}
    except Exception as error:  # damage shows in many ways
        raise NotKept(f"{run} has no policy.pt, and no agent in a checkpoint.pt: {error}") from None
    plain = str, int, float, bool
    kept |= {name: value for name, value in saved.items() if isinstance(value, plain)}
    kept["agent"] = {name: value.clone() for name, value in kept["agent"].items()}  # no views
    content = io.BytesIO()
    torch.save(kept, content)
    return path.name, content.getvalue()


def keep(run: Path, table: Path):
    """Write a run's policy beside its committed table, whose .json is `table`, and note the digests
    there. NotKept if there is no policy, or if it is too large."""
    name, content = policy(run)
    if len(content) > LARGEST:
        size = f"{len(content) / 1e6:.1f} MB"
        raise NotKept(f"its policy is not kept: {size} are more than {LARGEST / 1e6:g}")
    info = data.load_json(table)
    if not info.get("evaluation"):
        raise NotKept("its policy is not kept: it has played no episode")
    info["policy"] = {
        "name": name,
        "sha256": digest(content),
        "table_sha256": digest(table.with_suffix(".csv.gz").read_bytes()),
        "evaluation_sha256": of_evaluation(info.get("evaluation") or []),
    }
    programs.write_bytes(table.with_suffix(".pt"), content)
    programs.write_json(table, info)


def weight(results: Path) -> int:
    """Bytes of all policies in a folder."""
    return sum(path.stat().st_size for path in results.rglob("*.pt") if path.is_file())


# --- play again -----------------------------------------------------------------------------------


@dataclass
class Replay:
    """A run whose policy is played again."""

    run: data.Run
    table: Path  # its .json
    program: Path | None = None  # the script that plays it
    can_play: bool = False
    own_stack: bool = False  # made on this processor, with these versions
    rule: str = ""  # the first one that held; empty if none did
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.run.algorithm} seed {self.run.seed}"

    @property
    def record(self) -> dict:
        """What was noted when the policy was kept."""
        return data.typed("policy in its table", self.run.info.get("policy"), dict)

    @property
    def env_id(self) -> str:
        """The id as the script knows it, with its module."""
        args = data.typed("args", self.run.info.get("args"), dict)
        return data.typed("env_id", args.get("env_id"), str)

    def script(self, folders: Iterable[Path]) -> Path:
        """The program that plays it. It must lie in the working folder, and in no folder that is
        verified, which may come from elsewhere."""
        words = shlex.split(data.typed("command", self.run.info.get("command"), str))
        at = programs.script_at(words)
        if at is None:
            raise ValueError("its command names no script")
        path = Path(words[at]).resolve()
        strange = [folder for folder in folders if path.is_relative_to(folder.resolve())]
        if strange or not path.is_relative_to(Path.cwd()) or not path.is_file():
            raise ValueError(f"its program {words[at]} is not one of this folder")
        return path

    def made_by(self, ours: dict) -> bool:
        """Whether the run names our processor and versions, and no others."""
        told = stack(self.run.info)
        return len(told) > 1 and all(ours.get(name) == value for name, value in told.items())

    def unchanged(self):
        """Note what has changed since the policy was kept."""
        kept = {
            "policy": (self.table.with_suffix(".pt"), "sha256"),
            "table": (self.table.with_suffix(".csv.gz"), "table_sha256"),
        }
        for name, (path, key) in kept.items():
            if digest(programs.read_bytes(path, data.MOST_TABLE)) != self.record.get(key):
                self.faults.append(f"{path.name} is not the {name} that was kept")
        told = of_evaluation(self.run.info.get("evaluation") or [])
        if told != self.record.get("evaluation_sha256"):
            self.faults.append(f"evaluation in {self.table.name} is not the one that was kept")

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
            if near.all():
                self.rule = "close"
                return
            low, high = prediction(recorded, len(returns))
            if low <= returns.mean() <= high:
                self.rule = "mean"
                return
        first = int(np.flatnonzero(returns != recorded)[0])
        self.faults.append(
            f"episode {first} was {recorded[first]:,.2f} and is {returns[first]:,.2f}; the mean of "
            f"{len(returns)} was {recorded.mean():,.2f} and is {returns.mean():,.2f}"
        )


def prediction(returns: np.ndarray, more: int) -> tuple[float, float]:
    """The interval in which the mean of `more` episodes lies with 99.9 %, by Student's t."""
    from scipy.stats import t

    n = len(returns)
    if n < 2:
        return np.nan, np.nan  # one episode says nothing about others
    width = t.ppf(0.5 + LEVEL / 2, n - 1) * returns.std(ddof=1) * np.sqrt(1 / n + 1 / more)
    return float(returns.mean() - width), float(returns.mean() + width)


def stack(info: dict) -> dict:
    """What the bits of a replay depend on, from a run's json or from `provenance`."""
    hardware = info.get("hardware")
    versions = info.get("versions")
    told = {}
    if isinstance(versions, dict):  # some call 2.13.0+cpu 2.13.0
        told = {name: str(value).partition("+")[0] for name, value in versions.items()}
    told["cpu"] = hardware.get("cpu") if isinstance(hardware, dict) else hardware
    return told


class Player:
    """A process of player.py for the runs of one script. After a kill a new one is started."""

    def __init__(self, script: Path, limit: float):
        self.script = script
        self.limit = limit
        self.process = None

    def start(self):
        path = f"{programs.HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmark.player", str(self.script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path},
        )  # fmt: skip

    def stop(self):
        if self.process:
            programs.kill_group(self.process.pid)
            self.process.wait()
            self.process = None

    def play(self, flags: list[str], log: Path) -> int:
        """Run the script to its end; its exit code."""
        if not self.process:
            self.start()
        job = {"argv": [str(self.script), *flags], "log": str(log)}
        clock = threading.Timer(self.limit, programs.kill_group, [self.process.pid])
        clock.start()
        try:
            print(json.dumps(job), file=self.process.stdin, flush=True)
            told = self.process.stdout.readline()
        except OSError:
            told = ""
        finally:
            clock.cancel()
        if told:
            return int(told)
        self.stop()
        raise ValueError(f"still at it after {self.limit:,.0f} s, see --time-limit, or killed")


def play(replay: Replay, player: Player):
    """Play a policy as often as its table says, and compare."""
    with TemporaryDirectory() as folder:
        run = Path(folder, "run")
        run.mkdir()
        name = replay.record.get("name")
        if name not in ("policy.pt", "checkpoint.pt"):
            raise ValueError(f"the policy's name is {name!r}")
        content = programs.read_bytes(replay.table.with_suffix(".pt"), LARGEST)
        (run / name).write_bytes(content)
        programs.write_json(run / "run.json", replay.run.info)
        flags = ["--evaluate", str(run), "--env-id", replay.env_id]
        flags += ["--eval-episodes", str(len(replay.run.evaluation))]
        log = Path(folder, "log.txt")
        code = player.play(flags, log)
        if code:
            raise ValueError(f"{programs.how_it_ended(code)}: {programs.last_word(log)}")
        returns = programs.episodes_told(log.read_text(errors="replace"))
    replay.judge(np.array(returns, float))


def played(replays: list[Replay], workers: int, limit: float) -> Iterator[Replay]:
    """Play them, `workers` at once; yields them in order, each as soon as it has been played."""
    mine = threading.local()  # each thread's player, for one script
    players = []

    def work(replay: Replay):
        if not replay.can_play:
            return
        player = getattr(mine, "player", None)
        if not player or player.script != replay.program:
            if player:
                player.stop()
            mine.player = Player(replay.program, limit)
            players.append(mine.player)
        try:
            play(replay, mine.player)
        except (OSError, ValueError) as error:
            replay.faults.append(str(error))

    ordered = sorted(replays, key=lambda replay: (str(replay.program), replay.run.env_id))
    pool = ThreadPoolExecutor(workers)
    try:
        done = [pool.submit(work, replay) for replay in ordered]
        for replay, future in zip(ordered, done, strict=True):
            future.result()
            yield replay
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for player in players:
            player.stop()


def in_words(replays: list[Replay]) -> str:
    """How the policies of an environment compare with their tables, in words."""
    parts = []
    for rule, words in RULES.items():
        count = sum(not replay.faults and replay.rule == rule for replay in replays)
        if count:
            parts.append(f"{count} {words}")
    bad = sum(bool(replay.faults) for replay in replays)
    if bad:
        parts.append(f"{bad} DIFFER" if bad > 1 else "1 DIFFERS")
    return ", ".join(parts)


def show(env_id: str, replays: list[Replay]):
    """Print a line for an environment, and one for each fault."""
    episodes = sum(len(replay.run.evaluation) for replay in replays)
    count = "1 policy" if len(replays) == 1 else f"{len(replays)} policies"
    print(f"{env_id}: {count}, {episodes} episodes: {in_words(replays)}", flush=True)
    for replay in replays:
        for fault in replay.faults:
            print(f"  {replay}: {data.plain(fault)}", flush=True)


def verify(
    folders: tyro.conf.Positional[tuple[Path, ...]],
    env_ids: tuple[str, ...] = (),
    modules: tuple[str, ...] = (),
    workers: int = 0,
    time_limit: float = 600.0,
):
    """Play the policies kept beside committed tables again, and compare the returns with the
    tables. A line for each environment says by which rule they agree, and one more names each
    policy that differs. The exit code is 1 if any differs, and 2 if there is none.

    Args:
        folders: folders in which `run --results --keep-policies` has kept policies.
        env_ids: environments to verify (default: all).
        modules: modules of ids like package.module:Env-v0; only the code of these may run.
        workers: number of policies at once (default: as many as there are cores).
        time_limit: seconds that a policy may play.
    """
    at_least(0, workers=workers)
    at_least(0.1, time_limit=time_limit)
    runs = data.find(folders)
    if env_ids:
        must_have(runs, "env_id", env_ids)
        runs = only(runs, "env_id", env_ids)
    unreadable = [run for run in runs if run.status == "unreadable"]
    kept = [run for run in runs if run.place and run.place.with_suffix(".pt").exists()]
    noted = [run for run in runs if "policy" in run.info and run not in kept]
    replays = [Replay(run, run.place) for run in kept + noted]
    if not replays and not unreadable:
        refuse(f"no policy is kept in {', '.join(map(str, folders))}: see run --keep-policies")
    for run in unreadable:
        print(f"can't be read: {run.reason}")
    ours = stack(programs.provenance([sys.executable, __file__]))
    for replay in replays:
        replay.own_stack = replay.made_by(ours)
        try:
            replay.program = replay.script(folders)
            replay.unchanged()
            module = replay.env_id.rpartition(":")[0]
            if module not in ("", "envpool", *modules):
                raise ValueError(f"not played: --modules {module} lets that module's code run")
            replay.can_play = True
        except (OSError, ValueError) as error:
            replay.faults.append(str(error))
    left = Counter(replay.run.env_id for replay in replays)
    for replay in played(replays, workers or len(os.sched_getaffinity(0)), time_limit):
        env_id = replay.run.env_id
        left[env_id] -= 1
        if not left[env_id]:
            show(env_id, [own for own in replays if own.run.env_id == env_id])
    bad = [replay for replay in replays if replay.faults]
    strange = sum(not replay.own_stack for replay in replays)
    print(
        f"{len(replays) - len(bad)} of {len(replays)} policies play as their tables say; "
        f"{strange} were made by other versions or on another processor than this; "
        f"{len(runs) - len(unreadable) - len(replays)} runs have no policy"
    )
    if bad or unreadable:
        raise SystemExit(1)
