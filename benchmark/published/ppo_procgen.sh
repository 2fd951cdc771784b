#!/usr/bin/env bash
# Every published number of ppo_procgen.py: runs (given again, it goes on), tables. RUNS=folder may be set.
# The harness keeps the final policy's returns on all levels; those on the training levels are printed by
# python ppo_procgen.py --evaluate runs/published/.../run
. "$(dirname "$0")/bench.sh"
script="python ppo_procgen.py --num-threads 1 --env-threads 1 --num-levels 200"
bench --workers 1 --num-seeds 1 --eval-episodes 100 --env-ids StarpilotEasy-v0 \
  --command "$script --total-timesteps 1000000 --num-steps 64"
python -m benchmark.published
