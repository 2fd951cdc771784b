"""What two scripts share is the same text in both; what differs is the algorithm and its spaces."""

import ast
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["ppo", "ppo_continuous_action", "ppo_cma", "ppo_kl_adaptive", "ppo_atari_multigpu"]

# Names that two scripts give to different things, on purpose. All else of one name is one text.
DIFFERENT = {
    ("ppo", "ppo_continuous_action"): {
        "Args", "CHANGEABLE", "NEEDS", "BOUNDS",  # flags
        "make_env", "Envs", "make_envpool", "unsupported",  # spaces, reward scaling
        "Agent", "Rollout", "Batch", "update", "rollout", "evaluate", "train",
    },
    ("ppo", "ppo_cma"): {
        "Args", "CHANGEABLE", "NO_EFFECT", "BOUNDS", "check",
        "Episodes",  # PPO-CMA's ask for each, and none is cut in two by a checkpoint
        "GymnasiumEnvs", "make_envs", "unsupported",
        "Agent", "Batch", "update", "rollout",
        "ppo_loss",  # for comparison only in PPO-CMA: no value, other inputs
        "load_agent", "training_state", "load_training_state", "evaluate", "set_up", "train",
    },
}  # fmt: skip
DIFFERENT["ppo_continuous_action", "ppo_cma"] = DIFFERENT["ppo", "ppo_cma"] | {"NEEDS"}
KL_ADAPTIVE = {  # what of ppo_kl_adaptive differs from every other script's
    "Args", "CHANGEABLE", "NO_EFFECT", "BOUNDS", "check",
    "GymnasiumEnvs", "make_envs", "unsupported",  # episodes start when they are asked for
    "Agent", "update", "rollout",
    "training_state", "load_training_state", "evaluate", "set_up", "train",
}  # fmt: skip
DIFFERENT["ppo", "ppo_kl_adaptive"] = KL_ADAPTIVE | {"Envs", "Rollout"}
DIFFERENT["ppo_continuous_action", "ppo_kl_adaptive"] = KL_ADAPTIVE | {"Envs", "Rollout", "NEEDS"}
DIFFERENT["ppo_cma", "ppo_kl_adaptive"] = KL_ADAPTIVE | {"Episodes", "EnvPoolEnvs", "load_agent"}
ATARI = {  # what of ppo_atari_multigpu differs from every other script's
    "Args", "CHANGEABLE", "NO_EFFECT", "BOUNDS", "check",
    "Agent", "update", "rollout",
    "load_agent", "training_state", "evaluate", "set_up", "train",
}  # fmt: skip
CLIPPED = {"FlatAdam", "Envs", "Rollout", "Batch", "ppo_loss"}  # pixels, processes
DIFFERENT["ppo", "ppo_atari_multigpu"] = ATARI | CLIPPED
DIFFERENT["ppo_continuous_action", "ppo_atari_multigpu"] = ATARI | CLIPPED | {"NEEDS"}
DIFFERENT["ppo_cma", "ppo_atari_multigpu"] = ATARI | {"Batch", "ppo_loss"}
DIFFERENT["ppo_kl_adaptive", "ppo_atari_multigpu"] = ATARI | {"Envs", "Rollout"}


def blocks(script: str) -> dict[str, str]:
    """Every function, class and constant at the top level, as text."""
    text = (ROOT / f"{script}.py").read_text()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign):
            found[node.targets[0].id] = ast.get_source_segment(text, node)
    return found


@pytest.mark.parametrize("pair", list(itertools.combinations(SCRIPTS, 2)), ids="-".join)
def test_blocks_of_one_name_are_one_text(pair):
    first, second = (blocks(script) for script in pair)
    shared = first.keys() & second.keys()
    differ = {name for name in shared if first[name] != second[name]}
    assert differ == DIFFERENT[pair]
    plumbing = {"Run", "fail", "parse_args", "episode_seed", "gae", "savable"}
    plumbing |= {"save_checkpoint", "load_checkpoint", "stop_on_signals"}
    if "ppo_atari_multigpu" not in pair:
        plumbing.add("build_env")
    assert plumbing <= shared - differ


@pytest.mark.parametrize("script", SCRIPTS)
def test_sections_in_their_order(script):
    text = (ROOT / f"{script}.py").read_text()
    sections = re.findall(r"^# --- (.*?) -+$", text, re.M)
    assert sections == [
        "environments", "agent", "algorithm", "rollout",
        "run folder, checkpoints, evaluation", "training",
    ]  # fmt: skip
    assert text.startswith("# /// script\n")
    assert text.index("# ///\n") < text.index('"""') < text.index("class Args")
    assert max(map(len, text.splitlines())) <= 100


DETAILS = {  # of the 37 of Huang et al. 2022; the rest are for recurrent networks and others
    "ppo": [f"detail {n}" for n in range(1, 14)] + ["MultiDiscrete detail 1"],
    "ppo_continuous_action": [f"detail {n}" for n in range(1, 14)]
    + [f"continuous detail {n}" for n in range(1, 10)],
    "ppo_atari_multigpu": [f"detail {n}" for n in range(1, 13)]
    + [f"Atari detail {n}" for n in range(1, 10)],
}


@pytest.mark.parametrize("script", DETAILS)
def test_implementation_details_can_be_found(script):
    text = (ROOT / f"{script}.py").read_text()
    code = " ".join(text[text.index("class Args") :].split())
    marked = []
    for kind, numbers in re.findall(
        r"((?:continuous |MultiDiscrete |Atari )?)details? ((?:\d+, )*\d+)", code.replace("# ", "")
    ):
        marked += [f"{kind}detail {number}" for number in numbers.split(", ")]
    assert sorted(marked) == sorted(DETAILS[script])  # each once


def test_main_loop_is_short():
    for script in SCRIPTS:
        (loop,) = [
            node
            for node in ast.walk(ast.parse(blocks(script)["train"]))
            if isinstance(node, ast.While)
        ]
        assert loop.end_lineno - loop.lineno < 25
