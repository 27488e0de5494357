"""ROLL's rollout side for unit tests, as a stand-in: the same calls, order and failures. It needs only torch."""
