"""Ten edits that researchers make, as patches of ppo_continuous_action.py: each works, eagerly and
compiled, and none is longer than it should be. What can't work ends in an error by name."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from program import ROOT, scalars

import ppo_continuous_action

PATCHES = ROOT / "tests" / "edits"
# Lines and places that CleanRL's ppo_continuous_action.py needs for the same
CLEANRL = {
    "activation": (10, 2),
    "network": (10, 2),
    "layer-norm": (10, 2),
    "state-deviation": (3, 2),
    "adamw": (6, 2),
    "frozen-critic": (1, 1),
    "entropy-schedule": (1, 1),
    "clip-schedule": (1, 1),
    "no-scaling": (2, 1),
    "auxiliary-loss": (10, 4),
}
EDITS = pytest.mark.parametrize("name", CLEANRL)
FLAGS = (
    "--env-id Pendulum-v1 --num-envs 2 --num-steps 128 --num-minibatches 4 --total-timesteps 2560 "
    "--update-epochs 5 --learning-rate 3e-3 --target-kl None --no-cuda"
)


def module(folder: Path, name: str):
    """The script in a folder under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, folder / "ppo_continuous_action.py")
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """The script with an edit."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            shutil.copy(ppo_continuous_action.__file__, folder)
            alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
            command = ["git", "apply", str(PATCHES / f"{name}.patch")]
            subprocess.run(command, cwd=folder, env=alone, check=True)
            made[name] = module(folder, f"edited_{name.replace('-', '_')}")
        return made[name]

    return get


def train(script, folder: Path, flags: str) -> dict:
    script.train(script.parse_args([*FLAGS.split(), *flags.split(), "--run-dir", str(folder)]))
    return script.load_checkpoint(folder)


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    return train(ppo_continuous_action, tmp_path_factory.mktemp("unedited") / "run", "--no-compile")


def begun(script):
    """The agent as a run of it begins."""
    args = script.parse_args(FLAGS.split())
    torch.manual_seed(args.seed)
    return script.Agent(script.make_env(args.env_id), args)


def check_learned(name: str, script, folder: Path, trained: dict, unedited: dict):
    """All that should learn has moved, what should not has not, and the policy can be played."""
    first, final = begun(script).state_dict(), trained["agent"]
    learning = [key for key, p in script.load(folder)[0].named_parameters() if p.requires_grad]
    for key in learning:
        assert not torch.equal(first[key], final[key]), key
    for key in final.keys() - set(learning):
        if name == "frozen-critic" and key.startswith("critic"):
            assert torch.equal(first[key], final[key]), key
    added = {"state-deviation": "actor_spread", "auxiliary-loss": "predict", "network": "block"}
    assert name not in added or any(added[name] in key for key in learning)
    weight = "actor_logstd"
    assert not torch.equal(final[weight], unedited["agent"][weight])
    played = script.parse_args(["--evaluate", str(folder), "--eval-episodes", "1"])
    assert np.isfinite(script.evaluate(played)).all()
    if name == "auxiliary-loss":
        losses = [value for _, value in scalars(folder)["losses/prediction_loss"]]
        assert losses[-1] < losses[0]


@EDITS
def test_an_edit_works(name, edited, unedited, tmp_path):
    script = edited(name)
    trained = train(script, tmp_path / "run", "--no-compile")
    check_learned(name, script, tmp_path / "run", trained, unedited)


@pytest.mark.slow
@EDITS
def test_an_edit_works_compiled(name, edited, unedited, tmp_path, monkeypatch):
    """To the same numbers as eagerly, to rounding, as long as that stays small."""
    script, steps = edited(name), []
    plain = script.compile_step
    monkeypatch.setattr(script, "compile_step", lambda *a: steps.append(plain(*a)) or steps[-1])
    short = "--total-timesteps 768 --learning-rate 3e-4"
    eager = train(script, tmp_path / "eager", f"{short} --no-compile")
    compiled = train(script, tmp_path / "compiled", f"{short} --compile-from 0")
    assert [step is script.minibatch_step for step in steps] == [True, False]
    check_learned(name, script, tmp_path / "compiled", compiled, unedited)
    before = begun(script).state_dict()
    for key, value in eager["agent"].items():
        moved = (value - before[key]).abs().max()
        off = (compiled["agent"][key] - value).abs().max()
        assert off <= 0.02 * moved + 1e-6, key


def size(name: str) -> tuple[int, int]:
    """Lines that an edit adds or changes, and places: runs of changed lines. Blank ones and those
    of a class that is written anew are the researcher's own."""
    text = (PATCHES / f"{name}.patch").read_text()
    body = text.split("+++ ", 1)[1].split("\n", 1)[1]
    if name == "network":  # whose class is as long in either script
        body = re.sub(r"\+class Residual.*?\n\+\n\+\n", "", body, flags=re.DOTALL)
    lines = body.splitlines()
    marks = "".join(line[0] if line else " " for line in lines)
    places = len(re.findall(r"[+-]+", marks))
    return max(marks.count("+"), marks.count("-")), places


@EDITS
def test_an_edit_is_at_most_twice_as_long_as_in_cleanrl(name):
    lines, places = size(name)
    assert lines <= 2 * CLEANRL[name][0]
    assert places <= 2 * CLEANRL[name][1]
