"""What a library's trace means for its session: how the episode ended, and its rewards by name."""

from dataclasses import replace

from environments.episodes.rollouts.traces import PlayedTrace, PlayedTraces
from environments.outcome import EpisodeOutcome, NamedReward


def outcome_of_trace(
    played: PlayedTraces, session_id: str, learns: bool, source: str, graded_elsewhere: bool
) -> EpisodeOutcome:
    """The outcome of the session. What went wrong is never a reward of 0: the episode has failed, with the
    first error as its reason."""
    trace = next((each for each in played.traces if each.session_id == session_id), None)
    if trace is None:
        return EpisodeOutcome("failed", reason=_first(played.errors, "the agent did not play"))
    known = EpisodeOutcome("failed", turns=trace.turns, metrics=dict(trace.metrics))
    if why := _failure(played, trace, learns):
        return replace(known, reason=why)
    named = tuple(
        NamedReward(name, value, source) for name, value in trace.rewards.items() if value is not None
    )
    if trace.truncated:
        return replace(
            known, status="truncated", named=named, reason=trace.stopped_by or "an answer was cut off"
        )
    if not named and learns and not graded_elsewhere:
        return replace(known, reason="the environment gave no reward")
    return replace(known, status="completed", named=named)


def _failure(played: PlayedTraces, trace: PlayedTrace, learns: bool) -> str | None:
    """Why the trace must not be trained; None if it may."""
    if learns and not trace.trained:
        return f"the environment does not train the agent {trace.agent!r} in this episode"
    if not trace.ok:
        return _first(trace.errors, f"the rollout failed: {trace.stopped_by}")
    if trace.late:
        return f"a deadline of the library expired: {trace.stopped_by}"
    if not played.ok:
        others = [error for each in played.traces for error in each.errors]
        return f"the episode failed: {_first((*played.errors, *others), 'the library does not say why')}"
    if None in trace.rewards.values():
        missing = [name for name, value in trace.rewards.items() if value is None]
        return f"scoring did not run: {', '.join(missing)}"
    return None


def _first(errors: tuple[str, ...], otherwise: str) -> str:
    return errors[0] if errors else otherwise
