#!/usr/bin/env bash
# Every published number of ppo_atari_multigpu.py: runs (a cut-off one is resumed), tables, speed.
# RUNS=folder and PROCESSES=number may be set. On a GPU, the same lines without --bf16 or with it.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUNS=${RUNS:-runs/published} OMP_NUM_THREADS=1

one() { # variant, environment, seed, further arguments
  folder="$RUNS/$1/$2-s$3"
  mkdir -p "$RUNS/$1"
  launch=(torchrun --standalone "--nproc-per-node=${PROCESSES:-2}" ppo_atari_multigpu.py)
  if grep -qs '"status": "finished"' "$folder/run.json"; then
    return
  elif [ -f "$folder/checkpoint.pt" ]; then
    "${launch[@]}" --resume "$folder" >>"$folder.log" 2>&1
  else
    rm -rf "$folder"
    "${launch[@]}" --env-id "$2" --seed "$3" --run-dir "$folder" "${@:4}" >"$folder.log" 2>&1
  fi
}

one default Pong-v5 1 --bf16 --num-minibatches 16 --update-epochs 3 --learning-rate 5e-4 --total-timesteps 1500000
python benchmark/curves.py collect "$RUNS"/default/Pong-v5-*/ --variant default
python benchmark/speed_atari.py --env-id Pong-v5 # on a machine that does nothing else
