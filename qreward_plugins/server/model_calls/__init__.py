"""The proxy of model calls: clients' own requests go to the sources with limits, retries, failover and hedging.

It has no HTTP of its own. `transport` puts it into httpx clients, and `server` behind a port.
"""

from __future__ import annotations

from .exchange import Pieces
from .proxy import ClientReply, ClientRequest, Proxy, refusal

__all__ = ["ClientReply", "ClientRequest", "Pieces", "Proxy", "refusal"]
