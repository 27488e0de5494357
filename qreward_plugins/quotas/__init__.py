"""Quotas of sources: sliding-window ledgers, pacing, learned limits and retry budgets, joined in one `Quota`.

`tokens` bounds the tokens of a request by its body, and learns from answers what texts really take.
"""
