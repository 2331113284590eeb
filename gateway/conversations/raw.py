"""Finds the parent of a prompt of `/v1/completions`, which has no messages, by its token ids."""

import hashlib

from gateway.conversations.branches import deepest_match, live_turns
from gateway.conversations.conversation import Prompt
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.tokens import TokenIds, pack


def locate_raw(head: SessionHead, prompt_ids: TokenIds) -> Prompt:
    """Place the prompt below the deepest turn whose prompt and output it begins with."""
    digest = hashlib.sha256(pack(prompt_ids)).digest()
    turns = live_turns(head)
    parent, known = deepest_match(turns, prompt_ids)
    added = TokenIds(prompt_ids[known:])
    if parent is not None:
        has_child = any(turn.parent_id == parent.turn_id for turn in turns)
        return Prompt(
            parent,
            "forks" if has_child else "extends",
            "history_edited" if has_child else None,
            added,
            prompt_ids,
            digest,
        )
    if turns:
        again = any(turn.prompt_digest == digest.hex() for turn in turns)
        reason = "sampled_again" if again else "new_conversation"
        return Prompt(None, "forks", reason, prompt_ids, prompt_ids, digest)
    return Prompt(None, "root", None, prompt_ids, prompt_ids, digest)
