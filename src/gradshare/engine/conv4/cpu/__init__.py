"""Conv-4 on a CPU: PyTorch's operators, with derivatives of our own."""
