"""Chaos: runs are killed, stopped, starved of disk space and damaged, and must keep what docs/reliability.md promises.

    python -m tests.stress.chaos --kills 1000 --damaged 3000 --seed 0 --minutes 45     # make chaos
    python -m tests.stress.chaos --only damage --damaged 200 --seed 7
    python -m tests.stress.chaos --sample --minutes 5                                  # some of everything

Importing PyTorch takes seconds. So one process imports everything once, and forks a child for every try. The child
calls the `main` of the command line with the words that a user would type.
"""
