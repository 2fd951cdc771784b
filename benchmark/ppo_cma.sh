#!/usr/bin/env bash
# Every published number of ppo_cma.py: runs (a cut-off one is resumed), tables, pictures.
# RUNS=folder and WORKERS=processes may be set; on two cores it takes about five hours.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUNS=${RUNS:-runs/published} OMP_NUM_THREADS=1
mkdir -p "$RUNS"

commands() {
  for seed in 1 2; do
    echo "--env-id Humanoid-v4 --seed $seed"
  done
  for seed in 1 2 3 4 5; do
    echo "--env-id Hopper-v4 --iter-steps 8000 --total-timesteps 400000 --seed $seed"
    echo "--env-id MountainCarContinuous-v0 --iter-steps 4000 --minibatch-size 2048" \
      "--action-repeat 4 --total-timesteps 50000 --seed $seed"
  done
}

one() {
  read -ra flags <<<"$1"
  folder="$RUNS/${flags[1]}-s${flags[-1]}"
  if [ -f "$folder/checkpoint.pt" ]; then
    python ppo_cma.py --resume "$folder"
  else
    rm -rf "$folder"
    python ppo_cma.py "${flags[@]}" --run-dir "$folder"
  fi
}
export -f one

commands | tr '\n' '\0' | xargs -0 -P "${WORKERS:-2}" -I{} bash -c 'one "{}"'
python benchmark/curves.py collect "$RUNS"/*
python benchmark/curves.py report
python benchmark/didactic.py
