"""benchmark speed: programs of known cost, what it writes, and the peers' hyper-parameters"""

import csv
import hashlib
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from benchmark import peers
from benchmark.speed import Cost, Program, built_in, holds, program, speed, steps_done, summarise

ROOT = Path(__file__).resolve().parent.parent.parent
# Takes --cost seconds of CPU and --idle seconds of sleep per step, and --start of both before.
TOY = """
import argparse, json, os, subprocess, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--total-timesteps", type=int)
parser.add_argument("--cost", type=float, default=0)
parser.add_argument("--idle", type=float, default=0)
parser.add_argument("--start", type=float, default=0)
parser.add_argument("--batch", type=int, default=0)
parser.add_argument("--child", action="store_true")
parser.add_argument("--say", default="")
parser.add_argument("--always", type=int, default=0)
parser.add_argument("--pipe", action="store_true")
args = parser.parse_args()
assert not Path("runs").exists()
print(args.say)
if args.child:  # more memory, and half of the work
    ballast = b"1" * 200_000_000
    half = ["--cost", str(args.cost), "--total-timesteps", str(args.total_timesteps)]
    code = Path(__file__).read_text().replace("Path(__file__)", "Path('')")
    subprocess.run([sys.executable, "-c", code, *half])

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

steps = args.total_timesteps
if args.batch:
    steps = steps // args.batch * args.batch
    Path("runs").mkdir()
    Path("runs/run.json").write_text(json.dumps({"global_step": steps}))
if args.pipe:
    os.mkfifo("run.json")
if args.always:
    steps = args.always
burn(args.start)
time.sleep(args.start)
burn(steps * args.cost)
time.sleep(steps * args.idle)
if args.say == "fail":
    sys.exit("no more room")
"""
TINY = {"rounds": 2, "steps": 2000, "warmup_steps": 500, "output": Path("out/speed.csv")}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)


def table() -> tuple[dict, list[dict]]:
    """The facts and the rows that `speed` wrote."""
    lines = Path("out/speed.csv").read_text().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("#"))
    return facts, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def summary(rows: list[dict]) -> dict:
    kinds = (str, int, str, int, float, float, float)
    return summarise(
        [tuple(kind(x) for kind, x in zip(kinds, row.values(), strict=True)) for row in rows]
    )


def test_known_costs(capsys):
    speed(
        ("python toy.py --cost 1e-4 --start 0.2",),
        (
            "twice=python toy.py --cost 2e-4",
            "idle=python toy.py --idle 3e-4 --start 0.1 --cost 1e-5",
        ),
        **TINY,
    )
    facts, rows = table()
    measured = summary(rows)
    assert np.median(measured["toy"].cpu_rates) == pytest.approx(1e4, rel=0.15)
    assert np.median(measured["twice"].cpu_rates) == pytest.approx(5e3, rel=0.15)
    # what a busy machine adds to wall time has no bound
    walls = [float(row["wall_seconds"]) for row in rows if row["program"] == "idle"]
    assert all(wall > 0.1 + 500 * 3e-4 for wall in walls)
    steady = [walls[2] - walls[1], walls[4] - walls[3]]
    assert measured["idle"].rates == pytest.approx([2000 / wall for wall in steady])
    starts = [wall - spent / 4 for wall, spent in zip(walls[1::2], steady, strict=True)]
    assert measured["idle"].starts == pytest.approx(starts)
    short = [float(row["cpu_seconds"]) for row in rows if row["program"] == "toy"][1]
    assert 0.25 < short < 0.5  # 0.2 + 500 * 1e-4 and Python's own

    assert len(rows) == 3 * (1 + 2 * 2)
    assert list(rows[0]) == [
        "program", "round", "run", "steps", "cpu_seconds", "wall_seconds", "peak_mb"
    ]  # fmt: skip
    kinds = [(row["round"], row["run"], row["steps"]) for row in rows if row["program"] == "idle"]
    rounds = [(str(k), *run) for k in (1, 2) for run in (("short", "500"), ("long", "2500"))]
    assert kinds == [("1", "cold", "500"), *rounds]
    assert {"cpu", "cores", "python", "torch", "gymnasium", "load average before"} <= facts.keys()
    assert re.match(r"[0-9a-f]{40}", facts["commit"])
    digest = hashlib.sha256(TOY.encode()).hexdigest()
    assert facts["commit of idle"] == f"none, sha256 of the source {digest}"  # in no repository
    assert facts["command of twice"] == "python toy.py --cost 2e-4"
    assert facts["rounds"] == "2"
    text = Path("out/speed.csv").read_text()
    assert not any(str(path) in text for path in (Path.cwd(), ROOT, sys.prefix))
    told = capsys.readouterr().out
    (line,) = re.findall(r"^ *toy / twice +(\S+) \(", told, re.MULTILINE)
    assert float(line) == pytest.approx(2, rel=0.15)
    assert "load average before: " in told
    assert int(re.search(r"more than 5 % apart: (\d) of 6", told)[1]) >= 2  # the idle one's


