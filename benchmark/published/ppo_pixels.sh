#!/usr/bin/env bash
# Every published number of ppo_pixels.py: runs (given again, it goes on), tables. RUNS=folder may be set.
# pip install minigrid vizdoom "gymnasium[box2d]" envpool. The harness keeps the final policy's greedy returns;
# those of drawn actions are printed by python ppo_pixels.py --evaluate runs/published/.../run
. "$(dirname "$0")/bench.sh"
script="python ppo_pixels.py --num-threads 1"
grid="$script --num-envs 16 --num-minibatches 8 --learning-rate 1e-3"
pixels() { bench --workers 1 --num-seeds 3 "$@"; }

pixels --env-ids minigrid:MiniGrid-DoorKey-5x5-v0 --command "$grid --total-timesteps 100000"
pixels --env-ids benchmark.published.gates:Gates-v0 --command \
  "$script --num-envs 16 --num-steps 64 --learning-rate 1e-3 --log-std-init -0.5 --total-timesteps 50000"
pixels --env-ids vizdoom.gymnasium_wrapper:VizdoomBasic-v1 --command \
  "$script --num-steps 64 --resize 60x80 --action-repeat 4 --total-timesteps 30000"
pixels --env-ids envpool:MiniGrid-DoorKey-8x8-v0 --command "$grid --total-timesteps 400000"
pixels --num-seeds 1 --env-ids envpool:CarRacing-v3 --variant envpool --command \
  "$script --grayscale --resize 64x64 --frame-stack 2 --action-repeat 4 --learning-rate 3e-4 --total-timesteps 250000"
python -m benchmark.published
