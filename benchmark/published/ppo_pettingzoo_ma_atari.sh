#!/usr/bin/env bash
# Every published number of ppo_pettingzoo_ma_atari.py: runs (given again, it goes on), tables. RUNS=folder may be set.
# The harness keeps the final policy's returns against a random player; against another run:
# python ppo_pettingzoo_ma_atari.py --evaluate runs/published/.../run --against RUN2
. "$(dirname "$0")/bench.sh"
script="python ppo_pettingzoo_ma_atari.py --num-threads 1"

# a tenth of the default steps: a faster rate and wider clipping, as in ppo_atari_multigpu.sh
more="--num-envs 32 --num-minibatches 8 --update-epochs 3 --clip-coef 0.2 --learning-rate 5e-4 --eval-interval 50"
bench --workers 1 --num-seeds 1 --eval-episodes 100 --env-ids pong_v3 \
  --command "$script $more --total-timesteps 2000000"
python -m benchmark.published
