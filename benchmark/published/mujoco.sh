#!/usr/bin/env bash
# KL-adaptive and CMA, and mode ppo of ppo_cma.py, on eight MuJoCo environments, 1M steps (given again, it goes on);
# the clipped one: ppo.sh. RUNS=folder, WORKERS=processes and SEEDS="1 2 ..." may be set; five seeds take about two hours.
. "$(dirname "$0")/bench.sh"
long=(HalfCheetah-v4 Swimmer-v4)                                       # each episode has 1000 steps
falling=(Hopper-v4 Walker2d-v4 Ant-v4 InvertedPendulum-v4 InvertedDoublePendulum-v4)
all=("${long[@]}" Reacher-v4 "${falling[@]}")
kl="python ppo_kl_adaptive.py --total-timesteps 1000000 --episodes-per-batch"
cma="python ppo_cma.py --no-anneal-lr --total-timesteps 1000000"
ppo="--mode ppo --iter-steps 2000 --minibatch-size 128 --clip-coef 0.005"

for seed in ${SEEDS:-1 2 3 4 5}; do
  # episodes a batch as in the original's list
  seed --variant 1M --env-ids "${long[@]}" --command "$kl 5"
  seed --variant 1M --env-ids Reacher-v4 --command "$kl 50"
  seed --variant 1M --env-ids "${falling[@]}" --command "$kl 20"
  seed --variant 1M --env-ids "${all[@]}" --command "$cma --iter-steps 8000"
  if ((seed <= 3)); then seed --variant 1M-ppo --env-ids "${all[@]}" --command "$cma $ppo"; fi
done