def test_processes_and_memory_count(root):
    flags = "--rounds 2 --steps 2000 --warmup-steps 500 --output out/speed.csv"
    command = f"{sys.executable} -m benchmark speed {flags} --command"  # which is small itself
    toy = "python toy.py --child --cost 2e-4"
    variables = os.environ | {"PYTHONPATH": str(root)}
    subprocess.run([*command.split(), toy], env=variables, check=True)
    measured = summary(table()[1])["toy"]
    assert np.median(measured.cpu_rates) == pytest.approx(2.5e3, rel=0.15)
    assert 200 < measured.memory < 250


def test_steps_are_those_a_program_says_it_did():
    speed(("python toy.py --cost 1e-4 --batch 450",), **TINY)  # 500 and 2500 are asked for
    _, rows = table()
    assert [int(row["steps"]) for row in rows] == [450] + 2 * [450, 2250]
    assert np.median(summary(rows)["toy"].cpu_rates) == pytest.approx(1e4, rel=0.15)


def test_as_many_steps_as_take_the_time():
    speed(("python toy.py --cost 1e-4",), **(TINY | {"steps": 0, "seconds": 0.6}))
    _, rows = table()
    assert int(rows[2]["steps"]) - int(rows[1]["steps"]) in range(4500, 7501, 500)


def test_as_many_steps_as_take_the_time_where_a_program_waits(monkeypatch):
    """500 steps beyond 500 take a second and, by a coarse clock, no CPU time at all."""
    monkeypatch.setattr(Program, "run", lambda _, steps: Cost(steps, 1.5, steps * 2e-3, 1.0))
    assert Program("toy", "", []).enough(500, 0.9) == 500
    assert Program("toy", "", []).enough(500, 9.0) == 4500


@pytest.mark.timeout(100)
@pytest.mark.parametrize("flags", ["", "--cost 1e-4", "--idle 1e-4", "--batch 1000000000000"])
def test_a_program_whose_time_does_not_depend_on_its_steps(flags, capsys):
    """Whatever is asked for, it makes so many steps."""
    with pytest.raises(SystemExit) as end:
        speed((f"python toy.py --always 100 {flags}",), **(TINY | {"steps": 0, "seconds": 6.0}))
    assert end.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith(
        "benchmark: toy: its time does not depend on --total-timesteps: 500 took"
    )
    assert told.count("\n") == 1


