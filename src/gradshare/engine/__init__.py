"""How a network runs for many tasks at once: any module, Conv-4 on a CPU and on a GPU, CUDA graphs, processes."""
