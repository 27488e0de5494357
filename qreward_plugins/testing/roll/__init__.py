"""ROLL's rollout side as a stand-in for unit tests: same calls, same order, same failures; it needs torch only."""
