"""An env manager for ROLL's agentic pipelines whose trajectories are judged when they are finished."""

from __future__ import annotations

from roll.pipeline.agentic.env_manager.traj_env_manager import TrajEnvManager

from roll_adapter import QRewardTrajectoryMixin


class JudgedTrajEnvManager(QRewardTrajectoryMixin, TrajEnvManager):
    """`TrajEnvManager`, and a judge's reward on the last step of every trajectory."""
