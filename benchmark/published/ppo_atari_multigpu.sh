#!/usr/bin/env bash
# Every published number of ppo_atari_multigpu.py: runs (given again, it goes on), tables, speed.
# RUNS=folder and PROCESSES=number may be set; the latter does not change what is learned (Pong took two, Breakout one).
. "$(dirname "$0")/bench.sh"
by() { bench --workers 1 --num-seeds 1 --env-ids "${@:3}" --command "torchrun --standalone --nproc-per-node=$1 ppo_atari_multigpu.py $2"; }
more="--bf16 --num-envs 32 --num-minibatches 8 --update-epochs 3 --clip-coef 0.2 --learning-rate 5e-4"
by "${PROCESSES:-2}" "$more --total-timesteps 4000000" Pong-v5 Breakout-v5
cores="--num-threads 1 --env-threads 1" # and the defaults, which are CleanRL's
for n in 1 2; do by $n "--bf16 $cores --total-timesteps 2000000" Pong-v5 --variant 2M-by-$n; done
by 2 "$cores" Pong-v5 Breakout-v5 --variant 10M; by 2 "--bf16 $cores" BeamRider-v5 --variant 10M # committed: see docs/measurements.md
python -m benchmark.published
