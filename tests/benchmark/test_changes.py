"""What benchmark/published adds to the scripts: changes, an environment."""

import subprocess

import pytest
import torch

from benchmark.published.studies import change

CLIPPED = (change.HERE / "changes").glob("[!c]*.patch")  # not cma- and coady-
PATCHES = sorted(path.stem for path in CLIPPED)
FLAGS = (
    "--env-id Pendulum-v1 --num-steps 256 --num-minibatches 4 --total-timesteps 512 --no-compile "
    "--no-cuda --log-std-init -2 --checkpoint-interval 1"
)
HISTORY = ["git", "cat-file", "-e", change.COMMIT]
COMMIT = pytest.mark.skipif(
    subprocess.run(HISTORY, cwd=change.HERE, capture_output=True).returncode != 0,
    reason=f"a shallow clone: the changes are of the scripts at {change.COMMIT}",
)


@COMMIT
@pytest.mark.parametrize("name", PATCHES)
def test_each_change_changes_what_is_learned(name, tmp_path):
    module = change.changed(name)
    args = module.parse_args([*FLAGS.split(), "--run-dir", str(tmp_path / "run")])
    module.train(args)
    final = module.load(tmp_path / "run")[0].state_dict()
    torch.manual_seed(args.seed)
    begun = module.Agent(module.make_env("Pendulum-v1"), args).state_dict()
    assert all(x.isfinite().all() for x in final.values())
    assert not torch.equal(final["actor_mean.0.weight"], begun["actor_mean.0.weight"])
