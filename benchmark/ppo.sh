#!/usr/bin/env bash
# Every published number of ppo.py and ppo_continuous_action.py: runs (a cut-off one is resumed) and
# their tables. RUNS=folder and WORKERS=processes may be set; on two cores it takes about two
# hours. Of CleanRL's settings on Humanoid-v4 one seed is published.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUNS=${RUNS:-runs/published} OMP_NUM_THREADS=1
mkdir -p "$RUNS"

# CleanRL's own settings, where this project's defaults differ
cleanrl_discrete="--learning-rate 2.5e-4 --update-epochs 4"
cleanrl_continuous="--log-std-init 0 --no-scale-actions --clip-vloss"

commands() { # variant, script, then its arguments, the environment first and the seed last
  for seed in 1 2 3 4 5; do
    for env in HalfCheetah Walker2d Hopper InvertedPendulum Humanoid; do
      echo "default ppo_continuous_action.py --env-id $env-v4 --compile --seed $seed"
    done
    echo "default ppo_continuous_action.py --env-id Pendulum-v1 --total-timesteps 200000 --seed $seed"
    echo "default ppo.py --env-id CartPole-v1 --total-timesteps 100000 --seed $seed"
    echo "default ppo.py --env-id Acrobot-v1 --seed $seed"
  done
  for seed in 1 2 3 4 5; do
    echo "cleanrl ppo.py --env-id CartPole-v1 --total-timesteps 100000 $cleanrl_discrete --seed $seed"
    echo "cleanrl ppo.py --env-id Acrobot-v1 $cleanrl_discrete --seed $seed"
  done
  for env in HalfCheetah Walker2d Hopper InvertedPendulum Humanoid; do
    for seed in 1 2 3; do
      echo "cleanrl ppo_continuous_action.py --env-id $env-v4 --compile $cleanrl_continuous --seed $seed"
    done
  done
}

one() {
  read -r variant script rest <<<"$1"
  read -ra flags <<<"$rest"
  folder="$RUNS/$variant/${flags[1]}-s${flags[-1]}"
  if grep -qs '"status": "finished"' "$folder/run.json"; then
    return
  elif [ -f "$folder/checkpoint.pt" ]; then
    python "$script" --resume "$folder" >>"$folder.log" 2>&1
  else
    rm -rf "$folder"
    mkdir -p "$RUNS/$variant"
    python "$script" "${flags[@]}" --run-dir "$folder" >"$folder.log" 2>&1
  fi
}
export -f one

commands | tr '\n' '\0' | xargs -0 -P "${WORKERS:-2}" -I{} bash -c 'one "{}"'
for variant in default cleanrl; do
  python benchmark/curves.py collect "$RUNS/$variant"/*/ --variant "$variant"
done
python benchmark/curves.py table
