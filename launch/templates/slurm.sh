#!/bin/bash
# One launcher a node. Slurm's signal has the run end in order, with a checkpoint, before its time is over. A job that
# Slurm starts again (--requeue) continues its own run; `sbatch FILE RUN_DIRECTORY` continues another.
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
$gres#SBATCH --exclusive
#SBATCH --time=$time
#SBATCH --signal=TERM@120

meeting="--rdzv-file $$SLURM_SUBMIT_DIR/rdzv-$$SLURM_JOB_ID --finish-timeout 100"
run=$run-$$SLURM_JOB_ID
checkpoint=$$(ls -d $runs/$$run-*/checkpoints/*/ 2> /dev/null | tail -1)
again=$${1:-$${checkpoint%/checkpoints/*}}
if [ "$$again" ]; then
    srun --kill-on-bad-exit=1 myxa resume "$$again" $$meeting
else
    srun --kill-on-bad-exit=1 myxa launch $launch --set run.name=$$run $$meeting
fi
