# Training on NVIDIA GPUs (Ampere or newer, driver 580 or newer for CUDA 13).
#
# Not built where the project is developed: there was no container daemon. So no step below has been run; the
# likeliest to need attention is the source build of Transformer Engine's PyTorch extension.
#
#   docker build -t moe_framework .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 moe_framework \
#       torchrun --nproc_per_node=8 train_fsdp2_ep.py --config-name L0_sanity device=cuda train.global_batch_size=32

FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends git python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
RUN python3.12 -m venv "$VIRTUAL_ENV"

# First alone: Transformer Engine's build imports torch, and this layer survives changes of the project.
RUN pip install --no-cache-dir 'torch==2.11.*' numpy 'setuptools>=77' wheel ninja pybind11

WORKDIR /workspace/moe_framework
COPY pyproject.toml setup.py README.md LICENSE ./
COPY moe_framework ./moe_framework
# The CUDA 13 core is named because the extension does not say which of the two cores it needs.
RUN NVTE_FRAMEWORK=pytorch MAX_JOBS=4 pip install --no-cache-dir --no-build-isolation \
    -e '.[te,megatron,resilience,hf,text,mx,demo]' 'transformer-engine[core_cu13]==2.20.*'

COPY . .
CMD ["python", "train_fsdp2_ep.py", "--help"]
