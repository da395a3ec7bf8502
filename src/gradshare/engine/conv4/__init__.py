"""Conv-4 for many tasks by code of its own: `cpu` on a CPU, `triton` on an NVIDIA GPU. The mathematics is the same."""
