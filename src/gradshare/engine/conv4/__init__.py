"""Conv-4, run for many tasks by code of its own."""
