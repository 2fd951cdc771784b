#!/usr/bin/env bash
# Runs by EnvPool, and dm_control's cheetah by shimmy. RUNS=folder and WORKERS=processes may be set.
. "$(dirname "$0")/bench.sh"
clipped="python ppo_continuous_action.py" three="--start-seed 201 --num-seeds 3"

# the same task by two simulators' wrappers: EnvPool's, then shimmy's as in ppo.sh
none="--variant no-bonus" # the default of then
bench $three $none --env-ids envpool:CheetahRun-v1 --command "$clipped --ent-coef 0"
bench $three $none --env-ids dm_control/cheetah-run-v0 --command "$clipped --ent-coef 0"

# the humanoid with 64 environments
large="--num-envs 64 --num-steps 64 --num-minibatches 4 --update-epochs 2 --learning-rate 2.95e-3"
bench $three --variant 3M-64envs --env-ids envpool:Humanoid-v4 --command "$clipped --total-timesteps 3000000 $large --env-workers 2"
