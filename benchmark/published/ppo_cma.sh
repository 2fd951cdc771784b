#!/usr/bin/env bash
# Every published number of ppo_cma.py: runs (given again, it goes on), tables, pictures, speed.
# RUNS=folder and WORKERS=processes may be set; on two cores it takes about ten hours.
. "$(dirname "$0")/bench.sh"
# at a constant learning rate but for anneal-lr: it became the default after these runs
car="python ppo_cma.py --no-anneal-lr --iter-steps 4000 --minibatch-size 2048 --total-timesteps 50000"
bench --env-ids MountainCarContinuous-v0 --command "$car --action-repeat 4"
bench --env-ids MountainCarContinuous-v0 --command "$car --action-repeat 2" --variant repeat2
bench --env-ids Hopper-v4 --command "python ppo_cma.py --no-anneal-lr --iter-steps 8000 --total-timesteps 400000"
human() { bench --env-ids Humanoid-v4 --variant "$1" --num-seeds "$2" --command "python ${4:-ppo_cma.py} $3"; }
human default 3 --no-anneal-lr; human anneal-lr 3 --anneal-lr; human half-rate 3 "--no-anneal-lr --learning-rate 2.5e-4"
human 5M-N8000 1 "--no-anneal-lr --iter-steps 8000 --total-timesteps 5000000"
for name in cma-published-ends cma-linear-mean; do human $name 1 --no-anneal-lr "$(benchmark/published/changed.sh $name)"; done
ppo="--no-anneal-lr --mode ppo --minibatch-size 128 --total-timesteps 5000000 --clip-coef" # the figure's: 0.0025
human 5M-ppo-N8000 1 "$ppo 0.0025 --iter-steps 8000"
for x in 0.0025/3 0.05/1 0.1/3 0.2/1; do human "5M-ppo-${x%/*}" ${x#*/} "$ppo ${x%/*}"; done # and seeds
python -m benchmark.published
