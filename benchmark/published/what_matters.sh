#!/usr/bin/env bash
# Which changes of ppo_continuous_action.py make it better: all runs of docs/what_matters.md, whose protocol was written
# before they ran. changes/*.patch are the changes, but for three of flags alone.
# RUNS=folder, WORKERS=processes, CHANGES="NAME ..." may be set.
. "$(dirname "$0")/bench.sh"
study() { # VARIANT COMMAND ENVIRONMENTS...
  bench --results runs/superseded --variant "$1" --command "$2" \
    --start-seed 101 --num-seeds 3 --env-ids "${@:3}"
}
screen() { study "$@" HalfCheetah-v4 Walker2d-v4 Ant-v4 InvertedDoublePendulum-v4; }
finish() { study "$@" Hopper-v4 Swimmer-v4 Humanoid-v4 Reacher-v4; }
eight="--num-envs 8 --num-steps 256" old="--ent-coef 0 --target-kl None" # e500984, of which changed.sh takes the script, had both
script="python ppo_continuous_action.py $old"
change() { echo "python $(benchmark/published/changed.sh $1) $old"; }

screen study "$script"
screen study-8-envs "$script $eight"
screen study-lambda-0.9 "$script --gae-lambda 0.9"
screen study-clip-vloss "$script --clip-vloss"
for name in ${CHANGES:-floor-0.01 kl-rate value-epochs fresh-advantages state-std least-std wide-critic layer-norm \
  pink-noise symlog floor-0.1 floor-relative floor-0.001 least-std+fresh-advantages spo}; do
  screen "$name" "$(change $name)"
done
screen least-std-8-envs "$(change least-std) $eight"

finish least-std-8-envs "$(change least-std) $eight"
for name in fresh-advantages least-std; do finish $name "$(change $name)"; done
finish study-8-envs "$script $eight"; finish study-clip-vloss "$script --clip-vloss"
study study-target-kl "${script/None/0.02}" {HalfCheetah,Walker2d,Ant,InvertedDoublePendulum,Humanoid}-v4
# study-std-0.1 is of commit 3015470, whose script had a flag that this one lacks: "python ppo_continuous_action.py --std-min 0.1"
