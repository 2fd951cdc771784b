"""Each script as a file by itself: what it requires, imported, and as a program."""

import importlib
import json
import os
import re
import runpy
import shutil
import signal
import sys
import tomllib
from pathlib import Path

import numpy as np
import torch
from program import ROOT, assert_same, run, status
from scripts import EVERY, POOLS, SMALL, STEPS, WHOLE, small_environments

DUEL = "ppo_pettingzoo_ma_atari"


def requirements(script: str) -> dict:
    header = re.search(r"# /// script\n(.*?)# ///\n", (ROOT / f"{script}.py").read_text(), re.S)
    return tomllib.loads(re.sub("^# ?", "", header[1], flags=re.M))


@EVERY
def test_what_the_header_requires_is_what_the_project_installs(script):
    """Version for version: the project's own dependencies or those of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = set(project["dependencies"])
    listed |= {each for extra in project["optional-dependencies"].values() for each in extra}
    listed |= {each.replace("[mujoco]", "") for each in listed}  # which not every script needs
    header = requirements(script)
    assert header["requires-python"] == project["requires-python"]
    assert {each for each in header["dependencies"]} - listed == set()


@EVERY
def test_importing_does_nothing(script, tmp_path, monkeypatch, capfd):
    def world():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        numbers = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        return handlers, numbers, torch.get_num_threads(), dict(os.environ)

    monkeypatch.chdir(tmp_path)
    before = world()
    names = runpy.run_path(str(ROOT / f"{script}.py"), run_name="imported")
    assert {"Args", "Agent"} <= names.keys()
    assert world() == before
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


ALONE = {  # two iterations or so of a real environment
    **{script: SMALL[script].replace("ClockBox-v0", "InvertedPendulum-v4") for script in WHOLE},
    "ppo": SMALL["ppo"].replace("ClockChoice-v0", "CartPole-v1") + " --compile-from 0",
    "ppo_continuous_action": SMALL["ppo_continuous_action"].replace(
        "ClockBox-v0", "InvertedPendulum-v4"
    )
    + " --compile-from 0 --capture-video --eval-episodes 1",
    **{
        script: f"{SMALL[script]} --compile".replace("ClockBox-v0", "CartPole-v1")
        for script in ("ppo_pixels", "ppo_lstm")
    },
    "ppo_pettingzoo": SMALL["ppo_pettingzoo"].replace(
        "agents_toy:make", "mpe2.simple_speaker_listener_v4"
    ),
    **{script: f"{SMALL[script]} --compile" for script in POOLS[:2]},
    "ppo_procgen": f"{SMALL['ppo_procgen']} --compile --eval-interval 99",
    DUEL: SMALL[DUEL].replace("duel_v0", "pong_v3"),
    "ppo_continuous_action_warp": SMALL["ppo_continuous_action_warp"],
}
COMPILES = [script for script in ALONE if "--compile" in ALONE[script]]


@EVERY
def test_a_script_alone_in_an_empty_folder(script, tmp_path, monkeypatch, capsys):
    """Copied, as a program, without what no header names, without a compiler, on a terminal of
    ASCII: it trains to the bits of a run in this process, and is played."""
    copied = f"alone_{script}"
    shutil.copy(ROOT / f"{script}.py", tmp_path / f"{copied}.py")
    filmed = "--capture-video" in ALONE[script]
    for package in ("wandb", "dotenv", *([] if filmed else ["moviepy"])):
        (tmp_path / f"{package}.py").write_text("raise ImportError")
    if script == "ppo":
        (tmp_path / "mujoco.py").write_text("raise ImportError")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"PYTHONIOENCODING": "ascii"}
    flags = f"{ALONE[script]} --total-timesteps {2 * STEPS[script]} --save-model --run-dir öß€"
    done = run(f"{copied}.py", *flags.split(), cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    said = done.stdout + done.stderr
    assert said.count("going on eagerly\n") == (script in COMPILES), said
    assert status(tmp_path / "öß€") == "finished"
    assert re.search(r" cpu, .*in \\xf6\\xdf\\u20ac\n", said), said
    final = json.loads((tmp_path / "öß€" / "run.json").read_text())["final_return"]
    assert f"return {final} over the last 100 episodes; play: python {copied}.py" in said
    if filmed:  # by MuJoCo, whose OpenGL this process is spared
        (video,) = (tmp_path / "öß€" / "videos").glob("*.mp4")
        assert video.stat().st_size > 1000
    weights = torch.load(tmp_path / "öß€" / f"{copied}.cleanrl_model", weights_only=True)
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(script)
    flags = re.sub("--capture-video|--compile-from 0|--compile", "", flags)
    no_compile = "--no-compile" if script in COMPILES else ""
    module.train(module.parse_args(f"{flags} {no_compile} --run-dir here".split()))
    assert_same(module.load_checkpoint(Path("here"))["agent"], weights)
    if script == DUEL:  # a game is too long
        return
    capsys.readouterr()
    if script in POOLS:  # so are these, but for toys
        small_environments(monkeypatch)
    monkeypatch.setattr(sys, "argv", [copied, "--evaluate", "here", "--eval-episodes", "1"])
    runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    assert "eval_episode=0, episodic_return=" in capsys.readouterr().out
