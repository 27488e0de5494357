"""A stand-in for slime's rollout side, for unit tests: the same calls, order and failures, without dependencies."""
