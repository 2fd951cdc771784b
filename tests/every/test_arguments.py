"""The command line: wrong input, flags in every spelling, help; environments that are refused."""

import importlib
import re
import shlex
import types
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from agents_toy import Watch
from program import Clockwork, Levels, Toy, installed
from scripts import (
    EVERY,
    GYMNASIUM,
    NAMED,
    PARALLEL,
    POOLS,
    SMALL,
    SPACES,
    STEPS,
    evaluate,
    parse,
    refused,
    train,
)

ADAPTED = ["ppo_cma", "ppo_kl_adaptive"]  # with the flags of other originals
CLIPPED = [script for script in SMALL if script not in ADAPTED]


class Wide(Clockwork):
    observation_space = gym.spaces.Box(-1, 1, (3,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, self.observation_space.dtype), {}


class Pixels(Wide):
    observation_space = gym.spaces.Box(0, 255, (36, 36, 3), np.uint8)


class Undrawn(Clockwork):
    def __init__(self, action_space, render_mode=None):
        super().__init__(action_space)

    def render(self):
        raise OSError("no display")


class Needy(Clockwork):
    def __init__(self, action_space, data):
        super().__init__(action_space)
        assert data == "x.csv"


for name in ("Box", "Choice"):
    for kind in (Pixels, Wide, Undrawn, Needy):
        gym.register(f"{kind.__name__}{name}-v0", kind, kwargs={"action_space": SPACES[name]})
SEVERAL = {"Multi": gym.spaces.MultiDiscrete([2, 3]), "Bits": gym.spaces.MultiBinary(3)}
for name, space in SEVERAL.items():
    gym.register(f"Clock{name}-v0", Clockwork, kwargs={"action_space": space})


pytestmark = pytest.mark.usefixtures("environments")


@pytest.fixture(scope="module")
def place(environments, tmp_path_factory):
    """A folder with a `run` of a script and what is none; never changed."""
    made = {}

    def get(script: str) -> Path:
        if script not in made:
            folder = made[script] = tmp_path_factory.mktemp(script)
            train(script, folder / "run")
            (folder / "file").write_text("mine")
            (folder / "empty").mkdir()
        return made[script]

    return get


def start(script: str, line: str, small: str | None = None):
    """What the script does as a program with these flags, after those of a small run."""
    module = importlib.import_module(script)
    small = SMALL[script] if small is None else small
    more = f"--total-timesteps {2 * STEPS[script]}" if small else ""
    args = module.parse_args(shlex.split(f"{small} {more} {line}"))
    return (module.evaluate if args.evaluate else module.train)(args)


# --- wrong input ----------------------------------------------------------------------------------

# What is said, by tyro's frame or in one line
WRONG = [
    ("--learning-rat 0.1", "--learning-rate"),
    ("--epsilon 0.2", "Unrecognized options: --epsilon"),
    ("surplus", "surplus"),
    ("--cuda maybe", "maybe"),
    ("--env-id", "Expected 1"),
    ("--env-id=", "--env-id"),
    ("--env-id :", "--env-id"),
    ("--env-id a:b:c", "--env-id a:b:c"),
    ("--env-id nowhere:", "--env-id nowhere:"),
    ("--env-id nowhere:Env-v0", "--env-id nowhere:Env-v0"),
    ("--env-id :CartPole-v1", "--env-id :CartPole-v1"),
    ("--env-id=-v0", "--env-id -v0"),
    ("--env-id Nothing-v0", "--env-id Nothing-v0"),
    ("--seed one", "one"),
    ("--seed -1", "--seed -1: not in 0 ..."),
    ("--total-timesteps 1e6", "1e6"),
    ("--total-timesteps 0", "--total-timesteps 0: not in"),
    ("--num-envs 2.5", "2.5"),
    ("--num-envs 0", "0: not in 1 ..."),
    ("--num-threads -1", "--num-threads -1: not in"),
    ("--eval-episodes 0", "--eval-episodes 0: not in 1 ..."),
    ("--checkpoint-interval 0", "--checkpoint-interval 0: not in 1 ..."),
    ("--learning-rate nan", "--learning-rate nan: not in"),
    ("--learning-rate inf", "--learning-rate inf: not in"),
    ("--gamma 1.5", "--gamma 1.5: not in 0 ... 1"),
    ("--gae-lambda -0.1", "--gae-lambda -0.1: not in 0 ... 1"),
    ("--exp-name=", "--exp-name '': a name is needed"),
    ("--resume nowhere", "nowhere: no checkpoint.pt that can be read here"),
    ("--evaluate empty", "empty: no checkpoint.pt that can be read here"),
    ("--resume run --evaluate run", "--resume goes on in its folder"),
    ("--resume run --run-dir new", "--resume goes on in its folder"),
    ("--resume run --num-envs 3", "run keeps its"),
    ("--resume run --seed 9", "--seed 9: run keeps its"),
    ("--resume run --gamma 1.5", "--gamma 1.5: not in 0 ... 1"),
    ("--run-dir run", "--resume run"),
    ("--track", "wandb is not installed: pip install wandb"),
    ("--capture-video", "moviepy 2 is not installed: pip install 'moviepy>=2'"),
    ("--evaluate run --capture-video", "moviepy 2 is not installed: pip install"),
]
SURROGATE = [
    ("--vf-coef inf", "--vf-coef inf: not in 0 ..."),
    ("--update-epochs 1.5", "1.5"),
    ("--num-steps 0", "--num-steps 0: not in 1 ..."),
    ("--num-minibatches 0", "--num-minibatches 0: not in 1 ..."),
    ("--resume run --num-steps 6", "--num-steps 6: run keeps its"),
]
MINIBATCHES = [
    ("--num-minibatches 99", "--minibatch-size 0: not in 2 ..."),
    ("--total-timesteps 1", "--total-timesteps 1: not in"),
]
WORKED = [
    ("--env-workers 9", "--env-workers 9: not in 0 ..."),
    ("--env-kwargs []", "--env-kwargs []: no JSON object"),
    ("--env-kwargs {", "no JSON object"),
    ("--env-kwargs 5", "no JSON object"),
    ("--env-kwargs null", "no JSON object"),
    ("--env-kwargs '{\"a\":1}}'", "no JSON object"),
]
UNKNOWN = [("--env-id Nothing-v0", "your own: module:Id; arguments: --env-kwargs")]
VECTORS = "observations are no vector (MiniGrid: a Flat wrapper); pixels: ppo_pixels.py"
FINITE = "a finite Box of actions is needed, its sides from 1e-6 to 1e6; choices: ppo.py"
SEVERAL_CHOICES = "a Box or Discrete of actions is needed; several choices: ppo.py"
ATARI = [
    ("--num-minibatches 9", "--num-minibatches 9: not in 1 ..."),
    ("--env-id CartPole-v1", "--env-id CartPole-v1: EnvPool has no such Atari game"),
    ("--resume run --env-id Pong-v5", "--env-id Pong-v5: run keeps its Breakout-v5"),
]


def wrong_agents(fault: str) -> str:
    return f'--env-id agents_toy:wrong --env-kwargs \'{{"fault":"{fault}"}}\''


ITS_OWN = {
    "ppo": [
        *SURROGATE, *MINIBATCHES, *WORKED, *UNKNOWN,
        ("--target-kl nan", "--target-kl nan: not in 0 ..."),
        ("--env-id CartPol-v1", "CartPole"),
        ("--env-id PixelsChoice-v0", f"Box(0, 255, (36, 36, 3), uint8): {VECTORS}"),
        ("--env-id ClockBox-v0", "for a Box use ppo_continuous_action.py"),
        ("--env-id ClockTuple-v0", "discrete actions are needed"),
        ("--evaluate run --env-id WideChoice-v0", "run: its agent, by"),
        ("--resume run --env-id WideChoice-v0", "run: its agent, by"),
    ],
    "ppo_continuous_action": [
        *SURROGATE, *MINIBATCHES, *WORKED, *UNKNOWN,
        ("--target-kl nan", "--target-kl nan: not in 0 ..."),
        ("--log-std-init inf", "--log-std-init inf: not in -9 ... 9"),
        ("--resume run --log-std-init 0", "--log-std-init 0.0: run keeps its -0.7"),
        ("--resume run --no-scale-actions", "--scale-actions False: run keeps its True"),
        ("--env-id Penduluum-v1", "Pendulum"),
        ("--env-id Hopper-v2", "gymnasium-robotics"),
        ("--env-id dm_control/cartpole-balance-v0", "import of shimmy halted"),
        ("--env-id PixelsBox-v0", VECTORS),
        ("--env-id ClockChoice-v0", "a Box of actions is needed; for discrete ones use ppo.py"),
        ("--evaluate run --env-id WideBox-v0", "run: its agent, by"),
        ("--resume run --env-id WideBox-v0", "run: its agent, by"),
    ],
    "ppo_cma": [
        *WORKED, *UNKNOWN,
        ("--env-name HalfCheeta-v4", "Did you mean: `HalfCheetah`?"),
        ("--env-id Humanoid-v9", "provides versioned environments"),
        ("--env-id PixelsBox-v0", VECTORS),
        ("--env-id ClockChoice-v0", FINITE),
        ("--env-id ClockEndless-v0", f"Box(-inf, inf, (1,), float32): {FINITE}"),
        ("--env-id envpool:HalfCheetah-v4", "envpool:HalfCheetah-v4"),
        ("--mode cma", "--mode cma: not one of ppo-cma-m, ppo-cma, ppo, pg, pg-pos"),
        ("--iter-steps 0", "--iter-steps 0: not in 1 ..."),
        ("--history-buffer-size 0", "--history-buffer-size 0: not in 1 ..."),
        ("--n-updates 1", "--n-updates 1: not in 2 ..."),
        ("--action-repeat 0", "--action-repeat 0: not in 1 ..."),
        ("--batch-size 0", "--minibatch-size 0: not in 1 ..."),
        ("--ppo-epsilon inf", "--clip-coef inf: not in 0 ..."),
        ("--resume run --mode ppo", ", does not fit the environment"),
        ("--evaluate run --env-id WideBox-v0", "run: its agent, by"),
        ("--resume run --env-id WideBox-v0", "run: its agent, by"),
    ],
    "ppo_kl_adaptive": [
        *WORKED, *UNKNOWN,
        ("--env-name Hoper-v4", "Did you mean: `Hopper`"),
        ("--env-id PixelsBox-v0", VECTORS),
        ("--env-id ClockTuple-v0", SEVERAL_CHOICES),
        ("--env-id ClockMulti-v0", f"MultiDiscrete([2 3]): {SEVERAL_CHOICES}"),
        ("--env-id ClockBits-v0", f"MultiBinary(3): {SEVERAL_CHOICES}"),
        ("--env-id envpool:HalfCheetah-v4", "envpool:HalfCheetah-v4"),
        ("--servo kody", "kody"),
        ("--kl-targ 0", "--kl-targ 0.0: not in 1e-09 ..."),
        ("--kl-targ big", "no type matching {None}|FLOAT"),
        ("--learning-rate 0", "--learning-rate 0.0: not in 1e-09 ..."),
        ("--value-learning-rate 0", "--value-learning-rate 0.0: not in 1e-09 ..."),
        ("--policy-logvar nan", "--policy-logvar nan: not in -20 ... 20"),
        ("--policy-logvar 21", "--policy-logvar 21.0: not in -20 ... 20"),
        ("--resume run --policy-logvar 1", "--policy-logvar 1.0: run keeps its"),
        ("--resume run --beta 2", "--beta 2.0: run keeps its None"),
        ("--num-episodes -1", "--num-episodes -1: not in 0 ..."),
        ("--num-steps 100", "Unrecognized options: --num-steps"),
        ("-b 1", "--num-envs 2: not in 1 ... 1"),
        ("--evaluate run --env-id WideBox-v0", "run: its agent, by"),
        ("--resume run --env-id WideBox-v0", "run: its agent, by"),
    ],
    "ppo_pixels": [
        *SURROGATE, *MINIBATCHES, *WORKED,
        ("--resume run --log-std-init 0.1", "--log-std-init 0.1: run keeps its"),
        ("--target-kl nan", "--target-kl nan: not in 0 ..."),
        ("--encoder resnet", "resnet"),
        ("--resize 84", "--resize 84: height and width are needed, as 60x80"),
        ("--action-repeat -1", "--action-repeat -1: not in"),
        ("--evaluate run --env-id PixelsBox-v0", "run: its agent "),
        ("--resume run --env-id WideBox-v0", "run: its agent, by"),
    ],
    "ppo_lstm": [
        *SURROGATE, *WORKED,
        ("--resume run --log-std-init 0.1", "--log-std-init 0.1: run keeps its"),
        ("--num-minibatches 9", "--num-minibatches 9: not in 1 ... 2"),
        ("--memory rnn", "rnn"),
        ("--memory-size 0", "--memory-size 0: not in 1 ..."),
        ("--resume run --memory gru", ", does not fit the environment and the flags"),
        ("--resume run --memory-size 16", ", does not fit the environment and the flags"),
        ("--resume run --previous-action", ", does not fit the environment and the flags"),
    ],
    "ppo_pettingzoo": [
        *SURROGATE, *MINIBATCHES, *WORKED,
        ("--resume run --log-std-init 0.1", "--log-std-init 0.1: run keeps its"),
        ("--critic global", "not local, concatenated or state"),
        ("--critic state", "--critic state"),
        (
            "--resume run --env-id agents_toy:make --critic concatenated",
            ", does not fit the environment and the flags",
        ),
        ("--max-episode-steps 0", "--max-episode-steps 0: not in 1"),
        (wrong_agents("names"), "no possible_agents"),
        (wrong_agents("mixed"), "all Box, or all with as many branches"),
        (wrong_agents("dict"), "a Dict of observation and action_mask"),
        (wrong_agents("large"), "above 20,000 numbers"),
        (f"{wrong_agents('rewards')} --run-dir new", "rewards for {'stranger'}"),
        ("--env-id agents_toy:nothing", "nothing"),
        ("--env-id mpe2.nothing_v1", "No module named 'mpe2.nothing_v1'"),
        ("--env-id nothing/nothing_v1", "Namespace 'nothing' not found"),
        ("--env-id Nothing-v1", "Environment `Nothing` doesn't exist"),
        ("--env-id butterfly/cooperative_pong_v6", "above 20,000 numbers"),
        (
            "--env-id pettingzoo.test.example_envs.generated_agents_parallel_v0",
            "no possible_agents",
        ),
    ],
    "ppo_atari_multigpu": [*SURROGATE, *ATARI, ("--backend mpl", "mpl")],
    "ppo_atari_lstm": [
        *SURROGATE, *ATARI,
        ("--num-steps 1 --num-minibatches 4", "--minibatch-size 1: not in 2 ..."),
    ],
    "ppo_procgen": [
        *SURROGATE, *MINIBATCHES,
        ("--num-minibatches 19", "--minibatch-size 1: not in 2 ..."),
        ("--num-levels -1", "--num-levels -1: not in 0 ... 1000000000"),
        ("--start-level 2000000000", "--start-level 2000000000: not in 0 ... 1000000000"),
        ("--eval-interval 0", "--eval-interval 0: not in 1 ..."),
        ("--env-id Breakout-v5", "--env-id Breakout-v5: EnvPool has no such Procgen game"),
        ("--env-id nogame", "--env-id nogame: EnvPool has no such Procgen game"),
        ("--resume run --env-id bigfish", "bigfish: run keeps its StarpilotEasy-v0"),
    ],
    "ppo_pettingzoo_ma_atari": [
        *SURROGATE, *MINIBATCHES,
        ("--num-envs 1", "--num-envs 0: not in 1 ..."),
        ("--eval-interval 0", "--eval-interval 0: not in 1 ..."),
        ("--env-id pong_v2", "--env-id pong_v2: No module named"),
        ("--env-id quadrapong_v4", "--env-id quadrapong_v4: too many values to unpack"),
        ("--env-id base_atari_env", "has no attribute 'parallel_env'"),
        ("--resume run --env-id other_v0", "other_v0: run keeps its duel_v0"),
    ],
    "ppo_continuous_action_warp": [
        *SURROGATE, *MINIBATCHES,
        ("--hidden 16 0", "--hidden 0: not in 1 ..."),
        ("--desired-kl -1", "not in 0 ..."),
        ("--log-std-init inf", "--log-std-init inf: not in -9 ... 9"),
        ("--resume run --log-std-init 0.1", "--log-std-init 0.1: run keeps its"),
        ("--resume run --no-scale-actions", "--scale-actions False: run keeps its True"),
        ("--env-id Nothing-v0", "not Pendulum-v1, HalfCheetah-v4"),
        ("--env-id nothing:Envs", "No module named 'nothing'"),
        ("--resume run --hidden 9", ", does not fit the environment and the flags"),
    ],
}  # fmt: skip


def tree(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every file and folder with its size and the time of its last change."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@EVERY
def test_wrong_input_is_told_and_changes_nothing(script, place, monkeypatch, capfd):
    installed(monkeypatch, wandb=False, moviepy=False, shimmy=False)
    monkeypatch.chdir(place(script))
    before, otherwise = tree(Path()), []
    for line, says in WRONG + ITS_OWN[script]:
        capfd.readouterr()
        code = None
        try:  # it would soon be over if it were not refused
            start(script, line)
        except SystemExit as end:
            code = end.code
        err = capfd.readouterr().err
        text = " ".join(word for word in err.split() if word != "│")
        framed = err.startswith("╭─") or re.fullmatch(rf"{script}\.py: .*\n", err)
        if (code, bool(framed), says in text) != (2, True, True):
            otherwise.append((line, code, err))
    assert not otherwise, "\n".join(map(str, otherwise))
    assert tree(Path()) == before


MISSING = {
    "ppo_pettingzoo_ma_atari": ["pettingzoo", "multi_agent_ale_py", "ale_py"],
    **{script: ["envpool"] for script in POOLS},
}


@pytest.mark.parametrize("script", MISSING)
def test_a_package_that_is_missing_is_named(script, monkeypatch, capfd):
    for package in MISSING[script]:
        with pytest.MonkeyPatch.context() as patch:
            installed(patch, **{package: False})
            err = refused(capfd, package, parse, script, SMALL[script])
            assert err == f"{script}.py: {package} is not installed: pip install {package}\n"


@EVERY
@pytest.mark.parametrize(
    "change",
    [
        {"gamma": "0.9"},
        {"gamma": True},
        {"eval_episodes": 8.0},
        {"eval_episodes": True},
        {"seed": None},
        {"seed": False},
        {"run_dir": "runs/1"},
    ],
)
def test_values_of_other_types_are_refused(script, change):
    """In Python, where no command line converts them."""
    (name,) = change
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .*: not of type"):
        importlib.import_module(script).Args(**change)


@pytest.mark.parametrize("script", CLIPPED)
def test_a_run_has_an_iteration_at_least(script):
    Args = importlib.import_module(script).Args
    least = Args().batch_size
    assert Args(total_timesteps=least).num_iterations == 1
    with pytest.raises(ValueError, match=f"--total-timesteps {least - 1}: not in {least} ..."):
        Args(total_timesteps=least - 1)
    with pytest.raises(ValueError, match="--total-timesteps 0: not in"):
        Args(total_timesteps=0)


@EVERY
def test_a_resumed_run_does_not_end_before_what_it_has_trained(script, place, capfd):
    """Its folder would tell fewer steps than the agent has learned from."""
    run = place(script) / "run"
    checkpoint = importlib.import_module(script).load_checkpoint(run)
    trained, *_ = checkpoint["counters"]
    least = min(trained, checkpoint["args"].total_timesteps)  # whole episodes go beyond the total
    resume = f"--resume {run} {NAMED.get(script, '')} --total-timesteps"
    says = f"--total-timesteps {least - 1}: {run} has trained {trained}\n"
    assert refused(capfd, says, parse, script, f"{resume} {least - 1}").endswith(says)
    assert parse(script, f"{resume} {least}").total_timesteps == least


def test_lists_and_choices_are_checked():
    multi = importlib.import_module("ppo_atari_multigpu")
    warp = importlib.import_module("ppo_continuous_action_warp")
    assert multi.Args(device_ids=[0, 1], backend="gloo").device_ids == [0, 1]
    for change in ({"device_ids": [0.5]}, {"device_ids": 3}, {"backend": "tcp"}):
        with pytest.raises(ValueError, match="not of type"):
            multi.Args(**change)
    with pytest.raises(ValueError, match="not of type"):
        warp.Args(hidden=(64, "64"))


@pytest.mark.parametrize("script", [each for each in SMALL if each != "ppo_atari_multigpu"])
def test_torchrun_is_refused(script, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(capfd, "torchrun is for ppo_atari_multigpu.py", parse, script, SMALL[script])
    monkeypatch.setenv("WORLD_SIZE", "1")
    parse(script, SMALL[script])


@EVERY
def test_what_videos_need_is_there_before_training(script, monkeypatch, capfd):
    """moviepy 2, and a frame that can be drawn: these environments have none."""
    installed(monkeypatch, moviepy=True)
    monkeypatch.setattr(metadata, "version", lambda name: "1.0.3")
    flags = f"{SMALL[script]} --capture-video".replace("Clock", "Undrawn")
    refused(capfd, "pip install 'moviepy>=2'", parse, script, flags)
    monkeypatch.setattr(metadata, "version", lambda name: "2.1")
    monkeypatch.setattr(Watch, "render", lambda env: 1 / 0)
    monkeypatch.setattr(gym.wrappers.OrderEnforcing, "render", lambda env: 1 / 0)
    if script in ("ppo_procgen", "ppo_pettingzoo_ma_atari"):  # which film what they see
        parse(script, flags)
    else:
        refused(capfd, "can't be drawn: ", parse, script, flags)


# --- environments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("script", GYMNASIUM)
def test_arguments_of_the_environment(script, tmp_path, capfd):
    env_id = SMALL[script].split()[1].replace("Clock", "Needy")
    err = refused(capfd, f"--env-id {env_id}: TypeError", start, script, f"--env-id {env_id}")
    assert "'data'" in err and "raised in" in err and "--env-kwargs" in err
    given = f"""--env-id {env_id} --env-kwargs '{{"data":"x.csv"}}' --run-dir {tmp_path / "run"}"""
    start(script, given)
    saved = importlib.import_module(script).load_checkpoint(tmp_path / "run")["args"]
    assert saved.env_kwargs == '{"data":"x.csv"}'
    assert evaluate(script, tmp_path / "run", "--eval-episodes 2") == [10.0, 10.0]


@pytest.mark.parametrize(
    "error", [AssertionError("no"), NotImplementedError(), OSError("dis\nplay")]
)
@pytest.mark.parametrize("script", PARALLEL)
def test_whatever_making_an_environment_raises_is_one_line(script, error, monkeypatch, capfd):
    def make(*given, **kwargs):
        raise error

    monkeypatch.setattr(gym, "make", make)
    monkeypatch.setattr("agents_toy.make", make)
    err = refused(capfd, type(error).__name__, start, script, "")
    assert "test_arguments.py, line" in err


ENDLESS = [script for script in SMALL if script != "ppo_pettingzoo_ma_atari"]  # 25,000 at most


def shortened(monkeypatch, module, limit: int) -> int:
    """Lower the 100,000 steps after which an evaluation gives up; how many functions have it."""
    owners = [module, *(x for x in vars(module).values() if isinstance(x, type))]
    functions = [getattr(x, "__wrapped__", x) for owner in owners for x in vars(owner).values()]
    found = set()
    for function in functions:
        code = getattr(function, "__code__", None)
        own = getattr(function, "__module__", "") == module.__name__
        if own and code and 100_000 in code.co_consts:
            consts = tuple(limit if c == 100_000 else c for c in code.co_consts)
            monkeypatch.setattr(function, "__code__", code.replace(co_consts=consts))
            found.add(function)
    return len(found)


@pytest.mark.parametrize("script", ENDLESS)
def test_an_environment_that_never_ends_is_told(script, place, monkeypatch, capfd):
    def endless(env, action):
        return np.zeros(2), 1.0, False, False, {}

    def pool(self, actions):
        n = len(self.t)
        no = np.zeros(n, bool)
        return self.obs(), np.zeros(n), no, no, {"terminated": no, "reward": np.zeros(n)}

    def together(self, actions):
        no = dict.fromkeys(self.agents, False)
        observations, infos = self.look()
        return observations, dict.fromkeys(self.agents, 1.0), no, dict(no), infos

    module, folder = importlib.import_module(script), place(script) / "run"
    monkeypatch.setattr(Clockwork, "step", endless)
    monkeypatch.setattr(Toy, "step", pool)
    monkeypatch.setattr(Levels, "step", pool)
    monkeypatch.setattr(Watch, "step", together)
    monkeypatch.setattr(gym.wrappers.TimeLimit, "step", lambda self, a: self.env.step(a))
    assert shortened(monkeypatch, module, 60) == 1
    refused(capfd, "100,000 steps", evaluate, script, folder, "--eval-episodes 2")
    if script in GYMNASIUM:  # as the line says
        monkeypatch.undo()
        monkeypatch.setattr(Clockwork, "step", endless)
        limit = """--env-kwargs {"max_episode_steps":50}"""
        assert evaluate(script, folder, limit) == [50.0] * 10
    if script == "ppo_pettingzoo":
        assert evaluate(script, folder, "--max-episode-steps 50") == [50.0] * 10


# --- flags ----------------------------------------------------------------------------------------

# Every flag of CleanRL's, with a value that is not the default; booleans come and go
CLEANRL = {
    "exp_name": "x", "seed": 7, "torch_deterministic": bool, "cuda": bool, "track": bool,
    "wandb_project_name": "p", "wandb_entity": "me", "capture_video": bool, "save_model": bool,
    "env_id": "some", "total_timesteps": 123456, "learning_rate": 0.125, "num_envs": 6,
    "num_steps": 65, "anneal_lr": bool, "gamma": 0.5, "gae_lambda": 0.25, "num_minibatches": 3,
    "update_epochs": 6, "norm_adv": bool, "clip_coef": 0.375, "clip_vloss": bool,
    "ent_coef": 0.0625, "vf_coef": 0.75, "max_grad_norm": 1.5, "target_kl": 0.875,
}  # fmt: skip
COMPUTED = {"batch_size": 390, "minibatch_size": 130, "num_iterations": 123456 // 390}


@EVERY
@pytest.mark.parametrize(("mark", "joint", "on"), [("-", " ", True), ("_", "=", False)])
def test_every_flag_of_cleanrl_in_every_spelling(script, mark, joint, on, monkeypatch):
    module = importlib.import_module(script)
    installed(monkeypatch, wandb=True, moviepy=True)
    closes = types.SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(metadata, "version", lambda name: "2.1")
    for name in ("drawn_env", "drawn_envs"):
        monkeypatch.setattr(module, name, lambda args: closes, raising=False)
    wanted = {name: on if value is bool else value for name, value in CLEANRL.items()}
    computed = COMPUTED if script in CLIPPED else {}
    wanted |= dict.fromkeys(computed, 5)
    known = module.Args.__dataclass_fields__
    absent = wanted.keys() - known.keys()
    assert script not in CLIPPED or absent <= {"anneal_lr", "target_kl"}
    assert not absent or script in (*ADAPTED, "ppo_continuous_action_warp")
    words = []
    for name in wanted.keys() - absent:
        flag, value = name.replace("_", mark), wanted[name]
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no{mark}{flag}")
        else:
            words += f"--{flag}{joint}{value}".split()
    found = asdict(module.parse_args(words))
    wanted = {name: value for name, value in (wanted | computed).items() if name in known}
    assert found.items() >= wanted.items()


PPO_CMA = (
    "--env_name Humanoid-v4 --max_steps 10000000 --mode PPO-CMA-m --iter_steps 32000 "
    "--batch_size 512 --history_buffer_size 9 --run_suffix 1"
)
TRPO = (  # Coady's
    "--env_name Ant-v4 --num_episodes 9 --gamma 0.9 --lam 0.8 --kl_targ 0.02 --batch_size=7 "
    "--hid1_mult 3 --policy_logvar -0.5"
)
ANT = {
    "env_id": "Ant-v4", "num_episodes": 9, "gamma": 0.9, "gae_lambda": 0.8, "kl_targ": 0.02,
    "episodes_per_batch": 7, "hid1_mult": 3, "policy_logvar": -0.5,
}  # fmt: skip
ORIGINAL = [
    (
        "ppo_cma",
        PPO_CMA,
        {
            "env_id": "Humanoid-v4", "total_timesteps": 10_000_000, "mode": "ppo-cma-m",
            "iter_steps": 32_000, "minibatch_size": 512, "history_buffer_size": 9, "exp_name": "1",
        },
    ),
    ("ppo_cma", "-m PPO", {"mode": "ppo"}),
    ("ppo_cma", "--mode ppo_cma_m", {"mode": "ppo-cma-m"}),
    ("ppo_cma", "-m PG-pos", {"mode": "pg-pos"}),
    ("ppo_cma", "-lr 0.001 --batch-size=64", {"learning_rate": 0.001, "minibatch_size": 64}),
    ("ppo_cma", "--learning_rate 0.001", {"learning_rate": 0.001}),
    ("ppo_cma", "--ppo_epsilon 0.1", {"clip_coef": 0.1}),
    ("ppo_cma", "--ppo_ent_l_w 0.01", {"ent_coef": 0.01}),
    ("ppo_cma", "--n_updates 7", {"n_updates": 7}),
    ("ppo_kl_adaptive", TRPO, ANT),
    (
        "ppo_kl_adaptive",
        "--env_name Hopper-v4 --num_episodes 30000 --gamma 0.995 --lam 0.98 --kl_targ 0.003 "
        "--batch_size 20 --hid1_mult 10 --policy_logvar -1.0",
        {"env_id": "Hopper-v4", "num_episodes": 30_000, "kl_targ": 0.003},
    ),
    ("ppo_kl_adaptive", "Ant-v4 -n 9 -g 0.9 -l 0.8 -k 0.02 -b 7 -m 3 -v -0.5", ANT),
    ("ppo_kl_adaptive", "--lambda_returns", {"lambda_returns": True}),
]  # fmt: skip


@pytest.mark.parametrize(("script", "line", "wanted"), ORIGINAL)
@pytest.mark.parametrize("mark", ["_", "-"])
def test_the_originals_flags_mean_what_they_did(script, line, wanted, mark):
    line = re.sub("(?<=[a-z0-9])_(?=[a-z])", mark, line)
    assert parse(script, line) == importlib.import_module(script).Args(**wanted)


@EVERY
def test_help_lists_every_flag_and_what_it_does(script, capsys):
    with pytest.raises(SystemExit) as end:
        parse(script, "--help")
    assert end.value.code == 0
    out = capsys.readouterr().out
    module = importlib.import_module(script)
    for name in module.Args.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in out
    text = " ".join(word for word in out.split() if word != "│")
    assert "iterations between checkpoints" in text  # what a flag's comment says
    assert " ".join(module.__doc__.split("\n")[0].split()[:4]) in text
    if script in CLIPPED:
        assert "--norm-adv, --no-norm-adv" in text
        assert "computed: " in text
    if script == "ppo_kl_adaptive":
        for servo in module.PRESETS:
            assert f"`{servo}`" in text or f"`--servo {servo}`" in text
        for flag in ("--env-name", "--lam", "-k {None}|FLOAT, --kl-targ", "--batch-size"):
            assert flag in text
    if script == "ppo_cma":
        for flag in ("--env-name", "--max-steps", "--batch-size", "--ppo-epsilon"):
            assert flag in text
