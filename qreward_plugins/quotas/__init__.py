"""Quotas of sources: sliding-window ledgers, pacing, learned limits and retry budgets, joined in one `Quota`."""

from .concurrency import UNDECLARED_CONCURRENCY, ConcurrencyWindow
from .ledger import MARGIN_S, Ledger
from .pace import BucketEvidence, Pace
from .quota import Quota
from .reservation import Reservation
from .retries import RetryBudget
from .shared import Resource, SharedQuota
from .use import QuotaUse

__all__ = [
    "MARGIN_S",
    "UNDECLARED_CONCURRENCY",
    "BucketEvidence",
    "ConcurrencyWindow",
    "Ledger",
    "Pace",
    "Quota",
    "QuotaUse",
    "Reservation",
    "Resource",
    "RetryBudget",
    "SharedQuota",
]
