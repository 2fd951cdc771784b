#!/usr/bin/env bash
# The long runs that are still to be done, in order. Given again, it goes on: jobs that are finished are skipped, those
# that were cut off are resumed. Start it from a clone of its own, at one commit, before any other work:
#     RUNS=../queue-runs nice -n 19 bash benchmark/published/queue.sh
# The protocol has run: (a) and (b) by commit 8a46dfc with studies/adapt_ent_coef.patch, before --adapt-ent-coef was a flag.
# Policies made so call action_bias and action_scale origin and unit: rename them to be played.
. "$(dirname "$0")/bench.sh"
clipped="python ppo_continuous_action.py"

# 1. A bonus where rewards repeat: the fourth protocol of docs/what_matters.md. (a) The robots keep their bits.
adapt="--anneal-ent-coef --adapt-ent-coef --ent-coef" # today's defaults, but were not then
robots=({HalfCheetah,Hopper,Walker2d,Ant,Swimmer,Reacher,InvertedDoublePendulum,Humanoid}-v4)
short() {
  python -m benchmark run --runs-dir "${RUNS:-runs/published}" --workers "${WORKERS:-2}" --eval-episodes 0 --num-seeds 2 \
    --start-seed 301 --env-ids "${robots[@]}" --variant "$1" --command "$clipped --total-timesteps 100000 $2"
}
short bits-none "--ent-coef 0"
short bits-repeats "$adapt 0.01"
python benchmark/published/studies/same_bits.py "${RUNS:-runs/published}" bits-none bits-repeats

# (b) Where a reward is rare. An action has one dimension on the first three tasks, two on the next three, and four.
one=(dm_control/{pendulum-swingup,cartpole-swingup_sparse}-v0 InvertedPendulum-v4)
two=(dm_control/{finger-spin,ball_in_cup-catch,reacher-easy}-v0) four=(dm_control/hopper-hop-v0)
arm() { bench --num-seeds 3 --start-seed "$2" --variant "$1" --command "$clipped $3" --env-ids "${@:4}"; }
arm repeats 301 "$adapt 0.01" "${two[@]}" "${one[@]}" "${four[@]}"
arm no-bonus 201 "--ent-coef 0" dm_control/{ball_in_cup-catch,cartpole-swingup_sparse}-v0 # the others are published
arm repeats-dims 301 "$adapt 0.005" "${two[@]}"
arm repeats-dims 301 "$adapt 0.0025" "${four[@]}"

# (c) Five fresh seeds of the winner.
for seed in 201 202 203 204 205; do
  seed --variant default --env-ids "${two[@]}" "${four[@]}" "${one[@]}" --command "$clipped $adapt 0.01"
done
bench --start-seed 206 --env-ids InvertedPendulum-v4 --command "$clipped $adapt 0.01"

# 2. dm_control's other tasks, 3. the robots' policies: ppo.sh. 4. mujoco.sh: those of ppo_kl_adaptive.py and ppo_cma.py.
