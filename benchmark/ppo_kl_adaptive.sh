#!/usr/bin/env bash
# Every published number of ppo_kl_adaptive.py: runs (a cut-off one is resumed) and their tables.
# RUNS=folder and WORKERS=processes may be set; on two cores it takes about an hour.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUNS=${RUNS:-runs/published} OMP_NUM_THREADS=1
mkdir -p "$RUNS"

# Episodes per iteration as in the original's list, 5 where an episode has always 1000 steps.
commands() { # variant, then the script's arguments, the environment first and the seed last
  for seed in 1 2 3 4 5; do
    episodes=$((seed <= 3 ? 3000 : 1000))
    echo "default --env-id HalfCheetah-v4 --episodes-per-batch 5 --num-episodes $episodes --seed $seed"
    echo "default --env-id Swimmer-v4 --episodes-per-batch 5 --num-episodes 1000 --seed $seed"
    echo "default --env-id InvertedPendulum-v4 --num-episodes 1000 --seed $seed"
    echo "default --env-id CartPole-v1 --total-timesteps 200000 --seed $seed"
  done
  for seed in 1 2 3; do
    echo "default --env-id Hopper-v4 --num-episodes 3000 --seed $seed"
  done
}

one() {
  read -r variant rest <<<"$1"
  read -ra flags <<<"$rest"
  folder="$RUNS/$variant/${flags[1]}-s${flags[-1]}"
  if grep -qs '"status": "finished"' "$folder/run.json"; then
    return
  elif [ -f "$folder/checkpoint.pt" ]; then
    python ppo_kl_adaptive.py --resume "$folder" >>"$folder.log" 2>&1
  else
    rm -rf "$folder"
    mkdir -p "$RUNS/$variant"
    python ppo_kl_adaptive.py "${flags[@]}" --run-dir "$folder" >"$folder.log" 2>&1
  fi
}
export -f one

commands | tr '\n' '\0' | xargs -0 -P "${WORKERS:-2}" -I{} bash -c 'one "{}"'
python benchmark/curves.py collect "$RUNS"/default/*/ --variant default
python benchmark/curves.py episodes
# on a machine that does nothing else, about four minutes
python benchmark/speed_ppo.py --script ppo_kl_adaptive
