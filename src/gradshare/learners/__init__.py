"""A model bound to a rule, a loss and an engine: the learner, the algorithms, the outer step."""
