"""Mutants: small faults in a script, one at a time, each against that script's quick tests.

    nice -n 15 python tests/mutants.py mutants.jsonl ppo ppo_cma --number 60

Of the lines above a script's rule, and of what BELOW names. A process that has collected all tests,
in a copy of this repository, forks for each mutant. It runs the tests that pass without a fault and
call the mutant's function, the quickest first. A row of the file is a mutant with the test that
fails with it, twice; "" if none does. A second start goes on, so another commit needs another file.
mutants.md judges those that survive.
"""

import argparse
import ast
import contextlib
import copy
import inspect
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
from torch._dynamo.utils import counters

ROOT = Path(__file__).resolve().parent.parent
BELOW = {"Envs", "WorkerEnvs", "Run", "save", "load_checkpoint"}
TESTS = ["tests/algorithms", "tests/every/test_environments.py", "tests/every/test_matrix.py"]
TESTS += ["tests/pages/test_docs.py"]  # of flags
FLIPS = {
    "Lt": "LtE Gt", "LtE": "Lt", "Gt": "GtE Lt", "GtE": "Gt", "Eq": "NotEq", "NotEq": "Eq",
    "Is": "IsNot", "IsNot": "Is", "In": "NotIn", "NotIn": "In", "Add": "Sub", "Sub": "Add",
    "Mult": "Div", "Div": "Mult", "Pow": "Mult", "FloorDiv": "Mult", "Mod": "FloorDiv",
    "BitOr": "BitAnd", "BitAnd": "BitOr", "And": "Or", "Or": "And",
}  # fmt: skip
SKIPPED = ast.JoinedStr, ast.Import, ast.ImportFrom  # the parts of an f-string have wrong places


def faults(node: ast.AST, flags: list[str]):
    """Nodes that could stand in this one's place by mistake."""

    def but(**fields):
        new = copy.copy(node)
        vars(new).update(fields)
        return new

    def flipped(operator):
        return [getattr(ast, x)() for x in FLIPS.get(type(operator).__name__, "").split()]

    match node:
        case ast.Compare(ops=[operator]):
            yield from (but(ops=[x]) for x in flipped(operator))
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign():
            yield from (but(op=x) for x in flipped(node.op))
        case ast.Constant(value=bool()):
            yield but(value=not node.value)
        case ast.Constant(value=int()):
            yield from (but(value=node.value + 1), but(value=node.value - 1))
        case ast.Constant(value=float()):
            yield but(value=node.value * 2 or 1.0)
        case ast.UnaryOp():
            yield node.operand
        case ast.IfExp():
            yield from (node.body, node.orelse)
        case ast.Attribute(value=ast.Name(id="args")) if node.attr in flags:
            yield but(attr=flags[(flags.index(node.attr) + 1) % len(flags)])
        case ast.Subscript(slice=ast.Slice()):
            for part in ("lower", "upper", "step"):
                if getattr(node.slice, part):
                    yield but(slice=ast.Slice(**vars(node.slice) | {part: None}))
        case ast.Call():
            for i in range(len(node.args) - 1):
                first, second = node.args[i : i + 2]
                yield but(args=[*node.args[:i], second, first, *node.args[i + 2 :]])
            for i, keyword in enumerate(node.keywords):
                if keyword.arg:
                    yield but(keywords=node.keywords[:i] + node.keywords[i + 1 :])
        case ast.If():
            yield from (but(test=ast.Constant(x)) for x in (True, False))
        case ast.Expr(value=ast.Call()) | ast.Break() | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
    if isinstance(node, ast.AugAssign):
        yield ast.Pass()


def mutants(source: bytes):
    """All mutants: line, function, what was there, what is there, the whole source."""
    tree, starts = ast.parse(source), [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))
    rule = source[: source.index(b"# ==== below this line")].count(b"\n") + 1
    (args,) = (node for node in tree.body if getattr(node, "name", "") == "Args")
    flags = [node.target.id for node in args.body if isinstance(node, ast.AnnAssign)]

    def walk(node, owner):
        if isinstance(node, SKIPPED):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            owner = f"{owner}.{node.name}".strip(".")
        for new in faults(node, flags):
            last = node.test if isinstance(node, ast.If) else node  # an `if` keeps its body
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[last.end_lineno - 1] + last.end_col_offset
            was, now = source[begin:end].decode(), ast.unparse(new)
            if isinstance(node, ast.If):
                now = f"{was.split()[0]} {new.test.value}"
            elif isinstance(new, ast.expr):
                now = f"({now})"
            yield node.lineno, owner, was, now, source[:begin] + now.encode() + source[end:]
        for name, child in ast.iter_fields(node):
            for part in child if isinstance(child, list) else [child]:
                if isinstance(part, ast.AST) and name not in ("annotation", "returns"):
                    yield from walk(part, owner)

    for node in tree.body:
        if node.lineno < rule or getattr(node, "name", "") in BELOW:
            yield from walk(node, "")


def chosen(source: bytes, number: int, seed: str) -> list:
    """Random ones, of a line not more than two."""
    found, taken = [*mutants(source)], []
    random.Random(seed).shuffle(found)
    for mutant in found:
        if sum(x[0] == mutant[0] for x in taken) < 2:
            taken.append(mutant)
    return taken[:number]


