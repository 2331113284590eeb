"""An environment of verifiers 0.1: the agent doubles a number, and is asked once more if it was wrong."""

import json
from pathlib import Path

import verifiers as vf
from datasets import Dataset


class DoublesEnv(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"] or ""
        if state["answer"] in said:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"no, double of {state['info']['number']}?"}]


def load_environment(how="right", fails=0, count=8, record="", compares=False, max_turns=-1):
    """The first tasks fail in the way `how`; `record` is a file for what the library knows of a rollout."""

    def right(completion, answer, info, **kwargs):
        if how == "none" and info["number"] < fails:
            return None
        if how == "raises" and info["number"] < fails:
            raise RuntimeError("the grader is gone")
        return float(answer in completion[0]["content"])

    async def brief(completion, state, **kwargs):
        if record:
            with Path(record).open("a", encoding="utf-8") as file:  # noqa: ASYNC230
                file.write(json.dumps(known(state) | {"right": right(completion, **state["input"])}) + "\n")
        return 1.0 / (1 + len(completion[0]["content"]))

    def best(states, **kwargs):
        return [0.0 for _ in states]

    rows = [
        {"question": f"double of {n}?", "answer": str(2 * n), "info": {"number": n}} for n in range(count)
    ]
    rubric = vf.Rubric(funcs=[right, brief, *([best] if compares else [])], weights=None)
    rubric.weights[1] = 0.25
    return DoublesEnv(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=max_turns)


def known(state):
    session = str(state["client"].base_url).split("/sessions/")[1].split("/")[0]
    turns = [turn["tokens"] for turn in state["trajectory"]]
    return {
        "id": session,
        "length": len(state["completion"][0]["content"]),
        "turns": [
            tokens
            and {
                "prompt_ids": tokens["prompt_ids"],
                "ids": tokens["completion_ids"],
                "logprobs": tokens["completion_logprobs"],
            }
            for tokens in turns
        ],
    }