def test_how_often_it_is_tried_before_that_is_said(monkeypatch):
    """However long it takes, and whatever steps it tells of."""
    for told in (lambda steps: steps, lambda steps: 7):
        tried = []

        def run(_, steps, told=told, tried=tried):
            tried.append(steps)
            return Cost(told(steps), 50.0, 60.0, 1.0)

        monkeypatch.setattr(Program, "run", run)
        with pytest.raises(SystemExit):
            Program("toy", "", []).enough(8192, 10.0)
        assert len(tried) <= 8 and tried[-1] > 1e8
    fast = []

    def run_fast(_, steps):
        fast.append(steps)
        return Cost(steps, 3.0 + steps / 2e7, 4.0 + steps / 2e7, 1.0)

    monkeypatch.setattr(Program, "run", run_fast)
    assert Program("toy", "", []).enough(8192, 10.0) == pytest.approx(2e8, rel=1e-3)
    assert max(fast) < 3e8


def test_a_delay_of_a_busy_machine_is_no_dependence_on_steps(monkeypatch):
    """Every third run takes two minutes longer by the clock, whatever is asked for."""
    tried = []

    def run(_, steps):
        tried.append(steps)
        return Cost(steps, 3.0, 4.0 + 120.0 * (len(tried) % 3 == 0), 1.0)

    monkeypatch.setattr(Program, "run", run)
    with pytest.raises(SystemExit):
        Program("toy", "", []).enough(8192, 10.0)
    assert 5 < len(tried) < 15


def test_a_program_that_goes_on_for_ever_is_ended(capsys):
    with pytest.raises(SystemExit) as end:
        speed(("python toy.py --say started --start 600",), **TINY, time_limit=2.0)
    assert end.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith("benchmark: toy: still at it after 2 s, see --time-limit:\n")


def test_a_word_of_a_command_may_be_longer_than_a_file_name():
    long = f'python toy.py --env-kwargs \'{{"path": "{"x" * 5000}"}}\''
    assert program(long).words[2:] == ["--env-kwargs", f'{{"path": "{"x" * 5000}"}}']


@pytest.mark.timeout(100)
def test_a_run_json_that_tells_nothing_is_left_aside():
    speed(("python toy.py --cost 1e-4 --pipe",), **(TINY | {"rounds": 1}))
    assert [int(row["steps"]) for row in table()[1]] == [500, 500, 2500]
    numbers = ('"9"', "NaN", "[1]", "-4")
    for told in ("[" * 200_000, "[", *(f'{{"global_step":{x}}}' for x in numbers)):
        Path("run.json").write_text(told)
        assert steps_done(Path(), 500) == 500
    Path("run.json").write_text('{"global_step":9}')
    assert steps_done(Path(), 500) == 9


def test_words_are_found_in_a_log_of_any_size(tmp_path):
    log = tmp_path / "log"
    for at in (0, 5, 2**20 - 7, 2**20, 2**21 - 1):
        log.write_bytes(b"." * at + b"going on eagerly" + b"." * 2**20)
        assert holds(log, b"going on eagerly")
    log.write_bytes(b"going on" + b"." * 2**20 + b"eagerly")
    assert not holds(log, b"going on eagerly")


def test_what_is_measured_before_one_fails_is_kept(capsys):
    with pytest.raises(SystemExit):
        speed(("python toy.py --cost 1e-4", "b=python toy.py --say fail"), **TINY)
    assert "\nmeasured so far: out/speed.part.csv\n" in capsys.readouterr().out
    assert not Path("out/speed.csv").exists()
    kept = Path("out/speed.part.csv").read_text()
    assert [line.split(",")[:4] for line in kept.splitlines() if line[0] != "#"][1:] == [
        ["toy", "1", "cold", "500"]
    ]
    speed(("python toy.py --cost 1e-4",), **TINY)
    assert len(table()[1]) == 5
    assert not Path("out/speed.part.csv").exists()


