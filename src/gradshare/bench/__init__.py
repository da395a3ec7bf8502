"""Benchmarks: the time of a meta-iteration, next to other libraries and to the least time that the machine allows."""
