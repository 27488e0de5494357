"""Failed samples on verl's real trainers, on the CPU: `QREWARD_VERL=1 pytest tests/conformance/verl`.

verl's package is all that it takes, but each run trains in a subprocess for a minute, so they are asked for by name.
"""
