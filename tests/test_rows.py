"""Which test holds what users are promised: each feature and each promise names tests at the public surface.

A test of this table must fail when its feature breaks. Whoever moves or deletes one names another here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

FEATURES: dict[tuple[int, str], str] = {
    (1, "verl: reward manager in the trainer"): """
        conformance/verl/test_trainings.py::test_a_failed_sample_is_neutral_to_its_group
        verl_adapter/test_startup.py::test_every_way_to_select_it_resolves_to_the_class
        recipes/test_verl_recipes.py::test_grpo_trains_while_one_judge_is_flaky_and_some_samples_are_lost
        """,
    (2, "verl: older contracts"): """
        verl_adapter/test_manager.py::test_rewards_stand_at_the_last_token_of_each_response
        verl_adapter/test_manager.py::test_a_failed_sample_is_neutral_to_its_group_and_a_group_that_failed_has_one_number
        """,
    (3, "slime: rewards, filters, logs, aborts"): """
        slime_adapter/test_scoring.py::test_a_group_and_a_fan_out_get_a_list
        slime_adapter/test_scoring.py::test_an_evaluation_sample_gets_the_mean_of_its_data_set
        slime_adapter/test_hooks.py::test_a_group_with_too_few_rewards_is_dropped_under_its_reason
        slime_adapter/test_hooks.py::test_the_step_is_summed_up_in_slimes_own_dict
        slime_adapter/test_hooks.py::test_pending_rewards_end_while_the_judge_still_thinks
        """,
    (4, "ROLL: worker, rollout loop, trajectories"): """
        roll_adapter/test_on_the_trainer.py::test_rewards_are_the_judges
        roll_adapter/test_on_the_trainer.py::test_the_batch_path_cuts_groups_between_workers
        roll_adapter/test_rollouts.py::test_the_judges_reward_is_added_to_that_of_the_last_step
        """,
    (5, "recipes"): """
        recipes/test_verl_recipes.py::test_every_key_is_one_of_verls
        recipes/test_launch_scripts.py::test_a_recipe_sets_exactly_these_hooks
        recipes/test_launch_scripts.py::test_every_domain_has_data_and_a_worker_of_its_own
        recipes/test_preparation.py::test_every_judges_file_is_valid_and_can_be_planned
        """,
    (6, "fake trainers"): """
        testing/test_fake_verl.py::test_a_step_has_scores_at_the_last_token_and_advantages_by_group
        test_promises.py::test_no_framework_ever_holds_a_number_that_is_none
        """,
    (7, "connections are kept"): "engine/test_engine.py::test_connections_are_kept_and_used_again",
    (8, "several calls in one request"): """
        engine/test_batches.py::test_calls_that_wait_go_in_full_requests_spread_over_the_declared_places
        engine/test_batches.py::test_the_one_that_fails_a_request_is_found_by_splitting_and_costs_no_neighbour
        """,
    (9, "requests, tokens and concurrency of a source"): """
        engine/test_engine.py::test_real_limits_are_spent_and_kept
        reliability/test_reliability.py::test_a_completion_is_counted_when_it_comes
        """,
    (10, "learned limits"): """
        reliability/test_reliability.py::test_an_undeclared_window_is_found_without_a_storm
        sharing/test_limits.py::test_all_workers_know_what_one_of_them_has_learned
        bench/test_bench.py::test_workers_learn_an_undeclared_limit_with_hardly_more_429s_than_one
        """,
    (11, "retries by class of error"): """
        engine/test_failures.py::test_the_class_of_an_error_decides_whether_it_is_asked_again
        engine/test_limits.py::test_a_429_pauses_the_source_as_long_as_it_says_and_is_no_failure
        engine/test_failures.py::test_retries_come_no_faster_than_their_budget
        """,
    (12, "failover"): """
        engine/test_failures.py::test_a_dead_source_is_not_asked_until_a_probe_is_answered
        engine/test_limits.py::test_a_throttled_sample_moves_on_at_once_where_another_source_is_free
        """,
    (13, "circuit breaker"): "engine/test_failures.py::test_a_dead_source_is_not_asked_until_a_probe_is_answered",
    (14, "hedging"): (
        "engine/test_order.py::test_where_nothing_waits_an_attempt_is_hedged_elsewhere_before_it_is_overdue"
    ),
    (15, "priorities over one pool of sources"): """
        engine/test_order.py::test_one_sample_may_go_before_a_batch
        engine/test_order.py::test_what_goes_first
        """,
    (16, "model routes, strategies, cost"): """
        server/test_passing.py::test_models_are_routed_by_the_first_pattern
        engine/test_order.py::test_a_strategy_and_weights_are_taken_from_the_configuration
        engine/test_order.py::test_prefer_cost_is_taken_from_the_configuration
        """,
    (17, "streams"): """
        engine/test_texts.py::test_verdicts_are_those_without_a_stream
        engine/test_texts.py::test_several_streams_come_interleaved_and_an_error_touches_only_its_own
        """,
    (18, "accelerate"): """
        acceleration/test_limits.py::test_limits_hold_every_call_ends_and_nothing_is_left
        acceleration/test_sync.py::test_a_generator_is_retried_until_its_first_item_and_makes_no_item_ahead
        acceleration/test_accelerate.py::test_each_key_has_a_rate_of_its_own
        acceleration/test_accelerate.py::test_higher_priorities_go_first
        acceleration/test_sync.py::test_threads_share_the_limits_of_a_sync_function
        acceleration/test_sync.py::test_worker_processes_are_killed_and_carry_exceptions
        acceleration/test_limits.py::test_processes_keep_to_one_rate_for_each_key
        """,
    (19, "reload, all or nothing"): """
        engine/test_reload.py::test_waiting_samples_go_to_a_source_that_was_added
        engine/test_reload.py::test_mistakes_are_raised_and_nothing_changes
        engine/test_reload.py::test_a_change_of_the_file_is_applied_and_told_once
        """,
    (20, "metrics and events"): """
        observers/test_observers.py::test_attempts_and_calls_are_counted
        observers/test_observers.py::test_what_is_told_adds_up_to_the_statistics
        """,
    (21, "replicas that we start"): """
        replicas/test_replica_set.py::test_servers_start_with_the_first_samples_and_end_with_the_engine
        replicas/test_replica_set.py::test_mistakes_are_found_before_anything_starts
        replicas/test_ray_pool.py::test_a_pool_on_ray
        """,
    (22, "start, clean-up and restart of replicas"): """
        replicas/test_pool.py::test_a_start_fails_as_a_whole_and_shows_the_log_of_the_guilty_one
        replicas/test_pool.py::test_cancelling_a_start_leaves_nothing
        replicas/test_replica_set.py::test_a_killed_replica_comes_back_and_is_asked_again
        """,
    (23, "routing between replicas"): """
        engine/test_engine.py::test_the_siblings_of_a_group_are_judged_at_one_server
        engine/test_engine.py::test_a_server_that_dies_loses_no_sample
        sources/test_replicas.py::test_the_fullest_cache_is_avoided_while_all_are_known
        """,
    (24, "weights in place, sleep and wake"): """
        replicas/test_weights.py::test_weights_are_updated_in_place_under_load
        replicas/test_weights.py::test_weights_come_from_memory
        replicas/test_weights.py::test_servers_sleep_and_wake_under_load
        """,
    (25, "one limit over all processes"): """
        sharing/test_machine.py::test_a_keeper_that_is_killed_in_the_middle_is_replaced_and_no_limit_is_broken
        sharing/test_ray.py::test_a_keeper_that_is_killed_in_the_middle_is_replaced_and_no_limit_is_broken
        sharing/test_machine.py::test_engines_of_one_process_keep_one_window_at_once_and_one_after_the_other
        server/test_remote_engine.py::test_many_engines_keep_one_limit
        """,
    (26, "finish-time scheduling"): """
        engine/test_order.py::test_a_slow_source_takes_short_samples_and_idles_when_it_would_end_last
        engine/test_batches.py::test_a_batch_is_cut_off_and_its_outcomes_keep_their_order
        """,
    (27, "a failure never trains"): "test_promises.py::test_no_framework_ever_holds_a_number_that_is_none",
    (28, "journal"): """
        engine/test_engine.py::test_the_journal_answers_what_was_scored_before
        cli/test_score_interrupted.py::test_after_sigkill_the_same_command_goes_on
        journal/test_texts.py::test_a_story_is_what_the_server_saw_and_said
        cli/test_journal_command.py::test_a_sample_is_told_of_from_its_prompt_to_its_reward
        """,
    (29, "blame"): "engine/test_batches.py::test_the_last_batch_says_what_it_waited_for",
    (30, "quota discovery and plan"): """
        reliability/test_reliability.py::test_an_undeclared_window_is_found_without_a_storm
        cli/test_plan.py::test_a_plan_is_printed
        planning/test_measured.py::test_a_plan_from_a_journal_is_within_a_tenth_of_the_step
        """,
    (31, "trust in the judge"): """
        engine/test_engine.py::test_an_answer_that_forges_its_own_verdict_is_not_believed
        test_promises.py::test_what_is_no_score_is_a_failure_of_the_verdict_and_never_a_number
        cli/test_audit.py::test_the_judge_gives_z_scores
        judges/test_attacks.py::test_control_tokens_are_rewritten_wherever_they_stand
        """,
    (32, "criteria, sums, foreign judges"): """
        engine/test_judging.py::test_the_parts_are_asked_at_the_same_time_and_added
        test_kinds.py::test_a_judge_of_another_package_asks
        """,
    (33, "reward server"): """
        server/test_server.py::test_one_sample_and_many
        server/test_server.py::test_slime
        server/test_server.py::test_openrlhf
        server/test_server.py::test_get_reward
        server/test_server.py::test_queries_of_many_callers_go_in_one_request_and_each_gets_its_own_rewards
        bridges/test_trl.py::test_a_sample_without_a_reward_gets_none
        bridges/test_environments.py::test_a_sample_without_a_reward_gets_none
        """,
    (34, "plots, tables, check"): """
        cli/test_check.py::test_a_good_source_shows_latency_limits_and_verdict
        cli/test_journal_command.py::test_it_shows_the_steps_their_slowest_samples_and_the_sources
        planning/test_plan.py::test_a_picture_is_drawn
        ui/test_page.py::test_the_samples_of_a_step_are_found_filtered_and_sorted
        """,
    (35, "reward models"): """
        sources/test_reward_models.py::test_a_reward_model_scores_a_batch
        sources/test_reward_models.py::test_each_protocol
        sources/test_reward_models.py::test_equal_numbers_end_the_start
        sources/test_reward_models.py::test_the_reply_has_the_logits_of_each_step
        """,
    (36, "dialects"): """
        testing/test_judge_server.py::test_every_dialect_scores
        sources/test_dialects.py::test_reasoning_models_get_no_temperature_and_the_bound_that_they_read
        """,
    (37, "images"): "engine/test_images.py::test_a_judge_sees_the_images_numbered_and_named",
    (38, "dense rewards"): """
        judges/test_reward_model.py::test_what_steps_add_is_the_score
        conformance/verl/test_trainings.py::test_each_turn_has_its_reward_where_its_mask_ends
        roll_adapter/test_rollouts.py::test_in_parts_each_turn_adds_to_its_own_step
        """,
    (40, "transport of one's own SDK"): """
        server/test_model_calls.py::test_answers_and_streams
        server/test_model_calls.py::test_limits_are_kept
        server/test_model_calls.py::test_another_source_answers_before_the_first_byte
        """,
    (41, "a kind in one file"): """
        examples/test_examples.py::test_rollouts_are_scored_within_its_limits
        examples/test_examples.py::test_the_expensive_judge_is_asked_only_where_the_cheap_one_is_not_sure
        """,
    (42, "a file of rollouts"): """
        cli/test_score.py::test_rows_come_out_in_order_with_their_outcome
        cli/test_score_interrupted.py::test_after_sigkill_the_same_command_goes_on
        """,
    (43, "features of HTTP clients, several keys"): """
        sources/test_httpx.py::test_http2_carries_many_requests_over_one_connection
        sources/test_httpx.py::test_mutual_tls
        sources/test_httpx.py::test_socks_with_a_password
        sources/test_httpx.py::test_auth_signs_and_is_never_shown
        engine/test_limits.py::test_each_key_has_its_own_limits
        """,
    (44, "a judge that shares the trainer's devices"): """
        replicas/test_colocated.py::test_verl
        replicas/test_colocated.py::test_slime
        replicas/test_colocated.py::test_roll
        verl_adapter/test_startup.py::test_the_reward_model_that_verl_serves_is_found_by_its_name
        """,
}

PROMISES: dict[tuple[int, str], str] = {
    (1, "one outcome a sample, in order, by its deadline"): """
        test_promises.py::test_every_sample_has_one_outcome_in_order_by_its_deadline
        simulation/test_soak.py::test_every_promise_is_kept
        engine/test_judging.py::test_every_sample_of_a_tree_has_one_outcome_in_time
        engine/test_samples.py::test_a_field_that_holds_something_else_is_that_samples_failure
        """,
    (2, "no number that is none"): """
        test_promises.py::test_what_is_no_score_is_a_failure_of_the_verdict_and_never_a_number
        judges/test_function.py::test_what_is_no_finite_number_is_invalid
        engine/test_samples.py::test_a_verdict_holds_what_is_finite_in_float32_and_nothing_else
        test_promises.py::test_no_framework_ever_holds_a_number_that_is_none
        """,
    (3, "no limit is broken"): """
        simulation/test_soak.py::test_every_promise_is_kept
        sharing/test_machine.py::test_a_keeper_that_is_killed_in_the_middle_is_replaced_and_no_limit_is_broken
        """,
    (4, "attempts are bounded"): """
        engine/test_order.py::test_the_budget_of_a_batch_and_of_a_sample_is_kept
        engine/test_failures.py::test_a_few_samples_that_always_fail_are_given_up_soon_and_taken_for_no_outage
        """,
    (5, "nothing is left behind"): """
        engine/test_judging.py::test_a_call_that_is_cancelled_at_once_leaves_nothing
        test_promises.py::test_a_permit_of_a_cancelled_call_is_free_at_once
        engine/test_engine.py::test_whatever_fails_or_is_cancelled_closing_ends_and_leaves_nothing
        """,
    (6, "an outcome stays, and nothing is sent after it"): """
        simulation/test_soak.py::test_every_promise_is_kept
        engine/test_judging.py::test_a_judge_that_does_not_end_is_ended_and_nothing_is_sent_after_its_outcome
        """,
    (7, "the same seed, the same schedule"): """
        simulation/test_scenarios.py::test_the_engine_scores_a_scenario_and_repeats_itself
        engine/test_judging.py::test_every_sample_of_a_tree_has_one_outcome_in_time
        """,
    (8, "bounded memory"): """
        test_promises.py::test_a_stream_holds_a_window_of_samples_however_long_it_is
        sources/test_faults.py::test_every_fault_of_a_judge_has_its_class
        """,
    (9, "no secret comes out, TLS is verified"): """
        engine/test_secrets.py::test_no_secret_comes_out_anywhere
        sources/test_http.py::test_a_certificate_that_does_not_verify_makes_the_source_unusable
        """,
    (10, "a recorded answer is for the same question"): """
        journal/test_journal_keys.py::test_keys_are_equal_exactly_where_what_is_sent_is
        engine/test_reuse.py::test_what_becomes_of_a_score_is_changed_without_paying_for_it_again
        """,
    (11, "no response takes a source from the others"): """
        test_promises.py::test_what_one_response_provokes_costs_no_other_sample
        test_promises.py::test_an_absurd_usage_bars_no_later_sample
        """,
}

OPEN = {39}
"""Features that are not built yet: a budget, and one call for equal questions."""


@cache
def functions_of(file: str) -> frozenset[str]:
    path = TESTS / file
    nodes = ast.parse(path.read_text()).body if path.is_file() else []
    return frozenset(node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


NAMED = [(row, node) for table in (FEATURES, PROMISES) for row, nodes in table.items() for node in nodes.split()]


@pytest.mark.parametrize(("row", "node"), NAMED, ids=[node for _, node in NAMED])
def test_the_named_test_exists(row: tuple[int, str], node: str) -> None:
    file, _, function = node.partition("::")
    assert function in functions_of(file), f"{row} names {node}, which is not there: name the test that took its place"


def test_every_feature_and_every_promise_names_a_test() -> None:
    assert {number for number, _ in FEATURES} == set(range(1, 45)) - OPEN
    assert {number for number, _ in PROMISES} == set(range(1, 12))
    assert all(nodes.split() for nodes in [*FEATURES.values(), *PROMISES.values()])
