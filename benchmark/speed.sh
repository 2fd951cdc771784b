#!/usr/bin/env bash
# Every published speed, in tables in benchmark/results/speed. On a machine that does nothing else;
# a quarter of an hour.
set -euo pipefail
cd "$(dirname "$0")/.."

speed() { python -m benchmark speed --rounds 3 "$@"; }

# CleanRL's MuJoCo setting, compiled and eager
halfcheetah="python ppo_continuous_action.py --env-id HalfCheetah-v4"
halfcheetah+=" --log-std-init 0 --no-scale-actions --clip-vloss --no-cuda"
speed --steps 40960 --command "compiled=$halfcheetah --compile" --command "eager=$halfcheetah"

kl="python ppo_kl_adaptive.py --env-id HalfCheetah-v4 --episodes-per-batch 5 --no-cuda"
speed --steps 40000 --warmup-steps 10000 --command "1_environment=$kl" \
  --command "5_environments=$kl --num-envs 5"

cma="python ppo_cma.py --env-id Humanoid-v4 --no-cuda"
speed --no-sb3 --steps 64000 --warmup-steps 32000 --command "$cma"
