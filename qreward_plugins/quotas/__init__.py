"""What a source still allows: limits (`Quota`), pauses and its circuit breaker, and budgets of dollars and retries.

`tokens` bounds the tokens of a request by its body, and learns from answers what texts really take.
"""
