#!/usr/bin/env bash
# Which changes of ppo_continuous_action.py make it better, by a protocol that was written before it ran:
# 1. Each change alone, 1M steps, seeds 101 to 103, on HalfCheetah, Walker2d, Ant and InvertedDoublePendulum. Judged by
#    python -m benchmark compare --metric evaluation: P, that a run with it scores above one without, and P's interval.
# 2. Of those with P >= 0.5, the ones with p < 0.2 or 5% fewer CPU seconds, at most four, run on Hopper, Swimmer, Humanoid
#    and Reacher, too, all with seeds 101 to 105: alone, and the best two together. Beside them: the published runs of
#    the defaults, seeds 1 to 10 (Humanoid and Reacher 1 to 5). Where P's interval holds 0.5, fewer CPU seconds decide.
# 3. The setting that wins runs once on all eight with seeds 201 to 210. That is reported, whatever comes of it.
# changes/*.patch are the changes, but for three of flags alone. RUNS=folder, WORKERS=processes, CHANGES="NAME ..." may be set.
. "$(dirname "$0")/bench.sh"
four=(HalfCheetah-v4 Walker2d-v4 Ant-v4 InvertedDoublePendulum-v4)
study() { # VARIANT COMMAND FIRST-SEED SEEDS ENVIRONMENTS...
  bench --results benchmark/published/results/what_matters --variant "$1" --command "$2" \
    --start-seed "$3" --num-seeds "$4" --env-ids "${@:5}"
}
screen() { study "$@" 101 3 "${four[@]}"; }
finish() { study "$@" 101 5 Hopper-v4 Swimmer-v4 Humanoid-v4 Reacher-v4 && study "$@" 104 2 "${four[@]}"; }
script="python ppo_continuous_action.py" eight="--num-envs 8 --num-steps 256" change="python benchmark/published/change.py"

screen study "$script"
screen study-8-envs "$script $eight"
screen study-lambda-0.9 "$script --gae-lambda 0.9"
screen study-clip-vloss "$script --clip-vloss"
for name in ${CHANGES:-floor-0.01 kl-rate value-epochs fresh-advantages state-std least-std wide-critic layer-norm \
  pink-noise symlog floor-0.1 floor-relative floor-0.001}; do
  screen "$name" "$change $name"
done

both=least-std+fresh-advantages
screen $both "$change $both"
finish study-8-envs "$script $eight"
for name in fresh-advantages least-std $both; do finish $name "$change $name"; done
