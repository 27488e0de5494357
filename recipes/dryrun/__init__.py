"""Checks of a recipe before it is started, for `recipes/dry_run.py`."""
