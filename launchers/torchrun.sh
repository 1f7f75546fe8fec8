#!/usr/bin/env bash
# Train on the GPUs of this machine. From the repository's root:
#
#   launchers/torchrun.sh --config-name L1_8x7B_ep checkpoint.ckpt_dir=/path/to/ckpt
#   NPROC_PER_NODE=2 launchers/torchrun.sh --config-name L0_sanity      # without GPUs
#
# Every argument goes to train_fsdp2_ep.py unchanged. Variables:
#   NPROC_PER_NODE  ranks; the number of visible GPUs by default
#   PYTHON          the interpreter; .venv/bin/python by default, where it exists, or else python3
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3

# nvidia-resiliency-ext depends on the old pynvml package, about which every import of torch warns.
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore:The pynvml package:FutureWarning}

num_ranks=${NPROC_PER_NODE:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
if [[ $num_ranks == 0 ]]; then
    echo "torchrun.sh: no GPU is visible here. Set NPROC_PER_NODE to the number of ranks to run on the CPU." >&2
    exit 2
fi

# --standalone: a free port is found, so that several runs on one machine do not meet.
exec "$python" -m torch.distributed.run --standalone --nproc-per-node="$num_ranks" "$root/train_fsdp2_ep.py" "$@"
