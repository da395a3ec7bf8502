"""The paper: episodes, rules, sharing, the inner loop, the state. Needs PyTorch and NumPy alone.

Read `episodes`, `rules`, `sharing`, `adapt`, `state` in this order.
"""

SPLITS = ("train", "val", "test")
