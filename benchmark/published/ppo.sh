#!/usr/bin/env bash
# Every published number of ppo.py and ppo_continuous_action.py: runs (given again, it goes on), their
# tables, speed. RUNS=folder and WORKERS=processes may be set; on two cores it takes about twenty hours.
. "$(dirname "$0")/bench.sh"
clipped="python ppo_continuous_action.py" mujoco=(HalfCheetah-v4 Walker2d-v4 Hopper-v4 InvertedPendulum-v4)
control=(dm_control/{cartpole,pendulum,acrobot}-swingup-v0 dm_control/{cheetah,walker}-run-v0
  dm_control/{walker,quadruped}-walk-v0 dm_control/{finger-spin,fish-upright,hopper-hop,humanoid-stand,reacher-easy}-v0) pusher=benchmark.published.pusher:Pusher-v4
new() { bench --start-seed 201 "$@"; } # seeds that chose nothing
new --num-seeds 10 --command "$clipped" --env-ids "${mujoco[@]}" {Ant,Swimmer,InvertedDoublePendulum,Reacher,Humanoid}-v4
new --command "$clipped --total-timesteps 200000" --env-ids Pendulum-v1
new --num-seeds 3 --command "$clipped" --env-ids "${control[@]}" $pusher
# the 36 other tasks of dm_control that CleanRL has published
rest=(acrobot-swingup_sparse ball_in_cup-catch cartpole-{balance,balance_sparse,swingup_sparse,two_poles,three_poles}
  dog-{stand,walk,trot,run,fetch} finger-turn_{easy,hard} fish-swim hopper-stand humanoid-{walk,run,run_pure_state}
  humanoid_CMU-{stand,run} manipulator-{bring,insert}_{ball,peg} point_mass-{easy,hard} quadruped-{run,escape,fetch}
  reacher-hard stacker-stack_{2,4} swimmer-swimmer{6,15} walker-stand)
export MUJOCO_GL=egl # quadruped-escape makes its ground with OpenGL
tasks=("${rest[@]/#/dm_control/}")
new --num-seeds 3 --command "$clipped" --env-ids "${tasks[@]/%/-v0}"
flags() { new --variant "$1" "${@:3}" --command "$clipped $2"; }
flags 3M "--total-timesteps 3000000" --env-ids {HalfCheetah,Walker2d,Ant,Humanoid}-v4
flags gamma-0.9999-lambda-0.99 "--gamma 0.9999 --gae-lambda 0.99" --num-seeds 10 --env-ids Swimmer-v4
none="--ent-coef 0" # the default for a while, as was the bonus below
flags no-bonus "$none" --num-seeds 10 --env-ids InvertedPendulum-v4
flags no-bonus "$none" --num-seeds 3 --env-ids dm_control/{pendulum-swingup,cheetah-run,finger-spin,hopper-hop,reacher-easy}-v0
bonus="--no-adapt-ent-coef"
flags ent-coef-0.01 "$bonus" --num-seeds 10 --env-ids "${mujoco[@]}" {Ant,Swimmer,InvertedDoublePendulum,Reacher,Humanoid}-v4
# CleanRL's issue 215 advises 64 environments and ten times the rate for Humanoid; the rest is ours, not tuned
large="--num-envs 64 --num-steps 64 --num-minibatches 4 --update-epochs 2 --learning-rate 2.95e-3"
flags 1M-64envs "$large" --num-seeds 3 --env-ids {HalfCheetah,Walker2d,Ant,Hopper,Humanoid}-v4
old() { bench --results runs/superseded --variant "$1" "${@:3}" --command "$clipped --ent-coef 0 --target-kl None $2"; } # before there was a KL stop by default
old no-target-kl "" --num-seeds 10 --env-ids "${mujoco[@]:0:3}" Ant-v4 Swimmer-v4 InvertedDoublePendulum-v4
old no-target-kl "" --env-ids "${mujoco[@]:3}" Humanoid-v4 Reacher-v4
old no-target-kl "" --num-seeds 3 --env-ids "${control[@]}"
old no-target-kl-3M "--total-timesteps 3000000" --num-seeds 2 --env-ids {HalfCheetah,Walker2d,Ant,Humanoid}-v4
old no-target-kl-gamma-0.9999 "--gamma 0.9999" --num-seeds 10 --env-ids Swimmer-v4
old 10M-64envs "--total-timesteps 10000000 $large" --results benchmark/published/results --num-seeds 2 --env-ids Humanoid-v4
old log-std-0 "--log-std-init 0" --num-seeds 3 --env-ids dm_control/{finger-spin,hopper-hop,pendulum-swingup}-v0
bench --num-seeds 10 --env-ids CartPole-v1 --command "python ppo.py --total-timesteps 100000"
bench --num-seeds 10 --env-ids Acrobot-v1 MountainCar-v0 --command "python ppo.py"
taxi=(--num-seeds 3 --eval-episodes 100 --env-ids Taxi-v4)
bench "${taxi[@]}" --command "python ppo.py"
raw="--no-scale-obs --no-scale-rewards" # the default before the study of scale.sh
bench "${taxi[@]}" --variant no-masks --command "python ppo.py $raw --no-action-masks"
bench "${taxi[@]}" MountainCar-v0 --variant no-clip-vloss --command "python ppo.py $raw --no-clip-vloss"
bench "${taxi[@]}" --variant 8-envs --command "python ppo.py $raw --no-clip-vloss --num-envs 8"

# CleanRL's own settings, where this project's defaults differ
discrete="python ppo.py --learning-rate 2.5e-4 --update-epochs 4 $raw"
bench --variant cleanrl --env-ids CartPole-v1 --command "$discrete --total-timesteps 100000"
bench --variant cleanrl --env-ids Acrobot-v1 --command "$discrete"
bench --variant cleanrl --num-seeds 3 --env-ids MountainCar-v0 --command "$discrete"
bench --variant cleanrl-500k --num-seeds 3 --env-ids CartPole-v1 --command "$discrete"
theirs="--log-std-init 0 --no-scale-actions --clip-vloss"
old cleanrl "$theirs" --results benchmark/published/results --env-ids "${mujoco[@]:0:3}" {Ant,Swimmer,InvertedDoublePendulum,Reacher,Humanoid}-v4
old cleanrl "$theirs" --results benchmark/published/results --num-seeds 3 --env-ids InvertedPendulum-v4 $pusher
python -m benchmark.published
