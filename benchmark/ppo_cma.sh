#!/usr/bin/env bash
# Every published number of ppo_cma.py: runs (a cut-off one is resumed), tables, pictures.
# RUNS=folder and WORKERS=processes may be set; on two cores it takes about four hours. The published
# Humanoid-v4 tables are of these commands stopped before their 10M steps; results/ppo_cma.md says where.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUNS=${RUNS:-runs/published} OMP_NUM_THREADS=1
mkdir -p "$RUNS"

commands() { # variant, then the script's arguments, the environment first and the seed last
  for seed in 1 2 3 4; do
    echo "default --env-id Humanoid-v4 --seed $seed"
  done
  for seed in 1 2 3 4 5; do
    echo "default --env-id Hopper-v4 --iter-steps 8000 --total-timesteps 400000 --seed $seed"
    car="--env-id MountainCarContinuous-v0 --iter-steps 4000 --minibatch-size 2048"
    echo "default $car --action-repeat 4 --total-timesteps 50000 --seed $seed"
    echo "repeat2 $car --action-repeat 2 --total-timesteps 50000 --seed $seed"
  done
}

one() {
  read -r variant rest <<<"$1"
  read -ra flags <<<"$rest"
  folder="$RUNS/$variant/${flags[1]}-s${flags[-1]}"
  if grep -qs '"status": "finished"' "$folder/run.json"; then
    return
  elif [ -f "$folder/checkpoint.pt" ]; then
    python ppo_cma.py --resume "$folder"
  else
    rm -rf "$folder"
    python ppo_cma.py "${flags[@]}" --run-dir "$folder"
  fi
}
export -f one

commands | tr '\n' '\0' | xargs -0 -P "${WORKERS:-2}" -I{} bash -c 'one "{}"'
for variant in default repeat2; do
  python benchmark/curves.py collect "$RUNS/$variant"/* --variant "$variant"
done
python benchmark/curves.py report
python benchmark/didactic.py
python benchmark/speed_ppo_cma.py --num-envs 1
python benchmark/speed_ppo_cma.py --num-envs 4