def is_of(item, script: str) -> bool:
    """Whether a test tries this script."""
    if "code_that_a_page" in item.name:  # which compares texts
        return False
    if "script" in getattr(item, "callspec", SimpleNamespace(params={})).params:
        named = item.callspec.params["script"]
        return script == getattr(named, "__name__", named)
    text = inspect.getsource(item.module) if "/algorithms/" in item.nodeid else item.nodeid
    return bool(re.search(rf"\b{script}\b|docs-{script}\b", text))


class Mutants:
    """A plugin that runs forks instead of tests."""

    def __init__(self, folder: Path, args):
        self.folder, self.args = folder, args

    def pytest_runtestloop(self, session):
        self.session, kills, done = session, Counter(), set()
        for line in self.args.results.read_text().splitlines():
            row = json.loads(line)
            done.add((row["script"], row["line"], row["was"], row["now"]))
            kills[row["by"]] += 1
        for script in self.args.scripts:
            path, own = self.folder / f"{script}.py", [x for x in session.items if is_of(x, script)]
            source = path.read_bytes()
            todo = chosen(source, self.args.number, script)
            todo = [x for x in todo if (script, x[0], x[2], x[3]) not in done]
            if todo:
                self.fork(self.passes, script, own)
                seconds, calls = json.loads(Path("passes.json").read_text())
            for k, (line, owner, was, now, whole) in enumerate(todo):
                begun, by = time.monotonic(), ""
                named = any(owner in names for names in calls.values())
                left = [
                    x
                    for x in own
                    if x.nodeid in calls and (not named or {owner, "?"} & {*calls[x.nodeid]})
                ]
                left.sort(key=lambda x: seconds[x.nodeid] / (1 + kills[x.nodeid]))
                path.write_bytes(whole)  # for processes that import it
                os.utime(path, (k, k))  # or its bytecode would be taken for another mutant's
                while left and (by := self.fork(self.test, script, whole, left)) and ":" in by:
                    (i,) = (i for i, x in enumerate(left) if x.nodeid == by)
                    if self.fork(self.test, script, whole, [left[i]]):
                        break
                    left, by = left[i + 1 :], ""  # it fails by chance
                kills[by] += 1
                row = {"script": script, "line": line, "function": owner, "was": was, "now": now}
                row |= {"by": by, "seconds": round(time.monotonic() - begun)}
                with self.args.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            path.write_bytes(source)
        return True

    def fork(self, call, *args) -> str:
        """What a call returns in a fork, or why it doesn't."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            with contextlib.suppress(BaseException):
                os.write(writer, call(*args).encode())
            os._exit(0)
        os.close(writer)
        hangs = not select.select([reader], [], [], 1800.0)[0]
        answer = "hangs" if hangs else os.read(reader, 1000).decode() or "ends"
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # and whatever it started
        os.waitpid(pid, 0)
        return answer.removeprefix("survives")

    def passes(self, script: str, items: list) -> str:
        """Writes of each test that passes its seconds and the script's functions that it calls; ?
        stands for those that other processes or compiled code may call."""
        seconds, calls, names, file = {}, {}, set(), sys.modules[script].__file__
        shared = {}  # what a fixture of a module calls, for the first test that asks for it

        def called(frame, event, _):
            code = frame.f_code
            function = code.co_flags & inspect.CO_OPTIMIZED  # no class's body
            if event == "call" and function and code.co_filename == file:
                names.add(code.co_qualname.replace(".<locals>", ""))

        def elsewhere(event, _):
            if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
                names.add("?")

        sys.addaudithook(elsewhere)
        sys.setprofile(called)
        threading.setprofile(called)
        for item, after in zip(items, [*items[1:], None], strict=True):
            names.clear()
            begun, failed = time.monotonic(), self.session.testsfailed
            graphs = sum(counters["frames"].values())
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            for name, found in item._fixtureinfo.name2fixturedefs.items():
                if found[-1].scope == "module":
                    names |= shared.setdefault((name, item.module), names.copy())
            if self.session.testsfailed == failed:
                seconds[item.nodeid] = time.monotonic() - begun
                compiled = sum(counters["frames"].values()) != graphs
                workers = "WorkerEnvs.__init__" in names
                calls[item.nodeid] = sorted(names | {"?"} if compiled or workers else names)
        Path("passes.json").write_text(json.dumps([seconds, calls]))
        return "done"

    def test(self, script: str, source: bytes, items: list) -> str:
        """The first of these tests that fails if the module, and what tests have imported from it,
        becomes the mutant."""
        names = sys.modules[script].__dict__
        before = {id(x): name for name, x in names.items() if isinstance(x, type | FunctionType)}
        try:
            exec(compile(source, names["__file__"], "exec"), names)
        except Exception:
            return "no module"
        for module in {item.module for item in self.session.items}:
            for name, x in [*vars(module).items()]:
                if id(x) in before:
                    setattr(module, name, names[before[id(x)]])
        for item, after in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.session.testsfailed:
                return item.nodeid
        return "survives"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("scripts", nargs="+")
    parser.add_argument("--number", type=int, default=60)
    args = parser.parse_args()
    args.results = args.results.absolute()
    args.results.touch()
    folder = Path(tempfile.mkdtemp(prefix="mutants")) / "copy"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    os.chdir(folder)
    words = ["-o", "addopts=--import-mode=importlib -m 'not slow'", "-p", "no:cacheprovider"]
    words += ["-p", "no:xdist", f"--basetemp={folder}/tmp", "--timeout=60", *TESTS]
    words += sorted(map(str, Path("tests").glob("ppo*")))
    pytest.main(words, plugins=[Mutants(folder, args)])
    shutil.rmtree(folder.parent)


if __name__ == "__main__":
    main()
