"""Shares the limits of sources between processes: of a Ray job, of one machine, or over a reward server."""

from .channels import OpenedChannel, open_channel
from .keeper import Keeper
from .keys import may_share, source_addresses, source_keys
from .member import Demand, Member
from .membership import Channel, Membership

__all__ = [
    "Channel",
    "Demand",
    "Keeper",
    "Member",
    "Membership",
    "OpenedChannel",
    "may_share",
    "open_channel",
    "source_addresses",
    "source_keys",
]
