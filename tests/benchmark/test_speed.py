"""benchmark speed: programs of known cost, whole runs, and the peers' hyper-parameters"""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from harness import ROOT, digest, ended, refused
from stable_baselines3.common.vec_env import unwrap_vec_normalize

from benchmark import data, peers
from benchmark.speed import Row, built_in, program, speed, summarise

# Takes --cost seconds of CPU and --idle seconds of sleep per step, and --start of both before; with
# --compiles one second more with an empty compile cache.
TOY = """
import argparse, json, os, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
for name in ("--total-timesteps", "--batch"):
    parser.add_argument(name, type=int)
for name in ("--cost", "--idle", "--start"):
    parser.add_argument(name, type=float, default=0)
parser.add_argument("--compiles", action="store_true")
parser.add_argument("--say", default="")
args = parser.parse_args()
print(args.say)
steps = args.total_timesteps
if args.batch:
    steps = steps // args.batch * args.batch
    Path("runs").mkdir()  # fails if it is there
    Path("runs/run.json").write_text(json.dumps({"global_step": steps}))
seconds = args.start + steps * args.cost
cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "step")
if args.compiles and not cache.exists():
    seconds += 1
    cache.touch()
end = time.process_time() + seconds
while time.process_time() < end:
    pass
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


def cpu_rate(name: str) -> float:
    found = summarise([tuple(row.values()) for row in data.read_csv(TABLE)])
    return np.median(found[name].cpu_rates)


def test_known_costs():
    others = ("twice=python toy.py --cost 2e-4", "idle=python toy.py --idle 3e-4 --start 0.1")
    output = measured("python toy.py --cost 1e-4 --start 0.2", peer=others).stdout
    rows = data.read_csv(TABLE)
    assert cpu_rate("toy") == pytest.approx(1e4, rel=0.15)
    assert cpu_rate("twice") == pytest.approx(5e3, rel=0.15)
    # what a busy machine adds to wall time has no bound
    walls = [row["wall_seconds"] for row in rows if row["program"] == "idle"]
    assert all(wall > 0.1 + 500 * 3e-4 for wall in walls)
    short = [row["cpu_seconds"] for row in rows if row["program"] == "toy"][1]
    assert 0.25 < short < 0.5  # 0.2 + 500 * 1e-4 and Python's own
    kinds = [(row["round"], row["run"], row["steps"]) for row in rows if row["program"] == "idle"]
    rounds = [(k, *run) for k in (1, 2) for run in (("short", 500), ("long", 2500))]
    assert kinds == [(1, "cold", 500), *rounds]
    facts = dict(x[2:].split(": ", 1) for x in TABLE.read_text().splitlines() if x[0] == "#")
    assert facts["commit of idle"] == f"none, sha256 of the source {digest(TOY)}"
    assert facts["command of twice"] == "python toy.py --cost 2e-4"
    assert not any(str(path) in TABLE.read_text() for path in (Path.cwd(), ROOT, sys.prefix))
    (ratio,) = re.findall(r"^ *toy / twice +(\S+) \(", output, re.MULTILINE)
    assert float(ratio) == pytest.approx(2, rel=0.15)


def test_whole_runs_with_a_cold_and_a_warm_cache():
    command = "ours=python toy.py --cost 1e-4 --start 0.1 --compiles"
    peer = ("theirs=python toy.py --cost 4e-4",)
    output = measured(command, peer=peer, whole=True).stdout
    rows = data.read_csv(TABLE)
    assert list(rows[0]) == list(Row._fields)
    order = [(row["program"], row["round"], row["run"]) for row in rows]
    names = [(name, kind) for name in ("ours", "theirs") for kind in ("cold", "warm")]
    assert order == [(name, k, kind) for k in (1, 2) for name, kind in names]
    assert {row["steps"] for row in rows} == {2000}
    cpu = {name: [] for name in names}
    for row in rows:
        cpu[row["program"], row["run"]].append(row["cpu_seconds"])
    middle = {own: np.median(values) for own, values in cpu.items()}
    own = middle["ours", "warm"]  # 0.3 and Python's own
    assert 0.3 < own < 0.6
    assert middle["ours", "cold"] - own == pytest.approx(1, abs=0.15)
    assert middle["theirs", "warm"] - own == pytest.approx(0.5, abs=0.15)
    ratio = np.median(np.divide(cpu["theirs", "warm"], cpu["ours", "warm"]))
    (shown,) = re.findall(r"theirs / ours +warm +.*\) +(\S+) \(.*\)\n", output)
    assert float(shown) == pytest.approx(ratio, abs=0.006)


def test_steps_are_those_a_program_says_it_did():
    measured("python toy.py --cost 1e-4 --batch 450")  # 500 and 2500 are asked for
    assert [row["steps"] for row in data.read_csv(TABLE)] == [450] + 2 * [450, 2250]
    assert cpu_rate("toy") == pytest.approx(1e4, rel=0.15)


def test_what_fails_ends_it_with_its_log():
    for flags, says in (
        ("--say fail", "toy: exit code 1:\nfail\nno more room\n"),
        ("--say 'so going on eagerly'", "toy: does not compile:\nso going on eagerly\n"),
        ("--batch 900", "toy: no more steps"),
    ):
        assert says in measured(f"python toy.py {flags}", code=1).stderr
        assert not TABLE.exists()


def test_wrong_input_is_one_line():
    toys = ("python toy.py", "python toy.py")
    wrongs = [{"command": words} for words in ((), ("python none.py",), ("nosuchprogram",), toys)]
    for wrong in (*wrongs, {"vary": "num-envs"}, {"rounds": 0}, {"whole": True, "steps": 0}):
        refused("benchmark: ", speed, **({"command": toys[:1]} | TINY | wrong))


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
    assert (a.rates / b.rates).tolist() == [2, 4, 1]  # of runs that were neighbours


def test_built_in_peers(monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = "--env-id CartPole-v1 --compile"
    peer = built_in("sb3", program(f"torchrun --nproc-per-node=2 ppo.py {flags}"))
    assert peer.command == f"python benchmark/peers.py sb3 ppo.py {flags}"
    own = [str(ROOT / "benchmark" / "peers.py"), "sb3", str(ROOT / "ppo.py")]
    assert peer.words[1:] == [*own, *peer.command.split()[4:]]
    fit = {kind: peers.fit(kind, ["ppo_kl_adaptive.py"]) for kind in ("bare", "sb3")}
    assert fit == {"bare": True, "sb3": False}  # SB3 has no such algorithm
    assert peers.fit("sb3", ["ppo.py"])


def parsed(script: str, flags: str):
    return peers.parse(ROOT / f"{script}.py", flags.split())


OTHERS = """--num-envs 2 --num-steps 64 --gamma 0.9 --gae-lambda 0.8 --ent-coef 0.1 --vf-coef 0.7
--max-grad-norm 2 --log-std-init -1 --no-scale-actions"""
SB3 = [
    ("ppo", "--num-envs 3 --num-steps 50 --num-minibatches 7 --target-kl 0.03 --no-norm-adv"),
    ("ppo_continuous_action", "--env-id Pendulum-v1 --no-cuda --no-anneal-lr --clip-vloss"),
    ("ppo_continuous_action", f"--env-id Pendulum-v1 {OTHERS}"),
]
THEIRS = {  # what ours are called there
    "num_envs": "n_envs", "num_steps": "n_steps", "update_epochs": "n_epochs", "gamma": "gamma",
    "gae_lambda": "gae_lambda", "ent_coef": "ent_coef", "seed": "seed",
    "max_grad_norm": "max_grad_norm", "norm_adv": "normalize_advantage",
}  # fmt: skip


@pytest.mark.parametrize(("script", "flags"), SB3)
def test_sb3_has_our_hyper_parameters(script, flags):
    module, args = parsed(script, f"{flags} --total-timesteps 20480")
    model = peers.sb3_model(module, args)
    same = {ours: getattr(model, theirs) for ours, theirs in THEIRS.items()}
    assert same == {name: getattr(args, name) for name in THEIRS}
    assert model.vf_coef == args.vf_coef / 2  # its squared error has no 1/2
    assert model.clip_range(0.5) == args.clip_coef
    limit = model.clip_range_vf and model.clip_range_vf(0.5)
    assert limit == (args.clip_coef if args.clip_vloss else None)
    iterations = 20480 // (args.num_envs * args.num_steps)
    for k in (0, iterations // 2, iterations - 1):  # SB3 has then done k + 1 rollouts
        left = 1 - (k + 1) / iterations
        wanted = args.learning_rate * ((1 - k / iterations) if args.anneal_lr else 1)
        assert model.lr_schedule(left) == pytest.approx(wanted)
    assert -(-args.num_envs * args.num_steps // model.batch_size) == args.num_minibatches
    assert (model.target_kl and model.target_kl * 1.5) == args.target_kl  # the limit of each
    assert model.policy.optimizer.defaults["eps"] == 1e-5
    assert model.policy.optimizer.defaults["betas"] == (0.9, 0.999)
    networks = module.Agent(model, args), model.policy  # which has the spaces
    shapes = [sorted(tuple(p.shape) for p in net.parameters()) for net in networks]
    assert shapes[0] == shapes[1]
    normalizer = unwrap_vec_normalize(model.env)
    assert (normalizer is None) == (script == "ppo")
    if normalizer:
        assert (model.policy.log_std == args.log_std_init).all()
        assert (normalizer.clip_obs, normalizer.clip_reward, normalizer.epsilon) == (10, 10, 1e-8)
        assert normalizer.gamma == args.gamma
        assert normalizer.norm_obs and normalizer.norm_reward
        limit = 2.0 if "--no-scale" in flags else 1.0  # in the policy's units
        assert (model.action_space.high == limit).all()
    model.env.close()


@pytest.mark.parametrize("script, env_id", [("ppo", "CartPole-v1"), ("ppo_cma", "Pendulum-v1")])
def test_bare_steps(script, env_id, monkeypatch):
    taken = []
    module, args = parsed(script, f"--env-id {env_id} --num-envs 2 --total-timesteps 1024")
    step = TimeLimit.step
    monkeypatch.setattr(TimeLimit, "step", lambda env, x: taken.append(x) or step(env, x))
    assert peers.bare(module, args) == len(taken) == 1024
    assert 0.4 < np.std(taken) < 2  # random ones
