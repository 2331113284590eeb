"""For each alert, series on which it fires, and series on which it does not."""

from dataclasses import dataclass, field

Series = dict[str, str]
"""The values of each series, one a minute, in promtool's notation."""


@dataclass(frozen=True)
class Case:
    """What promtool is asked of one alert. `labels`: those of the alert that fires, except its severity."""

    alert: str
    fires: Series
    quiet: Series
    labels: dict[str, str] = field(default_factory=dict)
    at: str = "60m"


A = {"instance": "a"}


def up(job: str) -> dict[str, str]:
    return {"job": job, "instance": "a"}


def down(alert: str, job: str) -> Case:
    name = f'up{{job="{job}",instance="a"}}'
    return Case(alert, {name: "1x50 0x20"}, {name: "0x5 1x60"}, up(job))


def slow(alert: str, name: str, bound: str, higher: str) -> Case:
    """An alert on a quantile: with a quarter of the observations between the bounds, and with none."""

    def series(fast: int) -> Series:
        return {
            f'{name}_bucket{{instance="a",le="{bound}"}}': f"0+{fast}x70",
            f'{name}_bucket{{instance="a",le="{higher}"}}': "0+100x70",
            f'{name}_bucket{{instance="a",le="+Inf"}}': "0+100x70",
        }

    return Case(alert, series(75), series(100), A)


def counted(alert: str, series: str, labels: dict[str, str]) -> Case:
    """An alert on a rare event: its series begins to exist with it, or does not grow for a long time."""
    return Case(alert, {series: "_x55 1x10"}, {series: "3x70"}, labels)


def gauge(alert: str, series: str, bad: str, good: str, labels: dict[str, str] | None = None) -> Case:
    return Case(alert, {series: f"{bad}x70"}, {series: f"{good}x70"}, labels or {})


def responses(status: str, count: int) -> Series:
    name = "weir_http_responses_total"
    return {
        f'{name}{{instance="a",dialect="chat",status="200"}}': "0+100x70",
        f'{name}{{instance="a",dialect="chat",status="{status}"}}': f"0+{count}x70",
        f'{name}{{instance="a",dialect="rest",status="{status}"}}': "0+900x70",
    }


