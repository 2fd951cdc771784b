#!/usr/bin/env bash
# A default that explores: step 1 of the protocol in docs/what_matters.md, written before anything ran.
# Given again, it goes on. RUNS=folder, WORKERS=processes, CANDIDATES="NAME ..." may be set.
. "$(dirname "$0")/bench.sh"
explore() { # VARIANT COMMAND
  for task in finger-spin pendulum-swingup walker-run hopper-hop acrobot-swingup; do
    bench --results benchmark/published/results/explore --variant "$1" --command "$2" \
      --start-seed 101 --num-seeds 3 --env-ids "dm_control/$task-v0"
  done
}
script="python ppo_continuous_action.py" change="python benchmark/published/studies/change.py"

for name in ${CANDIDATES:-explore-defaults explore-log-std-0 explore-log-std-0.35 explore-8-envs state-std \
  explore-entropy-falls explore-pink-start least-std}; do
  case $name in
    explore-defaults) explore $name "$script" ;;
    explore-log-std-0) explore $name "$script --log-std-init 0" ;;
    explore-log-std-0.35) explore $name "$script --log-std-init -0.35" ;;
    explore-8-envs) explore $name "$script --num-envs 8 --num-steps 256" ;;
    *) explore "$name" "$change $name" ;;
  esac
done
