"""Shares the limits of sources between the processes of one job."""

from .keeper import Keeper
from .keys import may_share, source_keys
from .member import Demand, Member
from .membership import Channel, Membership
from .ray_keeper import open_channel

__all__ = ["Channel", "Demand", "Keeper", "Member", "Membership", "may_share", "open_channel", "source_keys"]
