#!/usr/bin/env bash
# Everything that needs a CUDA device, measured on a machine with one: tests, speeds beside LeanRL's
# on an H100, MuJoCo Warp at three sizes, seconds to known returns. It takes several turns of at most
# SECONDS_A_TURN (530 by default): what is finished is not done again, training runs go on. RUNS=folder
# may be set. Exit code 0 when all is done, 75 when the turn is over, 1 if something failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
runs=${RUNS:-runs/gpu}
tables=benchmark/published/results/gpu
turn=${SECONDS_A_TURN:-530}
failed=0
mkdir -p "$tables" "$runs"
python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "gpu.sh: no CUDA device"; exit 2; }

# step NAME SECONDS COMMAND...: its output becomes NAME.txt once it has ended well; a step that can't
# end within this turn waits for the next one
step() {
  local name=$1 needs=$2 left=$((turn - SECONDS)) status=0
  shift 2
  [ -e "$tables/$name.txt" ] && return
  if ((left < needs)); then
    echo "gpu.sh: $name and what follows: in the next turn"
    exit 75
  fi
  echo "gpu.sh: $name"
  timeout --signal TERM --kill-after 20 "$left" "$@" >"$runs/$name.log" 2>&1 || status=$?
  tail -n 40 "$runs/$name.log"
  if ((status == 0)); then
    mv "$runs/$name.log" "$tables/$name.txt"
  elif ((status == 124 || status == 143)); then
    echo "gpu.sh: $name goes on in the next turn"
    exit 75
  else
    echo "gpu.sh: $name failed ($status): $runs/$name.log"
    failed=1
  fi
}

# speed NAME STEPS WARMUP COMMAND: steps per second by the harness, from outside
speed() {
  step "speed-$1" 60 python -m benchmark speed --rounds 1 --no-sb3 --no-bare --steps "$2" \
    --warmup-steps "$3" --output "$tables/speed-$1.csv" --command "$1=$4"
}

