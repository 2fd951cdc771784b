"""What a file may weigh, and what scripts share: bounds of their lines, blocks that are one text,
and pairs whose `diff` shows mainly the algorithm."""

import subprocess

import pytest
from blocks import ROOT, blocks

BOUNDS = {  # lines at most; the last line of PPO, which `train` ends
    "ppo": (1024, 430),
    "ppo_continuous_action": (994, 445),
    "ppo_kl_adaptive": (1034, 550),
    "ppo_cma": (976, 490),
    "ppo_atari_multigpu": (932, 465),
    "ppo_continuous_action_warp": (912, 455),
    "ppo_pixels": (1278, 585),
    "ppo_lstm": (1390, 690),
    "ppo_pettingzoo": (1218, 540),
}
SCRIPTS = [*BOUNDS]
DIFFS = {  # lines of `diff` that begin with < or >
    ("ppo", "ppo_continuous_action"): 285,
    ("ppo_pixels", "ppo_lstm"): 290,
    # as they are; the goals are 550, 550 and 650
    ("ppo_continuous_action", "ppo_kl_adaptive"): 901,
    ("ppo_continuous_action", "ppo_continuous_action_warp"): 930,
    ("ppo_atari_multigpu", "ppo_pixels"): 1470,
}
PPO, NOISE, KL, CMA, ATARI, WARP, PIXELS, LSTM, AGENTS = SCRIPTS
# The algorithm, its spaces, and what is kept of them: each script has its own
ALGORITHM = {
    "Agent", "Args", "Batch", "Envs", "Rollout", "Run.__init__", "Run.episode", "Run.log_rollout",
    "check_actor", "check_spaces", "env_actions", "evaluate", "make_env", "mlp", "numpy_actor",
    "parse_args", "rollout", "save", "train", "update",
}  # fmt: skip
SPLIT = {"Run", "WorkerEnvs", "PoolEnvs"}  # method by method
# All else of one name is one text, but for these scripts, whose groups have a text each
OWN = {
    "PoolEnvs.__init__": [[PPO], [PIXELS, LSTM]],  # choices; options of Atari, lives and games
    "PoolEnvs.flatten": [[PPO]],  # choices as ones and zeros
    "PoolEnvs.step": [[PPO], [PIXELS, LSTM]],  # choices; raw scores and lost lives
    "Run.__exit__": [[KL], [CMA], [ATARI], [WARP]],  # beyond the total; of rank 0; no sys.exit
    "Run.log": [[ATARI]],  # of rank 0
    "WorkerEnvs.receive": [[PIXELS, LSTM]],  # observations of several parts
    "WorkerEnvs.step": [[KL], [CMA]],  # which environments play; repeated actions
    "branches": [[AGENTS]],  # a Box, too
    "check_finite": [[CMA, ATARI, AGENTS]],  # no moments of observations
    "episode_seed": [[ATARI]],  # EnvPool draws from no generator of Python's
    "fail": [[ATARI]],  # of rank 0; the process group is left
    "gae": [[WARP], [AGENTS]],  # of tensors; with turns and deaths
    "load": [[ATARI], [WARP]],  # how an environment is made
    # no actions to play; no module; no arguments; --eval-env-kwargs; known packages
    "load_checkpoint": [[CMA], [ATARI], [WARP], [PIXELS, LSTM], [AGENTS]],
    "make_envs": [[KL, CMA], [WARP], [AGENTS]],  # no EnvPool; on the device; PettingZoo's errors
    "minibatch_step": [[ATARI]],  # with the gradient of all processes
    "play": [[LSTM]],  # a state
    "ppo_loss": [[KL], [CMA], [ATARI], [PIXELS], [LSTM], [AGENTS]],  # a loss or a policy of its own
    "print_next_command": [[ATARI], [WARP]],  # of rank 0; own engines
    "stop_signals": [[ATARI]],  # torchrun passes signals on
    "worker_loop": [[KL, CMA]],  # which environments play
}


def differing(name: str) -> set[str]:
    """The scripts that have a text of their own for this block, or for a method of it."""
    if name in ALGORITHM:
        return set(SCRIPTS)
    groups = [x for own in OWN if own == name or own.startswith(f"{name}.") for x in OWN[own]]
    return {script for group in groups for script in group}


@pytest.mark.parametrize("script", SCRIPTS)
def test_bounds(script):
    lines, (total, rule) = (ROOT / f"{script}.py").read_text().splitlines(), BOUNDS[script]
    (below,) = (k for k, line in enumerate(lines, 1) if line.startswith("# ==== below this line"))
    assert len(lines) <= total
    assert len("\n".join(lines[: below - 1]).rstrip().splitlines()) <= rule
    assert any(line.startswith("def train(") for line in lines[:below])


@pytest.mark.parametrize("pair", DIFFS, ids="-".join)
def test_siblings_differ_in_few_lines(pair):
    paths = [str(ROOT / f"{script}.py") for script in pair]
    lines = subprocess.run(["diff", *paths], capture_output=True, text=True).stdout.splitlines()
    assert 0 < sum(line[0] in "<>" for line in lines) <= DIFFS[pair]


def test_blocks_of_one_name_are_one_text():
    texts = {}
    for script in SCRIPTS:
        for name, (_, _, text) in blocks(script).items():
            owner = name.partition(".")[0]
            if name not in SPLIT and ("." not in name or owner in SPLIT):
                texts.setdefault(name, {})[script] = text
    for name in texts.keys() - ALGORITHM:
        groups = [[x for x in SCRIPTS if x not in differing(name)], *OWN.get(name, [])]
        kinds = [{texts[name][x] for x in group if x in texts[name]} for group in groups]
        assert max(map(len, kinds)) == 1, f"{name}: of {groups} not all are the same"
        assert len(set.union(*kinds)) == sum(map(len, kinds)), f"{name} of OWN is the shared text"
    assert ALGORITHM | OWN.keys() <= texts.keys()
    assert len(texts["episode_seed"]) == len(SCRIPTS)
