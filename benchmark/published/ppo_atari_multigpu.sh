#!/usr/bin/env bash
# Every published number of ppo_atari_multigpu.py: runs (given again, it goes on), tables, speed.
# RUNS=folder and PROCESSES=number of a run may be set; the latter does not change what is learned. The
# committed run of Pong took two processes; that of Breakout one, with --num-threads 1 --env-threads 1.
. "$(dirname "$0")/bench.sh"
by() { bench --workers 1 --num-seeds 1 --env-ids "${@:3}" --command "torchrun --standalone --nproc-per-node=$1 ppo_atari_multigpu.py --bf16 $2"; }
more="--num-envs 32 --num-minibatches 8 --update-epochs 3 --clip-coef 0.2 --learning-rate 5e-4"
by "${PROCESSES:-2}" "$more --total-timesteps 4000000" Pong-v5 Breakout-v5
short="--num-threads 1 --env-threads 1 --total-timesteps 2000000" # of the defaults, which are CleanRL's
for n in 1 2; do by $n "$short" Pong-v5 --variant 2M-by-$n; done
python -m benchmark.published
