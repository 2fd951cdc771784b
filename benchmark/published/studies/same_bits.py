"""Whether two variants of a job have learned the same weights, to the bit.

python benchmark/published/studies/same_bits.py RUNS VARIANT VARIANT
"""

import sys
from pathlib import Path

import torch

runs, first, second = sys.argv[1:]
pairs = 0
for path in sorted(Path(runs).glob(f"*/*/{first}-s*/run/checkpoint.pt")):
    other = Path(str(path).replace(f"/{first}-s", f"/{second}-s"))
    one, two = (torch.load(x, weights_only=True)["agent"] for x in (path, other))
    same = all(torch.equal(one[name], two[name]) for name in one)
    print(f"{path.parts[-5]} {path.parts[-3]}: {'same' if same else 'OTHER'} weights")
    pairs += same
print(f"{pairs} pairs have the same weights")
