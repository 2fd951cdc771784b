"""What two scripts share is the same text in both; what differs is the algorithm and its spaces."""

import ast
import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Lines that each script may have at most, with slack: clarity comes first
LINES = {
    "ppo": 1160,
    "ppo_continuous_action": 1190,
    "ppo_cma": 674,
    "ppo_kl_adaptive": 712,
    "ppo_atari_multigpu": 1000,
    "ppo_atari_lstm": 820,
    "ppo_procgen": 800,
    "ppo_pettingzoo_ma_atari": 830,
    "ppo_continuous_action_warp": 1030,
}
EVERY = pytest.mark.parametrize("script", LINES)

# Functions and classes whose text is not the others' in these scripts, on purpose. All else of one
# name is one text in all scripts that have it.
CMA, KL, ATARI = "ppo_cma", "ppo_kl_adaptive", "ppo_atari_multigpu"
LSTM, PROCGEN, DUEL = "ppo_atari_lstm", "ppo_procgen", "ppo_pettingzoo_ma_atari"
WARP, NOISE = "ppo_continuous_action_warp", "ppo_continuous_action"
GAMES = {LSTM, PROCGEN, DUEL}  # a state; levels; two players
OWN = {
    **dict.fromkeys(["Args", "Agent", "Episodes", "make_env", "rollout", "update", "train"], LINES),
    "parse_args": {KL, ATARI, *GAMES},  # an environment without a flag; restarts; no modules
    "Envs": {NOISE, ATARI, *GAMES},
    "PoolEnvs": {NOISE},  # returns seen from now
    "to_env": {NOISE},
    "check_spaces": {NOISE},
    "check_actor": {NOISE},
    "drawn_env": {NOISE, WARP},  # MuJoCo's camera
    "mlp": {KL, WARP},
    "gae": {WARP},  # of tensors
    "Rollout": {NOISE, KL, ATARI, WARP, *GAMES},  # whole episodes; values of the policy that acted
    "Batch": {NOISE, ATARI, WARP, *GAMES},
    "ppo_loss": {CMA, ATARI, LSTM, NOISE},  # without a value; a share of several processes; RPO
    "flat_adam": {ATARI},  # torch's Adam
    "check_views": {ATARI},
    "check": {ATARI, WARP, *GAMES},  # no arguments for gym.make; lists and choices
    "restore": {ATARI, WARP, *GAMES},  # torch's Adam; the past agent; tensors of the device
    "stop_signals": {ATARI},  # torchrun's
    "finish": {ATARI, WARP},  # rank 0; gymnasium plays
    "own_envs": {ATARI},
    "make_envs": {WARP},
    "save": {CMA, KL, ATARI, WARP, *GAMES},
    "load": {CMA, KL, ATARI, WARP, *GAMES},
    "play": {DUEL},
    "evaluate": {CMA, KL, ATARI, WARP, *GAMES},
    "Run": {ATARI, WARP, DUEL},  # of rank 0; returns of two players
    "fail": {ATARI},
}
# Blocks that two scripts still have in an older text
NEW = {"Run", "RunningMoments", "load_checkpoint", "parse_args"}
OLDER = {CMA, KL}


def source(script: str) -> str:
    return (ROOT / f"{script}.py").read_text()


def blocks(script: str) -> dict[str, str]:
    """Every function, class and constant at the top level, as text."""
    text, found = source(script), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign):
            found[node.targets[0].id] = ast.get_source_segment(text, node)
    return found


def test_blocks_of_one_name_are_one_text():
    found = {script: blocks(script) for script in LINES}
    for name in set().union(*found.values()):
        texts = {script: found[script][name] for script in LINES if name in found[script]}
        if name in NEW:
            texts = {script: text for script, text in texts.items() if script not in OLDER}
        own = OWN.get(name, set()) & texts.keys()
        shared = {texts[script] for script in texts.keys() - own}
        assert len(shared) <= 1, name
        assert not shared & {texts[script] for script in own}, name
    assert OWN.keys() <= set().union(*found.values())
    assert len({found[script]["episode_seed"] for script in LINES}) == 1


