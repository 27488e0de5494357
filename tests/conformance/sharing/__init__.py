"""Limits that the workers of a Ray job share, on a real Ray whose processes and nodes are killed and stopped.

It takes minutes, so it runs where `QREWARD_RAY_DEATHS=1` is set.
"""
