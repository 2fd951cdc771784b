"""benchmark/: a general harness, and a room beside it for what is of this project alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import ROOT, folded

HARNESS = ROOT / "benchmark"
FILES = sorted(HARNESS.rglob("*.py"))
GENERAL = sorted(HARNESS.glob("*.py"))


def module(path: Path) -> str:
    """A file's dotted name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module(path): path for path in FILES}


def imported(text: str, path: Path) -> set[str]:
    """The files of benchmark/ that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = module(path).split(".")[: -node.level or None] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found & NAMES.keys()


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty if there is none."""
    left = dict(graph)
    while left:
        ends = [name for name, others in left.items() if not others & left.keys()]
        if not ends:
            return sorted(left)
        for name in ends:
            del left[name]
    return []


def test_no_file_imports_itself_by_way_of_others():
    graph = {name: imported(path.read_text(), path) for name, path in NAMES.items()}
    # packages whose __init__ imports none of their files
    packages = {"benchmark", "benchmark.published", "benchmark.published.studies"}
    assert all(not graph[name] for name in packages)
    graph = {name: others - packages for name, others in graph.items() if name not in packages}
    assert sum(map(len, graph.values())) > 20
    assert circle(graph) == []
    graph["benchmark.stats"] |= {"benchmark.report"}
    assert {"benchmark.stats", "benchmark.report"} <= set(circle(graph))


def test_the_harness_imports_nothing_of_published():
    for path in GENERAL:
        found = imported(path.read_text(), path)
        assert not [name for name in found if "published" in name], path
    text = "def f():\n    from benchmark import published\n"
    assert "benchmark.published" in imported(text, HARNESS / "run.py")


SCRIPTS = sorted(path.stem for path in ROOT.glob("ppo*.py"))


def said(text: str) -> Iterator[str]:
    """Names and strings of a program, but for docstrings, which may hold examples."""
    tree = ast.parse(text)
    examples = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in examples:
                yield node.value
        elif isinstance(node, ast.Name | ast.Attribute | ast.alias):
            yield getattr(node, "id", None) or getattr(node, "attr", None) or node.name


def scripts_in(text: str) -> list[str]:
    names = "|".join(map(re.escape, SCRIPTS))
    return [word for word in said(text) if re.search(rf"(?<!\w)({names})(?!\w)", word)]


@pytest.mark.parametrize("path", GENERAL, ids=lambda path: path.stem)
def test_the_harness_knows_no_script(path):
    assert len(SCRIPTS) >= 5
    assert scripts_in(path.read_text()) == []
    text = '"""python ppo.py"""\nprint("ppo_cma.py")\nimport ppo\nppos = "apple"\n'
    assert sorted(scripts_in(text)) == ["ppo", "ppo_cma.py"]


# The GPU programs still have three such lines.
UNFOLDED = [path for path in FILES if not path.stem.startswith("gpu_")]


@pytest.mark.parametrize("path", UNFOLDED, ids=module)
def test_one_line_says_one_thing(path):
    assert folded(path.read_text()) == []


def test_what_says_two_things_is_found():
    lines = (
        "a, b = [], 1",
        "x = f', {y}' * (y != 0)",
        "x = y * bool(z)",
        "x = y * (not z)",
        "x = 's' * (n > 1)",
        "x = y * (a and b)",
    )
    assert [len(folded(line)) for line in lines] == [1] * len(lines)
    assert folded("a, b = pair\na, *b = *c, 1\nx = 2 * y\nx = [0] * n\n") == []
