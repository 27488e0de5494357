from qreward_plugins.testing.verl.reward_functions import default_compute_score

__all__ = ["default_compute_score"]
