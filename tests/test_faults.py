"""Kill, corrupt, starve and mislead every script."""

import contextlib
import hashlib
import importlib
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from program import ROOT, assert_same, content, rows, scalars, status, write_checkpoint

# Flags of each script with which an iteration takes some 20 ms, and its steps
SETTINGS = {
    "ppo": (
        "--env-id CartPole-v1 --num-envs 2 --num-steps 32 --num-minibatches 2 --update-epochs 2",
        64,
    ),
    "ppo_continuous_action": (
        "--env-id Pendulum-v1 --num-envs 2 --num-steps 40 --num-minibatches 2 --update-epochs 2",
        80,
    ),
    "ppo_cma": (
        "--env-id Pendulum-v1 --iter-steps 200 --n-updates 2 --minibatch-size 32 "
        "--history-buffer-size 3",
        200,
    ),
    "ppo_kl_adaptive": (
        "--env-id CartPole-v1 --num-envs 2 --num-steps 32 --hid1-mult 4 --update-epochs 2 "
        "--value-epochs 2",
        64,
    ),
    "ppo_atari_multigpu": (  # some 100 ms, most of them for a checkpoint of 20 MB
        "--env-id Breakout-v5 --num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 1 "
        "--num-threads 1 --env-threads 1 --no-cuda",
        32,
    ),
}
ATARI = "ppo_atari_multigpu"  # whose games can't be restored
EVERY = pytest.mark.parametrize("script", SETTINGS)
N = 6  # iterations of a run

# --- scripts as from a shell, without the seconds that their imports take -------------------------

SERVER = """
import envpool, gc, io, json, mujoco, os, signal, subprocess, sys, torch
import torch._dynamo  # so does the first optimizer

root, *names = sys.argv[1:]
sys.path.insert(0, root)
for name in names:
    __import__(name)
code = {}
for name in names:
    with open(f"{root}/{name}.py") as file:
        code[name] = compile(file.read(), file.name, "exec")
gc.freeze()

def serve():  # until the end; in a child, its job
    children = set()
    try:
        for line in sys.stdin:
            task = json.loads(line)
            if "wait" in task:
                signal.alarm(300)
                pid, answer = os.waitpid(task["wait"], os.WUNTRACED)
                signal.alarm(0)
                if os.WIFSTOPPED(answer):
                    answer = -os.WSTOPSIG(answer)
                else:
                    answer = os.waitstatus_to_exitcode(answer)
                    children.remove(pid)
            elif "shell" in task:
                answer = subprocess.run(task["shell"], shell=True).returncode
            else:
                assert len(os.listdir("/proc/self/task")) == 1  # no fork takes a thread along
                answer = os.fork()
                if not answer:
                    children.clear()
                    return task
                children.add(answer)
            print(answer, flush=True)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    raise SystemExit

def too_long(*_):
    raise TimeoutError

signal.signal(signal.SIGALRM, too_long)
job = serve()
path = f"{root}/{job['script']}.py"
for fd, name in enumerate((os.devnull, os.devnull, job["err"])):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), fd)
save, saves = torch.save, 0

def spy(content, file):
    global saves
    saves += 1
    number = job["at"].get(str(saves))
    if number == signal.SIGKILL:  # half a checkpoint reaches the disk
        whole = io.BytesIO()
        save(content, whole)
        file.write(whole.getvalue()[: whole.tell() // 2])
        file.flush()
    if number:
        os.kill(os.getpid(), number)
    save(content, file)

torch.save, sys.argv = spy, [path, *job["argv"]]
exec(code[job["script"]], {"__name__": "__main__", "__file__": path})
sys.stdout.flush()
os._exit(0)  # sooner than by freeing what it has of the server
"""


