"""Copies a block of text that several scripts share from one script into the others.

    python tests/blocks.py ppo_continuous_action check_finite fail

`test_blocks.py` compares them. What is in ALGORITHM is each script's own; OWN names the scripts whose
block differs for the reason that stands beside it.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def blocks(script: str) -> dict[str, tuple[int, int, str]]:
    """Every function, class and constant at the top level: its first line, last line and text."""
    text = (ROOT / f"{script}.py").read_text()
    lines = text.splitlines()
    places = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            name = node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            start = node.lineno
            name = node.targets[0].id
        else:
            continue
        places[name] = start, node.end_lineno, "\n".join(lines[start - 1 : node.end_lineno])
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
    source, *names = sys.argv[1:]
    from every.test_blocks import OWN, SCRIPTS  # noqa: E402

    for name in names:
        for script in SCRIPTS:
            if script != source and script not in OWN.get(name, ()):
                paste(source, name, script)
