"""`run --keep-policies` and `verify`: what is kept, and that what was changed is found."""

import gzip
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import TOY, digest, ended, refused, told

from benchmark.programs import write_json
from benchmark.run import run
from benchmark.verify import keep, prediction, verify


def train(code: int = 0, **more) -> subprocess.CompletedProcess:
    given = {"command": "python toy.py", "env_ids": ["A-v0"], "num_seeds": 2, "retries": 0}
    given |= {"runs_dir": Path("runs"), "results": Path("kept"), "eval_episodes": 5}
    return ended(run, code=code, **given | {"keep_policies": True} | more)


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


def test_what_is_kept_plays_as_it_did(kept, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS has none
    assert len(list(kept.rglob("*.pt"))) == 4
    record = told(place())["policy"]
    assert (record["name"], record["sha256"]) == ("policy.pt", digest("1.123     "))
    first, *envs, last = verified().splitlines()
    minutes = 4 / os.cpu_count() / 6
    assert first == f"4 policies, some {minutes:.1f} minutes"
    says = ": 2 policies, 10 episodes: 2 equal to the last digit"
    assert sorted(envs) == [f"A-v0{says}", f"B-v0{says}"]
    assert last.startswith("4 of 4 policies play as their tables say; 0 were made by other")


def one_digit(path: Path):
    recorded = told(path)["evaluation"]
    change(path, evaluation=[*recorded[:2], round(recorded[2] + 0.01, 2), *recorded[3:]])


def one_return(path: Path):
    packed = path.with_suffix(".csv.gz")
    text = gzip.decompress(packed.read_bytes()).decode()
    packed.write_bytes(gzip.compress(text.replace(",2.12,", ",2.13,").encode()))


def weights(path: Path):
    path.with_suffix(".pt").write_text("1.623")


CHANGED = {
    one_digit: "another evaluation_sha256 than when the policy was kept",
    one_return: "another table_sha256 than when the policy was kept",
    weights: "another sha256 than when the policy was kept",
    lambda path: path.with_suffix(".pt").unlink(): "default-s1.pt",
    lambda path: change(path, policy=None): "can't be played",
    lambda path: change(path, command="python gone.py"): "gone.py is not one of this folder",
}


@pytest.mark.parametrize("make, fault", CHANGED.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_what_was_changed_is_found(kept, make, fault):
    make(place())
    _, first, *more = verified(1, env_ids=("A-v0",)).splitlines()
    assert first == "A-v0: 2 policies, 10 episodes: 1 equal to the last digit, 1 DIFFER"
    assert fault in more[0]
    assert more[-1].startswith("1 of 2 policies play as their tables say; ")


def test_a_policy_that_plays_otherwise_is_found_where_its_digest_was_made_anew(kept):
    weights(place())
    change(place(), policy=told(place())["policy"] | {"sha256": digest("1.623")})
    differs = "episode 0 was 1.25 and is 1.80; the mean of 5 was 3.74 and is 5.40"
    assert f"  toy seed 1: {differs}" in verified(1, env_ids=("A-v0",))


def test_the_rule_that_applies_is_said(kept, monkeypatch):
    """On another processor chaos may play other episodes, with the same mean."""
    for path in kept.rglob("B-v0/toy/*.json"):
        change(path, versions=told(path)["versions"] | {"torch": "0.1"})
    for noise, own, other in (
        ("0.004", "2 DIFFER", "2 each return within 0.01 %"),
        ("0.3", "2 DIFFER", "2 mean within its interval"),
        ("90", "2 DIFFER", "2 DIFFER"),
    ):
        monkeypatch.setenv("NOISE", noise)
        output = verified(1)
        assert f"A-v0: 2 policies, 10 episodes: {own}\n" in output
        assert f"B-v0: 2 policies, 10 episodes: {other}\n" in output
        assert "; 2 were made by other versions" in output


def test_a_mean_of_other_episodes_lies_in_an_interval():
    recorded = np.array([100.0, 300.0, 200.0, 400.0])
    width = 12.924 * np.std(recorded, ddof=1) * np.sqrt(0.5)  # Student's t of 3, 0.9995
    assert prediction(recorded, 4) == pytest.approx((250 - width, 250 + width), rel=1e-4)


def test_a_strangers_program_and_module_are_not_run(kept):
    for path in (Path("kept/A-v0/evil.py"), Path("../outside.py"), Path("evil.py")):
        path.write_text("open('harmed', 'w')\n")
    change(place(), args=told(place())["args"] | {"env_id": "evil:A-v0"})
    change(place(seed=2), command="python kept/A-v0/evil.py")
    change(place("B-v0"), command="python ../outside.py")
    output = verified(1)
    assert "--modules evil lets that module's code run" in output
    assert output.count(" is not one of this folder") == 2
    assert not Path("harmed").exists()


def test_policies_that_are_asked_for_later(toy):
    """Nothing is trained or played again; verify says how to ask."""
    train(keep_policies=False)
    for folder in ("kept", "runs"):
        says = f"no policy is kept in {folder}: give the command of `run` again with --results"
        refused(says, verify, (Path(folder),))
    log = Path("runs/A-v0/toy/default-s1/log.txt")
    before = log.read_text()
    train()
    assert log.read_text() == before
    assert "2 of 2 policies play as their tables say" in verified()


def test_a_large_policy_is_left_out_and_that_is_said(toy):
    command = "python toy.py --size 1200000"
    done = train(command=command)
    assert done.stdout.count("its policy is not kept: 1.2 MB are more than 1\n") == 2
    assert not list(Path("kept").rglob("*.pt"))
    assert len(list(Path("kept").rglob("*.json"))) == 2
    assert "2 jobs in runs, 2 done before" in train(command=command).stdout


def test_of_a_checkpoint_what_playing_needs_is_kept(kept):
    """Tensors and settings, and of a tensor that is a part of another only that part."""
    run = Path("runs/A-v0/toy/default-s1/run")
    (run / "policy.pt").unlink()
    flat = torch.arange(100_000.0)
    content = {"agent": {"weight": flat[3:5], "count": torch.tensor(7)}, "args": {"seed": 1}}
    torch.save(content | {"adam": flat, "script": "toy"}, run / "checkpoint.pt")
    keep(run, place())
    path = place().with_suffix(".pt")
    saved = torch.load(path, weights_only=True)
    assert (saved.pop("args"), saved.pop("script")) == ({"seed": 1}, "toy")
    assert saved.keys() == {"agent"}
    assert saved["agent"]["weight"].tolist() == [3, 4]
    assert path.stat().st_size < 3_000
    assert told(place())["policy"]["name"] == "checkpoint.pt"
