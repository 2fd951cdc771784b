#!/usr/bin/env bash
# Every published number of ppo_atari_multigpu.py: runs (given again, it goes on), tables, speed.
# RUNS=folder and PROCESSES=number of a run may be set; the latter does not change what is learned. The
# committed run of Pong took two processes; that of Breakout one, with --num-threads 1 --env-threads 1.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

bench() {
  python -m benchmark run --runs-dir "${RUNS:-runs/published}" --results benchmark/results \
    --num-seeds 1 "$@"
}
script="torchrun --standalone --nproc-per-node=${PROCESSES:-2} ppo_atari_multigpu.py --bf16"

more="--num-envs 32 --num-minibatches 8 --update-epochs 3 --clip-coef 0.2 --learning-rate 5e-4"

bench --env-ids Pong-v5 Breakout-v5 --command "$script $more --total-timesteps 4000000"

python -m benchmark.curves atari
python benchmark/speed_atari.py --env-id Pong-v5 # on a machine that does nothing else
