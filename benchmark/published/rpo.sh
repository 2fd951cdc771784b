#!/usr/bin/env bash
# Noise on the means in learning (Rahman & Xue 2023), ppo_continuous_action.py --rpo-alpha: 1M steps, 3 seeds,
# on four MuJoCo and four dm_control tasks; runs (given again, it goes on), tables. RUNS=folder, WORKERS=processes
# and ALPHAS="0.5 0.1 ..." may be set. On MuJoCo alpha 0 is in mujoco.sh.
. "$(dirname "$0")/bench.sh"
mujoco=(HalfCheetah-v4 Hopper-v4 Walker2d-v4 Ant-v4)
control=(dm_control/walker-walk-v0 dm_control/cheetah-run-v0 dm_control/hopper-hop-v0 dm_control/reacher-easy-v0)

for alpha in ${ALPHAS:-0.5 0 0.1 0.01}; do
  envs=("${control[@]}")
  if [ "$alpha" != 0 ]; then envs=("${mujoco[@]}" "${control[@]}"); fi
  bench --num-seeds 3 --variant "rpo-$alpha" --env-ids "${envs[@]}" \
    --command "python ppo_continuous_action.py --rpo-alpha $alpha"
done
python -m benchmark.published
