"""`python benchmark/published/policies.py RUN...` keeps what playing needs of each run's folder, in
policies/<env>, and prints its row for the table of policies/README.md."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
POLICIES = ROOT / "benchmark/published/policies"


def smaller(name: str, x: torch.Tensor) -> torch.Tensor:
    """A tensor to keep: the value function's weights become one expanded 0, large tensors get 16
    bits."""
    if name.startswith("critic"):
        return torch.zeros((), dtype=x.dtype).expand(x.shape)
    return x.half() if x.numel() > 30_000 else x


def keep(run: Path) -> str:
    """Write policies/<env>; returns its row of the table."""
    content = json.loads((run / "run.json").read_text())
    saved = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
    args = saved["args"]
    script = content["script"].removesuffix(".py")
    weights = {name: smaller(name, x) for name, x in saved["agent"].items()}
    folder = POLICIES / args["env_id"].rpartition(":")[2]
    folder.mkdir(exist_ok=True)
    torch.save({"args": args, "agent": weights}, folder / "checkpoint.pt")
    module = importlib.import_module(script)
    flags = ["--evaluate", str(folder), "--eval-episodes", "20", "--no-cuda"]
    flags += ["--env-id", args["env_id"]]
    returns = module.evaluate(module.parse_args(flags))
    module_of = args["env_id"].rpartition(":")[0]
    own = ("seed", "batch_size", "minibatch_size", "num_iterations")
    own += () if module_of else ("env_id",)  # a module has to be named again
    default = vars(module.Args())  # runs of older commits may have arguments that are gone
    changed = {k: x for k, x in args.items() if k not in own and x != default.get(k, x)}
    more = " ".join(f"`{k}={x}`" for k, x in changed.items())
    if content["status"] != "finished":
        more += f" stopped before its {args['total_timesteps']:,} steps"
    name = f"{folder.name} | `{script}.py` | {more} | {args['seed']}"
    digits = 1 if abs(np.mean(returns)) >= 10 else 2
    score = f"{np.mean(returns):,.{digits}f} +- {np.std(returns):,.{digits}f}"
    return f"| {name} | {content['global_step']:,} | {score} |"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for path in sys.argv[1:]:
        print(keep(Path(path)))
