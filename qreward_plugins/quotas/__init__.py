"""Quotas of sources: sliding-window ledgers, pacing, learned limits and retry budgets, joined in one `Quota`.

`demand` bounds the tokens of a request by its body, and `tokens` learns from answers what texts really take.
"""
