"""Measures what is lost where a trainer tokenises the text of answers again, instead of keeping their ids.

python -m bench.retokenising [MODEL] [--answers N]      MODEL: a directory; run/models/smollm2 by default

answers are sampled at temperature 1 ──▶ text ──▶ other ids? ──▶ what the model gives those

A session of several turns is one row only if no earlier answer changes. What is trained otherwise has other
tokens than those that were sampled, with other log-probabilities.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from weir.demo.extraction import asked_about, sentence_of

BATCH, TOKENS = 16, 40
ASKED: dict[str, Callable[[int], list[dict[str, str]]]] = {
    "one JSON object": lambda seed: asked_about(sentence_of(seed)[0]),
    "a text": lambda seed: [{"role": "user", "content": f"Tell me a story about the number {seed}."}],
}
TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=Path("run/models/smollm2"))
    parser.add_argument("--answers", type=int, default=128, help="of each kind")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(asked.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval()
    print(
        "| answers | other ids | sessions of 5 turns that split | their log-probability moves, mean | most |"
    )
    print("|---|---|---|---|---|")
    for kind, messages_of in ASKED.items():
        moved, changed = list[float](), 0
        for start in range(0, asked.answers, BATCH):
            prompts = [
                tokenizer.apply_chat_template(
                    messages_of(seed), add_generation_prompt=True, return_dict=False
                )
                for seed in range(start, start + BATCH)
            ]
            for prompt, ids in zip(prompts, sampled(model, tokenizer, prompts), strict=True):
                again = tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]
                if again != ids:
                    changed += 1
                    moved.append(abs(logprob_of(model, prompt, again) - logprob_of(model, prompt, ids)))
        share = changed / asked.answers
        split = 1 - (1 - share) ** (TURNS - 1)
        of_moved = f"{statistics.mean(moved):.2f} | {max(moved):.2f}" if moved else "|"
        print(f"| {kind} | {share:.1%} | {split:.0%} | {of_moved} |", flush=True)


@torch.no_grad()
def sampled(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The ids of one answer to each prompt, without its end."""
    ends = {tokenizer.eos_token_id, *tokenizer.all_special_ids}
    padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    made = model.generate(
        **padded, max_new_tokens=TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
    )
    answers = made[:, padded["input_ids"].shape[1] :].tolist()
    return [ids[: next((at for at, each in enumerate(ids) if each in ends), len(ids))] for ids in answers]


@torch.no_grad()
def logprob_of(model: Any, prompt: list[int], ids: list[int]) -> float:
    """The log-probability of an answer, in nats."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids)[:, None])
    return float(chosen.sum())


if __name__ == "__main__":
    main()