def test_vary(capsys):
    speed(("python toy.py",), vary="cost 1e-4 3e-4", **(TINY | {"rounds": 1}))
    _, rows = table()
    assert [row.pop("cost") for row in rows] == 3 * ["1e-4"] + 3 * ["3e-4"]
    rates = [summary(part)["toy"].cpu_rates[0] for part in (rows[:3], rows[3:])]
    assert rates == pytest.approx([1e4, 1e4 / 3], rel=0.15)
    assert "\n--cost 3e-4\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--say fail", "toy: exit code 1:\nfail\nno more room\n"),
        ("--say 'so going on eagerly'", "toy: does not compile:\nso going on eagerly\n"),
        ("--batch 900", "toy: 0 steps, then 1800 more in "),
        ("--batch 100000", "toy: 0 steps, then 0 more in "),
    ],
)
def test_what_fails_ends_it_with_its_log(flags, told, capsys):
    with pytest.raises(SystemExit) as end:
        speed((f"python toy.py {flags}",), **TINY)
    assert end.value.code == 1
    assert told in capsys.readouterr().err
    assert not Path("out/speed.csv").exists()


def test_a_program_without_cpu_time_is_measured_by_the_clock(monkeypatch, capsys):
    monkeypatch.setattr(Program, "run", lambda _, steps: Cost(steps, 0.0, steps * 1e-3, 1.0))
    speed(("python toy.py", "b=python toy.py --cost 0"), **TINY)
    measured = summary(table()[1])
    assert measured["b"].rates == pytest.approx([1000, 1000])
    assert np.isnan(measured["b"].cpu_rates).all()
    told = capsys.readouterr().out
    assert re.search(r"\n *b +- +1,000 \(1,000 to 1,000\) ", told)


@pytest.mark.parametrize(
    "wrong",
    [
        {"command": ()},
        {"command": ("",)},
        {"command": ("python none.py",)},
        {"command": ("python 'toy.py",)},
        {"command": ("nosuchprogram",)},
        {"command": ("python toy.py", "python toy.py")},
        {"peer": ("python toy.py",)},
        {"output": Path("toy.py/speed.csv")},
        {"peer": ("toy=python toy.py",)},
        {"vary": "num-envs"},
        {"vary": "3 4"},
        {"rounds": 0},
        {"seconds": 0.0},
        {"warmup_steps": 0},
    ],
)
def test_wrong_input_is_one_line(wrong, capsys):
    with pytest.raises(SystemExit) as end:
        speed(**({"command": ("python toy.py",)} | TINY | wrong))
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("benchmark: ")
    assert told.count("\n") == 1


def test_summary_of_known_rows():
    rows = []
    for name, slowness in (("a", [1, 2, 4]), ("b", [2, 8, 4])):
        rows.append((name, 1, "cold", 10, 1.0, 70.0, 1.0))
        for k, factor in enumerate(slowness, 1):
            rows.append((name, k, "short", 10, 5.0, 6.0 + factor, 100.0))
            rows.append((name, k, "long", 110, 5.0 + 5 * factor, 6.0 + 11 * factor, 100.0 + k))
    a, b = summarise(rows).values()
    assert a.cpu_rates.tolist() == [20, 10, 5]
    assert a.rates.tolist() == [10, 5, 2.5]
    assert a.starts == pytest.approx([6, 6, 6])
    assert a.cold == pytest.approx(70 - 10 / 5)
    assert a.memory == 103
    assert b.busy.tolist() == [0.5, 0.5, 0.5]
    assert (a.rates / b.rates).tolist() == [2, 4, 1]  # of runs that were neighbours


def test_names_and_built_in_peers(root, monkeypatch):
    monkeypatch.chdir(root)
    flags = "--env-id CartPole-v1 --compile"
    one, two = program(f"python ppo.py {flags}"), program("x=python ppo.py --num-envs=8")
    assert (one.name, one.command) == ("ppo", f"python ppo.py {flags}")
    assert (two.name, two.command) == ("x", "python ppo.py --num-envs=8")
    assert one.words[:2] == [sys.executable, str(root / "ppo.py")]
    peer = built_in("sb3", program(f"torchrun --nproc-per-node=2 ppo.py {flags}"))
    assert peer.command == f"python benchmark/peers.py sb3 ppo.py {flags}"
    own = [str(root / "benchmark" / "peers.py"), "sb3", str(root / "ppo.py")]
    assert peer.words[1:] == [*own, *peer.command.split()[4:]]
    fit = {name: peers.fit([str(root / f"{name}.py")]) for name in ("ppo", "ppo_atari_lstm")}
    assert fit == {"ppo": True, "ppo_atari_lstm": False}
    assert not peers.fit(["program"])


