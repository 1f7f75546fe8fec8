# What slurm_train.sbatch and slurm_ft.sbatch share; to be sourced from the repository's root.
# shellcheck shell=bash disable=SC2034
#
# Sets python, num_ranks (of each node), num_nodes, master_addr, master_port and log_dir, and defines run_step.

# Until run_step begins, a request to stop is only remembered. It may come at once, as in a job whose time limit is
# shorter than the time before it at which Slurm is to send the signal.
told_early=''
trap 'told_early=1' USR1 TERM

if [[ ! -f train_fsdp2_ep.py ]]; then
    echo "$PWD has no train_fsdp2_ep.py. Call sbatch from the repository's root, or give it --chdir." >&2
    exit 2
fi
if [[ -z ${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-}} ]]; then
    echo "The job has no GPUs. Give sbatch --gpus-per-node=N, or set NPROC_PER_NODE to the ranks of each node." >&2
    exit 2
fi

python=${PYTHON:-$PWD/.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
num_ranks=${NPROC_PER_NODE:-$SLURM_GPUS_ON_NODE}
num_nodes=$SLURM_JOB_NUM_NODES

# The address by which Slurm itself reaches the node, since a node's name need not be a host's.
# (head would end before scontrol has written all names, and so fail the pipe.)
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
master_addr=${MASTER_ADDR:-$(scontrol show node "$first_node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')}

# Below the ports that Linux gives to clients. Each start of each job has another one: after a requeue, what the start
# before has left on its port does not matter.
master_port=${MASTER_PORT:-$((10000 + (SLURM_JOB_ID + 1009 * ${SLURM_RESTART_COUNT:-0}) % 20000))}

# nvidia-resiliency-ext depends on the old pynvml package, about which every import of torch warns.
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore:The pynvml package:FutureWarning}

log_dir=$PWD/${LOG_DIR:-logs}/$SLURM_JOB_ID
[[ ${LOG_DIR:-} != /* ]] || log_dir=$LOG_DIR/$SLURM_JOB_ID
mkdir -p "$log_dir"

# Rank 0 writes 75 here when the ranks have stopped because they were told to, after saving.
export MOE_EXIT_FILE=$log_dir/exit_code
# This script makes it when it is told to stop, for ranks that are just being started, or started again, and hear no
# signal yet. It tells the ranks of this start of the job only: what a start that was killed has left is removed.
export MOE_STOP_FILE=$log_dir/stop
rm -f "$MOE_EXIT_FILE" "$MOE_STOP_FILE"

# Before each line of the ranks' output.
# shellcheck disable=SC2016
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${rank}] '

# From Slurm 22.05 on, srun no longer takes it over from sbatch, and the ranks of a node would share one core.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# Run a command once on each node; requeue the job if it stopped on request, and end with the step's exit code if not.
# SIGUSR1 and SIGTERM to this script ask the ranks to stop; they count once, since the ranks obey a second one at once.
# The file comes before the signal: ranks that miss it look for the file later.
run_step() {
    local srun_pid='' code=0 heard='' told=''
    trap 'heard=1; trap "" USR1 TERM; touch "$MOE_STOP_FILE" || true; kill -USR1 $srun_pid || true' USR1 TERM
    [[ -z $told_early ]] || touch "$MOE_STOP_FILE" || true

    # Once an agent has ended, the others get half a minute: their ranks then say themselves how they ended, and the
    # code is theirs, not that of a kill.
    srun --nodes="$num_nodes" --ntasks="$num_nodes" --ntasks-per-node=1 --export=ALL \
        --kill-on-bad-exit=0 --wait=30 "$@" &
    srun_pid=$!
    wait "$srun_pid" || code=$?
    if [[ -n $heard ]]; then # The signal has ended the wait, not srun.
        code=0
        wait "$srun_pid" || code=$?
    fi

    [[ ! -f $MOE_EXIT_FILE ]] || told=$(<"$MOE_EXIT_FILE")
    rm -f "$MOE_EXIT_FILE" "$MOE_STOP_FILE"
    [[ $told == 75 ]] || exit "$code"
    # Of a job that was cancelled, or that Slurm requeues itself, nothing is left to do.
    if [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
        echo "Stopped on request, and saved; requeues job $SLURM_JOB_ID."
        scontrol requeue "$SLURM_JOB_ID" || true
    fi
    exit 75
}
