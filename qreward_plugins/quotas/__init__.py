"""What sources still allow: ledgers of sliding windows, pacing, and the quota that joins them with concurrency."""

from .ledger import MARGIN_S, Entry, Ledger, Pace
from .quota import UNDECLARED_CONCURRENCY, Quota, QuotaUse, Reservation

__all__ = ["MARGIN_S", "UNDECLARED_CONCURRENCY", "Entry", "Ledger", "Pace", "Quota", "QuotaUse", "Reservation"]
