#!/usr/bin/env bash
# Everything that needs a CUDA device, in the order of worth. A step takes at most 90 seconds (a
# training as long as it says) and writes its table at once into benchmark/published/results/gpu;
# what is there is not done again, and trainings go on where they were ended. `gpu.sh NAME...` does
# these steps alone. RUNS=folder may be set. With TRY=1 all is tried at tiny sizes, with a GPU or
# without, on Pendulum in place of MuJoCo's robots, and leaves its tables in the folder of the runs.
# Exit code 1 if a step failed or was too long.
set -uo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TQDM_DISABLE=1
runs=${RUNS:-runs/gpu}
tables=benchmark/published/results/gpu
limit=${SECONDS_A_STEP:-90}
seconds=3 # of a row of gpu_profile, after its warm start
graphs="--compile --cudagraphs"
compile=" --compile"
always="--compile-from 0"
sizes=(8 32 128) # games
worlds=(4096 16384 1024)
robots=(HalfCheetah-v4 Ant-v4 Walker2d-v4 Hopper-v4)
workers=8 # of pytest
tiny="" # more flags of all games
few=""  # and of all robots
if [ -n "${TRY:-}" ]; then
  tables=$runs/tables
  limit=900
  seconds=0.1
  graphs=""
  compile=""
  always="--no-compile"
  sizes=(2 3 4)
  worlds=(4 2)
  robots=(Pendulum-v1)
  workers=0
  tiny=" --num-steps 8 --num-minibatches 2 --update-epochs 1"
  few=" --num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1"
fi
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
# the engine loads, and warnings; if `rowed`, the command has its own table, and knows what is done.
# When it was, and for how long, is a row of minutes.csv
noise="global_step=|^Module |Warning|warnings.warn|WARN|INFO|^W[0-9]|^ *$|^  "
step() {
  local name=$1 start=$SECONDS status
  shift
  todo "$name" || return
  timeout --kill-after 10 "$limit" "$@" >"$runs/$name.log" 2>&1
  status=$?
  echo "gpu.sh: $name: $((SECONDS - start)) s, exit code $status"
  echo "$(date -u +%FT%TZ),$name,$((SECONDS - start)),$status" >>"$tables/minutes.csv"
  case $status in
    0) [ -n "${rowed:-}" ] || grep -avE "$noise" "$runs/$name.log" >"$tables/$name.txt" ;;
    *) tail -n 15 "$runs/$name.log"; failed=1 ;;
  esac
}

# rows TABLE NAME SCRIPT FLAGS...: speed and parts of an iteration for each FLAGS, as rows of a table
rows() {
  rowed=1 step "$2" python -m benchmark.published.studies.gpu_profile "$tables/$1.csv" $seconds "${@:3}"
}

# train NAME SECONDS COMMAND...: so many seconds of a training, then ended as one ends it by hand
train() {
  local name=$1 seconds=$2
  shift 2
  [ -n "${TRY:-}" ] && set -- "$@" --total-timesteps 600 && seconds=600
  local limit=$((seconds + 30))
  step "train-$name" bash -c '
    folder=$1 seconds=$2
    shift 2
    more=(--run-dir "$folder")
    [ -e "$folder/checkpoint.pt" ] && more=(--resume "$folder")
    timeout --signal TERM "$seconds" "$@" "${more[@]}"
    python -m benchmark.published.studies.gpu_seconds "$folder"
  ' - "$runs/$name" "$seconds" "$@"
}

# warp TABLE NAME ENV_ID WORLDS... FLAGS: speeds by MuJoCo Warp
warp() {
  rowed=1 step "$2" python -m benchmark.published.studies.gpu_warp "$tables/$1.csv" "${@:3}"
}

step device nvidia-smi

# (a) Atari, since acting is one CUDA graph
breakout="--env-id Breakout-v5$tiny --num-envs"
for games in "${sizes[@]}"; do
  rows acting "acting-$games" ppo_atari_multigpu "$breakout $games $graphs --bf16" "$breakout $games $graphs"
done
MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=1000000000 \
  rows acting-kept acting-kept ppo_atari_multigpu "$breakout ${sizes[2]} $graphs --bf16"
train Breakout-by-1 40 python ppo_atari_multigpu.py $breakout "${sizes[2]}" $graphs --bf16
train Breakout-by-2 40 python -m torch.distributed.run --standalone --nproc-per-node=2 \
  ppo_atari_multigpu.py --device-ids 0 0 $breakout "${sizes[2]}" $graphs --bf16

