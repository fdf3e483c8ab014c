"""GPU memory that PyTorch's allocator does not give out, by formula: it cannot be counted on another machine."""

MIB = 2**20

# The CUDA context with PyTorch's kernels loaded: what nvidia-smi shows after `torch.zeros(1, device="cuda")`; 0.4 to
# 0.6 GiB on A100 and H100, by driver and version.
CONTEXT = 512 * MIB

# cuBLAS allocates this from PyTorch once for each handle and stream (CUBLAS_WORKSPACE_CONFIG, 8 MiB before Hopper).
CUBLAS_WORKSPACE = 32 * MIB

# NCCL keeps a buffer of NCCL_BUFFSIZE (4 MiB unless set) for each direction of each channel of a communicator, and up
# to 32 channels; 16 are usual between the GPUs of a node, fewer between nodes
# (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
NCCL_BUFFER = 4 * MIB
NCCL_CHANNELS = 16


def bytes_outside(num_communicators: int) -> int:
    """Bytes beside what is counted on a GPU that takes part in so many NCCL communicators."""
    return CONTEXT + CUBLAS_WORKSPACE + num_communicators * 2 * NCCL_CHANNELS * NCCL_BUFFER
