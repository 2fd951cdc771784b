#!/usr/bin/env bash
# A default that explores: the protocol of docs/what_matters.md, written before anything ran. Given again, it goes on.
# STEP=1: each candidate on the five tasks where the defaults are behind. STEP=2: those that go on, on eight of MuJoCo
# and on five where the defaults lead. CANDIDATES="NAME ...", RUNS=folder and WORKERS=processes may be set.
# Step 3, the winner with seeds that chose nothing, is in ppo.sh.
. "$(dirname "$0")/bench.sh"
all="explore-defaults explore-log-std-0 explore-log-std-0.35 explore-8-envs state-std explore-entropy-falls
  explore-pink-start least-std"
tasks=(dm_control/{finger-spin,pendulum-swingup,walker-run,hopper-hop,acrobot-swingup}-v0)
if [[ ${STEP:-1} == 2 ]]; then
  all="explore-log-std-0 explore-entropy-falls"
  tasks=({HalfCheetah,Walker2d,Ant,InvertedDoublePendulum,Hopper,Swimmer,Humanoid,Reacher}-v4
    dm_control/{cartpole-swingup,cheetah-run,walker-walk,reacher-easy,quadruped-walk}-v0)
fi
explore() { # VARIANT COMMAND
  bench --results runs/superseded --variant "$1" --command "$2" \
    --start-seed 101 --num-seeds 3 --env-ids "${tasks[@]}"
}
old="--ent-coef 0 --no-anneal-ent-coef" # changed.sh takes the script of e500984, which had the bonus
script="python ppo_continuous_action.py $old"

for name in ${CANDIDATES:-$all}; do
  case $name in
    explore-defaults) explore $name "$script" ;;
    explore-log-std-0) explore $name "$script --log-std-init 0" ;;
    explore-log-std-0.35) explore $name "$script --log-std-init -0.35" ;;
    explore-8-envs) explore $name "$script --num-envs 8 --num-steps 256" ;;
    *) explore "explore-${name#explore-}" "python $(benchmark/published/changed.sh $name) $old" ;;
  esac
done
