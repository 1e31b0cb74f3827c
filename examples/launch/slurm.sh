#!/usr/bin/env bash
# sbatch examples/launch/slurm.sh, from the root of the repository
#SBATCH --job-name=sylvie
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
set -euo pipefail
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
exec srun python examples/bring_your_own_module.py \
  --nodes "$SLURM_NNODES" --devices "$SLURM_NTASKS_PER_NODE" "$@"
