"""Many runs: the cells of a grid, each an ordinary run folder, trained here or on a Ray cluster."""
