"""`python -m qreward_plugins.cli`, for where the command is not on the path."""

from __future__ import annotations

from . import main

main()
