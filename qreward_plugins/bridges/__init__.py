"""Rewards for libraries that take a function or a class of yours: TRL, ms-swift, verifiers, NeMo-Gym and OpenEnv.

Such a library needs no reward manager and no server: a bridge is the object that it asks for, over a configuration.

    from qreward_plugins.bridges.trl import reward

    trainer = GRPOTrainer(reward_funcs=[reward("judges.yaml")], ...)

- `trl`: a reward function.
- `ms_swift`: an ORM.
- `verifiers`: a reward function of tasks.
- `nemo_gym`: a resources server.
- `openenv`: a rubric.
- `scorer`: what they share: a configuration, and its engine in this process.

A sample without a reward never gets a number. TRL and ms-swift get None, which they leave out; the others have no value
for this, so they get the error that each of them keeps out of training. `nemo_gym` and `openenv` import their library,
for its base class; the others do not.
"""
