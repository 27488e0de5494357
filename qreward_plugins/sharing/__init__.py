"""Shares the limits of sources between the processes of one job."""

from .channels import open_channel
from .keeper import Keeper
from .keys import may_share, source_keys
from .member import Demand, Member
from .membership import Channel, Membership

__all__ = ["Channel", "Demand", "Keeper", "Member", "Membership", "may_share", "open_channel", "source_keys"]
