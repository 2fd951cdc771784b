#!/usr/bin/env bash
# Everything that needs a CUDA device, measured on a machine with one: tests, speeds beside LeanRL's
# on an H100, MuJoCo Warp at three sizes, seconds to known returns. It takes several turns of at most
# SECONDS_A_TURN (530 by default): what is finished is not done again, training goes on. RUNS=folder
# may be set. Exit code 0 when all is done, 75 when the turn is over, 1 if something failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
runs=${RUNS:-runs/gpu}
tables=benchmark/published/results/gpu
failed=0
mkdir -p "$tables" "$runs"
python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "gpu.sh: no CUDA device"; exit 2; }

# step NAME COMMAND...: its output becomes NAME.txt once it has ended well
step() {
  local name=$1 left=$((${SECONDS_A_TURN:-530} - SECONDS)) status=124
  shift
  [ -e "$tables/$name.txt" ] && return
  if ((left > 60)); then
    echo "gpu.sh: $name"
    timeout --kill-after 20 "$left" "$@" >"$runs/$name.log" 2>&1
    status=$?
  fi
  case $status in
    0) mv "$runs/$name.log" "$tables/$name.txt" ;;
    124) echo "gpu.sh: $name: in the next turn" && exit 75 ;;
    *) echo "gpu.sh: $name failed ($status): $runs/$name.log" && failed=1 ;;
  esac
}

# speed NAME STEPS WARMUP COMMAND: steps per second by the harness, from outside
speed() {
  step "speed-$1" python -m benchmark speed --rounds 1 --no-sb3 --no-bare --steps "$2" \
    --warmup-steps "$3" --output "$tables/speed-$1.csv" --command "$1=$4"
}

step device nvidia-smi
step tests python -m pytest -m gpu -n 0 -p no:cacheprovider

# LeanRL on an H100 with compilation and CUDA graphs: 1,774 (MuJoCo) and 6,809 (Atari) steps per second
for flag in "" --no-compile --cudagraphs --no-cuda; do
  speed "continuous$flag" 40960 8192 "python ppo_continuous_action.py --env-id HalfCheetah-v4 --compile-from 0 $flag"
  speed "ppo$flag" 81920 8192 "python ppo.py --env-id CartPole-v1 --compile-from 0 $flag"
done
speed cma 64000 32000 "python ppo_cma.py --env-id HalfCheetah-v4"
speed kl 40000 10000 "python ppo_kl_adaptive.py --env-id HalfCheetah-v4 --episodes-per-batch 5"
# half of this machine's cores step the games
atari="ppo_atari_multigpu.py --env-id Breakout-v5 --env-threads $((($(nproc) + 1) / 2))"
for flags in "" --compile "--compile --cudagraphs" "--compile --cudagraphs --bf16"; do
  speed "atari${flags// /}" 81920 8192 "python $atari $flags"
done
speed atari-2-on-one-gpu 40960 8192 "torchrun --standalone --nproc-per-node=2 $atari" # gloo
for flag in "" --compile; do
  speed "lstm$flag" 20480 8192 "python ppo_atari_lstm.py --env-id Breakout-v5 $flag"
  speed "procgen$flag" 65536 16384 "python ppo_procgen.py $flag"
done

# MuJoCo Warp: the environment alone, with inference, and with learning
for env_id in Ant-v4 HalfCheetah-v4; do
  for num_envs in 1024 4096 16384; do
    for how in eager cudagraphs; do
      step "warp-$env_id-$num_envs-$how" python -m benchmark.published.gpu_warp "$env_id" "$num_envs" "$how"
    done
  done
done
grep -h "steps/s" "$tables"/warp-*.txt

# seconds to a mean of 100 training episodes
train() { step "$1" python -m benchmark run --runs-dir "$runs" --workers 1 --num-seeds 1 "${@:2}"; }
train pong --env-ids Pong-v5 --command "torchrun --standalone --nproc-per-node=1 ppo_atari_multigpu.py \
  --bf16 --num-envs 32 --num-minibatches 8 --update-epochs 3 --clip-coef 0.2 --learning-rate 5e-4 \
  --total-timesteps 4000000 --compile --cudagraphs"
train warp --env-ids HalfCheetah-v4 Walker2d-v4 Ant-v4 \
  --command "python ppo_continuous_action_warp.py"
python - "$runs" <<'PYTHON' | tee "$tables/seconds.txt"
import sys
from benchmark import data, stats

for run in data.find(sys.argv[1:]):
    goal = 18 if run.env_id == "Pong-v5" else 5000
    seconds = stats.first_reach(run.seconds, run.returns, goal, least=100)
    print(f"{run.env_id}: a return of {goal} after {seconds:.0f} s")
PYTHON
exit $failed
