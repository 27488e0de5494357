"""Stands in for the package of this name: slime imports it, and nothing of it runs without a GPU."""
