#!/usr/bin/env bash
# Every published number of ppo_cma.py: runs (given again, it goes on), tables, pictures, speed.
# RUNS=folder and WORKERS=processes may be set; on two cores it takes about five hours.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

bench() {
  python -m benchmark run --runs-dir "${RUNS:-runs/published}" --workers "${WORKERS:-2}" \
    --results benchmark/results --num-seeds 5 "$@"
}
car="python ppo_cma.py --iter-steps 4000 --minibatch-size 2048 --total-timesteps 50000"

bench --env-ids MountainCarContinuous-v0 --command "$car --action-repeat 4"
bench --env-ids MountainCarContinuous-v0 --command "$car --action-repeat 2" --variant repeat2
bench --env-ids Hopper-v4 --command "python ppo_cma.py --iter-steps 8000 --total-timesteps 400000"
bench --env-ids Humanoid-v4 --command "python ppo_cma.py" --num-seeds 3
bench --env-ids Humanoid-v4 --command "python ppo_cma.py --anneal-lr" --num-seeds 3 --variant anneal-lr
bench --env-ids Humanoid-v4 --command "python benchmark/cma_published_ends.py" --num-seeds 1

python -m benchmark.curves report
python benchmark/didactic.py
python benchmark/speed_ppo_cma.py --num-envs 1
python benchmark/speed_ppo_cma.py --num-envs 4
