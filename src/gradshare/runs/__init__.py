"""Runs: options, folders, training, checkpoints, evaluation, models to pass on."""
