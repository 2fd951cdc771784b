#!/usr/bin/env bash
# Everything that needs a CUDA device, in the order of worth. A step takes at most 90 seconds (a
# training as long as it says) and writes its table at once into benchmark/published/results/gpu;
# what is there is not done again, and trainings go on where they were ended. `gpu.sh NAME...` does
# these steps alone. RUNS=folder may be set, and LEANRL=folder with LeanRL's scripts. Exit code 1 if
# a step failed or was too long.
set -uo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TQDM_DISABLE=1
runs=${RUNS:-runs/gpu}
leanrl=${LEANRL:-.leanrl}
tables=benchmark/published/results/gpu
limit=${SECONDS_A_STEP:-90}
wanted=("$@")
failed=0
mkdir -p "$tables" "$runs"
python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || echo "gpu.sh: no CUDA device"

# todo NAME: whether a step is to be done, and not done yet
todo() {
  [ -e "$tables/$1.txt" ] && return 1
  [ ${#wanted[@]} -eq 0 ] || [[ " ${wanted[*]} " == *" $1 "* ]]
}

# step NAME COMMAND...: its output becomes NAME.txt once it has ended well, without episodes, what
# the engine loads, and warnings; if `rowed`, the command has its own table, and knows what is done
noise="global_step=|^Module |Warning|warnings.warn|WARN|INFO|^W[0-9]|^ *$|^  "
step() {
  local name=$1 start=$SECONDS status
  shift
  todo "$name" || return
  timeout --kill-after 10 "$limit" "$@" >"$runs/$name.log" 2>&1
  status=$?
  echo "gpu.sh: $name: $((SECONDS - start)) s, exit code $status"
  case $status in
    0) [ -n "${rowed:-}" ] || grep -avE "$noise" "$runs/$name.log" >"$tables/$name.txt" ;;
    *) tail -n 15 "$runs/$name.log"; failed=1 ;;
  esac
}

# rows TABLE NAME SCRIPT FLAGS...: speed and parts of an iteration for each FLAGS, as rows of a table
rows() {
  rowed=1 step "$2" python -m benchmark.published.gpu_profile "$tables/$1.csv" 3 "${@:3}"
}

# train NAME SECONDS COMMAND...: so many seconds of a training, then ended as one ends it by hand
train() {
  local name=$1 seconds=$2
  shift 2
  local limit=$((seconds + 30))
  step "train-$name" bash -c '
    folder=$1 seconds=$2
    shift 2
    more=(--run-dir "$folder")
    [ -e "$folder/checkpoint.pt" ] && more=(--resume "$folder")
    timeout --signal TERM "$seconds" "$@" "${more[@]}"
    python -m benchmark.published.gpu_seconds "$folder"
  ' - "$runs/$name" "$seconds" "$@"
}

step device nvidia-smi

# (a) Atari: where the time goes. First what the games alone take
graphs="--compile --cudagraphs"
breakout="--env-id Breakout-v5 --num-envs"
[ -e "$tables/games.csv" ] || rowed=1 step games python -m benchmark.published.gpu_games "$tables/games.csv"
rows atari atari-8 ppo_atari_multigpu \
  "$breakout 8" "$breakout 8 --compile" "$breakout 8 $graphs" "$breakout 8 $graphs --bf16"
rows atari atari-128 ppo_atari_multigpu "$breakout 128" "$breakout 128 $graphs" "$breakout 128 $graphs --bf16"
rows atari atari-32 ppo_atari_multigpu "$breakout 32" "$breakout 32 $graphs" "$breakout 32 $graphs --bf16"

# (b) LeanRL's scripts, if benchmark/published/leanrl/get.sh has brought them
if [ -e "$leanrl/ppo_atari_envpool_torchcompile.py" ]; then
  shim=(env "PYTHONPATH=$PWD/benchmark/published/leanrl:${PYTHONPATH:-}" "SPEED_SECONDS=${SPEED_SECONDS:-8}")
  for envs in 8 128; do
    step leanrl-atari-$envs "${shim[@]}" python "$leanrl/ppo_atari_envpool_torchcompile.py" --num-envs $envs $graphs
  done
  step leanrl-continuous "${shim[@]}" python "$leanrl/ppo_continuous_action_torchcompile.py" $graphs
fi

# (d) C MuJoCo, one environment and 64
cheetah="--env-id HalfCheetah-v4 --compile-from 0"
many="$cheetah --num-envs 64 --num-steps 64 --num-minibatches 4 --update-epochs 2 --learning-rate 2.95e-3"
rows continuous continuous-64 ppo_continuous_action "$many --cudagraphs" "$many --no-cuda"
rows continuous continuous-1 ppo_continuous_action "$cheetah --cudagraphs" "$cheetah --no-cuda" "$cheetah"

# (c) MuJoCo Warp. The engine first compiles its kernels for each task, which takes a minute, and
# keeps them: all tasks side by side
if todo warp-speed || todo train-HalfCheetah-v4; then
  for env_id in HalfCheetah-v4 Walker2d-v4 Ant-v4 Hopper-v4; do
    timeout 150 python -m benchmark.published.gpu_warp "$runs/kernels.csv" $env_id 256 &>"$runs/kernels-$env_id.log" &
  done
  wait
fi
rowed=1 step warp-speed python -m benchmark.published.gpu_warp "$tables/warp.csv" HalfCheetah-v4 4096 1024 16384
[ -e "$tables/warp-profile-HalfCheetah.txt" ] || rowed=1 step warp-profile python -m benchmark.published.gpu_warp "$tables/warp-profile-HalfCheetah.txt" HalfCheetah-v4 4096 --profile
rowed=1 step warp-speed-ant python -m benchmark.published.gpu_warp "$tables/warp.csv" Ant-v4 4096 1024 16384

# (e) the tests that need one
step tests python -m pytest -m gpu -n 4 -p no:cacheprovider --disable-warnings \
  tests/test_{atari,clipped_script,kl_adaptive_script,ppo_cma}.py
step tests-warp python -m pytest -m gpu -n 4 -p no:cacheprovider --disable-warnings tests/test_warp.py

# (f) trainings
warp="python ppo_continuous_action_warp.py --env-id"
train HalfCheetah-v4 65 $warp HalfCheetah-v4
for env_id in Walker2d-v4 Ant-v4 Hopper-v4; do
  train $env_id 85 $warp $env_id
done
train Pong-v5 240 python ppo_atari_multigpu.py --env-id Pong-v5 --bf16 --num-envs 32 \
  --num-minibatches 8 --update-epochs 3 --clip-coef 0.2 --learning-rate 5e-4 --total-timesteps 4000000 $graphs

# (g) the other scripts for pixels
rows pixels lstm ppo_atari_lstm "--env-id Breakout-v5" "--env-id Breakout-v5 --compile"
rows pixels procgen ppo_procgen "" "--compile"
exit $failed
