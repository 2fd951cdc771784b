"""docs/coming_from.md and docs/your_environment.md: what a user copies from them runs."""

import importlib
import json
import re
import runpy
import shlex
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from program import ROOT, content, scalars, status

import ppo
import ppo_cma
import ppo_continuous_action
import ppo_kl_adaptive

COMING = (ROOT / "docs" / "coming_from.md").read_text()
YOURS = (ROOT / "docs" / "your_environment.md").read_text()
GYMNASIUM = (ppo, ppo_continuous_action, ppo_cma, ppo_kl_adaptive)

# Of each script: two iterations of some 500 steps
CLIPPED = "--num-minibatches 8 --update-epochs 2 --total-timesteps 1024 --no-cuda"
SMALL = {
    ppo: f"--env-id ReachDiscrete-v0 --num-envs 4 --num-steps 128 {CLIPPED}",
    ppo_continuous_action: f"--env-id Reach-v0 --num-steps 512 {CLIPPED}",
    ppo_cma: "--env-id Reach-v0 --iter-steps 500 --total-timesteps 1000 --n-updates 4 --no-cuda",
    ppo_kl_adaptive: "--env-id Reach-v0 -b 10 --total-timesteps 1000 --value-epochs 1 --no-cuda",
}


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


WATCH, SECOND = snippets(COMING)
(LOOP,) = snippets((ROOT / "docs" / "ppo_cma.md").read_text())


@pytest.fixture(scope="module", autouse=True)
def my_envs(tmp_path_factory):
    """The page's module, imported from its folder."""
    folder = tmp_path_factory.mktemp("module")
    (folder / "my_envs.py").write_text(snippets(YOURS)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("my_envs")
    del sys.modules["my_envs"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda *_: None)  # which takes 4 s
    return tmp_path


def train(script, flags: str = ""):
    return script.train(script.parse_args(shlex.split(f"{SMALL[script]} {flags}")))


def play(script, folder, flags: str = "", episodes: int = 3) -> list[float]:
    flags = f"--evaluate {folder} --eval-episodes {episodes} {flags}"
    return script.evaluate(script.parse_args(shlex.split(flags)))


def start(snippet: str, script, flags: str) -> dict:
    """A snippet as a program, with these flags; `script` stands for the page's. Its names."""
    names = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", shlex.split(f"snippet.py {SMALL[script]} {flags}"))
        # what a snippet replaces in the script is put back
        for name in re.findall(r"^script\.(\w+) =", snippet, re.MULTILINE):
            patch.setattr(script, name, getattr(script, name))
        exec(snippet.replace("import ppo_continuous_action", f"import {script.__name__}"), names)
    return names


# --- coming_from.md -------------------------------------------------------------------------------
@pytest.mark.parametrize("script", GYMNASIUM, ids=lambda x: x.__name__)
def test_evaluating_while_it_trains(script, place, capsys):
    flags = "--checkpoint-interval 1 --eval-episodes 2 --run-dir"
    scores = start(WATCH, script, f"{flags} watched")["scores"]
    assert len(scores) == capsys.readouterr().out.count("eval, 2 episodes") >= 4
    plain = train(script, f"{flags} plain")
    watched, alone = (script.load_checkpoint(place / x)["agent"] for x in ("watched", "plain"))
    assert all(torch.equal(x, watched[name]) for name, x in alone.items())
    assert scores[-1] == pytest.approx(np.mean(play(script, plain, episodes=2)))
    assert np.mean(play(script, place / "watched" / "best", episodes=2)) == max(scores)
    logged = scalars(place / "watched")["eval/episodic_return"]
    assert [value for _, value in logged] == pytest.approx(scores, rel=1e-5)


def test_a_second_task_begins_with_the_networks_of_the_first(place, monkeypatch):
    init = ppo_continuous_action.Agent.__init__
    monkeypatch.setattr(ppo_continuous_action.Agent, "__init__", init)  # is put back
    train(ppo_continuous_action, "--run-dir runs/FIRST")
    start(SECOND, ppo_continuous_action, "--learning-rate 0 --run-dir second")
    load = ppo_continuous_action.load_checkpoint
    first, second = (load(place / name)["agent"] for name in ("runs/FIRST", "second"))
    assert all(torch.equal(x, second[name]) for name, x in first.items() if "moments" not in name)
    assert second["obs_moments.count"] > 1.5 * first["obs_moments.count"]
    assert status(place / "second") == "finished"


def test_a_loop_of_ones_own():
    """The page of PPO-CMA: without `rollout` and `Run`."""
    names = {}
    exec(LOOP.replace("range(250)", "range(2)").replace("2000", "300"), names)
    assert names["agent"].updates == 2
    assert np.isfinite(names["metrics"]["charts/mean_episodic_return"])


@pytest.mark.parametrize("name", ["ppo_lstm", "ppo_pixels", "ppo_pettingzoo"])
def test_commands_for_games_have_cleanrls_defaults(name):
    """Those of ppo_atari_lstm.py, ppo_procgen.py and ppo_pettingzoo_ma_atari.py."""
    page = (ROOT / "docs" / f"{name}.md").read_text().replace("\\\n", " ")
    pattern = rf"^ +python {name}\.py (--env-id (?:envpool|atari).*--total-.*)$"
    commands = re.findall(pattern, page, re.M)
    args = vars(importlib.import_module(name).parse_args(shlex.split(commands[0])))
    theirs = {
        "total_timesteps": 10_000_000, "learning_rate": 2.5e-4, "num_envs": 8, "num_steps": 128,
        "num_minibatches": 4, "update_epochs": 4, "gamma": 0.99, "gae_lambda": 0.95,
        "anneal_lr": True, "norm_adv": True, "clip_coef": 0.1, "clip_vloss": True,
        "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5, "target_kl": None,
    }  # fmt: skip
    if name == "ppo_pixels":  # Procgen
        theirs |= {"total_timesteps": 25_000_000, "num_envs": 64, "num_steps": 256, "gamma": 0.999}
        theirs |= {"learning_rate": 5e-4, "num_minibatches": 8, "update_epochs": 3}
        theirs |= {"anneal_lr": False, "clip_coef": 0.2}
    assert {flag: args[flag] for flag in theirs} == theirs


@pytest.mark.parametrize("script", GYMNASIUM[:2], ids=lambda x: x.__name__)
def test_predict_and_action_probability(script):
    """What the page types into Python, by the definitions of the distributions."""
    agent, _ = script.load(train(script, "--run-dir run"))
    obs = np.array([0.1, -0.2, 0.5], np.float32)
    tensor = torch.tensor(obs)[None].repeat(2, 1)

    def typed(row: str, number: int = 0, **names):
        (second,) = re.findall(rf"^\| {re.escape(row)}[^|]*\| ([^|]*) ", COMING, re.M)
        code = re.findall("`(agent[^`]*)`", second)[number]
        return eval(code, {"agent": agent, "obs": tensor} | names)

    greedy, sampled = (typed("`predict(obs, deter", k, obs=obs) for k in (0, 1))
    if script is ppo:
        assert {int(greedy), int(sampled)} <= {0, 1, 2}
        probability = typed("`action_probability(obs)`")
        assert probability.sum(-1).tolist() == pytest.approx([1.0, 1.0])
        assert probability[0].argmax() == greedy
        action = torch.tensor([[0], [2]])
        expected = probability[0, action[:, 0]]
    else:
        mean, deviation = (typed("`action_probability(obs)`", k) for k in (1, 2))
        # the kernels of a row alone and in two may differ
        np.testing.assert_allclose(mean[0], greedy, rtol=1e-4, atol=1e-4)
        assert deviation.item() == pytest.approx(2.0 * np.exp(-0.7), rel=0.05)
        assert greedy != sampled
        action = torch.tensor([[0.5], [-1.0]])
        density = torch.distributions.Normal(torch.tensor(mean), deviation).log_prob(action)
        expected = density.exp()[:, 0]
    found = typed("`action_probability(obs, actions=a)`", a=action)
    torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=1e-5)
    assert typed("`policy.predict_values").shape == (2,)