SB3 = [
    ("ppo", "--env-id CartPole-v1"),
    ("ppo", "--num-envs 3 --num-steps 50 --num-minibatches 7 --target-kl 0.03 --no-norm-adv"),
    ("ppo_continuous_action", "--env-id Pendulum-v1 --no-cuda --no-anneal-lr --clip-vloss"),
    (
        "ppo_continuous_action",
        "--env-id Pendulum-v1 --num-envs 2 --num-steps 64 --gamma 0.9 --gae-lambda 0.8 "
        "--ent-coef 0.1 --vf-coef 0.7 --max-grad-norm 2 --log-std-init -1 --no-scale-actions",
    ),
]


@pytest.mark.parametrize(("script", "flags"), SB3)
def test_sb3_has_our_hyper_parameters(script, flags):
    import torch
    from stable_baselines3.common.vec_env import VecNormalize, unwrap_vec_normalize

    total = "--total-timesteps 20480"
    module, args = peers.parse(ROOT / f"{script}.py", f"{flags} {total}".split())
    assert peers.clipped(args) is args
    assert module.__name__ == script
    model = peers.sb3_model(module, args)
    same = {
        "num_envs": model.n_envs,
        "num_steps": model.n_steps,
        "update_epochs": model.n_epochs,
        "gamma": model.gamma,
        "gae_lambda": model.gae_lambda,
        "clip_coef": model.clip_range(0.5),
        "ent_coef": model.ent_coef,
        "vf_coef": model.vf_coef,
        "max_grad_norm": model.max_grad_norm,
        "norm_adv": model.normalize_advantage,
        "seed": model.seed,
    }
    assert same == {name: getattr(args, name) for name in same}
    if args.clip_vloss:
        assert model.clip_range_vf(0.5) == args.clip_coef
    else:
        assert model.clip_range_vf is None
    batch = args.num_envs * args.num_steps
    iterations = 20480 // batch
    for k in (0, iterations // 2, iterations - 1):  # SB3 has then done k + 1 rollouts
        left = 1 - (k + 1) / iterations
        wanted = args.learning_rate * ((1 - k / iterations) if args.anneal_lr else 1)
        assert model.lr_schedule(left) == pytest.approx(wanted)
    assert -(-batch // model.batch_size) == args.num_minibatches
    assert (model.target_kl and model.target_kl * 1.5) == args.target_kl  # the limit of each
    assert model.policy.optimizer.defaults["eps"] == 1e-5
    assert model.policy.optimizer.defaults["betas"] == (0.9, 0.999)

    obs_space, action_space = model.observation_space, model.action_space

    class Spaces:
        observation_space = obs_space

    Spaces.action_space = action_space
    agent = module.Agent(Spaces, args)
    shapes = [sorted(tuple(p.shape) for p in net.parameters()) for net in (agent, model.policy)]
    assert shapes[0] == shapes[1]
    gains = [  # of orthogonal weights
        sorted(
            float(torch.linalg.matrix_norm(p.detach().flatten(1), 2))
            for p in net.parameters()
            if p.ndim > 1
        )
        for net in (agent, model.policy)
    ]
    assert gains[0] == pytest.approx(gains[1], rel=1e-3)
    if script == "ppo_continuous_action":
        assert (model.policy.log_std == args.log_std_init).all()
        normalizer = unwrap_vec_normalize(model.env)
        assert (normalizer.clip_obs, normalizer.clip_reward, normalizer.epsilon) == (10, 10, 1e-8)
        assert normalizer.gamma == args.gamma
        assert normalizer.norm_obs and normalizer.norm_reward
        limit = 2.0 if "--no-scale" in flags else 1.0  # in the policy's units
        assert (action_space.high == limit).all()
    else:
        assert not isinstance(model.env, VecNormalize)
    used = {
        type(m) for m in model.policy.modules() if m.__class__.__module__.endswith("activation")
    }
    assert used == {torch.nn.Tanh}
    model.env.close()


@pytest.mark.parametrize("script", ["ppo_kl_adaptive", "ppo_cma"])
def test_beside_scripts_without_an_equal_sb3_has_cleanrls_settings(script):
    flags = "--env-id Hopper-v4 --num-envs 5 --seed 3 --total-timesteps 40960 --no-cuda"
    module, args = peers.parse(ROOT / f"{script}.py", flags.split())
    model = peers.sb3_model(module, peers.clipped(args))
    assert (model.n_envs, model.n_steps, model.batch_size, model.n_epochs) == (1, 2048, 64, 10)
    assert (model.clip_range_vf(1), model.lr_schedule(0.95), model.seed) == (0.2, 3e-4, 3)
    assert (model.policy.log_std == 0).all()
    assert str(model.device) == "cpu"
    model.env.close()


def test_rescaled_actions_span_the_box():
    flags = "--env-id Pendulum-v1 --num-envs 2 --num-steps 64"
    envs = peers.sb3_envs(*peers.parse(ROOT / "ppo_continuous_action.py", flags.split()))
    assert (envs.action_space.low, envs.action_space.high) == (-1, 1)
    envs.reset()
    for action in (-1.0, 0.25, 1.0):
        envs.step(np.full((2, 1), action))
        assert envs.venv.envs[0].unwrapped.last_u == 2 * action


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("ppo", "--env-id CartPole-v1"),
        ("ppo_cma", "--env-id InvertedPendulum-v4 --num-envs 2"),
        ("ppo_continuous_action", "--env-id Pendulum-v1 --num-steps 512"),
    ],
)
def test_bare_steps(script, flags, monkeypatch):
    import gymnasium as gym

    taken = []

    class Noted(gym.Wrapper):
        def step(self, action):
            taken.append(action)
            return super().step(action)

    words = [*flags.split(), "--total-timesteps", "1024"]
    module, args = peers.parse(ROOT / f"{script}.py", words)
    make_env = module.make_env
    monkeypatch.setattr(module, "make_env", lambda env_id: Noted(make_env(env_id)))
    assert peers.bare(module, args) == len(taken) == 1024
    assert 0.4 < np.std(taken) < 2  # random ones


