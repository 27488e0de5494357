"""verl's side of a reward as a stand-in for unit tests: same calls, same order, same failures; it needs numpy."""
