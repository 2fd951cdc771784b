"""What the tests of the harness train: from outside as our scripts are. A step a tick, a checkpoint
after each; SIGTERM stops it. Tests copy it to toy.py."""

import argparse
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("--env-id", "--run-dir", "--resume", "--evaluate", "--kind"):
    parser.add_argument(name)
for name in ("--seed", "--bad-seed", "--eval-episodes"):
    parser.add_argument(name, type=int)
parser.add_argument("--total-timesteps", type=int, default=5)
parser.add_argument("--size", type=int, default=10)  # of the policy, in bytes
parser.add_argument("--x", type=float)  # best at 0.3, with kind a
parser.add_argument("--fail-above", type=float, default=math.inf)
parser.add_argument("--tick", type=float, default=0.0)
args, _ = parser.parse_known_args()
if args.evaluate:
    weight = float(Path(args.evaluate, "policy.pt").read_text())
    noise = float(os.environ.get("NOISE", 0)) * weight
    for k in range(args.eval_episodes):
        value = weight * (k + 1) * 1.11 + noise * (-1) ** k
        print(f"eval_episode={k}, episodic_return={value:.2f}")
    sys.exit()
folder = Path(args.resume or args.run_dir)
how = "resumed" if args.resume else "new"
step = 0
if args.resume:  # ours want the id again for one that names a module
    own, step = json.loads((folder / "checkpoint.pt").read_text())
    assert own["env_id"] == args.env_id
    args = argparse.Namespace(**own | {"tick": 0.0})
else:
    folder.mkdir(parents=True)  # fails if it is there


def write(name: str, content: str):
    (folder / "half").write_text(content)
    (folder / "half").rename(folder / name)


def save(status: str):
    info = {"script": "toy.py", "status": status, "seed": args.seed, "pid": os.getpid()}
    info["args"] = {"env_id": args.env_id, "total_timesteps": args.total_timesteps}
    write("checkpoint.pt", json.dumps([vars(args), step]))
    write("run.json", json.dumps(info))


def returns() -> list[float]:
    if args.x is None:
        return [args.seed * k + 0.125 for k in range(1, step + 1)]
    lost = 20 if args.kind == "b" else 0
    score = 100 - 100 * (args.x - 0.3) ** 2 - lost + args.seed
    return [0.0] * 51 + [score] * 100  # the last 100 are its score


with open("starts.txt", "a") as file:
    words = [args.env_id, args.seed, step, os.getpid(), how, folder.parent.name, os.getppid()]
    print(*words, file=file)
if args.x is not None and args.x > args.fail_above:
    sys.exit(f"{args.x} is too much")
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
save("running")
while step < args.total_timesteps:
    if stop:
        sys.exit(143)
    if args.bad_seed == args.seed and step == 2:
        sys.exit("the loss is not finite")
    time.sleep(args.tick)
    step += 1
    rows = [f"{k},{k}.25,{value},1\n" for k, value in enumerate(returns(), 1)]
    write("episodes.csv", "".join(["global_step,seconds,return,length\n", *rows]))
    save("running")
write("policy.pt", f"{args.seed}.123".ljust(args.size))
save("finished")
with open("ends.txt", "a") as file:
    print(args.env_id, args.seed, file=file)
