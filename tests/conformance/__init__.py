"""Tests against the frameworks themselves, run where a checkout of them is at hand."""
