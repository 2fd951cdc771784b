#!/usr/bin/env bash
# Every published number of ppo_atari_multigpu.py: runs (given again, it goes on), tables, speed.
# RUNS=folder and PROCESSES=number of a run may be set; the latter does not change what is learned. The
# committed run of Pong took two processes; that of Breakout one, with --num-threads 1 --env-threads 1.
. "$(dirname "$0")/bench.sh"
script="torchrun --standalone --nproc-per-node=${PROCESSES:-2} ppo_atari_multigpu.py --bf16"
more="--num-envs 32 --num-minibatches 8 --update-epochs 3 --clip-coef 0.2 --learning-rate 5e-4"
bench --workers 1 --num-seeds 1 --env-ids Pong-v5 Breakout-v5 --command "$script $more --total-timesteps 4000000"
python -m benchmark.published
