"""What tests are set up with, one noun a module. None of it is a test, and none of it is shipped.

- `configs`: a configuration and samples, in one line each, and what is wrong with a configuration.
- `stage`: an engine in virtual time over scripted sources, a judge without an engine, and a test in virtual time.
- `journals`: a journal in memory, and one that is written without an engine, with sources of a run that goes on.
- `wire`: engines against judge servers on loopback.
- `programs`: a program in a process of its own, which ends with its test.
- `players`: one step of each framework's fake trainer.
- `leaks`: tasks, threads and sockets that are left.
- `tables`: a table of cases as one test; a module that is imported when it is first used; scripts as modules.

    played = Stage({"a": 1.0, "b": hangs}).play(make_samples(8))
    assert played.all_scored
"""

from .configs import make_config, make_limits, make_sample, make_samples, mistakes_of
from .journals import MemoryJournal, record, sql, write_live
from .leaks import connections_left, no_thread_left, tasks_left
from .players import FRAMEWORKS, Step, play
from .programs import SAFETY_S, Program, comes, lives, wait_until
from .stage import NEVER_S, Played, Recorder, Stage, asked, fails, hangs, in_virtual_time, now, scored_text, takes, told
from .tables import each_of, imported, later, scripts
from .wire import Wired, by_word, overlap_of, wired

__all__ = [
    "FRAMEWORKS",
    "NEVER_S",
    "SAFETY_S",
    "MemoryJournal",
    "Played",
    "Program",
    "Recorder",
    "Stage",
    "Step",
    "Wired",
    "asked",
    "by_word",
    "comes",
    "connections_left",
    "each_of",
    "fails",
    "hangs",
    "imported",
    "in_virtual_time",
    "later",
    "lives",
    "make_config",
    "make_limits",
    "make_sample",
    "make_samples",
    "mistakes_of",
    "no_thread_left",
    "now",
    "overlap_of",
    "play",
    "record",
    "scored_text",
    "scripts",
    "sql",
    "takes",
    "tasks_left",
    "told",
    "wait_until",
    "wired",
    "write_live",
]
