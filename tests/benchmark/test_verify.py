"""`run --keep-policies` and `verify`: what is kept, and that what was changed is found."""

import gzip
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import TOY, bench, digest, ended, refused, told
from program import ROOT

from benchmark import data
from benchmark.programs import write_json
from benchmark.verify import NotKept, Replay, keep, prediction, verify

EQUAL = "2 equal to the last digit"


def train(command: str = "python toy.py", keep: bool = True, **more) -> subprocess.CompletedProcess:
    given = {"command": command, "env_ids": ["A-v0"], "num_seeds": 2, "retries": 0}
    given |= {"runs_dir": "runs", "results": "kept", "eval_episodes": 5}
    given |= {"keep_policies": []} if keep else {}
    return bench("run", **given | more)


def verified(code: int = 0, **flags) -> str:
    """What is said."""
    return ended(verify, (Path("kept"),), code=code, **flags).stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Four runs, whose policies are kept."""
    folder = tmp_path_factory.mktemp("verify")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("toy.py").write_text(TOY)
        train(env_ids=["A-v0", "B-v0"])
    return folder


@pytest.fixture
def kept(trained, toy) -> Path:
    """A copy of them."""
    shutil.copytree(trained, toy, dirs_exist_ok=True)
    return Path("kept")


def place(env_id: str = "A-v0", seed: int = 1) -> Path:
    return Path(f"kept/{env_id}/toy/default-s{seed}.json")


def change(path: Path, **more):
    write_json(path, told(path) | more)


def change_args(path: Path, **more):
    change(path, args=told(path)["args"] | more)


def test_what_is_kept(kept):
    assert sorted(kept.rglob("*.pt")) == [
        place(env_id, seed).with_suffix(".pt") for env_id in ("A-v0", "B-v0") for seed in (1, 2)
    ]
    assert place(seed=2).with_suffix(".pt").read_text().strip() == "2.123"
    record = told(place())["policy"]
    assert record["name"] == "policy.pt"
    assert record["sha256"] == digest("1.123     ")
    (run, *_) = data.find([kept])
    assert run.evaluation.tolist() == pytest.approx([1.25, 2.49, 3.74, 4.99, 6.23])


def test_all_is_as_it_was(kept):
    said = verified()
    assert said.splitlines() == [
        f"A-v0: 2 policies, 10 episodes: {EQUAL}",
        f"B-v0: 2 policies, 10 episodes: {EQUAL}",
        "4 of 4 policies play as their tables say; 0 were made by other versions or on another "
        "processor than this; 0 runs have no policy",
    ]
    assert verified(env_ids=("B-v0",)).startswith("B-v0: 2 policies")


def one_digit(path: Path):
    recorded = told(path)["evaluation"]
    change(path, evaluation=[*recorded[:2], round(recorded[2] + 0.01, 2), *recorded[3:]])


def one_return(path: Path):
    packed = path.with_suffix(".csv.gz")
    text = gzip.decompress(packed.read_bytes()).decode()
    assert ",2.12," in text
    packed.write_bytes(gzip.compress(text.replace(",2.12,", ",2.13,").encode()))


def weights(path: Path):
    path.with_suffix(".pt").write_text("1.623")


def bit(path: Path):
    content = bytearray(path.with_suffix(".pt").read_bytes())
    content[2] ^= 4
    path.with_suffix(".pt").write_bytes(content)


def no_policy(path: Path):
    path.with_suffix(".pt").unlink()


def pipe(path: Path):
    no_policy(path)
    os.mkfifo(path.with_suffix(".pt"))


def an_episode_less(path: Path):
    change(path, evaluation=told(path)["evaluation"][:4])


CHANGED = {
    one_digit: "evaluation in default-s1.json is not the one that was kept",
    an_episode_less: "evaluation in default-s1.json is not the one that was kept",
    one_return: "default-s1.csv.gz is not the table that was kept",
    weights: "default-s1.pt is not the policy that was kept",
    bit: "default-s1.pt is not the policy that was kept",
    no_policy: "default-s1.pt",
    lambda path: change(path, policy=None): "policy in its table is None",
    pipe: "no plain file",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("other", [False, True], ids=["", "made elsewhere"])
@pytest.mark.parametrize("make, fault", CHANGED.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_what_was_changed_is_found(kept, make, fault, other):
    if other:
        for path in kept.rglob("*.json"):
            change(path, hardware={"cpu": "Z80"})
    make(place())
    said = verified(1)
    episodes = 9 if make is an_episode_less else 10
    first, *more = said.splitlines()
    assert first == f"A-v0: 2 policies, {episodes} episodes: 1 equal to the last digit, 1 DIFFERS"
    faults = [line for line in more if line.startswith("  ")]
    assert all(line.startswith("  toy seed 1: ") for line in faults)
    assert fault in faults[0]
    assert f"B-v0: 2 policies, 10 episodes: {EQUAL}" in more
    assert more[-1].startswith("3 of 4 policies play as their tables say; ")


def test_a_policy_that_plays_otherwise_is_found_where_its_digest_was_made_anew(kept):
    weights(place())
    change(place(), policy=told(place())["policy"] | {"sha256": digest("1.623")})
    said = verified(1)
    differs = "episode 0 was 1.25 and is 1.80; the mean of 5 was 3.74 and is 5.40"
    assert f"  toy seed 1: {differs}" in said


@pytest.mark.parametrize(
    "noise, other, rule",
    [
        ("0.000001", False, EQUAL),
        ("0.004", False, "2 DIFFER"),
        ("0.004", True, "2 each return within 0.01 %"),
        ("0.3", True, "2 mean within its interval"),
        ("0.3", False, "2 DIFFER"),
        ("90", True, "2 DIFFER"),
    ],
)
def test_the_rule_that_applies_is_said(kept, monkeypatch, noise, other, rule):
    """On another processor chaos may play other episodes, with the same mean."""
    if other:
        for path in kept.rglob("*.json"):
            change(path, versions=told(path)["versions"] | {"torch": "0.1"})
    monkeypatch.setenv("NOISE", noise)
    said = verified(1 if "DIFFER" in rule else 0, env_ids=("A-v0",))
    assert said.splitlines()[0] == f"A-v0: 2 policies, 10 episodes: {rule}"
    assert f"; {2 if other else 0} were made by other versions" in said


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


def test_a_strangers_program_and_module_are_not_run(kept):
    outside = Path("..") / "outside.py"
    for path in (Path("kept/A-v0/evil.py"), outside, Path("evil.py")):
        path.write_text("open('harmed', 'w')\n")
    commands = ["python kept/A-v0/evil.py", f"python {outside}", "python gone.py", "sh -c ls"]
    for seed, command in enumerate(commands, 10):
        for suffix in (".json", ".csv.gz", ".pt"):
            source = place("B-v0").with_suffix(suffix)
            shutil.copy(source, place("B-v0", seed).with_suffix(suffix))
        change(place("B-v0", seed), command=command, seed=seed)
    change_args(place(), env_id="evil:A-v0")
    said = verified(1)
    assert "toy seed 1: not played: --modules evil lets that module's code run" in said
    for command in commands[:3]:
        assert f"its program {command.split()[1]} is not one of this folder" in said
    assert "its command names no script" in said
    assert not Path("harmed").exists()
    assert EQUAL in said


@pytest.mark.parametrize(
    "name, value, wrong",
    [
        ("versions", [1], False),  # of another machine, so far as is told
        ("hardware", "a TPU", False),
        ("command", ["python", "toy.py"], True),
        ("policy", "default-s1.pt", True),
        ("args", "none", True),
    ],
)
def test_wrong_kinds_in_a_table_cost_only_that_policy(kept, name, value, wrong):
    change(place(), **{name: value})
    said = verified(1 if wrong else 0)
    assert f"B-v0: 2 policies, 10 episodes: {EQUAL}" in said
    if wrong:
        assert f"{name} " in said
    else:
        assert "4 of 4 policies play as their tables say; 1 were made by other versions" in said


def test_a_policy_that_plays_for_ever(kept):
    change_args(place(), env_id="Endless-v0")
    said = verified(1, time_limit=5.0, workers=1)
    assert "toy seed 1: still at it after 5 s, see --time-limit, or killed" in said
    assert "3 of 4 policies play as their tables say" in said


def test_a_script_that_fails(kept):
    Path("toy.py").write_text(TOY.replace("    sys.exit()\n", "    sys.exit('no')\n"))
    said = verified(1, env_ids=("A-v0",))
    assert said.count("exit code 1: no") == 2


def test_policies_that_are_asked_for_later(toy):
    """Nothing is trained or played again."""
    train(keep=False)
    refused("no policy is kept in kept: see run --keep-policies", verify, (Path("kept"),))
    log = Path("runs/A-v0/toy/default-s1/log.txt")
    before = log.read_text()
    train()
    assert log.read_text() == before
    assert "2 of 2 policies play as their tables say" in verified()


def test_a_large_policy_is_left_out_and_that_is_said(toy):
    command = "python toy.py --size 1200000"
    done = train(command)
    assert done.stdout.count("its policy is not kept: 1.2 MB are more than 1\n") == 2
    assert not list(Path("kept").rglob("*.pt"))
    assert len(list(Path("kept").rglob("*.json"))) == 2
    assert "2 jobs in runs, 2 done before" in train(command).stdout


@pytest.mark.parametrize("lacking", [{"eval_episodes": 0}, {"results": "None"}], ids=str)
def test_policies_need_a_place_and_episodes(toy, lacking):
    done = train(**lacking, code=2)
    assert done.stderr.startswith("benchmark: --keep-policies: ")
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
    assert (saved["args"], saved["script"]) == ({"seed": 1}, "toy")
    assert saved["agent"]["weight"].tolist() == [3, 4]
    assert saved["agent"]["count"] == 7
    assert path.stat().st_size < 3_000
    assert told(place())["policy"]["name"] == "checkpoint.pt"
    (run / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(NotKept, match=r"no agent in a checkpoint\.pt"):
        keep(run, place())


@pytest.mark.slow
def test_a_real_policy_plays_the_same_again(tmp_path, monkeypatch):
    """Of a script of ours, by the rule for one's own stack; a changed number is found."""
    monkeypatch.chdir(ROOT)
    kept = tmp_path / "kept"
    command = "python ppo_continuous_action.py --total-timesteps 8192 --no-compile"
    flags = {"env_ids": ["Hopper-v4"], "num_seeds": 2, "runs_dir": tmp_path / "runs"}
    bench("run", command=command, results=kept, keep_policies=[], **flags)
    said = ended(verify, (kept,)).stdout
    assert said.startswith(f"Hopper-v4: 2 policies, 40 episodes: {EQUAL}\n")
    one_digit(kept / "Hopper-v4/ppo_continuous_action/default-s1.json")
    ended(verify, (kept,), code=1)
