"""verl on a laptop's CPU: a platform and a rollout server, so that the real trainer runs without a GPU.

Load it with `VERL_USE_EXTERNAL_MODULES=verl_cpu`; verl then imports it in every process, and no file of verl is
changed. It is for tiny models and demonstrations, not for speed.
"""

from __future__ import annotations

from . import platform

platform.install()

# Only here: these import modules of verl that ask for the platform while they are imported.
from . import checkpoint, critic, rollout  # noqa: E402

rollout.install()
checkpoint.install()
critic.install()

__all__: list[str] = []
