#!/usr/bin/env bash
# Noise on the means in learning (Rahman & Xue 2023), after git apply tests/edits/rpo.patch: 1M steps, 3 seeds,
# on four MuJoCo and four dm_control tasks; runs (given again, it goes on), tables. RUNS=folder, WORKERS=processes
# and ALPHAS="0.5 0.1 ..." may be set. ppo.sh runs alpha 0.
. "$(dirname "$0")/bench.sh"
for alpha in ${ALPHAS:-0.5 0.1 0.01}; do
  bench --results runs/superseded --num-seeds 3 --variant "rpo-$alpha" --command "python ppo_continuous_action.py --rpo-alpha $alpha --target-kl None --ent-coef 0" \
    --env-ids {HalfCheetah,Hopper,Walker2d,Ant}-v4 dm_control/{walker-walk,cheetah-run,hopper-hop,reacher-easy}-v0
done
python -m benchmark.published