# (b) the tests that need one
step tests-trains python -m pytest -m gpu -n $workers -p no:cacheprovider --disable-warnings \
  tests/every/test_gpu.py
step tests-graphs python -m pytest -m gpu -n $workers -p no:cacheprovider --disable-warnings \
  tests/ppo_* -k "not warp_trains"

# (c) MuJoCo Warp. The engine first compiles its kernels for each task, which takes a minute, and
# keeps them: all tasks side by side
first=${robots[0]}
if todo warp-tf32 || todo "train-$first-tf32" || todo "train-${robots[-1]}"; then
  for env_id in "${robots[@]}"; do
    timeout 150 python -m benchmark.published.studies.gpu_warp "$runs/kernels.csv" $env_id 256 &>"$runs/kernels-$env_id.log" &
  done
  wait
fi
warp warp-tf32 warp-tf32 "$first" "${worlds[0]}" --tf32
script="python ppo_continuous_action_warp.py$few --env-id"
train "$first-tf32" 65 $script "$first" --tf32
train "$first-whole" 65 $script "$first"
for env_id in "${robots[@]:1}"; do
  train "$env_id" 85 $script "$env_id" --tf32
done
warp warp-tf32 warp-tf32-more "$first" "${worlds[@]:1}" --tf32
for env_id in "${robots[@]:1:1}"; do
  warp warp warp-more "$env_id" "${worlds[@]}"
done
step tests-warp python -m pytest -m gpu -n $workers -p no:cacheprovider --disable-warnings \
  tests/ppo_continuous_action_warp -k warp_trains

# (d) HalfCheetah by C MuJoCo in EnvPool's threads, 64 environments: a million steps, the second time
# with what the compiler has kept; then where the time goes
cheetah="--env-id envpool:HalfCheetah-v4 --env-workers 16"
cheetah+=" --num-envs 64 --num-steps 64 --num-minibatches 4 --update-epochs 2 --learning-rate 2.95e-3"
[ -n "${TRY:-}" ] && cheetah="--env-id envpool:HalfCheetah-v4 --env-workers 2$few"
train cheetah-eager 60 python ppo_continuous_action.py $cheetah --cuda --no-compile
for turn in 1 2; do
  train cheetah-compiled-$turn 60 python ppo_continuous_action.py $cheetah $always --cuda
  train cheetah-cpu-$turn 60 python ppo_continuous_action.py $cheetah $always --no-cuda
done
rows robots robots-64 ppo_continuous_action "$cheetah --cuda --no-compile" \
  "$cheetah $always --cuda" "$cheetah $always --no-cuda"
# both scripts alone, on either device: why --cuda is off by default
alone="--env-id HalfCheetah-v4$few $always"
rows robots robots-1 ppo_continuous_action "$alone --no-cuda" "$alone --cuda"
alone="--env-id CartPole-v1$few $always"
rows robots cartpole ppo "$alone --no-cuda" "$alone --cuda"

# (e) Pong to 20
train Pong-v5 240 python ppo_atari_multigpu.py --env-id Pong-v5 --bf16 --num-envs 32 --num-minibatches 8 \
  --update-epochs 3 --clip-coef 0.2 --learning-rate 5e-4 --total-timesteps 4000000 $graphs$tiny

# (f) the other scripts for pixels
pool="--env-id envpool:Breakout-v5 --num-envs 8 --env-workers 8$tiny"
rows pixels pixels ppo_pixels "$pool" "$pool$compile"
single="$pool --env-kwargs '{\"stack_num\": 1}'"
rows pixels lstm ppo_lstm "$single" "$single$compile"
levels="--env-id envpool:StarpilotEasy-v0 --encoder impala --num-envs 64 --env-workers 16$tiny"
rows pixels procgen ppo_pixels "$levels" "$levels$compile"

# (g) What was measured on 27 November 2026, when acting was not one graph yet: again only if its
# table is taken away
before_graphs() {
  rows atari atari-8 ppo_atari_multigpu "$breakout 8" "$breakout 8 --compile" "$breakout 8 $graphs" \
    "$breakout 8 $graphs --bf16"
  rows atari atari-128 ppo_atari_multigpu "$breakout 128" "$breakout 128 $graphs"
}
once() { [ -e "$tables/$1" ] || [ -n "${TRY:-}" ] || "${@:2}"; }
once atari.csv before_graphs
once warp.csv warp warp warp-speed HalfCheetah-v4 4096 1024 16384
once train-HalfCheetah-v4.txt train HalfCheetah-v4 65 $script HalfCheetah-v4
exit $failed
