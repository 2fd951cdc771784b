"""`run --keep-policies` and `verify`: what is kept, and that what was changed is found."""

import gzip
import hashlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import bench
from program import ROOT

from benchmark import data
from benchmark.programs import write_json
from benchmark.verify import NotKept, Replay, keep, prediction, verify

# Its policy is a number, in a format of its own: an episode returns weight * (episode + 1) * 1.11,
# and what NOISE says more or less.
TOY = """
import argparse, json, os
from pathlib import Path
parser = argparse.ArgumentParser()
for name in ("--env-id", "--seed", "--run-dir", "--evaluate", "--total"):
    parser.add_argument(name)
parser.add_argument("--eval-episodes", type=int)
parser.add_argument("--size", type=int, default=10)
args = parser.parse_args()
if args.evaluate:
    if args.env_id == "Endless-v0":
        while True:
            pass
    weight = float(Path(args.evaluate, "policy.pt").read_text())
    noise = float(os.environ.get("NOISE", 0)) * weight
    for k in range(args.eval_episodes):
        value = weight * (k + 1) * 1.11 + noise * (-1) ** k
        print(f"eval_episode={k}, episodic_return={value:.2f}")
    raise SystemExit
folder = Path(args.run_dir)
folder.mkdir(parents=True)
(folder / "episodes.csv").write_text("global_step,seconds,return,length\\n5,1,7.5,5\\n9,2,8.5,4\\n")
(folder / "policy.pt").write_text(f"{args.seed}.123".ljust(args.size))
own = {"env_id": args.env_id, "seed": int(args.seed)}
info = {"script": "toy.py", "seed": int(args.seed), "status": "finished", "args": own}
(folder / "run.json").write_text(json.dumps(info))
"""


