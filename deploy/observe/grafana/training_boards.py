"""The boards of the trainer, and of the queue and what waits in it."""

from board import Board, Section, of_step, plot, rates

TRAINING = Board(
    "training",
    "Weir: training",
    (
        Section(
            "Learning",
            (
                of_step("Reward", "short", "reward_mean"),
                of_step("Loss", "short", "loss"),
                of_step("Norm of the gradient", "short", "grad_norm"),
                of_step("Entropy", "short", "entropy"),
                of_step("KL to the reference", "short", "kl/reference"),
                of_step("Advantages", "short", "adv/mean", "adv/std", "adv/zero_frac"),
                of_step("Ratio of the policies", "short", "ppo/ratio_mean", "ppo/kl"),
                of_step("Clipped tokens", "percentunit", "ppo/clip_hi", "ppo/clip_lo", "ppo/dual"),
                plot(
                    "Evaluations", "short", ("weir_trainer_eval_reward or vector(0)", "version {{version}}")
                ),
            ),
        ),
        Section(
            "Trainer and engine",
            (
                of_step(
                    "Difference of their probabilities",
                    "short",
                    "mismatch/abs_logp",
                    "mismatch/kl",
                    "mismatch/k3",
                ),
                of_step("Weights of the correction", "short", "is/mean", "is/max"),
                of_step("Tokens capped or masked", "percentunit", "is/capped_frac", "is/masked_frac"),
                of_step(
                    "Age in versions",
                    "none",
                    "staleness/total_mean",
                    "staleness/in_flight_mean",
                    "staleness/in_queue_mean",
                ),
                of_step("Effective sample size", "percentunit", "mismatch/ess"),
                of_step("Masked as too old", "percentunit", "staleness/masked_frac"),
            ),
        ),
        Section(
            "Data",
            (
                of_step("Groups", "none", "group/live", "group/zero_var", "group/singleton", "group/dropped"),
                of_step("Tokens per row", "none", "len/mean", "len/p90"),
                of_step("Rollouts and rows", "none", "rollouts", "rows"),
                rates("Sessions by verdict", "weir_trainer_sessions_total", "verdict"),
                of_step("Turns by their history", "none", "drift/clean", "drift/realign", "drift/fork"),
            ),
        ),
        Section(
            "Work of the trainer",
            (
                of_step("Seconds of the last step", "s", "seconds/read", "seconds/train", "seconds/publish"),
                of_step("Tokens a second", "short", "tokens_per_s"),
                plot("Steps an hour", "short", ("sum(rate(weir_trainer_steps_total[5m])) * 3600", "steps")),
                plot(
                    "Disk of the versions",
                    "bytes",
                    ("weir_trainer_disk_free_bytes", "free"),
                    ("weir_trainer_policies_bytes", "versions"),
                ),
                rates("Pushes to servers", "weir_trainer_pushes_total", "ok"),
                plot("Paused", "none", ("weir_trainer_paused", "paused")),
                rates("Alarms of guards", "weir_trainer_guard_alarms_total", "guard"),
                rates("Returns to older versions", "weir_trainer_recoveries_total", "by"),
                rates("Failures of sinks", "weir_trainer_sink_failures_total", "sink"),
                rates("Writes that the disk refused", "weir_trainer_disk_refusals_total", "what"),
            ),
        ),
    ),
)

QUEUE = Board(
    "queue",
    "Weir: queue and rewards",
    (
        Section(
            "Redis",
            (
                plot("Redis answers", "none", ("min(weir_redis_up)", "up")),
                plot(
                    "Memory",
                    "bytes",
                    ("max(weir_redis_used_bytes)", "used"),
                    ("max(weir_redis_max_bytes)", "maxmemory"),
                ),
                plot("Records in the stream", "short", ("max(weir_queue_entries)", "records")),
                plot("Records that could not be read", "short", ("max(weir_queue_dead_letters)", "records")),
            ),
        ),
        Section(
            "Sessions",
            (
                plot(
                    "Sessions without a verdict",
                    "short",
                    ("max(weir_sessions_unfinished)", "sessions"),
                ),
                plot(
                    "Rollouts",
                    "short",
                    ("max(weir_rollouts_waiting)", "wait for a step"),
                    ("max(weir_rollouts_owed)", "wait for a checkpoint"),
                    ("max(weir_rollouts_per_step)", "used by a step"),
                ),
                plot("State of the trainer", "none", ("max by (state) (weir_trainer_state)", "{{state}}")),
                plot(
                    "Time since the trainer reported",
                    "s",
                    ("time() - max(weir_trainer_seen_timestamp_seconds)", "seconds"),
                ),
            ),
        ),
        Section(
            "Reward service",
            (
                plot("Sessions that wait", "short", ("sum by (rule) (weir_rewards_queue)", "{{rule}}")),
                plot("Sessions in work", "short", ("sum(weir_rewards_sessions_in_work)", "sessions")),
                rates("Sessions by outcome", "weir_rewards_sessions_total", "outcome"),
                rates("Attempts", "weir_rewards_attempts_total", "outcome"),
                plot(
                    "Mean time of an attempt",
                    "s",
                    (
                        "sum by (rule) (rate(weir_rewards_attempt_seconds_sum[5m])) / "
                        "(sum by (rule) (rate(weir_rewards_attempt_seconds_count[5m])) > 0) or vector(0)",
                        "{{rule}}",
                    ),
                ),
                rates("Readings of the gateway's list", "weir_rewards_list_readings_total", "outcome"),
            ),
        ),
        Section(
            "Traces",
            (
                rates("Spans sent", "weir_trace_spans_exported_total", "job"),
                rates("Spans dropped", "weir_trace_spans_dropped_total", "job"),
            ),
        ),
    ),
)
