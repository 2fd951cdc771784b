"""The harness's commands, called in this process, which saves their imports."""

import contextlib
import io
import os
import signal
import subprocess
from unittest import mock

import tyro

from benchmark.run import run
from benchmark.verify import verify


def bench(*argv: str, **variables: str) -> subprocess.CompletedProcess:
    """`python -m benchmark` with these words and environment variables."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    handler, verbs = signal.getsignal(signal.SIGINT), {"run": run, "verify": verify}
    with (
        mock.patch.dict(os.environ, variables),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            tyro.extras.subcommand_cli_from_dict(verbs, prog="python -m benchmark", args=argv)
        except SystemExit as end:
            code = end.code or 0
        finally:
            signal.signal(signal.SIGINT, handler)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())