# train NAME RETURN COMMAND: train to the end, in as many turns as that takes; then the seconds until
# the mean of 100 training episodes reached RETURN
train() {
  step "train-$1" 60 bash -c '
    trap : TERM # the program saves and ends first
    name=$1 goal=$2 folder=$3/$1
    shift 3
    if [ -e "$folder/checkpoint.pt" ] && [[ $1 == python ]]; then set -- "$1" "$2" --resume "$folder"
    else set -- "$@" --run-dir "$folder"; fi
    "$@" || exit
    awk -F, -v goal="$goal" -v name="$name" "NR > 1 {
      sum += \$3 - last[NR % 100]; last[NR % 100] = \$3
      if (NR > 100 && sum / 100 >= goal) { print name, \"reached\", goal, \"after\", \$2, \"s,\", \$1, \"steps\"; found = 1; exit }
    } END { if (!found) print name, \"did not reach\", goal }" "$folder/episodes.csv"' \
    "$1" "$1" "$2" "$runs" "${@:3}"
}

step device 5 nvidia-smi
step tests 120 python -m pytest -m gpu -n 0 -p no:cacheprovider

# LeanRL on an H100 with compilation and CUDA graphs: 1,774 (MuJoCo) and 6,809 (Atari) steps per second
mujoco="python ppo_continuous_action.py --env-id HalfCheetah-v4 --compile-from 0"
speed continuous-eager 20480 8192 "$mujoco --no-compile"
speed continuous-compiled 40960 8192 "$mujoco"
speed continuous-cudagraphs 40960 8192 "$mujoco --cudagraphs"
speed continuous-cpu 40960 8192 "$mujoco --no-cuda"
cartpole="python ppo.py --env-id CartPole-v1 --compile-from 0"
speed ppo-eager 40960 8192 "$cartpole --no-compile"
speed ppo-compiled 81920 8192 "$cartpole"
speed ppo-cudagraphs 81920 8192 "$cartpole --cudagraphs"
speed cma-eager 64000 32000 "python ppo_cma.py --env-id HalfCheetah-v4"
speed kl-eager 40000 10000 "python ppo_kl_adaptive.py --env-id HalfCheetah-v4"
# half of this machine's cores step the games
atari="ppo_atari_multigpu.py --env-id Breakout-v5 --env-threads $((($(nproc) + 1) / 2))"
speed atari-eager 40960 8192 "python $atari"
speed atari-compiled 81920 8192 "python $atari --compile"
speed atari-cudagraphs 81920 8192 "python $atari --compile --cudagraphs"
speed atari-bf16 81920 8192 "python $atari --compile --cudagraphs --bf16"
speed atari-nccl 40960 8192 "torchrun --standalone --nproc-per-node=1 $atari --backend nccl"
speed atari-2-on-one-gpu 40960 8192 "torchrun --standalone --nproc-per-node=2 $atari" # gloo
speed lstm 20480 8192 "python ppo_atari_lstm.py --env-id Breakout-v5"
speed lstm-compiled 20480 8192 "python ppo_atari_lstm.py --env-id Breakout-v5 --compile"
speed procgen 65536 16384 "python ppo_procgen.py"
speed procgen-compiled 65536 16384 "python ppo_procgen.py --compile"

# MuJoCo Warp: the environment alone, with inference, and with learning
warp=$(cat <<'PYTHON'
import sys, time, torch
import ppo_continuous_action_warp as script

env_id, num_envs, graphs = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "cudagraphs"
args = script.Args(env_id=env_id, num_envs=num_envs, total_timesteps=10**9)
torch.manual_seed(1)
envs = script.make_envs(env_id, num_envs, "cuda")
agent = script.Agent(envs, args).to("cuda")
agent.adam = script.flat_adam(agent)
agent.adam["learning_rate"] = torch.tensor(args.learning_rate, device="cuda")
at, data = script.start(agent, envs, args)
record = script.Recorded if graphs else lambda function: function
actions = torch.zeros(num_envs, len(envs.low), device="cuda")

def environment():
    _, _, terminated, truncated = envs.step(actions)
    envs.reset(terminated | truncated)

environment, take_step = record(environment), record(script.take_step)
update = record(script.update)
rollout = lambda: script.rollout(agent, envs, at, data, args, take_step)
parts = {"environment": lambda: [environment() for _ in range(args.num_steps)], "and inference": rollout}
parts["everything"] = lambda: (rollout(), update(agent, data, args))
for name, part in parts.items():
    for _ in range(5):
        part()
    torch.cuda.synchronize()
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < 5:
        part()
        torch.cuda.synchronize()
        rounds += 1
    rate = rounds * args.batch_size / (time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() / 1e9
    print(f"{env_id},{num_envs},{sys.argv[3]},{name},{rate:.0f} steps/s,{memory:.2f} GB of torch")
PYTHON
)
for env_id in Ant-v4 HalfCheetah-v4; do
  for num_envs in 1024 4096 16384; do
    for how in eager cudagraphs; do
      step "warp-$env_id-$num_envs-$how" 90 python -c "$warp" "$env_id" "$num_envs" "$how"
    done
  done
done

# Seconds to a return
train Pong 18 torchrun --standalone --nproc-per-node=1 ppo_atari_multigpu.py --env-id Pong-v5 --bf16 \
  --num-envs 32 --num-minibatches 8 --update-epochs 3 --clip-coef 0.2 --learning-rate 5e-4 \
  --total-timesteps 4000000 --compile --cudagraphs
for env_id in HalfCheetah-v4 Walker2d-v4 Ant-v4; do
  train "$env_id-on-warp" 5000 python ppo_continuous_action_warp.py --env-id "$env_id" --cudagraphs
done

cat "$tables"/train-*.txt | grep reach
grep -h "steps/s" "$tables"/warp-*.txt
exit $failed
