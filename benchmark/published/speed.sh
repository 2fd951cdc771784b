#!/usr/bin/env bash
# Every published speed, in tables in benchmark/published/results/speed: an hour of a machine that does nothing else.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=benchmark/published/results/speed

speed() { python -m benchmark speed --rounds 3 --output $folder "$@"; }
now="--no-cuda --compile-from 0" # also in runs as short as these

# CleanRL's settings
one="python ppo.py --env-id CartPole-v1 --learning-rate 2.5e-4 --update-epochs 4 --no-scale-obs --no-scale-rewards $now"
speed --steps 122880 --command "compiled=$one" --command "eager=$one --no-compile"
mujoco="--log-std-init 0 --no-scale-actions --clip-vloss --target-kl None --ent-coef 0 $now"
one="python ppo_continuous_action.py --env-id HalfCheetah-v4 $mujoco"
speed --steps 30720 --command "compiled=$one" --command "eager=$one --no-compile"

# docs/superseded.md: each change of the first study
now+=" --ent-coef 0 --target-kl None" eight="--num-envs 8 --num-steps 256" one="python ppo_continuous_action.py"
changes=(--command "study=$one $now")
for flags in "8-envs=$eight" clip-vloss=--clip-vloss; do changes+=(--command "study-${flags/=/=$one $now }"); done
for name in floor-0.01 kl-rate value-epochs fresh-advantages state-std least-std wide-critic layer-norm pink-noise symlog \
  least-std+fresh-advantages; do
  changes+=(--command "$name=python $(benchmark/published/changed.sh $name) $now")
done
speed --no-sb3 --no-bare --steps 163840 --output $folder/what_matters-changes.csv "${changes[@]}"

cma="python ppo_cma.py --env-id Humanoid-v4 --no-cuda"
speed --no-sb3 --steps 64000 --warmup-steps 32000 --command "1_environment=$cma" --command "4_environments=$cma --num-envs 4"

pong="ppo_atari_multigpu.py --env-id Pong-v5 --no-cuda --num-threads 1 --env-threads 1"
two="torchrun --standalone --nproc-per-node=2 $pong" pong="python $pong"
speed --no-sb3 --no-bare --steps 6144 --warmup-steps 1024 --command "fp32=$pong" \
  --command "contiguous=$pong --no-channels-last" --command "bf16=$pong --bf16"
speed --no-sb3 --steps 4096 --warmup-steps 1024 --output $folder/ppo_atari_multigpu-Pong-v5-processes.csv \
  --command "1=$pong" --command "1_bf16=$pong --bf16" --command "2=$two" --command "2_bf16=$two --bf16"

# memory of long iterations
speed --rounds 1 --no-sb3 --no-bare --steps 128000 --warmup-steps 320000 --command "$cma" \
  --output $folder/ppo_cma-Humanoid-v4-memory.csv
