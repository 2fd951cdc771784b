"""python benchmark/published/policies.py RUN...: keep of each run's folder what playing needs, in
policies/<env>, and how the mean action does there in policies/README.md."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
POLICIES = ROOT / "benchmark/published/policies"
HEADER = """# Policies to watch

Checkpoints with arguments and weights only, without those of the value function: to be played, not
to be trained further. This records a video into the policy's folder:

    python SCRIPT --evaluate benchmark/published/policies/ENV --capture-video

Returns: mean and deviation of 20 episodes of the mean or likeliest action, played on the machine
that trained it (one CPU core) by `python benchmark/published/policies.py RUN...`, which made this
page from the runs' folders.

| environment | script | arguments | seed | steps | return |
|---|---|---|---|---|---|
"""
ROW = "| {env} | `{script}.py` | {more} | {seed} | {steps:,} | {mean:,.1f} +- {std:,.1f} |\n"


def smaller(name: str, x: torch.Tensor) -> torch.Tensor:
    """Weights of the value function as one 0, expanded; large tensors with 16 bits."""
    if name.startswith("critic"):
        return torch.zeros((), dtype=x.dtype).expand(x.shape)
    return x.half() if x.numel() > 30_000 else x


def keep(run: Path) -> str:
    """Write policies/<env>; its row of the table."""
    content = json.loads((run / "run.json").read_text())
    saved = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
    args, script = saved["args"], content["script"].removesuffix(".py")
    weights = {name: smaller(name, x) for name, x in saved["agent"].items()}
    folder = POLICIES / args["env_id"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.save({"args": args, "agent": weights}, folder / "checkpoint.pt")
    module = importlib.import_module(script)
    flags = ["--evaluate", str(folder), "--eval-episodes", "20", "--no-cuda"]
    returns = module.evaluate(module.parse_args(flags))
    changed = {k: x for k, x in args.items() if x != getattr(module.Args(), k)}
    own = ("env_id", "seed", "batch_size", "minibatch_size", "num_iterations")
    more = " ".join(f"`{k}={x}`" for k, x in changed.items() if k not in own)
    if content["status"] != "finished":
        more += f" stopped before its {args['total_timesteps']:,} steps"
    row = {"env": args["env_id"], "script": script, "more": more, "seed": args["seed"]}
    row |= {"steps": saved["counters"][0], "mean": np.mean(returns), "std": np.std(returns)}
    return ROW.format(**row)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    table = POLICIES / "README.md"
    rows = (
        table.read_text().splitlines(keepends=True)[HEADER.count("\n") :] if table.exists() else []
    )
    found = {row.split("|")[1]: row for row in rows}
    for row in map(keep, map(Path, sys.argv[1:])):
        found[row.split("|")[1]] = row
    table.write_text(HEADER + "".join(found[env] for env in sorted(found)))
