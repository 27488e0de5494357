"""ROLL itself, on a CPU: its clusters, schedulers and pipeline on a small Ray, with everything of a GPU stood in for.

ROLL is not on the package index, and its pins fit no environment with current frameworks, so these tests run where
`QREWARD_ROLL_SRC` names a checkout and ROLL's packages are installed (`environment.sh` makes such an environment and
runs them there). Elsewhere they are skipped, but for what `FakeRollTrainer` plays, which needs torch only. ROLL and Ray
run in a process of their own (`player`), which the tests talk to (`real`) and whose reward is judged by servers in the
test process. What is played is told in `scenarios`, which knows nothing of ROLL, so that `fake` can play the same.
"""
