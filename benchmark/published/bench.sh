# What the .sh files here share. RUNS=folder and WORKERS=processes may be set.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1

bench() {
  python -m benchmark run --runs-dir "${RUNS:-runs/published}" --workers "${WORKERS:-2}" \
    --results benchmark/published/results --keep-policies --num-seeds 5 "$@"
}
seed() { bench --start-seed "$seed" --num-seeds 1 "$@"; }
