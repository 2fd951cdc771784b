"""What every script promises: nothing listens or connects, nothing that is read is run."""

import ast
import os
import socket
import sys
from collections.abc import Iterator

import pytest
from program import ROOT, in_a_fork
from scripts import EVERY, SMALL, train

pytestmark = pytest.mark.usefixtures("small")

SOURCES = [ROOT / f"{script}.py" for script in SMALL] + sorted((ROOT / "benchmark").rglob("*.py"))
LOADERS = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "load"}
RUNNERS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pty.spawn"}


def dangers(text: str) -> Iterator[str]:
    """What in a program runs what it reads, or could."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            if names & LOADERS:
                yield ast.unparse(node)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            safe = given.get("weights_only") == "True" if name == "torch.load" else True
            flags = {given.get(flag, "False") for flag in ("shell", "allow_pickle")}
            if name in RUNNERS or not safe or flags != {"False"}:
                yield ast.unparse(node)


def test_nothing_that_is_read_is_run():
    assert {str(path): [*dangers(path.read_text())] for path in SOURCES} == {
        str(path): [] for path in SOURCES
    }
    for line in (
        "torch.load(path)", "torch.load(path, weights_only=False)", "import pickle",
        "from torch import load", "import cloudpickle as c", "np.load(path, allow_pickle=True)",
        "eval(text)", "exec(text)", "os.system(text)", "subprocess.run(text, shell=True)",
    ):  # fmt: skip
        assert list(dangers(f"def f():\n    {line}")) == [line]


@EVERY
def test_nothing_listens_or_connects(script, tmp_path):
    def watched(call, *args):
        def hook(event, _):
            if event in ("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto"):
                os._exit(77)

        sys.addaudithook(hook)
        call(*args)
        assert not {"wandb", "huggingface_hub"} & sys.modules.keys()

    assert in_a_fork(watched, socket.create_connection, ("127.0.0.1", 9)) == 77  # it would be seen
    assert in_a_fork(watched, train, script, tmp_path / "run") == 0
