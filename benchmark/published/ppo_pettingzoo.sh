#!/usr/bin/env bash
# Every published number of ppo_pettingzoo.py: runs (given again, it goes on), tables. RUNS=folder may be set.
# Needs pip install -e '.[agents]'. The harness keeps the returns of drawn actions, means over agents.
. "$(dirname "$0")/bench.sh"
script="python ppo_pettingzoo.py"
agents() { bench --workers 1 --num-seeds 1 --eval-episodes 100 "$@"; }

# independent PPO, the default; and MAPPO's settings
mappo="--team-reward --critic concatenated --num-envs 128 --num-steps 25 --num-minibatches 1"
mappo="$mappo --learning-rate 7e-4 --no-anneal-lr --vf-coef 1 --max-grad-norm 10"
agents --num-seeds 3 --env-ids mpe2.simple_speaker_listener_v4 --command "$script"
agents --num-seeds 3 --env-ids mpe2.simple_speaker_listener_v4 --variant mappo \
  --command "$script $mappo --update-epochs 15"
agents --env-ids mpe2.simple_spread_v3 --command "$script --total-timesteps 2000000"
agents --env-ids mpe2.simple_spread_v3 --variant mappo \
  --command "$script $mappo --update-epochs 10 --total-timesteps 2000000"

# food that two must lift together; its own time limit, a termination, is switched off
agents --env-ids lbforaging:Foraging-8x8-2p-2f-coop-v3 \
  --command "$script --env-kwargs '{\"max_episode_steps\":1000000}' --max-episode-steps 50"

# early deaths
agents --env-ids butterfly/knights_archers_zombies_v11 \
  --command "$script --num-envs 8 --env-kwargs '{\"max_cycles\":900,\"max_zombies\":10}'"

# two players, at the settings of ppo_pettingzoo_ma_atari.py of d814e18, whose run is in results, too. Against
# random: --evaluate runs/published/.../run --against RANDOM --eval-episodes 100
players="--num-envs 16 --num-minibatches 8 --update-epochs 3 --learning-rate 5e-4 --eval-interval 50 --eval-episodes 20"
agents --env-ids atari/pong_v3 --command "$script $players --total-timesteps 1000000"
python -m benchmark.published
