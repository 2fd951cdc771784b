#!/usr/bin/env bash
# LeanRL's two PPO scripts, into the folder given (.leanrl by default), changed so that they run with
# today's gymnasium, EnvPool and tensordict (0.15): they are measured beside ours, and not committed.
# The second argument may be a clone of https://github.com/pytorch-labs/LeanRL.
set -euo pipefail
cd "$(dirname "$0")/../../.."
folder=${1:-.leanrl}
clone=${2:-$folder/clone}
[ -e "$clone" ] || git clone --quiet https://github.com/pytorch-labs/LeanRL "$clone"
for name in ppo_atari_envpool_torchcompile ppo_continuous_action_torchcompile; do
  git -C "$clone" show "8dbb6336:leanrl/$name.py" >"$folder/$name.py"
done
atari=$folder/ppo_atari_envpool_torchcompile.py
continuous=$folder/ppo_continuous_action_torchcompile.py
# parameters shared with the learner's, for acting alone: an older tensordict made them so
sed -i 's/^    agent_inference_p.to_module(agent_inference)$/&\n    agent_inference.requires_grad_(False)/' "$atari" "$continuous"
# EnvPool's own properties, and one interface for both
sed -i -e 's/env_type="gym"/env_type="gymnasium"/' -e 's/isinstance(envs.action_space, /isinstance(envs.single_action_space, /' \
  -e '/^    envs.num_envs = /d' -e '/^    envs.single_\w* = /d' "$atari"
# gymnasium 1: an argument more, the old autoreset, the form of infos
sed -i -e 's/np.clip(obs, -10, 10))/np.clip(obs, -10, 10), env.observation_space)/' \
  -e 's/gym.vector.SyncVectorEnv(/&autoreset_mode=gym.vector.AutoresetMode.SAME_STEP, env_fns=/' \
  -e 's/for info in infos\["final_info"\]:/for r in infos["final_info"]["episode"]["r"]:/' \
  -e 's/r = float(info\["episode"\]\["r"\].reshape(()))/r = float(r)/' "$continuous"
# 2,048 steps of gae compile for minutes; they still become one CUDA graph
sed -i 's/^        gae = torch.compile(gae, fullgraph=True)$/        pass/' "$continuous"
