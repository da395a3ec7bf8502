"""Conv-4 on a GPU, by kernels of our own. Needs Triton, which PyTorch for CUDA brings."""