class Server:
    """A process that has imported every script, and starts them by forks of itself; where that is
    allowed, in a mount namespace of its own."""

    NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
    PLAIN = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")  # root may write everywhere

    def __init__(self, folder: Path):
        self.folder, self.jobs = folder, 0
        trial = [*self.NAMESPACE, "mount", "-t", "tmpfs", "none", str(folder)]
        self.can_mount = subprocess.run(trial, capture_output=True).returncode == 0
        prefix = self.NAMESPACE if self.can_mount else self.PLAIN if os.getuid() == 0 else ()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", SERVER, str(ROOT), *SETTINGS], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, **task) -> int:
        print(json.dumps(task), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def shell(self, command: str):
        assert self.ask(shell=command) == 0

    def run(self, script: str, flags: str) -> "Job":
        """A job that has ended."""
        job = Job(self, script, flags)
        job.code = job.wait()
        return job

    def view(self, path: Path) -> Path:
        """Where this process finds what the server has mounted there."""
        return Path(f"/proc/{self.process.pid}/root{path}")


class Job:
    """A script in a process; `at` has the signals that it sends itself as it starts to write its
    first, second, ... checkpoint."""

    def __init__(self, server: Server, script: str, flags: str, at: dict[int, int] | None = None):
        self.server, self.file = server, server.folder / f"{server.jobs}.err"
        server.jobs += 1
        task = {"script": script, "argv": flags.split(), "at": at or {}, "err": str(self.file)}
        self.pid = server.ask(**task)

    def wait(self) -> int:
        """The exit status, or less than 0: the signal that ended or stopped it."""
        return self.server.ask(wait=self.pid)

    def kill(self, number: int):
        os.kill(self.pid, number)

    @property
    def err(self) -> str:
        """What it wrote to standard error."""
        return self.file.read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.process.stdin.close()
    server.process.wait()


@pytest.fixture(scope="module")
def begun(server, tmp_path_factory):
    """A copy of a run that was stopped before its first iteration."""
    folders = {}

    def copy(script: str, folder: Path) -> Path:
        if script not in folders:
            folders[script] = tmp_path_factory.mktemp(script) / "begun"
            job = Job(server, script, new(script, folders[script]), {1: signal.SIGTERM})
            assert job.wait() == 128 + signal.SIGTERM, job.err
        shutil.copytree(folders[script], folder, dirs_exist_ok=True)
        return folder

    return copy


@pytest.fixture(scope="module")
def undisturbed(server, begun, tmp_path_factory):
    """The folder of a run that was never killed. As Atari's games are new ones after each resume,
    its run is stopped by SIGTERM and resumed at the iterations `resumed`."""
    folders = {}

    def get(script: str, resumed: list[int], iterations: int = N) -> Path:
        stops = sorted({*resumed} - {0}) if script == ATARI else []
        key = script, *stops, iterations
        if key not in folders:
            folders[key] = folder = begun(script, tmp_path_factory.mktemp(script) / "run")
            for last, stop in zip([0, *stops], [*stops, None], strict=True):
                at = {stop - last: signal.SIGTERM} if stop else {}
                job = Job(server, script, resume(script, folder, iterations), at)
                assert job.wait() == (128 + signal.SIGTERM if stop else 0), job.err
        return folders[key]

    return get


def new(script: str, folder: Path) -> str:
    flags, steps = SETTINGS[script]
    return f"{flags} --checkpoint-interval 1 --total-timesteps {N * steps} --run-dir {folder}"


def resume(script: str, folder: Path, iterations: int = N) -> str:
    return f"--resume {folder} --total-timesteps {iterations * SETTINGS[script][1]}"


def load(script: str, folder: Path) -> dict:
    """Its checkpoint, but for the process that started it."""
    checkpoint = importlib.import_module(script).load_checkpoint(folder)
    checkpoint["training"].pop("launcher", None)
    return checkpoint


def assert_same_run(script: str, folder: Path, other: Path):
    """Checkpoint, episodes and TensorBoard, to the bit; not what measures time."""
    assert_same(load(script, folder), load(script, other))
    assert rows(folder) == rows(other)
    steps = [int(step) for step, _, _ in rows(folder)[1:]]
    assert steps == sorted(steps)
    logs, wanted = (
        {tag: points for tag, points in scalars(f).items() if not tag.startswith("charts/share_")}
        for f in (folder, other)
    )
    assert logs == wanted
    for tag in logs.keys() - {"charts/episodic_return", "charts/episodic_length"}:
        assert len({step for step, _ in logs[tag]}) == len(logs[tag]), tag
    assert status(folder) == status(other) == "finished"
    assert not list(folder.glob("*.tmp"))


# --- kills, signals, a second process -------------------------------------------------------------


@EVERY
@pytest.mark.parametrize(
    ("kills", "iterations"),
    [
        ({"training": 1, "write": 1, "set-up": 1}, N),
        pytest.param({"training": 10, "write": 7, "set-up": 3}, 50, marks=pytest.mark.slow),
    ],
    ids=["3 kills", "20 kills"],
)
def test_killed_again_and_again(script, kills, iterations, server, begun, undisturbed, tmp_path):
    rng = random.Random(1)
    folder, resumed = begun(script, tmp_path / "run"), []
    moments = [moment for moment, times in kills.items() for _ in range(times)]
    rng.shuffle(moments)
    for moment in moments:
        k = rng.randint(1, 2)  # the stops after the first bound its progress
        stops = {"set-up": [1], "training": [k, k + 1, k + 2], "write": []}[moment]
        at = dict.fromkeys(stops, signal.SIGSTOP) or {k + 1: signal.SIGKILL}
        job = Job(server, script, resume(script, folder, iterations), at)
        if moment == "training":
            assert job.wait() == -signal.SIGSTOP, job.err
            start = time.monotonic()
            job.kill(signal.SIGCONT)
            assert job.wait() == -signal.SIGSTOP, job.err
            iteration = time.monotonic() - start
            job.kill(signal.SIGCONT)
            time.sleep(rng.uniform(0, 1.5 * iteration))
        elif moment == "set-up":
            time.sleep(rng.uniform(0, 0.2))
        if moment != "write":
            job.kill(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL, job.err
        resumed.append(load(script, folder)["iteration"])
        if moment == "write":
            assert (folder / "checkpoint.pt.tmp").stat().st_size > 1000
    assert len({*resumed}) > sum(kills.values()) / 2
    assert server.run(script, resume(script, folder, iterations)).code == 0
    assert_same_run(script, folder, undisturbed(script, resumed, iterations))


@EVERY
def test_sigusr1_and_further_signals(script, begun, undisturbed, tmp_path, monkeypatch, capsys):
    module, folder = importlib.import_module(script), begun(script, tmp_path / "run")
    plain, numbers = module.rollout, [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM]

    def rollout(agent, envs, run, *args):
        if run.iteration == 1:
            for number in numbers:
                os.kill(os.getpid(), number)
        return plain(agent, envs, run, *args)

    monkeypatch.setattr(module, "rollout", rollout)
    handlers = [signal.getsignal(number) for number in numbers]
    with pytest.raises(SystemExit) as end:
        module.train(module.parse_args(resume(script, folder).split()))
    assert end.value.code == 128 + signal.SIGUSR1
    assert [signal.getsignal(number) for number in numbers] == handlers
    captured = capsys.readouterr()
    assert f"; go on with: python {script}.py --resume {folder}\n" in captured.out
    assert captured.err.count("\nstopping after this iteration; Ctrl-C: at once\n") == 1
    assert load(script, folder)["iteration"] == 2
    assert status(folder) == "running"
    monkeypatch.setattr(module, "rollout", plain)
    module.train(module.parse_args(["--resume", str(folder)]))
    assert_same_run(script, folder, undisturbed(script, [2]))


@EVERY
def test_a_signal_during_set_up_ends_in_a_checkpoint(script, begun, tmp_path, monkeypatch, capsys):
    module, folder = importlib.import_module(script), tmp_path / "run"
    plain = module.Agent

    def agent(*args, **kwargs):  # made before there is a folder
        os.kill(os.getpid(), signal.SIGUSR1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(module, "Agent", agent)
    with pytest.raises(SystemExit) as end:
        module.train(module.parse_args(new(script, folder).split()))
    assert end.value.code == 128 + signal.SIGUSR1
    assert f"--resume {folder}\n" in capsys.readouterr().out
    assert_same(load(script, folder), load(script, begun(script, tmp_path / "begun")))
    assert status(folder) == "running"


@EVERY
def test_a_second_process_is_turned_away(script, server, begun, undisturbed, tmp_path):
    folder = begun(script, tmp_path / "run")
    at = {2: signal.SIGSTOP, 3: signal.SIGKILL}
    job = Job(server, script, resume(script, folder), at)
    assert job.wait() == -signal.SIGSTOP, job.err
    before = content(folder)
    second = server.run(script, resume(script, folder))
    assert second.code == 2
    assert second.err == f"{script}.py: {folder}: another process is training there\n"
    assert content(folder) == before
    job.kill(signal.SIGCONT)
    assert job.wait() == -signal.SIGKILL
    assert load(script, folder)["iteration"] == 2
    assert server.run(script, resume(script, folder)).code == 0
    assert_same_run(script, folder, undisturbed(script, [2]))


# --- storage that is full or read-only ------------------------------------------------------------


@pytest.fixture
def disk(server, tmp_path):
    """A file system of 64 MB in the server's namespace; a plain folder where there is none."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if server.can_mount:
        server.shell(f"mount -t tmpfs -o size=64m none {folder}")
    yield folder
    if server.can_mount:
        server.shell(f"umount --lazy {folder}")


def fill(folder: Path, left: int):
    """Fill the file system but for so many bytes."""
    with open(folder / "filler", "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))
        file.truncate(file.tell() - left)


ERRORS = {"disk": "[Errno 28] No space left on device", "limit": "[Errno 27] File too large"}


@EVERY
@pytest.mark.parametrize("how", ERRORS)
def test_no_room_for_a_checkpoint(script, how, server, disk, begun, undisturbed):
    run, view = disk / "run", server.view(disk)
    begun(script, view / "run")
    job = Job(server, script, resume(script, run), {3: signal.SIGSTOP})
    assert job.wait() == -signal.SIGSTOP, job.err
    half = (view / "run" / "checkpoint.pt").stat().st_size // 2
    how = how if server.can_mount else "limit"
    if how == "disk":
        fill(view, half)
    else:
        resource.prlimit(job.pid, resource.RLIMIT_FSIZE, (half, half))
    job.kill(signal.SIGCONT)
    assert job.wait() == 1
    assert re.fullmatch(
        rf"{run}: stopped in iteration 4, after step \d+: {run}/checkpoint.pt.tmp can't be "
        rf"written: {re.escape(ERRORS[how])}; its checkpoint.pt is the last good one: mend the "
        r"cause and --resume\n",
        job.err,
    ), job.err
    assert load(script, view / "run")["iteration"] == 2
    assert status(view / "run") == "failed"
    assert not list((view / "run").glob("*.tmp"))
    if how == "disk":
        server.shell(f"mount -o remount,size=128m {disk}")
    assert server.run(script, resume(script, run)).code == 0
    assert_same_run(script, view / "run", undisturbed(script, [2]))


@EVERY
def test_no_room_for_the_logs(script, server, disk, begun, undisturbed):
    run, view = disk / "run", server.view(disk)
    begun(script, view / "run")
    flags = f"{resume(script, run, 1000)} --checkpoint-interval 1000"
    job = Job(server, script, flags)
    end = time.monotonic() + 60
    while sum(path.stat().st_size for path in (view / "run").glob("events.*")) < 2**12:
        assert time.monotonic() < end
        time.sleep(0.01)
    how = "disk" if server.can_mount else "limit"
    if how == "disk":
        fill(view, 0)
    else:
        resource.prlimit(job.pid, resource.RLIMIT_FSIZE, (2**12, 2**12))
    assert job.wait() == 1
    assert re.search(  # TensorBoard's own thread may have its say before, after and around it
        rf"{run}: stopped in iteration \d+, after step [\d,]+: .*(episodes.csv|events|logs) .*"
        rf"{re.escape(ERRORS[how])}; its checkpoint.pt is the last good one: mend the cause and "
        r"--resume",
        job.err,
    ), job.err
    assert load(script, view / "run")["iteration"] == 0
    if how == "disk":
        server.shell(f"mount -o remount,size=128m {disk}")
    flags = f"{resume(script, run)} --checkpoint-interval 1"
    assert server.run(script, flags).code == 0
    assert_same_run(script, view / "run", undisturbed(script, []))


@EVERY
def test_a_read_only_folder_is_one_line(script, server, disk, begun):
    run, view = disk / "run", server.view(disk)
    begun(script, view / "run")
    lock = "mount -o remount,ro" if server.can_mount else "chmod -R a-w"
    server.shell(f"{lock} {disk}")
    before = content(view)
    for folder, flags in ((run, resume(script, run)), (disk / "new", new(script, disk / "new"))):
        job = server.run(script, flags)
        assert job.code == 2
        error = "(Read-only file system|Permission denied)"
        line = rf"{script}.py: {folder}: {error}; choose a folder to write to\n"
        assert re.fullmatch(line, job.err), job.err
    assert content(view) == before
    if not server.can_mount:
        server.shell(f"chmod -R u+w {disk}")


# --- a checkpoint or a log that is not what was written -------------------------------------------


def refused(capsys, script: str, flags: str) -> str:
    """What comes after the script's name in the line that it ends with."""
    module = importlib.import_module(script)
    with pytest.raises(SystemExit) as end:
        args = module.parse_args(flags.split())
        (module.evaluate if args.evaluate else module.train)(args)
    assert end.value.code == 2
    name, line = capsys.readouterr().err.split(": ", 1)
    assert name == f"{script}.py"
    assert line.count("\n") == 1
    return line


DAMAGED = "damaged, or not a checkpoint of this project"


@EVERY
def test_no_cut_and_no_flipped_bit_passes(script, begun, tmp_path, capsys):
    module = importlib.import_module(script)
    path = begun(script, tmp_path / "run") / "checkpoint.pt"
    data, rng = path.read_bytes(), random.Random(1)

    def check():
        with pytest.raises(SystemExit) as end:
            module.load_checkpoint(path.parent)
        assert end.value.code == 2
        assert capsys.readouterr().err == f"{script}.py: {path}: {DAMAGED} (ValueError)\n"

    for size in {len(data) * k // 10 for k in range(10)} | {len(data) - k for k in range(1, 41)}:
        path.write_bytes(data[:size])
        check()
    for mode in ("resume", "evaluate"):
        line = refused(capsys, script, f"--{mode} {path.parent}")
        assert line == f"{path}: {DAMAGED} (ValueError)\n"
    path.write_bytes(data)
    with open(path, "r+b") as file:
        for _ in range(200):
            at = rng.randrange(len(data))
            os.pwrite(file.fileno(), bytes([data[at] ^ 1 << rng.randrange(8)]), at)
            check()
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert module.load_checkpoint(path.parent)["iteration"] == 0


OTHER_ENV = dict.fromkeys(SETTINGS, "Acrobot-v1") | {
    "ppo_continuous_action": "InvertedPendulum-v4",
    "ppo_cma": "InvertedPendulum-v4",
    ATARI: "Pong-v5",
}


@EVERY
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("another script's", "{path}: written by ppo_x.py; use that script"),
        ("another version's", "{path}: of another version of {script}.py, which has --epsilon"),
        ("another environment's", "the checkpoint does not fit this environment"),
        ("empty", "{path}: " + DAMAGED),
        ("text", "{path}: " + DAMAGED),
        ("weights", "{path}: " + DAMAGED),
        ("folder", "{folder}: no checkpoint.pt there"),
        ("the file itself", "{path}: no checkpoint.pt there"),
    ],
)
def test_wrong_checkpoints_are_one_line(script, what, says, begun, tmp_path, capsys):
    folder = begun(script, tmp_path / "run")
    path = folder / "checkpoint.pt"
    good = importlib.import_module(script).load_checkpoint(folder)
    modes = ["evaluate"] if what == "another environment's" else ["evaluate", "resume"]
    if what == "another script's":
        write_checkpoint(folder, good | {"script": "ppo_x"})
    elif what == "another version's":
        write_checkpoint(folder, good | {"args": good["args"] | {"epsilon": 0.2}})
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "text":
        path.write_text("to do: train\n" * 99)
    elif what == "weights":  # a file of torch's, whole
        torch.save(good["agent"], path)
    elif what == "folder":
        path.unlink()
        path.mkdir()
    before = content(folder)
    for mode in modes:
        place = path if what == "the file itself" else folder
        more = f"--env-id {OTHER_ENV[script]}" if what == "another environment's" else ""
        line = refused(capsys, script, f"--{mode} {place} {more}")
        assert line.startswith(says.format(path=path, folder=folder, script=script)), line
    assert content(folder) == before


class Bomb:
    """Unpickled, it runs `function(*args)`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@EVERY
@pytest.mark.parametrize("wrapped", ["a pickle", "a pickle and its digest", "a checkpoint"])
def test_no_code_in_a_checkpoint_runs(script, wrapped, begun, tmp_path, capsys):
    folder, mark = begun(script, tmp_path / "run"), tmp_path / "mark"
    path = folder / "checkpoint.pt"
    good = importlib.import_module(script).load_checkpoint(folder)
    for bomb in Bomb(os.system, f"touch {mark}"), Bomb(open, str(mark), "w"):
        bad = good | {"agent": {}, "training": bomb}
        data = pickle.dumps(bad, protocol=2)  # torch's
        pickle.loads(data)
        mark.unlink()  # which shows that it would work
        if wrapped == "a checkpoint":
            write_checkpoint(folder, bad)
        else:
            digest = hashlib.sha256(data).digest() if "digest" in wrapped else b""
            path.write_bytes(data + digest)
        for mode in ("resume", "evaluate"):
            line = refused(capsys, script, f"--{mode} {folder}")
            error = "ValueError" if wrapped == "a pickle" else "UnpicklingError"
            assert line == f"{path}: {DAMAGED} ({error})\n"
            assert not mark.exists()


@EVERY
@pytest.mark.parametrize("which", ["episodes.csv", "events.out.tfevents.*"])
def test_a_log_that_was_cut_off_is_refused(script, which, undisturbed, tmp_path, capsys):
    folder = shutil.copytree(undisturbed(script, []), tmp_path / "run")
    path = max(folder.glob(which))
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)
    before = {name: data for name, (_, data) in content(folder).items()}
    line = refused(capsys, script, resume(script, folder, N + 1))
    assert line == f"{path}: cut off since the checkpoint; put it back, or delete it\n"
    assert {name: data for name, (_, data) in content(folder).items()} == before


@EVERY
@pytest.mark.parametrize("which", ["episodes.csv", "events.out.tfevents.*"])
def test_without_a_log_training_goes_on(script, which, undisturbed, tmp_path, capsys):
    module, whole = importlib.import_module(script), undisturbed(script, [])
    folder = shutil.copytree(whole, tmp_path / "run")
    gone = list(folder.glob(which))
    for path in gone:
        path.unlink()
    module.train(module.parse_args(resume(script, folder, N + 1).split()))
    out = capsys.readouterr().out
    for path in gone:
        assert f"\n{path}: gone since the checkpoint, and going on without\n" in f"\n{out}"
    assert out.count("gone since") == len(gone)
    assert load(script, folder)["iteration"] == N + 1
    header, *episodes = rows(folder)
    assert header == ["global_step", "return", "length"]
    tag = "losses/entropy"
    points = len(scalars(folder)[tag]), len(scalars(whole)[tag])
    if which == "episodes.csv":
        assert all(row not in rows(whole)[1:] for row in episodes)
        assert points == (N + 1, N)
    else:
        assert [header, *episodes][: len(rows(whole))] == rows(whole)
        assert points == (1, N)
