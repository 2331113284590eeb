"""Small stand-ins for models whose chat template the library `renderers` does not have.

Each template is written for the tests. It has the features of one real family: how it frames messages, where
it writes tools, calls and results, and what it refuses.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken

from tests.support.gateway.families_models import QWEN, THINK, write_model
from weir.demo.student import THINKING_TEMPLATE


@dataclass(frozen=True)
class OwnModel:
    """A template, the tokens that it writes, and what the gateway has to find out about it."""

    template: str
    special: tuple[str, ...]
    end: str
    """The token that ends an answer."""
    ordinary: tuple[str, ...] = ()
    """Added tokens that are not special."""
    tools: bool = True
    call: str | None = None
    """A call as the model writes it; None if no parser of the library reads it."""
    rewrites_tools: bool = False
    """The template writes the tools before the last message of the user."""

    def make(self, directory: Path) -> Path:
        """Write the model's files into the directory."""
        added = [AddedToken(token, special=True) for token in self.special]
        added += [AddedToken(token, special=False) for token in self.ordinary]
        write_model(directory, added, self.end)
        (directory / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        settings = {"bos_token": "<s>" if "<s>" in self.special else self.special[0], "eos_token": self.end}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return directory


def _template(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


HERMES_CALL = '\n<tool_call>\n{"name": "get", "arguments": {"key": "a"}}\n</tool_call>'

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BRACKETS = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
RESULTS = ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
PROMPTS = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]")
THOUGHTFUL = OwnModel(
    _template("thoughtful"),
    CHATML,
    "<|im_end|>",
    ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    call=HERMES_CALL,
)
"""It thinks, and drops earlier thoughts at the next message of the user."""
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
FUNCTIONS = ("<functions>", "</functions>", "<function_calls>", "</function_calls>")
LLAMA = ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>")
GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>")
MODELS = {
    "qwen2.5": OwnModel(
        _template("qwen2.5"), CHATML, "<|im_end|>", ("<tool_call>", "</tool_call>"), call=HERMES_CALL
    ),
    "mistral": OwnModel(_template("mistral"), (*BRACKETS, *RESULTS), "</s>", rewrites_tools=True),
    "devstral": OwnModel(_template("devstral"), (*BRACKETS, *RESULTS, *PROMPTS), "</s>"),
    "gemma3": OwnModel(_template("gemma3"), GEMMA, "<end_of_turn>", tools=False),
    "phi4": OwnModel(_template("phi4"), (*CHATML, "<|im_sep|>"), "<|im_end|>", tools=False),
    "olmo3": OwnModel(_template("olmo3"), CHATML, "<|im_end|>", FUNCTIONS),
    "llama4": OwnModel(_template("llama4"), LLAMA, "<|eot|>"),
    "granite": OwnModel(_template("granite"), GRANITE, "<|end_of_text|>"),
}
PHI3 = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
R1 = ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>")
COMMAND_R = (
    *("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
)
PUBLIC = {
    "hermes": OwnModel(
        _template("hermes"), CHATML, "<|im_end|>", ("<tool_call>", "</tool_call>"), call=HERMES_CALL
    ),
    "llama2": OwnModel(_template("llama2"), ("<s>", "</s>"), "</s>", tools=False),
    "llama3": OwnModel(_template("llama3"), (*LLAMA3, "<|end_of_text|>", "<|eom_id|>"), "<|eot_id|>"),
    "mistral": MODELS["mistral"],
    "gemma2": OwnModel(_template("gemma2"), GEMMA, "<end_of_turn>", tools=False),
    "phi3": OwnModel(_template("phi3"), PHI3, "<|end|>", tools=False),
    "zephyr": OwnModel(_template("zephyr"), ("<s>", "</s>"), "</s>", tools=False),
    "r1-distill": OwnModel(_template("r1_distill"), R1, "<|end_of_sentence|>", THINK, tools=False),
    "qwen3": OwnModel(THINKING_TEMPLATE, CHATML, "<|im_end|>", QWEN[3:], call=HERMES_CALL),
    "command-r": OwnModel(_template("command_r"), COMMAND_R, "<|END_OF_TURN_TOKEN|>"),
}
"""In the manner of well-known models. `command-r` has a template for calls with tools beside this one."""
COMMAND_R_TOOLS = _template("command_r_tools")
LOOP = "{%- set r = range(99999) %}{%- for a in r %}{%- for b in r %}{%- endfor %}{%- endfor %}"
"""A template that never ends."""
BASE = "{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ ': ' ~ m.content ~ '<|im_end|>' }}{%- endfor %}"
"""The simplest template."""
