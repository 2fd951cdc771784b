#!/usr/bin/env bash
# `python $(benchmark/published/changed.sh layer-norm) FLAGS` trains with a change: studies/changes/layer-norm.patch on the script
# as it was at commit e500984. NAME+NAME are two. ppo_cma.py has the changes cma-..., ppo_kl_adaptive.py coady-....
set -euo pipefail
cd "$(dirname "$0")/../.."
case $1 in cma-*) script=ppo_cma.py ;; coady-*) script=ppo_kl_adaptive.py ;; *) script=ppo_continuous_action.py ;; esac
folder=runs/changed/$1
mkdir -p "$folder"
git show "e500984:$script" >"$folder/$script"
for name in ${1//+/ }; do git apply --directory="$folder" "benchmark/published/studies/changes/$name.patch"; done
mv "$folder/$script" "$folder/change.py" # the same name in all results
echo "$folder/change.py"