def changed(first: str, second: str) -> int:
    """Lines that `diff` marks with < or >."""
    texts = (source(script).splitlines() for script in (first, second))
    return sum(line[0] in "+-" for line in difflib.ndiff(*texts))


def test_siblings_differ_in_few_lines():
    assert changed("ppo", "ppo_continuous_action") <= 280


@EVERY
def test_lines_and_sections(script):
    lines = source(script).splitlines()
    assert len(lines) <= LINES[script]
    assert max(map(len, lines)) <= 100
    sections = [k for k, line in enumerate(lines) if re.fullmatch(r"# --- .*? -+", line)]
    assert [lines[k].strip("# -") for k in sections] == [
        "environments", "agent", "algorithm", "rollout",
        "run folder, checkpoints, evaluation", "training",
    ]  # fmt: skip
    assert all(re.match("def|class|@", lines[k + 1]) for k in sections)
    text = source(script)
    assert text.startswith("# /// script\n")
    assert text.index("# ///\n") < text.index('"""') < text.index("class Args")


def nested(node: ast.AST) -> int:
    """Blocks in each other inside a function: loops, conditions and the like."""
    kinds = ast.For | ast.While | ast.If | ast.With | ast.Try | ast.FunctionDef
    deepest = 0
    for child in ast.iter_child_nodes(node):
        chained = isinstance(node, ast.If) and isinstance(child, ast.If) and [child] == node.orelse
        deepest = max(deepest, nested(child) + (isinstance(child, kinds) and not chained))
    return deepest


@EVERY
def test_code_is_flat_and_the_main_loop_short(script):
    functions = [n for n in ast.walk(ast.parse(source(script))) if isinstance(n, ast.FunctionDef)]
    assert {node.name: nested(node) for node in functions if nested(node) > 4} == {}
    (train,) = (node for node in functions if node.name == "train")
    (loop,) = (node for node in ast.walk(train) if isinstance(node, ast.While))
    assert loop.end_lineno - loop.lineno < 20


DETAILS = {  # of the 37 of Huang et al. 2022; the rest are for recurrent networks and others
    "ppo": [f"detail {n}" for n in range(1, 14)] + ["MultiDiscrete detail 1"],
    "ppo_continuous_action": [f"detail {n}" for n in range(1, 14)]
    + [f"continuous detail {n}" for n in range(1, 10)],
    "ppo_atari_multigpu": [f"detail {n}" for n in range(1, 13)]
    + [f"Atari detail {n}" for n in range(1, 10)],
    "ppo_atari_lstm": [f"detail {n}" for n in range(1, 13)]
    + [f"Atari detail {n}" for n in range(1, 10) if n != 7]  # no stack of frames
    + [f"LSTM detail {n}" for n in range(1, 6)],
    "ppo_procgen": [f"detail {n}" for n in range(1, 13)]
    + ["continuous detail 8", "continuous detail 9"],
    "ppo_pettingzoo_ma_atari": [f"detail {n}" for n in range(1, 13)]
    + [f"Atari detail {n}" for n in (1, 2, 5, 6, 7, 8, 9)],
}


@pytest.mark.parametrize("script", DETAILS)
def test_implementation_details_can_be_found(script):
    text = (ROOT / f"{script}.py").read_text()
    code = " ".join(text[text.index("class Args") :].split())
    marked = []
    for kind, numbers in re.findall(
        r"((?:continuous |MultiDiscrete |Atari |LSTM )?)details? ((?:\d+, )*\d+)",
        code.replace("# ", ""),
    ):
        marked += [f"{kind}detail {number}" for number in numbers.split(", ")]
    assert sorted(marked) == sorted(DETAILS[script])  # each once
