#!/bin/bash
# One launcher a node. Slurm's signal has the run end in order, with a checkpoint, before its time is over;
# `sbatch FILE RUN_DIRECTORY` continues a run.
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
$gres#SBATCH --exclusive
#SBATCH --time=$time
#SBATCH --signal=TERM@120

meeting="--rdzv-file $$SLURM_SUBMIT_DIR/rdzv-$$SLURM_JOB_ID --finish-timeout 100"
if [ $$# -gt 0 ]; then
    srun --kill-on-bad-exit=1 myxa resume "$$1" $$meeting
else
    srun --kill-on-bad-exit=1 myxa launch $launch $$meeting
fi
