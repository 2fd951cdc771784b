#!/usr/bin/env bash
# What each part of PPO-CMA is worth: 1M steps with one part changed, beside the variant 1M of mujoco.sh;
# a falling learning rate, scaled rewards, centred advantages and more critic steps are modernisations.
# RUNS=folder, WORKERS=processes and SEEDS="1 2 ..." may be set.
. "$(dirname "$0")/bench.sh"
steps="--total-timesteps 1000000 --no-anneal-lr" # annealing became the default after these runs
cma="python ppo_cma.py $steps --iter-steps"
one="--env-ids Walker2d-v4" two="--env-ids Hopper-v4 Walker2d-v4"

for seed in ${SEEDS:-1 2 3}; do
  seed $one --variant 1M-no-mirror --command "$cma 8000 --mode ppo-cma"
  seed $one --variant 1M-H1 --command "$cma 8000 --history-buffer-size 1"
  seed $one --variant 1M-N32k --command "$cma 32000"
  for change in cma-{product-kernel,mean-first,scaled-rewards,centred-advantages,critic-steps}; do
    seed $one --variant $change --command "python $(benchmark/published/changed.sh $change) $steps --iter-steps 8000"
  done
  # what came nearest to better, and what Humanoid-v4 gains from
  seed $two --variant 1M-H5 --command "$cma 8000 --history-buffer-size 5"
  seed $two --variant 1M-anneal-lr --command "$cma 8000 --anneal-lr"
  ends=cma-published-ends
  seed $two --variant $ends --command "python $(benchmark/published/changed.sh $ends) $steps --iter-steps 8000"
done
