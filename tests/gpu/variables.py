"""Environment variables of the processes that the GPU tests start."""

# NVLink multicast needs rights that containers often lack, and NCCL and others fail instead of going without.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "UB_SKIPMC": "1",
}
