"""A stand-in for ROLL's rollout side, for unit tests: the same calls, order and failures."""
