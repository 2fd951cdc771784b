"""Every script: train, be killed, go on with other workers, evaluate; and flags that are wrong."""

import csv
import importlib
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import toys
import torch

SMALL = "--num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --num-threads 1"
WHOLE = "--env-id toys:Walk-v0 --num-envs 2 --total-timesteps 100"
RUNS = {  # flags of a run of six iterations or so, that of an iteration is 16
    "ppo": f"--env-id toys:Turn-v0 {SMALL} --total-timesteps 96",
    "ppo_continuous_action": f"--env-id toys:Walk-v0 {SMALL} --total-timesteps 96",
    "ppo_pixels": f"--env-id toys:Walk-v0 {SMALL} --total-timesteps 96",
    "ppo_lstm": f"--env-id toys:Walk-v0 {SMALL} --total-timesteps 96",
    "ppo_pettingzoo": f"--env-id toys:make {SMALL} --total-timesteps 96",
    "ppo_kl_adaptive": f"{WHOLE} -b 4 -m 2",
    "ppo_cma": f"{WHOLE} --iter-steps 16 --n-updates 2",
}
EVERY = pytest.mark.parametrize("script", RUNS)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(toys.__file__))  # workers find it, too
    monkeypatch.setattr("ppo_cma.pretrain_policy", lambda agent: None)


def parse(script, folder=None, more=""):
    module = importlib.import_module(script)
    place = f"--run-dir {folder}" if folder else ""
    flags = f"{RUNS[script]} --no-cuda --quiet --checkpoint-interval 2 {place} {more}"
    return module, module.parse_args(flags.split())


def outcome(module, folder):
    """All that a run leaves, but for the time that it took."""
    found = module.load_checkpoint(folder)
    table = list(csv.reader(open(folder / "episodes.csv")))
    step, iteration, _, rows = found.pop("counters")
    args = found.pop("args")
    return found, (step, iteration, rows), [[r[0], *r[2:]] for r in table], args


def same(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple) and not isinstance(a, str):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, torch.Tensor | np.ndarray):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    else:
        assert a == b


def killed(script, folder, call: int, more=""):
    """Train in a fork that kills itself in this update."""
    pid = os.fork()
    if pid == 0:
        try:
            module, args = parse(script, folder, more)
            plain, calls = module.update, []

            def update(*given):
                calls.append(1)
                if len(calls) == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return plain(*given)

            module.update = update
            module.train(args)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@EVERY
def test_killed_resumed_with_workers_and_evaluated(script, tmp_path, capsys):
    module, args = parse(script, tmp_path / "whole")
    module.train(args)
    whole = outcome(module, tmp_path / "whole")
    assert whole[1][1] >= 5 and len(whole[2]) > 5
    # the same command twice is the same run; a killed one goes on, also with worker processes
    killed(script, tmp_path / "cut", 4)
    again = module.load_checkpoint(tmp_path / "cut")
    step, iteration, seconds, rows = again["counters"]
    assert iteration == 2
    env_id = RUNS[script].split()[1]
    flags = f"--resume {tmp_path / 'cut'} --env-id {env_id} --env-workers 2"
    module.train(module.parse_args(flags.split()))
    resumed = outcome(module, tmp_path / "cut")
    same(whole[:3], resumed[:3])
    assert module.load_checkpoint(tmp_path / "cut")["counters"][2] > seconds
    # greedy and sampled episodes, the same each time, which change nothing
    module.train(parse(script, tmp_path / "seed", "--seed 2")[1])
    assert outcome(module, tmp_path / "seed")[2] != whole[2]
    before = {path: path.read_bytes() for path in (tmp_path / "cut").iterdir() if path.is_file()}
    flags = f"--evaluate {tmp_path / 'cut'} --env-id {env_id} --eval-episodes 2 --no-cuda"
    returns = [module.evaluate(module.parse_args(flags.split())) for _ in range(2)]
    assert len(returns[0]) == 2 and returns[0] == returns[1]
    assert before == {path: path.read_bytes() for path in before}


WRONG = {
    "--gamma 1.5": "gamma", "--learning-rate -1": "learning", "--env-id Nothing-v0": "Nothing",
    "--no-such-flag 1": "no-such-flag", "--num-envs 0": "num", "--resume /nowhere": "nowhere",
    "--evaluate /nowhere": "nowhere", "--env-kwargs [1]": "kwargs",
}  # fmt: skip


@EVERY
@pytest.mark.parametrize("flags", WRONG)
def test_wrong_flags_are_one_message(script, flags, tmp_path, capfd):
    with pytest.raises(SystemExit) as end:
        module, args = parse(script, tmp_path / "run", flags)
        (module.evaluate if args.evaluate else module.train)(args)
    said = capfd.readouterr().err
    assert end.value.code == 2 and WRONG[flags] in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


@EVERY
def test_a_folder_in_use_and_another_scripts_checkpoint(script, tmp_path, capfd):
    module, args = parse(script, tmp_path / "run")
    module.train(args)
    with pytest.raises(SystemExit):
        module.train(parse(script, tmp_path / "run")[1])
    assert "a run is there" in capfd.readouterr().err
    other = importlib.import_module("ppo_cma" if script == "ppo" else "ppo")
    with pytest.raises(SystemExit):
        other.evaluate(replace(other.Args(), evaluate=tmp_path / "run"))
