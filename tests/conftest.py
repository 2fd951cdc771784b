import itertools
import os
import random
import sys
import tempfile
from pathlib import Path

# Of the machine's settings only those that matter: not the user's repository and what he sets for
# git, not a job's port
for name in [*os.environ]:
    if name.startswith("GIT_") or name in ("PORT", "HEAD"):
        del os.environ[name]
os.environ |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PYTHONUTF8": "1"}
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start
if " " in tempfile.gettempdir():  # the tests' command lines are split at blanks
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from gymnasium.utils import seeding  # noqa: E402

torch.set_num_threads(1)
SEED = int(os.environ.get("TESTS_SEED", 1))


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    """Whatever ran before, a test draws the same, also from what gets no seed of gymnasium's."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    plain, seeds = seeding.np_random, itertools.count(SEED)
    monkeypatch.setattr(
        seeding, "np_random", lambda seed=None: plain(next(seeds) if seed is None else seed)
    )


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3600))
