"""The boards of the gateway and the engines, and the overview."""

from board import Board, Section, of_step, plot, quantiles, rates

OVERVIEW = Board(
    "overview",
    "Weir: overview",
    (
        Section(
            "Now",
            (
                rates(
                    "Agents' calls by status",
                    "weir_http_responses_total",
                    "status",
                    where='{dialect!="rest"}',
                ),
                plot(
                    "Tokens a second",
                    "short",
                    ("sum(rate(weir_output_tokens_total[5m]))", "sampled"),
                    ("sum(rate(weir_trainer_tokens_total[5m]))", "trained"),
                ),
                of_step("Reward", "short", "reward_mean"),
                plot(
                    "Versions",
                    "none",
                    ("max(weir_trained_version)", "trained"),
                    ("max(weir_serving_version)", "served"),
                ),
                of_step(
                    "Age of trained rows in versions", "none", "staleness/total_mean", "staleness/total_max"
                ),
                plot(
                    "What waits",
                    "short",
                    ("max(weir_sessions_unfinished)", "sessions without a verdict"),
                    ("max(weir_rollouts_waiting)", "rollouts without a step"),
                    ("max(weir_rollouts_owed)", "rollouts without a checkpoint"),
                ),
                plot("Servers by state", "none", ("max by (state) (weir_rollout_servers)", "{{state}}")),
                plot("Steps an hour", "short", ("sum(rate(weir_trainer_steps_total[5m])) * 3600", "steps")),
                plot("Services that Prometheus reads", "none", ("sum by (job) (up)", "{{job}}")),
            ),
        ),
    ),
)

GATEWAY = Board(
    "gateway",
    "Weir: gateway",
    (
        Section(
            "Calls",
            (
                rates("Responses by path", "weir_http_responses_total", "dialect"),
                rates("Responses by status", "weir_http_responses_total", "status"),
                plot("Calls in flight", "none", ("sum by (dialect) (weir_calls_in_flight)", "{{dialect}}")),
                quantiles("First token of a stream", "weir_first_token_seconds"),
                quantiles("Gap between two events", "weir_token_gap_seconds"),
                quantiles("Wait for an engine", "weir_engine_wait_seconds"),
                quantiles("A generation", "weir_turn_seconds"),
                rates("Refusals with 429", "weir_refusals_total", "code"),
            ),
        ),
        Section(
            "Work of the process",
            (
                quantiles("Lateness of the event loop", "weir_loop_lag_seconds"),
                quantiles("Append to Redis", "weir_record_seconds"),
                rates("Seconds that parts of calls take", "weir_part_seconds_sum", "part", "s"),
                plot(
                    "Hits of caches",
                    "percentunit",
                    (
                        'sum by (cache) (rate(weir_cache_lookups_total{result="hit"}[5m])) / '
                        "(sum by (cache) (rate(weir_cache_lookups_total[5m])) > 0) or vector(0)",
                        "{{cache}}",
                    ),
                ),
            ),
        ),
        Section(
            "Turns",
            (
                rates("Turns by relation", "weir_turns_total", "relation"),
                rates("Turns by finish", "weir_turns_total", "finish"),
                rates("Turns that do not extend the one before", "weir_drift_total", "reason"),
                plot("Rows per turn", "none", ("avg(weir_merge_ratio)", "rows per turn")),
                plot(
                    "Tokens a second",
                    "short",
                    ("sum(rate(weir_context_tokens_total[5m]))", "context"),
                    ("sum(rate(weir_output_tokens_total[5m]))", "sampled"),
                ),
                rates("Sessions removed after their verdict", "weir_sessions_forgotten_total", "why"),
            ),
        ),
    ),
)

ENGINES = Board(
    "engines",
    "Weir: engines",
    (
        Section(
            "Fleet",
            (
                plot("Servers in rotation", "none", ("max(weir_rollout_servers_in_rotation)", "in rotation")),
                plot("Servers by state", "none", ("max by (state) (weir_rollout_servers)", "{{state}}")),
                plot("Version of each server", "none", ("weir_rollout_policy_version", "{{instance}}")),
                plot("Restarts of engines", "none", ("weir_rollout_engine_restarts", "{{instance}}")),
                rates("Answers that an engine did not finish", "weir_engine_faults_total", "outcome"),
                plot(
                    "Servers without calls after failures",
                    "none",
                    ("max by (server) (weir_breaker_open) or vector(0)", "{{server}}"),
                ),
                plot("State of each server", "none", ("weir_rollout_state == 1", "{{instance}} {{state}}")),
            ),
        ),
        Section(
            "Versions",
            (
                plot("State of the last push", "none", ("max by (state) (weir_push_state)", "{{state}}")),
                plot("Version of the last push", "none", ("max(weir_push_version)", "version")),
                plot("Versions are held", "none", ("max(weir_versions_held)", "held")),
                plot(
                    "Mean time of a reload",
                    "s",
                    (
                        "weir_rollout_reload_seconds_sum / (weir_rollout_reload_seconds_count > 0) "
                        "or vector(0)",
                        "{{instance}}",
                    ),
                ),
                rates("Reloads that failed", "weir_rollout_reload_failures_total", "status"),
                plot(
                    "Share of time that engines stand still",
                    "percentunit",
                    ("rate(weir_rollout_paused_seconds_total[5m])", "{{instance}} loads"),
                    ("rate(weir_rollout_released_seconds_total[5m])", "{{instance}} has no memory"),
                ),
            ),
        ),
    ),
)