# --- your_environment.md --------------------------------------------------------------------------
def test_the_environment_and_its_commands(place, monkeypatch, capsys):
    """Those of the page, one after the other, with fewer steps."""
    for env_id in ("Reach-v0", "ReachDiscrete-v0"):
        check_env(gym.make(env_id).unwrapped, skip_render_check=True)
    lines = re.findall(r"^    (python .*)$", YOURS, re.MULTILINE)
    small = "--num-steps 512 --num-minibatches 4 --update-epochs 1 --no-cuda"

    def typed(line: str, more: str = "") -> str:
        """What is printed by a command, run in this process."""
        _, program, *flags = shlex.split(f"{line} {more}")
        monkeypatch.setattr(sys, "argv", [program, *flags])
        capsys.readouterr()
        if program == "-c":
            exec(flags[0], {"__name__": "__main__"})
        else:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        return capsys.readouterr().out

    checked, trained, played, resumed, discrete = lines
    typed(checked)
    typed(trained, f"{small} --total-timesteps 1024")
    typed(resumed.replace("2000000", "2048"))
    saved = json.loads((place / "runs/reach/run.json").read_text())
    assert (saved["status"], saved["args"]["total_timesteps"]) == ("finished", 2048)
    before = content(place / "runs")
    said = typed(played, "--eval-episodes 2")
    found = [float(x) for x in re.findall(r"eval_episode=\d+, episodic_return=(\S+)", said)]
    returns = play(ppo_continuous_action, "runs/reach", "--env-id my_envs:Reach-v0", 2)
    assert found == pytest.approx(returns, abs=0.006)
    assert content(place / "runs") == before
    typed(discrete, f"{small} --total-timesteps 4096 --run-dir runs/discrete")
    assert status(place / "runs" / "discrete") == "finished"
