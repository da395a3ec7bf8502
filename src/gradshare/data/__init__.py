"""Data sets: archive -> store -> Episodes."""
