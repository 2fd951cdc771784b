"""What two scripts share is the same text in both; what differs is the algorithm and its spaces."""

import ast
import difflib
import re
from pathlib import Path

import pytest
from program import folded

ROOT = Path(__file__).resolve().parent.parent.parent
# Lines that each script may have at most, with slack: clarity comes first
LINES = {
    "ppo": 1240,
    "ppo_continuous_action": 1260,
    "ppo_cma": 1220,
    "ppo_kl_adaptive": 1280,
    "ppo_atari_multigpu": 1060,
    "ppo_atari_lstm": 830,
    "ppo_procgen": 800,
    "ppo_pettingzoo_ma_atari": 840,
    "ppo_continuous_action_warp": 1070,
    "ppo_pixels": 1510,
    "ppo_lstm": 1630,
    "ppo_pettingzoo": 1325,
}
EVERY = pytest.mark.parametrize("script", LINES)

CMA, KL, ATARI = "ppo_cma", "ppo_kl_adaptive", "ppo_atari_multigpu"
LSTM, PROCGEN, DUEL = "ppo_atari_lstm", "ppo_procgen", "ppo_pettingzoo_ma_atari"
WARP, NOISE = "ppo_continuous_action_warp", "ppo_continuous_action"
PIXELS, AGENTS, MEMORY = "ppo_pixels", "ppo_pettingzoo", "ppo_lstm"
GAMES = {LSTM, PROCGEN, DUEL}  # a state; levels; two players
# The algorithm, its spaces, and what is kept of them: each script has its own
ALGORITHM = {
    "Agent", "Args", "Batch", "Envs", "KEPT", "Rollout", "check_actor", "check_spaces", "evaluate",
    "load", "make_env", "make_envs", "play", "ppo_loss", "restore", "rollout", "save", "to_env",
    "train", "update",
}  # fmt: skip
# but for these, which two siblings have in common
SIBLINGS = {
    ("ppo", NOISE): {"evaluate", "load", "make_envs", "play", "restore", "save", "train"},
    (CMA, KL): {"make_env", "make_envs"},
    (CMA, NOISE): {"make_env"},
    (LSTM, PROCGEN): {"restore", "save"},
    (LSTM, ATARI): {"load", "restore", "save"},
    ("ppo", PROCGEN): {"ppo_loss"},
    ("ppo", WARP): {"ppo_loss"},
    (PROCGEN, DUEL): {"ppo_loss", "update"},
    (PIXELS, MEMORY): {"Envs", "WorkerEnvs", "check_spaces", "evaluate", "make_env", "make_envs"},
}
# All else of one name is one text in all scripts but these
OWN = {
    "PoolEnvs": {NOISE},  # returns seen from now
    "Run": {ATARI, WARP, DUEL},  # of rank 0; thousands of episodes at once; returns of two players
    "WorkerEnvs": {PIXELS, MEMORY},  # observations of several parts
    "check": {ATARI, WARP, *GAMES},  # no arguments of environments
    "check_views": {ATARI},  # Adam has its own vector
    "drawn_env": {"ppo", WARP, AGENTS},  # no camera of MuJoCo's; another make_env
    "fail": {ATARI},
    "finish": {ATARI, WARP, AGENTS},  # of rank 0; no modules; known packages
    "flat_adam": {ATARI},  # torch's Adam
    "gae": {WARP, AGENTS},  # of tensors; with deaths
    "judge": {MEMORY},  # whole environments
    "load_checkpoint": {AGENTS},  # known packages
    "mlp": {KL, WARP},
    "own_envs": {ATARI},  # of a process of torchrun
    "parse_args": {KL, ATARI, *GAMES},  # an environment without a flag; restarts; no modules
    "start": {ATARI},  # games have begun
    "stop_signals": {ATARI},  # torchrun passes signals on
}


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
    for name in set().union(*found.values()) - ALGORITHM:
        texts = {script: found[script][name] for script in LINES if name in found[script]}
        own = OWN.get(name, set()) & texts.keys()
        shared = {texts[script] for script in texts.keys() - own}
        assert len(shared) <= 1, name
        assert not shared & {texts[script] for script in own}, name
    assert ALGORITHM | OWN.keys() <= set().union(*found.values())
    assert len({found[script]["episode_seed"] for script in LINES}) == 1


@pytest.mark.parametrize("pair", SIBLINGS, ids="-".join)
def test_blocks_of_siblings_are_one_text(pair):
    first, second = map(blocks, pair)
    assert [name for name in SIBLINGS[pair] if first[name] != second[name]] == []


def changed(first: str, second: str) -> int:
    """Lines that `diff` marks with < or >."""
    texts = (source(script).splitlines() for script in (first, second))
    return sum(line[0] in "+-" for line in difflib.ndiff(*texts))


def test_siblings_differ_in_few_lines():
    assert changed("ppo", "ppo_continuous_action") <= 310


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
    assert all(re.match(r"def|class|@|[A-Z_]+ = |# ", lines[k + 1]) for k in sections)
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
    "ppo_pixels": [f"detail {n}" for n in range(1, 13)]
    + [f"continuous detail {n}" for n in (1, 2, 3, 5, 6, 7, 8, 9)]
    + ["MultiDiscrete detail 1"]
    + [f"Atari detail {n}" for n in (2, 5, 7, 8, 9)],
    "ppo_lstm": [f"detail {n}" for n in range(1, 13)]
    + [f"continuous detail {n}" for n in (1, 2, 3, 5, 6, 7, 8, 9)]
    + ["MultiDiscrete detail 1"]
    + [f"Atari detail {n}" for n in (2, 5, 7, 8, 9)]
    + [f"LSTM detail {n}" for n in range(1, 6)],
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


@EVERY
def test_one_line_says_one_thing(script):
    assert folded(source(script)) == []
