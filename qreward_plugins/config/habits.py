"""The keys that people write by habit, from other tools, each with the key of this package that they mean.

A hint counts only where the key that it names exists, so one word may stand with several keys. A misspelt key needs no
hint: the nearest spelling is found anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from .findings import Path, letters
from .registry import rooms

HABITS: dict[str, str] = {
    "sources": """
        base_url: url urls api_base endpoint endpoints host address uri
        url: base_url urls api_base endpoint endpoints host address uri
        model: model_name model_id deployment model_path served_model_name
        api_key: key token auth_token api_token access_token openai_api_key
        api_key_env: key_env env_key api_key_var api_key_name env token_env
        headers: extra_headers default_headers http_headers
        parameters: extra_body params generation_config sampling_params options temperature max_tokens top_p
        limits.requests_per_minute: rpm max_rpm rate_limit request_rate rps qps rate
        limits.tokens_per_minute: tpm max_tpm token_limit token_rate
        limits.concurrency: max_concurrency max_concurrent concurrent_requests max_parallel parallelism semaphore
        limits.window_s: period interval
        timeouts.total_s: timeout timeout_s request_timeout total_timeout read_timeout deadline
        timeouts.connect_s: connect_timeout connection_timeout
        price.per_request: cost cost_per_request
        price.input_per_million: input_price input_cost prompt_price
        price.output_per_million: output_price output_cost completion_price
        weight: share ratio
        verify_tls: verify verify_ssl ssl_verify ssl tls insecure
        httpx.proxy: http_proxy https_proxy proxies
        batch.max_size: batch_size max_batch_size
        batch.max_wait_s: batch_wait batch_timeout
        routing: router load_balancing
        dialect: api api_type provider
        protocol: api api_type
        function: path callable entrypoint func fn reward_fn
        kwargs: args reward_kwargs
        body: payload request_body template
        score_key: score_path result_key response_key
        data_parallel: dp num_replicas replicas
        tensor_parallel: tp tp_size num_gpus gpus
        arguments: server_args engine_args vllm_args extra_args
        engine.max_attempts: retries max_retries num_retries attempts""",
    "judges": """
        sources: source endpoint endpoints model models judge_model client llm server provider
        instructions: prompt prompt_template template rubric rubrics instruction user_prompt judge_prompt
        system: system_prompt system_message
        criteria: criterion dimensions aspects metrics
        score_range: scale range score_scale min_score max_score likert
        reward_range: reward_scale output_range normalize rescale
        correct_at: threshold pass_threshold passing_score cutoff
        floor: default_score fallback fail_score failure_score default
        invalid_retries: retries max_retries num_retries
        response_format: json_mode structured_output guided_json output_format schema
        max_tokens: max_completion_tokens max_new_tokens max_output_tokens
        temperature: temp
        images: vision multimodal
        reduce: aggregate aggregation pooling
        weights: judges parts components coefficients rewards""",
    "": """
        sources: endpoints providers servers backends clients llms
        judges: rewards rubrics graders reward_functions evaluators scorers
        routes: routing router data_sources
        observers: callbacks loggers hooks listeners
        on_failure: on_error failures failure_policy
        engine: settings options config runtime
        engine.deadline_s: deadline timeout timeout_s total_timeout
        engine.max_attempts: retries max_retries num_retries attempts
        engine.scheduling: scheduler
        engine.scheduling.hedge: hedging speculative
        engine.journal.path: cache database db cache_path
        engine.journal.reuse: use_cache resume
        engine.reload: watch hot_reload auto_reload
        groups.min_scored: min_group_size quorum""",
}
"""By top-level key ("" for all the rest of the tree), a line for each key: its path below a source or a judge, and the
words that mean it. A path that begins with `engine.` is that of the tree.
"""


def meant_by(key: str, above: Path) -> Iterator[Path]:
    """Yield the paths that `key` in the mapping at `above` may mean. Not every path has a key of its kind."""
    entry = above[:2] if len(above) >= 2 and above[0] in rooms else ()
    for target in _targets(str(entry[0]) if entry else "").get(letters(key), ()):
        yield target if target[0] == "engine" else (*entry, *target)


@cache
def _targets(room: str) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = {}
    for line in HABITS[room].split("\n")[1:]:
        path, words = line.split(":")
        for word in words.split():
            found.setdefault(letters(word), []).append(tuple(path.strip().split(".")))
    return found
