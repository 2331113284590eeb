"""Colours, an image task on a tiny Qwen3-VL: learning with the images, and without them."""

import hashlib
import itertools
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from results.environments.colours import COLOURS as NAMES
from results.environments.colours import SIDE, Colours
from results.experiment import Experiment, Say, Variant
from tests.support.tiny_vision_model import FACTOR, make_tiny_vision_model

ENVIRONMENT = "python:results.environments.colours:Colours"
RIGHT_STEPS, MOSTLY_WRONG_STEPS, BATCH = 60, 30, 16
WRONG_SHARE = 0.7
PADS = (SIDE // FACTOR) ** 2
ASKED = f"<|im_start|>user\ncolour?<|vision_start|>{'<|image_pad|>' * PADS}<|vision_end|><|im_end|>\n"


def model(models: Path, say: Say) -> Path:
    """A model that has learned to see, and then to answer with any of the names most of the time."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    out = models / f"colours-{digest}-seed0"
    if not (out / "config.json").exists():
        models.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=models) as scratch:
            made = make_tiny_vision_model(Path(scratch) / "model")
            say(f"the vision model: loss {learn_names(made):.3f}")
            made.rename(out)
    return out


def learn_names(directory: Path) -> float:
    """Supervised learning of the names with images of their colours. Returns the last loss, in nats for each
    token."""
    import torch
    from PIL import Image
    from tokenizers import Tokenizer
    from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    torch.set_num_threads(1)
    seeing = Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    process = AutoImageProcessor.from_pretrained(directory)
    optimizer = torch.optim.AdamW(seeing.parameters(), lr=1e-3, weight_decay=0.0)
    draw, seen = Random(0), Colours().tasks(0)
    loss = torch.tensor(0.0)
    for step in range(RIGHT_STEPS + MOSTLY_WRONG_STEPS):
        optimizer.zero_grad()
        for task in itertools.islice(seen, BATCH):
            asked = tokenizer.encode(f"{ASKED}<|im_start|>assistant\n").ids
            wrong = step >= RIGHT_STEPS and draw.random() < WRONG_SHARE
            name = draw.choice([*NAMES]) if wrong else task["name"]
            said = tokenizer.encode(f"{name}<|im_end|>").ids
            ids_1L = torch.tensor([[*asked, *said]])
            shown: Any = process(
                images=[Image.new("RGB", (SIDE, SIDE), tuple(task["rgb"]))],
                do_resize=False,
                return_tensors="pt",
            )
            pads_1L = (ids_1L == seeing.config.image_token_id).int()
            logits = seeing(input_ids=ids_1L, mm_token_type_ids=pads_1L, **shown).logits
            loss = torch.nn.functional.cross_entropy(
                logits[0, len(asked) - 1 : -1].float(), torch.tensor(said)
            )
            (loss / BATCH).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    seeing.save_pretrained(directory)
    return float(loss)


COLOURS = Experiment(
    name="colours",
    question="Say which of four colours an image has. Does a model learn from what it sees? The other "
    "variant shows a grey image each time, so that only guessing can be learned.",
    warm_start=f"{RIGHT_STEPS} steps of supervised learning on images with their names, then "
    f"{MOSTLY_WRONG_STEPS} steps in which seven of ten names are drawn at random",
    model=model,
    run={
        "environment": ENVIRONMENT,
        "sampling": {"max_tokens": 8},
        "episodes": 2048,
        "concurrency": 32,
    },
    target=0.6,
    variants={
        "shown": Variant("the image has the colour"),
        "hidden": Variant("the image is grey", run={"options": {"shown": False}}),
    },
    services={"trainer": {"optimizer": {"lr": 1e-3}}},
    judged={"tasks": 256, "group_size": 1},
    found="What is learned comes from the pixels: with a grey image the reward stays at that of guessing.",
)
