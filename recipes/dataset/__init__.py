"""Data sets of the frameworks: made from questions and answers, and checked, for `recipes/prepare_data.py`."""
