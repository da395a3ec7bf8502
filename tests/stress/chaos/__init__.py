"""Chaos: runs killed, stopped, starved of disk and damaged, which must keep what docs/reliability.md promises.

    python -m tests.stress.chaos --kills 1000 --damaged 3000 --seed 0 --minutes 45     # make chaos
    python -m tests.stress.chaos --only damage --damaged 200 --seed 7

Importing PyTorch takes seconds, so one process imports everything once and forks a child for every try. The child calls
the command line's own `main` with the words that a user would type.
"""