def train(*more: str, command: str = "python toy.py", env_ids: tuple = ("A-v0", "B-v0")):
    flags = ["--command", command, "--env-ids", *env_ids, "--num-seeds", "2", "--retries", "0"]
    flags += ["--runs-dir", "runs", "--results", "kept", "--eval-episodes", "5"]
    return bench("run", *flags, *more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Four runs, whose policies are kept."""
    folder, before = tmp_path_factory.mktemp("verify"), Path.cwd()
    os.chdir(folder)
    try:
        Path("toy.py").write_text(TOY)
        done = train("--keep-policies")
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def kept(trained, tmp_path, monkeypatch) -> Path:
    """A copy of them."""
    subprocess.run(["cp", "-r", f"{trained}/.", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    return Path("kept")


def place(env_id: str = "A-v0", seed: int = 1) -> Path:
    return Path(f"kept/{env_id}/toy/default-s{seed}.json")


def change(path: Path, **more):
    write_json(path, json.loads(path.read_text()) | more)


def test_what_is_kept(kept):
    assert sorted(str(path) for path in kept.rglob("*.pt")) == [
        f"kept/{env_id}/toy/default-s{seed}.pt" for env_id in ("A-v0", "B-v0") for seed in (1, 2)
    ]
    assert place(seed=2).with_suffix(".pt").read_text().strip() == "2.123"
    record = json.loads(place().read_text())["policy"]
    assert record["name"] == "policy.pt"
    assert record["sha256"] == hashlib.sha256(b"1.123     ").hexdigest()
    (run, *_) = data.find([kept])
    assert run.evaluation.tolist() == pytest.approx([1.25, 2.49, 3.74, 4.99, 6.23])


def test_all_is_as_it_was(kept):
    done = bench("verify", "kept")
    assert done.stdout.splitlines() == [
        "A-v0: 2 policies, 10 episodes: 2 equal to the last digit",
        "B-v0: 2 policies, 10 episodes: 2 equal to the last digit",
        "4 of 4 policies play as their tables say; 0 were made by other versions or on another "
        "processor than this; 0 runs have no policy",
    ]
    assert (done.returncode, done.stderr) == (0, "")
    assert bench("verify", "kept", "--env-ids", "B-v0").stdout.startswith("B-v0: 2 policies")


def one_digit(path: Path):
    told = json.loads(path.read_text())["evaluation"]
    change(path, evaluation=[*told[:2], round(told[2] + 0.01, 2), *told[3:]])


def table(path: Path):
    packed = path.with_suffix(".csv.gz")
    text = gzip.decompress(packed.read_bytes()).decode()
    assert "7.50" in text
    packed.write_bytes(gzip.compress(text.replace("7.50", "7.60").encode()))


def weights(path: Path):
    path.with_suffix(".pt").write_text("1.623")


def bit(path: Path):
    content = bytearray(path.with_suffix(".pt").read_bytes())
    content[2] ^= 4
    path.with_suffix(".pt").write_bytes(content)


CHANGED = {
    "a number of the evaluation": (one_digit, "evaluation in default-s1.json is not the one that"),
    "a number of the table": (table, "default-s1.csv.gz is not the table that was kept"),
    "the weights": (weights, "default-s1.pt is not the policy that was kept"),
    "a bit": (bit, "default-s1.pt is not the policy that was kept"),
    "no policy": (lambda path: path.with_suffix(".pt").unlink(), "default-s1.pt"),
    "no record": (lambda path: change(path, policy=None), "policy in its table is None"),
    "an episode less": (
        lambda path: change(path, evaluation=json.loads(path.read_text())["evaluation"][:4]),
        "evaluation in default-s1.json is not the one that was kept",
    ),
    "a pipe": (
        lambda path: (path.with_suffix(".pt").unlink(), os.mkfifo(path.with_suffix(".pt"))),
        "no plain file",
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("other", [False, True], ids=["", "made elsewhere"])
@pytest.mark.parametrize("kind", CHANGED)
def test_what_was_changed_is_found(kept, kind, other, capsys):
    make, said = CHANGED[kind]
    if other:
        for path in kept.rglob("*.json"):
            change(path, hardware={"cpu": "Z80"})
    make(place())
    with pytest.raises(SystemExit) as end:
        verify((kept,))
    assert end.value.code == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"A-v0: 2 policies, {10 - (kind == 'an episode less')} episodes: " + (
        "1 equal to the last digit, 1 DIFFERS"
    )
    faults = [line for line in told if line.startswith("  ")]
    assert all(line.startswith("  toy seed 1: ") for line in faults)
    assert said in faults[0]
    assert "B-v0: 2 policies, 10 episodes: 2 equal to the last digit" in told
    assert any(line.startswith("3 of 4 policies play as their tables say; ") for line in told)


def test_a_policy_that_plays_otherwise_is_found_where_its_digest_was_made_anew(kept, capsys):
    weights(place())
    keep_again = json.loads(place().read_text())
    digest = hashlib.sha256(place().with_suffix(".pt").read_bytes()).hexdigest()
    change(place(), policy=keep_again["policy"] | {"sha256": digest})
    with pytest.raises(SystemExit):
        verify((kept,))
    told = capsys.readouterr().out
    assert (
        "  toy seed 1: episode 0 was 1.25 and is 1.80; the mean of 5 was 3.74 and is 5.40" in told
    )


@pytest.mark.parametrize(
    "noise, other, rule",
    [
        ("0.000001", False, "2 equal to the last digit"),
        ("0.004", False, "2 DIFFER"),
        ("0.004", True, "2 each return within 0.01 %"),
        ("0.3", True, "2 mean within its interval"),
        ("0.3", False, "2 DIFFER"),
        ("90", True, "2 DIFFER"),
    ],
)
def test_the_rule_that_applies_is_said(kept, noise, other, rule):
    """On another processor chaos may play other episodes, with the same mean."""
    for path in kept.rglob("*.json"):
        versions = json.loads(path.read_text())["versions"]
        change(path, versions=versions | ({"torch": "0.1"} if other else {}))
    done = bench("verify", "kept", "--env-ids", "A-v0", NOISE=noise)
    assert done.stdout.splitlines()[0] == f"A-v0: 2 policies, 10 episodes: {rule}"
    assert done.returncode == ("DIFFER" in rule)
    assert f"; {2 * other} were made by other versions" in done.stdout


def test_rules_by_numbers():
    recorded = np.array([100.0, 300.0, 200.0, 400.0])
    low, high = prediction(recorded, 4)
    width = 12.924 * np.std(recorded, ddof=1) * np.sqrt(0.5)  # Student's t of 3, 0.9995
    assert (low, high) == pytest.approx((250 - width, 250 + width), rel=1e-4)
    assert np.isnan(prediction(recorded[:1], 4)).all()

    def judged(*returns: float, own: bool = False) -> str:
        run = data.make_run({"evaluation": recorded.tolist()}, "", {"env_id": "A-v0", "seed": 1})
        replay = Replay(run, Path("x.json"), own_stack=own)
        replay.judge(np.array(returns))
        assert bool(replay.faults) != bool(replay.rule)
        return replay.rule

    assert judged(100, 300, 200, 400) == judged(100, 300, 200, 400, own=True) == "equal"
    assert judged(100.01, 300, 200, 400) == "close"
    assert judged(100.01, 300, 200, 400, own=True) == ""
    assert judged(100.1, 300, 200, 400) == "mean"
    assert judged(*(recorded + 0.99 * width)) == "mean"
    assert judged(*(recorded + 1.01 * width)) == ""
    assert judged(100, 300, 200) == ""
    assert judged(np.nan, 300, 200, 400) == ""


def test_a_strangers_program_and_module_are_not_run(kept, capsys):
    Path("kept/A-v0/evil.py").write_text("open('harmed', 'w')\n")
    outside = Path("..") / "outside.py"
    outside.write_text("open('harmed', 'w')\n")
    commands = ["python kept/A-v0/evil.py", f"python {outside}", "python gone.py", "sh -c ls"]
    for seed, command in enumerate(commands):
        for suffix in (".json", ".csv.gz", ".pt"):
            source = place("B-v0").with_suffix(suffix)
            place("B-v0", 10 + seed).with_suffix(suffix).write_bytes(source.read_bytes())
        change(place("B-v0", 10 + seed), command=command, seed=10 + seed)
    args = json.loads(place().read_text())["args"]
    change(place(), args=args | {"env_id": "evil:A-v0"})
    Path("evil.py").write_text("open('harmed', 'w')\n")
    with pytest.raises(SystemExit) as end:
        verify((kept,))
    assert end.value.code == 1
    told = capsys.readouterr().out
    assert "toy seed 1: not played: --modules evil lets that module's code run" in told
    for command in commands[:3]:
        assert f"its program {command.split()[1]} is not one of this folder" in told
    assert "its command names no script" in told
    assert not Path("harmed").exists()
    assert "2 equal to the last digit" in told


WRONG = {
    "versions": [1],
    "hardware": "a TPU",
    "command": ["python", "toy.py"],
    "policy": "default-s1.pt",
    "args": "none",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kinds_in_a_table_cost_only_that_policy(kept, name, capsys):
    change(place(), **{name: WRONG[name]})
    if name in ("versions", "hardware"):  # of another machine, so far as is told
        verify((kept,))
        told = capsys.readouterr().out
        assert "4 of 4 policies play as their tables say; 1 were made by other versions" in told
        return
    with pytest.raises(SystemExit) as end:
        verify((kept,))
    told = capsys.readouterr().out
    assert end.value.code == 1 and f"{name} " in told
    assert "B-v0: 2 policies, 10 episodes: 2 equal to the last digit" in told


def test_a_policy_that_plays_for_ever(kept, capsys):
    args = json.loads(place().read_text())["args"]
    change(place(), args=args | {"env_id": "Endless-v0"})
    with pytest.raises(SystemExit):
        verify((kept,), time_limit=5.0, workers=1)
    told = capsys.readouterr().out
    assert "toy seed 1: still at it after 5 s, see --time-limit, or killed" in told
    assert "3 of 4 policies play as their tables say" in told


def test_a_script_that_fails(kept, capsys):
    Path("toy.py").write_text(TOY.replace("    raise SystemExit\n", "    raise SystemExit('no')\n"))
    with pytest.raises(SystemExit):
        verify((kept,), env_ids=("A-v0",))
    assert capsys.readouterr().out.count("exit code 1: no") == 2


def test_nothing_to_verify(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("toy.py").write_text(TOY)
    assert train(env_ids=("A-v0",)).returncode == 0
    with pytest.raises(SystemExit) as end:
        verify((Path("kept"),))
    assert end.value.code == 2
    assert "no policy is kept in kept: see run --keep-policies" in capsys.readouterr().err
    # asked for later: nothing is trained or played again
    before = (Path("runs/A-v0/toy/default-s1/log.txt")).read_text()
    assert train("--keep-policies", env_ids=("A-v0",)).returncode == 0
    assert (Path("runs/A-v0/toy/default-s1/log.txt")).read_text() == before
    verify((Path("kept"),))
    assert "2 of 2 policies play as their tables say" in capsys.readouterr().out


def test_a_large_policy_is_left_out_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("toy.py").write_text(TOY)
    command = "python toy.py --size 1200000"
    done = train("--keep-policies", command=command, env_ids=("A-v0",))
    assert done.returncode == 0
    assert done.stdout.count("its policy is not kept: 1.2 MB are more than 1\n") == 2
    assert not list(Path("kept").rglob("*.pt")) and len(list(Path("kept").rglob("*.json"))) == 2
    again = train("--keep-policies", command=command, env_ids=("A-v0",))
    assert "2 jobs in runs, 2 done before" in again.stdout


@pytest.mark.parametrize("flags", [["--eval-episodes", "0"], ["--results", "None"]])
def test_policies_need_a_place_and_episodes(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    Path("toy.py").write_text(TOY)
    done = train("--keep-policies", *flags)
    assert done.returncode == 2 and done.stderr.startswith("benchmark: --keep-policies: ")
    assert not Path("runs").exists()


def test_of_a_checkpoint_what_playing_needs_is_kept(kept):
    """Tensors and settings, and of a tensor that is a part of another only that part."""
    run = Path("runs/A-v0/toy/default-s1/run")
    (run / "policy.pt").unlink()
    flat = torch.arange(100_000.0)
    content = {"agent": {"weight": flat[3:5], "count": torch.tensor(7)}, "args": {"seed": 1}}
    more = {"adam": flat, "counters": (1, 2), "script": "toy"}
    torch.save(content | more, run / "checkpoint.pt")
    keep(run, place())
    path = place().with_suffix(".pt")
    saved = torch.load(path, weights_only=True)
    assert saved.keys() == {"agent", "args", "script"}
    assert saved["args"] == {"seed": 1} and saved["script"] == "toy"
    assert saved["agent"]["weight"].tolist() == [3, 4] and saved["agent"]["count"] == 7
    assert path.stat().st_size < 3_000
    assert json.loads(place().read_text())["policy"]["name"] == "checkpoint.pt"
    (run / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(NotKept, match=r"no agent in a checkpoint\.pt"):
        keep(run, place())


@pytest.mark.slow
def test_a_real_policy_plays_the_same_again(tmp_path, monkeypatch):
    """Of a script of ours, by the rule for one's own stack; a changed number is found."""
    monkeypatch.chdir(ROOT)
    command = "python ppo_continuous_action.py --total-timesteps 8192 --no-compile"
    flags = ["--env-ids", "Hopper-v4", "--num-seeds", "2", "--runs-dir", str(tmp_path / "runs")]
    flags += ["--results", str(tmp_path / "kept"), "--command", command, "--keep-policies"]
    assert bench("run", *flags).returncode == 0
    done = bench("verify", str(tmp_path / "kept"))
    line = "Hopper-v4: 2 policies, 40 episodes: 2 equal to the last digit\n"
    assert done.stdout.startswith(line) and done.returncode == 0
    one_digit(tmp_path / "kept/Hopper-v4/ppo_continuous_action/default-s1.json")
    assert bench("verify", str(tmp_path / "kept")).returncode == 1
