"""benchmark speed: programs of known cost, what it writes, and the peers' hyper-parameters"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from harness import ROOT, background, digest, ended, lines, refused, wait_for
from stable_baselines3.common.vec_env import VecNormalize, unwrap_vec_normalize

from benchmark import data, peers
from benchmark.speed import Cost, Program, built_in, holds, program, speed, steps_done, summarise

# Takes --cost seconds of CPU and --idle seconds of sleep per step, and --start of both before.
TOY = """
import argparse, json, os, subprocess, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
for name in ("--total-timesteps", "--batch", "--always"):
    parser.add_argument(name, type=int)
for name in ("--cost", "--idle", "--start"):
    parser.add_argument(name, type=float, default=0)
for name in ("--child", "--pipe"):
    parser.add_argument(name, action="store_true")
parser.add_argument("--say", default="")
args = parser.parse_args()
assert not Path("runs").exists()
print(args.say)
if args.child:  # more memory, and half of the work
    ballast = b"1" * 200_000_000
    half = ["--cost", str(args.cost), "--total-timesteps", str(args.total_timesteps)]
    subprocess.run([sys.executable, __file__, *half])

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
steps = args.always or steps
burn(args.start + steps * args.cost)
time.sleep(args.start + steps * args.idle)
if args.say == "fail":
    sys.exit("no more room")
