"""Run Python scripts one after the other, without the seconds that each takes to import torch.

    python -m benchmark.player SCRIPT

imports what SCRIPT imports, once. Each line on standard input is a JSON object: "argv" holds a
script and its flags, "log" names a file for its output. A copy of this process runs the script. Its
exit code is then written as a line on standard output.
"""

import ast
import contextlib
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path


def imported(script: Path) -> list[str]:
    """The modules that a script imports at its top."""
    names = []
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return names


def run_script(argv: list[str], log: str):
    """Run a script as a program, in a copy of this process, and end the copy."""
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).parent)
    code = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def main(script: str):
    sys.path[0] = str(Path(script).parent)
    for name in imported(Path(script)):
        with contextlib.suppress(Exception):  # the script itself will say so
            importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            run_script(job["argv"], job["log"])
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
