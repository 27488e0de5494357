"""A judge on the GPUs of a real slime run is awake for every reward, and sleeps before slime trains."""

from __future__ import annotations

from tests.replicas.conftest import StandIns

from ..judges import Judge
from ..scenarios import Scenario
from .real import Player, play

STEPS = 2


def test_the_judge_sleeps_while_slime_trains(slime_source, tmp_path):
    stand_ins = StandIns(tmp_path)
    engine = {"deadline_s": 30, "shared": "off"}
    tree = stand_ins.tree(colocated=True, sleep_mode=True, data_parallel=1, start_within_s=300, engine=engine)

    def script(stage):
        for number in range(STEPS):
            stage.evaluate(number)
            stage.step(number)
            with (tmp_path / "notes").open("a") as notes:
                notes.write("trainer /train\n")

    scenario = Scenario("sleeping", Judge(), "all", steps=STEPS, evaluate=True)
    (tmp_path / "player").mkdir()
    with Player(slime_source, tmp_path / "player") as player:
        played = play(scenario, player, script=script, tree=tree, flags=["--colocate"])
    assert (played.error, played.error_text) == (None, "")
    events = [line.split()[1].partition("?")[0] for line in stand_ins.notes()]
    events = [event for event in events if event in ("/sleep", "/wake_up", "/train")]
    assert events == (["/sleep", "/train", "/wake_up"] * STEPS)[:-1]
    assert len(played.steps) == len(played.evaluations) == STEPS
    for step in (*played.steps, *played.evaluations):
        assert {round(sample.reward, 6) for sample in step.samples} == {0.7}
    assert stand_ins.living() == [], "the servers end with the process of slime"
