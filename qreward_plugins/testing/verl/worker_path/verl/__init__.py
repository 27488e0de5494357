"""What a worker process of a reward function finds of verl, where a `FakeVerlTrainer` plays it."""
