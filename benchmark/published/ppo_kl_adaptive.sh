#!/usr/bin/env bash
# Every published number of ppo_kl_adaptive.py: runs (given again, it goes on), their tables, speed.
# RUNS=folder and WORKERS=processes may be set; on two cores it takes about seven hours.
. "$(dirname "$0")/bench.sh"
# Episodes per iteration as in the original's list, 5 where an episode has always 1000 steps.
five="python ppo_kl_adaptive.py --episodes-per-batch 5"
twenty="python ppo_kl_adaptive.py"
bench --env-ids HalfCheetah-v4 --command "$five --num-episodes 3000"
bench --env-ids Swimmer-v4 --command "$five --num-episodes 2500"
bench --env-ids InvertedPendulum-v4 --command "$twenty --num-episodes 1000"
bench --env-ids Hopper-v4 --command "$twenty --num-episodes 3000" --num-seeds 3
bench --env-ids Walker2d-v4 --command "$twenty --total-timesteps 4000000" --num-seeds 3
bench --env-ids Humanoid-v4 --command "$twenty --total-timesteps 1200000" --num-seeds 1
bench --env-ids HumanoidStandup-v4 --command "$five --total-timesteps 1200000" --num-seeds 1
bench --env-ids CartPole-v1 --command "$twenty --total-timesteps 200000"

# Four claims of the post: each part of the algorithm is taken away in turn
steps="--total-timesteps 200000"
for seed in ${SEEDS:-1 2 3}; do
  for env_id in Hopper-v4 HalfCheetah-v4; do
    batch=""
    [[ $env_id == HalfCheetah-v4 ]] && batch="--episodes-per-batch 5"
    seed --env-ids $env_id --variant 200k --command "python ppo_kl_adaptive.py $batch $steps"
    seed --env-ids $env_id --variant 200k-lam-1 --command "python ppo_kl_adaptive.py $batch $steps --lam 1"
    for change in coady-{no-hinge,no-early-stop,fixed-rate}; do
      seed --env-ids $env_id --variant $change \
        --command "python $(benchmark/published/changed.sh $change) $batch $steps"
    done
  done
done
python -m benchmark.published
