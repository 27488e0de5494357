"""The keys that people write by habit, from other tools, each with the key of this package that they mean.

A hint counts only where the key that it names exists, so one word may stand with several keys. A misspelt key needs no
hint: the nearest spelling is found anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from .findings import Path, letters
from .registry import rooms

HABITS: dict[str, dict[str, str]] = {
    "sources": {
        "base_url": "url urls api_base base endpoint endpoints host address openai_api_base server_url uri base_urls",
        "url": "base_url urls api_base base endpoint endpoints host address server_url uri",
        "model": "model_name model_id deployment engine checkpoint model_path served_model_name",
        "api_key_env": "key_env env_key api_key_variable api_key_var api_key_name env api_key_environment token_env",
        "api_key": "key token auth_token api_token access_token openai_api_key secret bearer",
        "headers": "extra_headers default_headers http_headers header",
        "parameters": "extra_body params extra_args generation_config sampling_params sampling body_params options "
        "temperature max_tokens top_p seed chat_template_kwargs",
        "limits.requests_per_minute": "rpm max_rpm rate_limit request_rate requests_per_min rps qps rate",
        "limits.tokens_per_minute": "tpm max_tpm token_limit tokens_per_min token_rate",
        "limits.concurrency": "max_concurrency max_concurrent concurrent concurrent_requests max_concurrent_requests "
        "max_parallel parallel parallelism concurrency_limit semaphore max_in_flight num_workers",
        "limits.window_s": "period period_s interval window_size",
        "timeouts.total_s": "timeout timeout_s request_timeout total_timeout read_timeout timeout_seconds deadline",
        "timeouts.connect_s": "connect_timeout connection_timeout",
        "price.per_request": "cost cost_per_request",
        "price.input_per_million": "input_price input_cost prompt_price",
        "price.output_per_million": "output_price output_cost completion_price",
        "weight": "share ratio fraction",
        "verify_tls": "verify verify_ssl ssl_verify ssl tls insecure",
        "httpx.proxy": "proxy http_proxy https_proxy proxies",
        "httpx.cert": "cert client_cert certificate",
        "httpx.auth": "auth",
        "batch.max_size": "batch_size max_batch_size",
        "batch.max_wait_s": "batch_wait batch_timeout max_wait",
        "routing": "router load_balancing balancing routing_strategy",
        "dialect": "api api_type api_format provider api_version",
        "function": "path callable entrypoint func fn module reward_fn target file",
        "kwargs": "args reward_kwargs function_kwargs",
        "body": "payload request_body template json",
        "score_key": "score_path result_key response_key output_key",
        "protocol": "api api_type",
        "data_parallel": "dp dp_size num_replicas replicas",
        "tensor_parallel": "tp tp_size tensor_parallel_size num_gpus gpus gpus_per_replica",
        "arguments": "server_args engine_args vllm_args extra_args args",
        "engine.max_attempts": "retries max_retries num_retries retry attempts",
    },
    "judges": {
        "sources": "source endpoint endpoints model models judge_model client backend llm server provider",
        "instructions": "prompt prompt_template template rubric rubrics instruction user_prompt judge_prompt",
        "system": "system_prompt system_message",
        "criteria": "criterion dimensions aspects components metrics",
        "score_range": "scale range score_scale scores grades min_score max_score likert",
        "reward_range": "reward_scale output_range normalize normalise rescale clip",
        "correct_at": "threshold pass_threshold correct_threshold pass_at passing_score success_threshold cutoff",
        "floor": "default_score fallback fallback_score fail_score failure_score default min_reward",
        "invalid_retries": "retries max_retries num_retries parse_retries",
        "response_format": "json_mode structured_output guided_json output_format schema json_schema",
        "max_tokens": "max_completion_tokens max_new_tokens max_output_tokens",
        "temperature": "temp",
        "images": "image vision multimodal",
        "transform": "transforms scaling postprocess shift scale normalize",
        "reduce": "aggregate aggregation reduction pooling",
        "weights": "judges parts components coefficients rewards mix weighting",
    },
    "": {
        "sources": "endpoints providers servers backends clients llms services reward_models",
        "judges": "rewards rubrics graders reward_functions evaluators scorers reward_fns judge reward metrics",
        "routes": "routing router data_sources routers mapping dispatch",
        "observers": "callbacks loggers hooks listeners tracers logging",
        "on_failure": "failure on_error failures error_policy failure_policy",
        "engine": "settings options config runtime",
        "engine.deadline_s": "deadline timeout timeout_s total_timeout sample_timeout max_time_s",
        "engine.max_attempts": "retries max_retries num_retries attempts retry",
        "engine.scheduling": "scheduler",
        "engine.scheduling.hedge": "hedging hedges speculative",
        "engine.scheduling.hedge_budget": "hedge_ratio hedge_rate",
        "engine.journal.path": "cache database db cache_path cache_dir record log_path journal_path",
        "engine.journal.reuse": "use_cache reuse_answers resume",
        "engine.reload": "watch hot_reload auto_reload",
        "engine.priority": "priorities",
        "groups.min_scored": "min_group_size min_samples quorum min_valid",
        "groups.give_up_after": "max_dropped max_dropped_groups",
    },
}
"""By top-level key ("" for all the rest of the tree): the path of a key below it, and the words that mean it. In
`sources`, a path that begins with `engine.` is that of the tree.
"""


def meant_by(key: str, above: Path) -> Iterator[Path]:
    """Yield the paths that `key` in the mapping at `above` may mean. Not every path has a key of its kind."""
    entry = above[:2] if len(above) >= 2 and above[0] in rooms else ()
    for target in _targets(str(entry[0]) if entry else "").get(letters(key), ()):
        yield target if target[0] == "engine" else (*entry, *target)


@cache
def _targets(room: str) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = {}
    for path, words in HABITS[room].items():
        for word in words.split():
            found.setdefault(letters(word), []).append(tuple(path.split(".")))
    return found
