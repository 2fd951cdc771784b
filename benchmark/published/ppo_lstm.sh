#!/usr/bin/env bash
# Every published number of ppo_lstm.py: runs (given again, it goes on), tables. RUNS=folder may be set.
# pip install popgym minigrid "gymnasium[box2d]" envpool. Beside each task the same without a memory.
. "$(dirname "$0")/bench.sh"
novel=benchmark.published.novel
script="python ppo_lstm.py --num-threads 1"
plain="python ppo_pixels.py --num-threads 1" # the published ones: e500984, ppo_lstm.py --memory none
lstm() { bench --workers 1 --num-seeds 3 "$@"; }
none() { bench --workers 1 --num-seeds 1 --variant none "$@"; }

cartpole="--learning-rate 1e-3 --update-epochs 10 --gamma 0.98 --gae-lambda 0.9 --ent-coef 0 --total-timesteps 100000"
lstm --env-ids $novel:CartPoleNoVel-v1 --command "$script --memory-size 64 $cartpole"
none --env-ids $novel:CartPoleNoVel-v1 --command "$plain $cartpole"

pendulum="--separate-critic --num-steps 256 --learning-rate 1e-3 --update-epochs 10 --gamma 0.9 --ent-coef 0 --total-timesteps 100000"
lstm --env-ids $novel:PendulumNoVel-v1 --command "$script --memory-size 64 $pendulum"
none --env-ids $novel:PendulumNoVel-v1 --command "$plain $pendulum"

repeat="--num-envs 16 --num-steps 104 --learning-rate 1e-3 --total-timesteps 300000"
lstm --env-ids popgym:popgym-RepeatPreviousEasy-v0 --command "$script --memory gru --previous-action $repeat"
none --env-ids popgym:popgym-RepeatPreviousEasy-v0 --command "$plain $repeat"

cue="--num-envs 16 --learning-rate 1e-3 --total-timesteps 60000"
lstm --env-ids $novel:Cue-v0 --variant span --command "$script --memory-size 64 $cue --memory-span 128"
bench --workers 1 --num-seeds 1 --env-ids $novel:Cue-v0 --command "$script --memory-size 64 $cue"
none --env-ids $novel:Cue-v0 --command "$plain $cue"

position="$cartpole --gamma 0.99"
lstm --env-ids popgym:popgym-PositionOnlyCartPoleEasy-v0 --command "$script --memory-size 64 $position"
none --env-ids popgym:popgym-PositionOnlyCartPoleEasy-v0 --command "$plain $position"

memory="--num-envs 16 --learning-rate 1e-3 --total-timesteps 1000000"
bench --workers 1 --num-seeds 1 --env-ids minigrid:MiniGrid-MemoryS7-v0 --command "$script --memory-span 64 $memory"
none --env-ids minigrid:MiniGrid-MemoryS7-v0 --command "$plain $memory"

# Atari by single frames, at the settings of ppo_atari_lstm.py of d814e18, whose run is in results, too
frames="--env-kwargs '{\"stack_num\":1,\"episodic_life\":true,\"reward_clip\":true}' --env-workers 1"
frames="$frames --clip-vloss --no-scale-rewards --num-envs 32 --num-minibatches 8 --update-epochs 3"
bench --workers 1 --num-seeds 1 --env-ids envpool:Pong-v5 --command "$script $frames --total-timesteps 4000000"
python -m benchmark.published
