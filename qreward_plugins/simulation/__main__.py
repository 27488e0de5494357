"""`python -m qreward_plugins.simulation`: soak the scheduler, or with `--cluster` the sharing of limits; or play one
seed and show it.
"""

import sys

from .soak import main

if __name__ == "__main__":
    sys.exit(main())
