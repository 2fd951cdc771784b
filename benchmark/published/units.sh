#!/usr/bin/env bash
# Each script in seven units, three seeds each: the table of docs/your_environment.md. Given again, it goes on.
# Needs pip install -e '.[agents]'. RUNS=folder and WORKERS=processes may be set. ppo_atari_multigpu.py sees bytes.
. "$(dirname "$0")/bench.sh"
runs=${RUNS:-runs/published}/units
learn() { # TASK STEPS SCRIPT FLAGS
  ids=(benchmark.published.units:"$1"-{k1,k100,k0.01,b100,c100,c0.01,k100-b50-c100}-v0)
  python -m benchmark run --runs-dir "$runs" --workers "${WORKERS:-2}" --eval-episodes 0 --num-seeds 3 --start-seed 501 \
    --env-ids "${ids[@]}" --command "python $3.py --total-timesteps $2 --no-cuda ${*:4}"
}
learn CartPole 100000 ppo
learn Pendulum 150000 ppo_continuous_action
learn Pendulum 150000 ppo_kl_adaptive
learn Pendulum 150000 ppo_cma --iter-steps 4000
learn Pendulum 300000 ppo_continuous_action_warp --num-envs 64 --num-steps 32 --hidden 64 64
learn CartPole 60000 ppo_pixels --num-threads 1
learn CartPole 60000 ppo_lstm --num-threads 1
learn Speaker 150000 ppo_pettingzoo
python -m benchmark report "$runs" --output "$runs/report"
cp "$runs/report/runs.csv" benchmark/published/results/units.csv
python -m benchmark.published
