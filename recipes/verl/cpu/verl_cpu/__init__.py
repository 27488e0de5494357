"""verl on a laptop's CPU: a platform and a rollout server, so that the real trainer runs where no GPU is.

Load it with `VERL_USE_EXTERNAL_MODULES=verl_cpu`; verl then imports it in every process, and no file of verl is
touched. It is made for tiny models and for seeing a recipe work, not for speed.
"""

from __future__ import annotations

from . import platform

platform.install()

# Not before: these import modules of verl that ask for the platform while they are imported.
from . import checkpoint, critic, rollout  # noqa: E402

rollout.install()
checkpoint.install()
critic.install()

__all__: list[str] = []
