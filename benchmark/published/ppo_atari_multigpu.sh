#!/usr/bin/env bash
# Every published number of ppo_atari_multigpu.py but its speed: runs (given again, it goes on) and tables.
. "$(dirname "$0")/bench.sh"
by() { bench --workers 1 --num-seeds 1 --env-ids "${@:3}" --command "torchrun --standalone --nproc-per-node=$1 ppo_atari_multigpu.py $2"; }
more="--bf16 --num-envs 32 --num-minibatches 8 --update-epochs 3 --clip-coef 0.2 --learning-rate 5e-4"
by 2 "$more --total-timesteps 4000000" Pong-v5 Breakout-v5 # Breakout's was made by 1: the same is learned but for rounding
cores="--num-threads 1 --env-threads 1" # and the defaults, which are CleanRL's
for n in 1 2; do by $n "--bf16 $cores --total-timesteps 2000000" Pong-v5 --variant 2M-by-$n; done
by 2 "$cores" Pong-v5 Breakout-v5 --variant 10M # committed: Pong's first 4.3M; 1.5M and 1.4M by an H100
by 2 "--bf16 $cores" BeamRider-v5 --variant 10M
python -m benchmark.published
