#!/usr/bin/env bash
# Every published number of ppo_atari_lstm.py: runs (given again, it goes on), tables. RUNS=folder may be set.
. "$(dirname "$0")/bench.sh"
script="python ppo_atari_lstm.py --num-threads 1 --env-threads 1"

# as ppo_atari_multigpu.sh, but for memory in place of stacked frames
more="--num-envs 32 --num-minibatches 8 --update-epochs 3 --clip-coef 0.2 --learning-rate 5e-4"
bench --workers 1 --num-seeds 1 --env-ids Pong-v5 --command "$script $more --total-timesteps 4000000"
python -m benchmark.published
