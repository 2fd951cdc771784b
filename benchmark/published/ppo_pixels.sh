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

# levels, at the settings of ppo_procgen.py of d814e18, whose run is in results, too. The harness keeps greedy
# returns on all levels; those on the 200: --evaluate runs/published/.../run --eval-env-kwargs {}
levels="--env-kwargs '{\"num_levels\":200}' --eval-env-kwargs '{\"num_levels\":0}' --eval-interval 20 --eval-episodes 100"
levels="$levels --env-workers 1 --encoder impala --num-envs 64 --num-steps 64 --gamma 0.999 --num-minibatches 8 --update-epochs 3"
pixels --num-seeds 1 --eval-episodes 100 --env-ids envpool:StarpilotEasy-v0 --command \
  "$script $levels --clip-vloss --no-anneal-lr --total-timesteps 1000000"
python -m benchmark.published