"""
TABLE = Path("out/speed.csv")
TINY = {"rounds": 2, "steps": 2000, "warmup_steps": 500, "output": TABLE}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)


def measured(*commands: str, **more) -> subprocess.CompletedProcess:
    return ended(speed, commands, **TINY | more)


def summary(rows: list[dict] | None = None) -> dict:
    return summarise([tuple(row.values()) for row in rows or data.read_csv(TABLE)])


def cpu_rate(name: str) -> float:
    return np.median(summary()[name].cpu_rates)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_the_program_that_is_measured(number):
    Path("toy.py").write_text("""if True:
        import os, sys, time
        with open(sys.argv[1], "w") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(600)
    """)
    command = f"python toy.py {Path('starts.txt').resolve()}"
    measuring = background("speed", command=command, output=TABLE)
    wait_for(lambda: lines("starts.txt"))
    ((pid,),) = lines("starts.txt")
    measuring.send_signal(number)
    assert measuring.wait(20) == 128 + number, Path("out.txt").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_known_costs():
    others = ("twice=python toy.py --cost 2e-4", "idle=python toy.py --idle 3e-4 --start 0.1")
    said = measured("python toy.py --cost 1e-4 --start 0.2", peer=others).stdout
    rows = data.read_csv(TABLE)
    assert cpu_rate("toy") == pytest.approx(1e4, rel=0.15)
    assert cpu_rate("twice") == pytest.approx(5e3, rel=0.15)
    # what a busy machine adds to wall time has no bound
    walls = [row["wall_seconds"] for row in rows if row["program"] == "idle"]
    assert all(wall > 0.1 + 500 * 3e-4 for wall in walls)
    steady = [walls[2] - walls[1], walls[4] - walls[3]]
    idle = summary()["idle"]
    assert idle.rates == pytest.approx([2000 / wall for wall in steady])
    starts = [wall - spent / 4 for wall, spent in zip(walls[1::2], steady, strict=True)]
    assert idle.starts == pytest.approx(starts)
    short = [row["cpu_seconds"] for row in rows if row["program"] == "toy"][1]
    assert 0.25 < short < 0.5  # 0.2 + 500 * 1e-4 and Python's own

    names = ["program", "round", "run", "steps", "cpu_seconds", "wall_seconds", "peak_mb"]
    assert list(rows[0]) == names
    kinds = [(row["round"], row["run"], row["steps"]) for row in rows if row["program"] == "idle"]
    rounds = [(k, *run) for k in (1, 2) for run in (("short", 500), ("long", 2500))]
    assert kinds == [(1, "cold", 500), *rounds]
    assert len(rows) == 3 * len(kinds)
    text = TABLE.read_text()
    facts = dict(line[2:].split(": ", 1) for line in text.splitlines() if line[0] == "#")
    assert {"cpu", "cores", "python", "torch", "gymnasium", "load average before"} <= facts.keys()
    assert re.match(r"[0-9a-f]{40}", facts["commit"])
    assert facts["commit of idle"] == f"none, sha256 of the source {digest(TOY)}"
    assert facts["command of twice"] == "python toy.py --cost 2e-4"
    assert facts["rounds"] == "2"
    assert not any(str(path) in text for path in (Path.cwd(), ROOT, sys.prefix))
    (line,) = re.findall(r"^ *toy / twice +(\S+) \(", said, re.MULTILINE)
    assert float(line) == pytest.approx(2, rel=0.15)
    assert "load average before: " in said
    assert int(re.search(r"more than 5 % apart: (\d) of 6", said)[1]) >= 2  # the idle one's


def speed_alone(*flags: str, cwd: Path):
    """By a process of its own: what is measured counts no less memory than who measures."""
    command = [sys.executable, "-m", "benchmark", "speed", "--output", str(TABLE.absolute())]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *flags], cwd=cwd, env=environment, check=True)


def test_processes_and_memory_count():
    sizes = ["--rounds", "2", "--steps", "2000", "--warmup-steps", "500"]
    speed_alone(*sizes, "--command", "python toy.py --child --cost 2e-4", cwd=Path.cwd())
    assert cpu_rate("toy") == pytest.approx(2.5e3, rel=0.15)
    assert 200 < summary()["toy"].memory < 250


def test_steps_are_those_a_program_says_it_did():
    measured("python toy.py --cost 1e-4 --batch 450")  # 500 and 2500 are asked for
    assert [row["steps"] for row in data.read_csv(TABLE)] == [450] + 2 * [450, 2250]
    assert cpu_rate("toy") == pytest.approx(1e4, rel=0.15)


def test_as_many_steps_as_take_the_time():
    measured("python toy.py --cost 1e-4", steps=0, seconds=0.6)
    _, short, long, *_ = data.read_csv(TABLE)
    assert long["steps"] - short["steps"] in range(4500, 7501, 500)


@pytest.fixture
def costs(monkeypatch):
    """Programs that take what a function says of the steps asked for; what was asked for."""

    def set_up(cost) -> list[int]:
        tried = []
        monkeypatch.setattr(Program, "run", lambda _, n: tried.append(n) or cost(n, len(tried)))
        return tried

    return set_up


@pytest.mark.parametrize(
    "cost, warmup, seconds, wanted",
    [  # 500 steps take a second and, by a coarse clock, no CPU time at all
        (lambda n, _: Cost(n, 1.5, n * 2e-3, 1.0), 500, 0.9, 500),
        (lambda n, _: Cost(n, 1.5, n * 2e-3, 1.0), 500, 9.0, 4500),
        (lambda n, _: Cost(n, 3.0 + n / 2e7, 4.0 + n / 2e7, 1.0), 8192, 10.0, 2e8),
    ],
)
def test_steps_that_are_enough(cost, warmup, seconds, wanted, costs):
    tried = costs(cost)
    assert Program("toy", "", []).enough(warmup, seconds) == pytest.approx(wanted, rel=1e-3)
    assert max(tried) < 3e8


@pytest.mark.parametrize(
    "cost, most",
    [
        (lambda n, _: Cost(n, 50.0, 60.0, 1.0), 8),
        (lambda n, _: Cost(7, 50.0, 60.0, 1.0), 8),  # whatever steps it tells of
        (lambda n, k: Cost(n, 3.0, 124.0 if k % 3 == 0 else 4.0, 1.0), 14),  # a busy machine
    ],
)
def test_how_often_it_is_tried_before_that_is_said(cost, most, costs):
    tried = costs(cost)
    ended(Program("toy", "", []).enough, 8192, 10.0, code=1)
    assert 5 < len(tried) <= most
    assert tried[-1] > 1e8


@pytest.mark.timeout(100)
@pytest.mark.parametrize("flags", ["", "--cost 1e-4", "--idle 1e-4", "--batch 1000000000000"])
def test_a_program_whose_time_does_not_depend_on_its_steps(flags):
    """Whatever is asked for, it makes so many steps."""
    done = measured(f"python toy.py --always 100 {flags}", steps=0, seconds=6.0, code=1)
    said = "benchmark: toy: its time does not depend on --total-timesteps: 500 took"
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_a_word_of_a_command_may_be_longer_than_a_file_name():
    long = f'python toy.py --env-kwargs \'{{"path": "{"x" * 5000}"}}\''
    assert program(long).words[2:] == ["--env-kwargs", f'{{"path": "{"x" * 5000}"}}']


@pytest.mark.timeout(100)
def test_a_run_json_that_tells_nothing_is_left_aside():
    measured("python toy.py --cost 1e-4 --pipe", rounds=1)
    assert [row["steps"] for row in data.read_csv(TABLE)] == [500, 500, 2500]
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


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--say fail", "toy: exit code 1:\nfail\nno more room\n"),
        ("--say 'so going on eagerly'", "toy: does not compile:\nso going on eagerly\n"),
        ("--batch 900", "toy: 0 steps, then 1800 more in "),
        ("--batch 100000", "toy: 0 steps, then 0 more in "),
        ("--start 600", "toy: still at it after 2 s, see --time-limit:\n"),
    ],
)
def test_what_fails_ends_it_with_its_log(flags, told):
    done = measured(f"python toy.py {flags}", time_limit=2.0, code=1)
    assert told in done.stderr
    assert not TABLE.exists()


def test_what_is_measured_before_one_fails_is_kept():
    partial = Path("out/speed.part.csv")
    done = measured("python toy.py --cost 1e-4", "b=python toy.py --say fail", code=1)
    assert f"\nmeasured so far: {partial}\n" in done.stdout
    (row,) = data.read_csv(partial)
    assert (row["program"], row["round"], row["run"], row["steps"]) == ("toy", 1, "cold", 500)
    measured("python toy.py --cost 1e-4")
    assert len(data.read_csv(TABLE)) == 5
    assert not partial.exists()


def test_vary():
    said = measured("python toy.py", vary="cost 1e-4 3e-4", rounds=1).stdout
    rows = data.read_csv(TABLE)
    assert [row.pop("cost") for row in rows] == 3 * [1e-4] + 3 * [3e-4]
    rates = [summary(part)["toy"].cpu_rates[0] for part in (rows[:3], rows[3:])]
    assert rates == pytest.approx([1e4, 1e4 / 3], rel=0.15)
    assert "\n--cost 3e-4\n" in said


def test_a_program_without_cpu_time_is_measured_by_the_clock(costs):
    costs(lambda steps, _: Cost(steps, 0.0, steps * 1e-3, 1.0))
    said = measured("python toy.py", "b=python toy.py --cost 0").stdout
    found = summary()["b"]
    assert found.rates == pytest.approx([1000, 1000])
    assert np.isnan(found.cpu_rates).all()
    assert re.search(r"\n *b +- +1,000 \(1,000 to 1,000\) ", said)


@pytest.mark.parametrize(
    "wrong",
    [
        {"command": ()}, {"command": ("",)}, {"command": ("python none.py",)},
        {"command": ("python 'toy.py",)}, {"command": ("nosuchprogram",)},
        {"command": ("python toy.py", "python toy.py")}, {"output": Path("toy.py/speed.csv")},
        {"peer": ("python toy.py",)}, {"peer": ("toy=python toy.py",)}, {"vary": "num-envs"},
        {"vary": "3 4"}, {"rounds": 0}, {"seconds": 0.0}, {"warmup_steps": 0},
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(wrong):
    refused("benchmark: ", speed, **({"command": ("python toy.py",)} | TINY | wrong))


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


# --- peers ----------------------------------------------------------------------------------------


def test_names_and_built_in_peers(monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = "--env-id CartPole-v1 --compile"
    one, two = program(f"python ppo.py {flags}"), program("x=python ppo.py --num-envs=8")
    assert (one.name, one.command) == ("ppo", f"python ppo.py {flags}")
    assert (two.name, two.command) == ("x", "python ppo.py --num-envs=8")
    assert one.words[:2] == [sys.executable, str(ROOT / "ppo.py")]
    peer = built_in("sb3", program(f"torchrun --nproc-per-node=2 ppo.py {flags}"))
    assert peer.command == f"python benchmark/peers.py sb3 ppo.py {flags}"
    own = [str(ROOT / "benchmark" / "peers.py"), "sb3", str(ROOT / "ppo.py")]
    assert peer.words[1:] == [*own, *peer.command.split()[4:]]
    fit = {name: peers.fit([str(ROOT / f"{name}.py")]) for name in ("ppo", "ppo_atari_lstm")}
    assert fit == {"ppo": True, "ppo_atari_lstm": False}
    assert not peers.fit(["program"])


def parsed(script: str, flags: str):
    return peers.parse(ROOT / f"{script}.py", flags.split())


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
THEIRS = {  # what ours are called there
    "num_envs": "n_envs", "num_steps": "n_steps", "update_epochs": "n_epochs", "gamma": "gamma",
    "gae_lambda": "gae_lambda", "ent_coef": "ent_coef", "seed": "seed",
    "max_grad_norm": "max_grad_norm", "norm_adv": "normalize_advantage",
}  # fmt: skip


@pytest.mark.parametrize(("script", "flags"), SB3)
def test_sb3_has_our_hyper_parameters(script, flags):
    module, args = parsed(script, f"{flags} --total-timesteps 20480")
    assert peers.clipped(args) is args
    assert module.__name__ == script
    model = peers.sb3_model(module, args)
    same = {ours: getattr(model, theirs) for ours, theirs in THEIRS.items()}
    assert same == {name: getattr(args, name) for name in THEIRS}
    assert model.vf_coef == args.vf_coef / 2  # its squared error has no 1/2
    assert model.clip_range(0.5) == args.clip_coef
    if args.clip_vloss:
        assert model.clip_range_vf(0.5) == args.clip_coef
    else:
        assert model.clip_range_vf is None
    iterations = 20480 // (args.num_envs * args.num_steps)
    for k in (0, iterations // 2, iterations - 1):  # SB3 has then done k + 1 rollouts
        left = 1 - (k + 1) / iterations
        wanted = args.learning_rate * ((1 - k / iterations) if args.anneal_lr else 1)
        assert model.lr_schedule(left) == pytest.approx(wanted)
    assert -(-args.num_envs * args.num_steps // model.batch_size) == args.num_minibatches
    assert (model.target_kl and model.target_kl * 1.5) == args.target_kl  # the limit of each
    assert model.policy.optimizer.defaults["eps"] == 1e-5
    assert model.policy.optimizer.defaults["betas"] == (0.9, 0.999)
    agent = module.Agent(model, args)  # which has the spaces
    networks = agent, model.policy
    shapes = [sorted(tuple(p.shape) for p in net.parameters()) for net in networks]
    assert shapes[0] == shapes[1]
    weights = [[p.detach().flatten(1) for p in net.parameters() if p.ndim > 1] for net in networks]
    gains = [sorted(float(torch.linalg.matrix_norm(x, 2)) for x in net) for net in weights]
    assert gains[0] == pytest.approx(gains[1], rel=1e-3)  # of orthogonal weights
    if script == "ppo_continuous_action":
        assert (model.policy.log_std == args.log_std_init).all()
        normalizer = unwrap_vec_normalize(model.env)
        assert (normalizer.clip_obs, normalizer.clip_reward, normalizer.epsilon) == (10, 10, 1e-8)
        assert normalizer.gamma == args.gamma
        assert normalizer.norm_obs and normalizer.norm_reward
        limit = 2.0 if "--no-scale" in flags else 1.0  # in the policy's units
        assert (model.action_space.high == limit).all()
    else:
        assert not isinstance(model.env, VecNormalize)
    kinds = {type(m) for m in model.policy.modules() if "activation" in type(m).__module__}
    assert kinds == {torch.nn.Tanh}
    model.env.close()


@pytest.mark.parametrize("script", ["ppo_kl_adaptive", "ppo_cma"])
def test_beside_scripts_without_an_equal_sb3_has_cleanrls_settings(script):
    flags = "--env-id Hopper-v4 --num-envs 5 --seed 3 --total-timesteps 40960 --no-cuda"
    module, args = parsed(script, flags)
    model = peers.sb3_model(module, peers.clipped(args))
    assert (model.n_envs, model.n_steps, model.batch_size, model.n_epochs) == (1, 2048, 64, 10)
    assert (model.clip_range_vf(1), model.lr_schedule(0.95), model.seed) == (0.2, 3e-4, 3)
    assert (model.policy.log_std == 0).all()
    assert str(model.device) == "cpu"
    model.env.close()


def test_rescaled_actions_span_the_box():
    flags = "--env-id Pendulum-v1 --num-envs 2 --num-steps 64"
    envs = peers.sb3_envs(*parsed("ppo_continuous_action", flags))
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
    taken = []

    class Noted(gym.Wrapper):
        def step(self, action):
            taken.append(action)
            return super().step(action)

    module, args = parsed(script, f"{flags} --total-timesteps 1024")
    make_env = module.make_env
    monkeypatch.setattr(module, "make_env", lambda env_id: Noted(make_env(env_id)))
    assert peers.bare(module, args) == len(taken) == 1024
    assert 0.4 < np.std(taken) < 2  # random ones


@pytest.mark.parametrize("argv", [[], ["sb3"], ["other", "ppo.py"], ["bare", "none.py"]])
def test_peers_as_programs(argv):
    assert ended(peers.main, argv, code=2).stderr.count("\n") == 1


@pytest.mark.slow
def test_ours_is_faster_than_sb3_and_slower_than_its_environment():
    flags = ["--rounds", "1", "--seconds", "2"]
    speed_alone(*flags, "--command", "python ppo.py --env-id CartPole-v1", cwd=ROOT)
    ppo, sb3, bare = (cpu_rate(name) for name in ("ppo", "sb3", "bare"))
    assert 1.2 * sb3 < ppo < bare / 2
    assert 150 < summary()["ppo"].memory < 1000