CASES = (
    down("WeirGatewayDown", "gateway"),
    Case(
        "WeirGatewayDown", {"nothing": "1x70"}, {'up{job="gateway",instance="a"}': "1x70"}, {"job": "gateway"}
    ),
    gauge("WeirWorkerDown", 'weir_worker_up{worker="1"}', "0", "1", {"worker": "1"}),
    Case("WeirCallsFail", responses("503", 10), responses("503", 4), A),
    Case("WeirCallsRefused", responses("429", 30), responses("429", 20), A),
    Case(
        "WeirSessionsRefused",
        {'weir_refusals_total{instance="a",code="queue_full"}': "0+1x70"},
        {'weir_refusals_total{instance="a",code="rate_limited"}': "0+1x70"},
        A | {"code": "queue_full"},
    ),
    slow("WeirFirstTokenSlow", "weir_first_token_seconds", "10", "30"),
    slow("WeirEventLoopLate", "weir_loop_lag_seconds", "0.25", "0.5"),
    slow("WeirRecordSlow", "weir_record_seconds", "0.5", "1"),
    gauge("WeirNoEngine", 'weir_rollout_servers_in_rotation{instance="a"}', "0", "1", A),
    down("WeirRolloutServerDown", "rollout_server"),
    Case(
        "WeirEngineRestarts",
        {'weir_rollout_engine_restarts{instance="a"}': "0x40 1x5 2x5 3x20"},
        {'weir_rollout_engine_restarts{instance="a"}': "0x10 1x20 2x20 3x20"},
        A,
    ),
    slow("WeirEngineWaitLong", "weir_engine_wait_seconds", "5", "10"),
    gauge("WeirBreakerOpen", 'weir_breaker_open{server="s"}', "1", "0", {"server": "s"}),
    Case(
        "WeirAnswersGivenUp",
        {'weir_engine_faults_total{instance="a",reason="lost",outcome="given_up"}': "0+1x70"},
        {'weir_engine_faults_total{instance="a",reason="lost",outcome="retried"}': "0+1x70"},
        A | {"reason": "lost"},
    ),
    gauge("WeirPushStuck", 'weir_push_state{instance="a",state="pushing"}', "1", "0", A),
    gauge("WeirPushFailed", 'weir_push_state{instance="a",state="failed"}', "1", "0", A),
    counted(
        "WeirReloadsFail",
        'weir_rollout_reload_failures_total{instance="a",status="409"}',
        A | {"status": "409"},
    ),
    Case(
        "WeirFleetBehind",
        {"weir_trained_version": "9x70", "weir_serving_version": "4x70"},
        {"weir_trained_version": "9x70", "weir_serving_version": "5x70"},
    ),
    gauge("WeirVersionsHeld", "weir_versions_held", "1", "0"),
    Case(
        "WeirTrainerDown",  # of its ranks, one listens
        {'up{job="trainer",instance="a"}': "1x50 0x20", 'up{job="trainer",instance="b"}': "0x70"},
        {'up{job="trainer",instance="a"}': "1x70", 'up{job="trainer",instance="b"}': "0x70"},
        {"job": "trainer"},
    ),
    Case(
        "WeirTrainerSilent",
        {"weir_trainer_seen_timestamp_seconds": "0+60x50 3000x20"},
        {"weir_trainer_seen_timestamp_seconds": "0+60x70"},
    ),
    gauge("WeirTrainerPaused", "weir_trainer_paused", "1", "0"),
    counted("WeirGuardAlarm", 'weir_trainer_guard_alarms_total{guard="kl"}', {"guard": "kl"}),
    counted("WeirTrainerWentBack", 'weir_trainer_recoveries_total{by="guard"}', {"by": "guard"}),
    Case(
        "WeirNothingTrained",
        {'weir_trainer_steps_total{instance="a"}': "7x70", "weir_rollouts_waiting": "3x70"},
        {'weir_trainer_steps_total{instance="a"}': "7x70", "weir_rollouts_waiting": "0x70"},
        A,
    ),
    gauge("WeirStale", 'weir_trainer_staleness_total_mean{instance="a"}', "5", "4", A),
    gauge("WeirMismatch", 'weir_trainer_mismatch_abs_logp_current{instance="a"}', "0.15", "0.05", A),
    counted("WeirSinkFails", 'weir_trainer_sink_failures_total{sink="wandb"}', {"sink": "wandb"}),
    counted("WeirDiskRefuses", 'weir_trainer_disk_refusals_total{what="checkpoint"}', {"what": "checkpoint"}),
    gauge("WeirDiskLow", 'weir_trainer_disk_free_bytes{instance="a"}', "1000000000", "9000000000", A),
    gauge("WeirRedisDown", 'weir_redis_up{instance="a"}', "0", "1", A),
    Case(
        "WeirRedisFull",
        {"weir_redis_used_bytes": "85x70", "weir_redis_max_bytes": "100x70"},
        {"weir_redis_used_bytes": "85x70", "weir_redis_max_bytes": "0x70"},
    ),
    gauge("WeirRedisEvicts", "weir_redis_evicted_keys", "3", "0"),
    gauge("WeirRedisUnbounded", "weir_redis_max_bytes", "0", "100"),
    Case(
        "WeirRolloutsWait",
        {"weir_rollouts_waiting": "81x70", "weir_rollouts_per_step": "10x70"},
        {"weir_rollouts_waiting": "80x70", "weir_rollouts_per_step": "10x70"},
    ),
    gauge("WeirDeadLetters", "weir_queue_dead_letters", "1", "0"),
    down("WeirRewardServiceDown", "rewards"),
    counted(
        "WeirRewardDeadLetters",
        'weir_rewards_sessions_total{rule="r",outcome="dead_letter"}',
        {"rule": "r", "outcome": "dead_letter"},
    ),
    gauge("WeirRewardsWait", 'weir_rewards_queue{rule="r"}', "201", "200", {"rule": "r"}),
    Case(
        "WeirTracesDropped",
        {'weir_trace_spans_dropped_total{job="gateway",instance="a"}': "0+5x70"},
        {'weir_trace_spans_dropped_total{job="gateway",instance="a"}': "5x70"},
        up("gateway"),
    ),
)
