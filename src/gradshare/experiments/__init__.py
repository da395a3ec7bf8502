"""Presets, arms, comparisons and grids of runs."""
