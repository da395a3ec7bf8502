"""How a network is run for many tasks at once: any module, Conv-4 on a CPU, GPU kernels, CUDA graphs, processes."""
