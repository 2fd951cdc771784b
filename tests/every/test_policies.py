"""A saved policy is complete and acts to the bit; evaluation repeats, says each return, writes
nothing but videos."""

import importlib
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from agents_toy import Watch
from program import (
    Clockwork,
    Levels,
    Toy,
    assert_same,
    check_both_evaluations,
    content,
    installed,
    write_checkpoint,
)
from scripts import EVERY, GYMNASIUM, POOLS, SMALL, SPACES, evaluate, train

DUEL, AGENTS, WARP = "ppo_pettingzoo_ma_atari", "ppo_pettingzoo", "ppo_continuous_action_warp"
GAMES = [*POOLS, DUEL]
DRAWN = [*GYMNASIUM, "ppo_atari_multigpu", "ppo_atari_lstm"]  # and greedily
RECURRENT = ["ppo_lstm", "ppo_atari_lstm"]
ROWS = 99


class Drawn(Clockwork):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, action_space, render_mode=None):
        super().__init__(action_space)
        self.render_mode = render_mode

    def render(self):
        return np.full((64, 64, 3), 20 * self.t, np.uint8)


for name in ("Box", "Choice"):
    gym.register(f"Drawn{name}-v0", Drawn, kwargs={"action_space": SPACES[name]})


pytestmark = pytest.mark.usefixtures("environments")


@pytest.fixture(scope="module")
def runs(environments, tmp_path_factory):
    """The folder of a run of a script, never changed, and the agent that was trained there."""
    made = {}

    def get(script: str) -> tuple[Path, object]:
        if script not in made:
            folder, agents = tmp_path_factory.mktemp(script) / "run", []
            module = importlib.import_module(script)
            with pytest.MonkeyPatch.context() as patch:
                plain = module.save

                def save(run, agent, *rest):
                    agents.append(agent)
                    plain(run, agent, *rest)

                patch.setattr(module, "save", save)
                train(script, folder, "--save-model --exp-name ../a/name")
            made[script] = folder, agents[-1]
        return made[script]

    return get


def spaces(module, args):
    """What an agent is made for."""
    if module.__name__ == AGENTS:
        return module.make_envs(module.replace(args, env_id="agents_toy:make"), 1)
    if module.__name__ not in GAMES:
        return gym.make(args.env_id)
    which = {DUEL: 2, "ppo_procgen": 1}.get(module.__name__, slice(0, 1))
    return module.Envs(args, which)


def observed(script: str, envs) -> list | np.ndarray:
    """Observations to act on: drawn from their space or, of several agents, of whole episodes."""
    rng = np.random.default_rng(0)
    if script in GAMES:
        return rng.integers(0, 256, (ROWS, *envs.obs.shape[1:]), dtype=np.uint8)
    if script == AGENTS:
        return [Watch().reset(seed=seed)[0] for seed in range(ROWS)]
    envs.observation_space.seed(0)
    return np.stack([envs.observation_space.sample() for _ in range(ROWS)])


def noise(script: str, agent):
    if script in GAMES:
        return np.random.default_rng(1).gumbel(size=(ROWS, len(agent.actor.bias)))
    if script in ("ppo_pixels", "ppo_lstm"):
        return agent.noise(np.random.default_rng(1), ROWS)
    return agent.noise(3 if script == AGENTS else ROWS)


def act(script: str, agent, obs, given=None) -> np.ndarray:
    if script == AGENTS:
        return np.array([list(agent.act(each, given).values()) for each in obs])
    state = {"state": agent.initial_state(ROWS)} if script in RECURRENT else {}
    return agent.act(obs, given, **state)


@EVERY
def test_a_saved_policy_is_complete(script, runs):
    """As loaded, and as the weights alone in a new agent, it acts as the one that was trained."""
    module, (folder, trained) = importlib.import_module(script), runs(script)
    checkpoint = module.load_checkpoint(folder)
    envs = spaces(module, checkpoint["args"])
    agent, args = module.load(str(folder), envs) if script == AGENTS else module.load(str(folder))
    assert args == checkpoint["args"]
    weights = torch.load(folder / "name.cleanrl_model", weights_only=True)  # the name's last part
    assert_same(dict(weights), dict(checkpoint["agent"]))
    fresh = module.Agent(envs, module.replace(args, seed=7))
    torch.manual_seed(1)
    for x in fresh.parameters():
        x.data += torch.randn_like(x)
    obs, drawn = observed(script, envs), noise(script, trained)
    wanted = [act(script, trained, obs, given) for given in (None, drawn)]
    assert (act(script, fresh, obs, drawn) != wanted[1]).any()
    fresh.load_state_dict(weights)
    for each in (agent, fresh):
        assert (act(script, each, obs) == wanted[0]).all()
        assert (act(script, each, obs, drawn) == wanted[1]).all()
    if script not in (AGENTS, "ppo_procgen"):
        shape = envs.action_space.shape
        assert wanted[0].shape == wanted[1].shape == (ROWS, *shape)
    if script in GAMES and script not in RECURRENT:  # what is drawn is what is learned from
        with torch.no_grad():
            policy = trained.policy(torch.as_tensor(obs))[0].numpy()
        assert (wanted[0] == policy.argmax(axis=1)).all()
        assert (wanted[1] == (policy + drawn.astype(np.float32)).argmax(axis=1)).all()
    if script in RECURRENT:  # it would play without its memory
        with pytest.raises(TypeError, match="state"):
            trained.act(obs)


