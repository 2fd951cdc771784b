"""Copies a block of text that several scripts share from one script into the others.

    python tests/blocks.py ppo_continuous_action check_finite WorkerEnvs.receive

A block is a function, class or constant at the top level, or a method. `test_blocks.py` compares
them. ALGORITHM has what is each script's alone, OWN the scripts whose block differs, and why.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def blocks(script: str) -> dict[str, tuple[int, int, str]]:
    """Every function, class, constant and method: its first line, last line and text."""
    text = (ROOT / f"{script}.py").read_text()
    lines = text.splitlines()
    places = {}

    def place(node: ast.stmt, name: str):
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        places[name] = start, node.end_lineno, "\n".join(lines[start - 1 : node.end_lineno])

    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            place(node, node.name)
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    place(method, f"{node.name}.{method.name}")
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            place(node, node.targets[0].id)
    return places


def paste(source: str, name: str, script: str):
    """Replace a script's block of this name by the source's, if it has one."""
    there = blocks(script)
    if name in there:
        start, end, _ = there[name]
        path = ROOT / f"{script}.py"
        lines = path.read_text().splitlines()
        lines[start - 1 : end] = blocks(source)[name][2].splitlines()
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    from every.test_blocks import SCRIPTS, differing

    source, *names = sys.argv[1:]
    for name in names:
        for script in SCRIPTS:
            if script != source and script not in differing(name):
                paste(source, name, script)
