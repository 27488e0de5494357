"""slime itself, on a CPU: its data source, its rollouts and its rollout manager, with everything of a GPU stood in for.

slime is not on the package index, so these tests run against the checkout that `QREWARD_SLIME_SRC` names and are
skipped without one. slime keeps its state in module globals and the stubs of `stubs/` would mislead other packages of
the test process, so slime runs in a process of its own (`player`), which the tests talk to (`trainers`) and whose
reward is judged by servers in the test process. What is played is told in `scenarios`, which knows nothing of slime, so
that `FakeSlimeTrainer` can play the same.
"""