@pytest.fixture
def paid_by_actions(monkeypatch):
    """Rewards that tell what was done; elsewhere most of these pay for time alone."""
    clock, toy, levels = Clockwork.step, Toy.step, Levels.step

    def one(env, action):
        obs, reward, *rest = clock(env, action)
        return obs, reward + float(np.sum(action)), *rest

    def lives(envs, actions):
        *rest, info = toy(envs, actions)
        return *rest, info | {"reward": info["reward"] + actions * (info["reward"] > 0)}

    def rooms(envs, actions):
        obs, rewards, *rest = levels(envs, actions)
        return obs, rewards + actions * (rewards > 0), *rest

    monkeypatch.setattr(Clockwork, "step", one)
    monkeypatch.setattr(Toy, "step", lives)
    monkeypatch.setattr(Levels, "step", rooms)


@EVERY
@pytest.mark.usefixtures("paid_by_actions")
def test_evaluation_repeats_and_writes_nothing(script, runs, capsys):
    folder, _ = runs(script)
    before = content(folder)
    capsys.readouterr()
    returns = evaluate(script, folder, "--eval-episodes 4")
    assert evaluate(script, folder, "--eval-episodes 4") == returns
    assert content(folder) == before
    said = capsys.readouterr().out
    if script in DRAWN:
        check_both_evaluations(said, returns)
    lines = said.splitlines()
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]
    listed = [line for line in lines[: len(lines) // 2] if line.startswith("eval_episode=")]
    assert len(listed) == len(returns) == 4
    for i, line in enumerate(listed):
        assert line.startswith(f"eval_episode={i}, episodic_return={returns[i]:.2f}")


WORTH = {  # of an episode, whatever is done: two lives of three steps pay 1 + ... + 6
    **dict.fromkeys(GYMNASIUM, 10.0), **dict.fromkeys(POOLS[:2], 21.0), "ppo_procgen": 6.0
}  # fmt: skip


@EVERY
def test_what_a_tracked_run_needs_its_policy_does_not(script, runs, tmp_path, monkeypatch):
    """A run that was tracked and filmed can be loaded where neither is installed."""
    installed(monkeypatch, wandb=False, moviepy=False)
    saved = importlib.import_module(script).load_checkpoint(runs(script)[0])
    saved["args"].track = saved["args"].capture_video = True
    write_checkpoint(tmp_path, saved)
    assert importlib.import_module(script).load_checkpoint(tmp_path)["args"].track
    flags = "--no-track --no-capture-video --eval-episodes 1"
    (found,) = evaluate(script, tmp_path, flags)
    assert found == WORTH.get(script, found)


FILMS = {  # what is in videos/ after one episode of each kind
    **{script: ["rl-video-episode-0.mp4"] for script in SMALL},
    **{script: ["eval-episode-0.mp4", "sampled-episode-0.mp4"] for script in GYMNASIUM[-2:]},
    "ppo_procgen": ["eval-episode-0.mp4", "train-episode-0.mp4"],
}


@EVERY
def test_videos(script, runs, tmp_path, monkeypatch):
    """MuJoCo's are in test_programs.py."""
    monkeypatch.setattr(Toy, "render", lambda toy, env_ids: toy.obs()[env_ids, -1:], raising=False)
    saved = importlib.import_module(script).load_checkpoint(runs(script)[0])
    write_checkpoint(tmp_path, saved)
    flags = "--eval-episodes 1"
    returns = evaluate(script, tmp_path, flags)
    if script in GYMNASIUM:
        flags += f" --env-id {SMALL[script].split()[1].replace('Clock', 'Drawn')}"
    assert evaluate(script, tmp_path, f"{flags} --capture-video") == returns
    films = sorted((tmp_path / "videos").glob("*.mp4"))
    assert [film.name for film in films] == FILMS[script]
    assert min(film.stat().st_size for film in films) > 500
