"""Chooses the environment variable for an API key, and recognizes keys, so that no key is written to a file."""

from __future__ import annotations

import os
import re
from ipaddress import ip_address
from urllib.parse import urlsplit

_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_MOST_PLAIN_CHARS = 15
_MOST_DIGITS = 4
_VARIABLES = {
    "api.openai.com": "OPENAI_API_KEY",
    "api.anthropic.com": "ANTHROPIC_API_KEY",
    "generativelanguage.googleapis.com": "GEMINI_API_KEY",
    "openrouter.ai": "OPENROUTER_API_KEY",
}
OTHER_VARIABLE = "JUDGE_API_KEY"


def is_variable(answer: str) -> bool:
    """Whether an answer is the name of an environment variable and cannot be a key: the name of one that is set, or a
    name in capitals. Keys of some providers are words of capitals and digits, too.
    """
    if answer in os.environ:
        return True
    plain = len(answer) <= _MOST_PLAIN_CHARS or "_" in answer
    return bool(_NAME.fullmatch(answer)) and plain and sum(map(str.isdigit, answer)) <= _MOST_DIGITS


def usual_variable(url: str) -> str:
    """Return the usual variable for a key of this endpoint; "" for a server in a private network."""
    host = _host(url)
    if host in _VARIABLES:
        return _VARIABLES[host]
    return "" if url.startswith("framework://") or is_local(host) else OTHER_VARIABLE


def variable_for_key(url: str) -> str:
    """Return the name of the variable for a key of this endpoint."""
    return usual_variable(url) or OTHER_VARIABLE


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def is_local(host: str) -> bool:
    """Whether a host is one of this machine or of a private network."""
    try:
        return not ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith((".local", ".internal"))


_KEYS = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:sk|xai|pplx|rk)-[A-Za-z0-9_-]{12,}|(?:gsk|hf|ghp|r8)_[A-Za-z0-9]{12,}|AIza[A-Za-z0-9_-]{12,}"
    r"|AKIA[A-Z0-9]{12,})"
)


def without_key(text: str) -> str:
    """Return the text. Raises ValueError, which does not repeat it, if a key of a provider is in it."""
    if _KEYS.search(text):
        raise ValueError("that holds something that looks like an API key; no key is written to the file")
    return text


def is_local_url(url: str) -> bool:
    """Whether a URL leads to a private network, or to a server that the trainer starts."""
    return url.startswith("framework://") or is_local(_host(url))
