"""A reward server as the engine: samples go to it over one connection, and its outcomes come back."""

from .facts import FACTS_PATH, PROTOCOL, ServerFacts, ask_facts, facts_of
from .fingerprint import fingerprint_of
from .link import PATH
from .rows import FRAMEWORK_PROMPT, outcome_of_row, row_of_sample, rows_of, was_closed
from .scoring import RemoteScoring
from .server import RemoteServer, open_server

__all__ = [
    "FACTS_PATH",
    "FRAMEWORK_PROMPT",
    "PATH",
    "PROTOCOL",
    "RemoteScoring",
    "RemoteServer",
    "ServerFacts",
    "ask_facts",
    "facts_of",
    "fingerprint_of",
    "open_server",
    "outcome_of_row",
    "row_of_sample",
    "rows_of",
    "was_closed",
]
