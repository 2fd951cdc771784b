#!/usr/bin/env bash
# Whether ppo.py scales by default: the protocol of docs/ppo.md, written before its runs. Given again, it goes on.
# RUNS=folder and WORKERS=processes may be set; it takes about two hours on two cores. Its table is results/scale.csv.
. "$(dirname "$0")/bench.sh"
runs=${RUNS:-runs/published}/scale
played() { case $1 in [FT]*) echo 100 ;; *) echo 20 ;; esac; } # FrozenLake, Taxi
numbers=(CartPole-v1/100000 Acrobot-v1/200000 MountainCar-v0/300000 envpool:LunarLander-v3/300000)
choices=(FrozenLake-v1/200000 Taxi-v4/200000) # all of an observation are choices, which no arm scales
tasks=("${numbers[@]}" "${choices[@]}")
arm() { # NAME FLAGS
  for task in "${tasks[@]}"; do
    python -m benchmark run --runs-dir "$runs" --workers "${WORKERS:-2}" --eval-episodes "$(played "$task")" --variant "$1" \
      --start-seed 401 --num-seeds "${seeds:-10}" --env-ids "${task%/*}" --command "python ppo.py --total-timesteps ${task#*/} $2"
  done
}
arm both ""
arm none "--no-scale-obs --no-scale-rewards"
arm both-4-epochs "--update-epochs 4"
seeds=5 tasks=("${numbers[@]}")
arm rewards "--no-scale-obs"
arm obs "--no-scale-rewards"
python -m benchmark.published.studies.scale "$runs"