def test_peers_as_programs(root, capsys):
    for argv in ([], ["sb3"], ["other", "ppo.py"], ["bare", "none.py"]):
        with pytest.raises(SystemExit) as end:
            peers.main(argv)
        assert end.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_ours_is_faster_than_sb3_and_slower_than_its_environment():
    """By a process of its own: what is measured counts no less memory than who measures."""
    argv = [sys.executable, "-m", "benchmark", "speed", "--rounds", "1", "--seconds", "2"]
    argv += ["--command", "python ppo.py --env-id CartPole-v1"]
    argv += ["--output", str(Path("out/speed.csv").resolve())]
    subprocess.run(argv, cwd=ROOT, check=True)
    measured = summary(table()[1])
    (ppo,), (sb3,), (bare,) = (measured[name].cpu_rates for name in ("ppo", "sb3", "bare"))
    assert 1.2 * sb3 < ppo < bare / 2
    assert 150 < measured["ppo"].memory < 1000


def test_the_sleeper_sleeps():
    importlib.import_module("benchmark.published.sleeper")
    env = gym.make("Sleeper-v0", seconds=0.0)
    obs, _ = env.reset(seed=1)
    assert obs.shape == (17,)
    for _ in range(999):
        assert not env.step(env.action_space.sample())[3]
    assert env.step(env.action_space.sample())[3]  # its time limit
