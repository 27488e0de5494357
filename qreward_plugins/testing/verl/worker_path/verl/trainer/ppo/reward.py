from qreward_plugins.testing.verl.reward_functions import get_custom_reward_fn

__all__ = ["get_custom_reward_fn"]
