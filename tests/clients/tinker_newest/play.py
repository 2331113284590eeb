"""The program of a user of the `tinker` SDK: a training loop of its own, for every version of the SDK."""

import inspect
import json
import os
import sys
from pathlib import Path

import tinker
import torch
from tinker import types

PROMPT = [11, 12, 13, 14, 15, 16]
DATA = [([5, 6, 7, 8], [6, 7, 8, 9]), ([20, 21, 22], [21, 22, 23])]
NUMBERS = {
    "weights": [[0.0, 1.0, 0.5, -2.0], [1.0, 0.0, 0.25]],
    "logprobs": [[0.0, -6.5, -7.1, -6.9], [-7.0, 0.0, -6.6]],
    "advantages": [[0.0, 1.0, -0.5, 2.0], [1.5, 0.0, -1.0]],
    "sequence_ratio_mask": [[0.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0]],
}
LOSSES = {
    "cross_entropy": (["weights"], {}),
    "importance_sampling": (["logprobs", "advantages"], {}),
    "ppo": (["logprobs", "advantages"], {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    "cispo": (["logprobs", "advantages"], {"clip_low_threshold": 0.0, "clip_high_threshold": 1.5}),
    "gspo": (["logprobs", "advantages", "sequence_ratio_mask"], {}),
    "dro": (["logprobs", "advantages"], {"beta": 0.05}),
}
ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)


def service():
    return tinker.ServiceClient()


def trained(client, **more):
    seed = int(os.environ.get("SEED", "1"))
    return there(
        client.create_lora_training_client(base_model=os.environ["MODEL"], rank=4, seed=seed, **more)
    )


def there(client):
    """A client that some versions of the SDK return as a future."""
    return client.result() if hasattr(client, "result") else client


def floats(values):
    return types.TensorData(data=values, dtype="float32", shape=[len(values)])


def data(loss):
    names, _ = LOSSES[loss]
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens),
            loss_fn_inputs={"target_tokens": targets, **{name: floats(NUMBERS[name][at]) for name in names}},
        )
        for at, (tokens, targets) in enumerate(DATA)
    ]


def passed(future):
    result = future.result()
    return {
        "logprobs": [each["logprobs"].tolist() for each in result.loss_fn_outputs],
        "loss": result.metrics["loss:sum"],
    }


def losses():
    """The value of each loss, and the norm of the gradient that each one makes."""
    client = service()
    model = trained(client)
    info = model.get_info()
    told = {"is_lora": info.is_lora, "rank": info.lora_rank}
    for loss, (_, config) in LOSSES.items():
        done = model.forward_backward(data(loss), loss, config or None)
        stepped = model.optim_step(types.AdamParams(learning_rate=0.0))
        told[loss] = passed(done) | {"grad_norm": stepped.result().metrics["grad_norm"]}
    return told


def steps():
    """Three steps, a checkpoint, two ways to go on from it, and samples of the weights."""
    client = service()
    model = trained(client)
    before = passed(model.forward(data("cross_entropy"), "cross_entropy"))
    futures = []
    for _ in range(3):
        futures.append(model.forward_backward(data("cross_entropy"), "cross_entropy"))
        futures.append(model.optim_step(ADAM))
    for future in futures:
        future.result()
    after = passed(model.forward(data("cross_entropy"), "cross_entropy"))
    path = model.save_state("three").result().path
    again = there(client.create_training_client_from_state_with_optimizer(path))
    loaded = passed(again.forward(data("cross_entropy"), "cross_entropy"))
    for each in (model, again):
        each.forward_backward(data("cross_entropy"), "cross_entropy")
        each.optim_step(ADAM)
    further = [passed(each.forward(data("cross_entropy"), "cross_entropy")) for each in (model, again)]
    sampler = there(again.save_weights_and_get_sampling_client())
    tokens, targets = DATA[0]
    scores = sampler.compute_logprobs(types.ModelInput.from_ints([*tokens, targets[-1]])).result()
    sampled = sampler.sample(
        types.ModelInput.from_ints(PROMPT),
        num_samples=3,
        sampling_params=types.SamplingParams(max_tokens=5, seed=3),
    ).result()
    return {
        "before": before,
        "after": after,
        "loaded": loaded,
        "further": further,
        "scores": scores,
        "sampled": [[len(each.tokens), len(each.logprobs)] for each in sampled.sequences],
        "likeliest": likeliest(sampler, [*tokens, targets[-1]]),
        "path": path,
    }


def likeliest(sampler, tokens):
    """The likeliest tokens in each place of a prompt: as the engine tells them, and as it scores them."""
    if "target_prompt_logprobs" not in inspect.signature(sampler.sample).parameters:
        return None

    def scored(**wanted):
        return sampler.sample(
            types.ModelInput.from_ints(tokens),
            num_samples=1,
            sampling_params=types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            **wanted,
        ).result()

    top = scored(topk_prompt_logprobs=3).topk_prompt_logprobs[1:]
    ids = torch.tensor([[token for token, _ in each] for each in top])
    ids[0, 1] = -1
    found = []
    for tensor in (types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(ids, pad_value=-1)):
        told = scored(target_prompt_logprobs=tensor).target_prompt_logprobs
        found.append((told.to_torch().to_dense() if told.sparse_crow_indices else told.to_torch()).tolist())
    return {"told": [[logprob for _, logprob in each] for each in top], "scored": found}


def errors():
    """What a user sees of a mistake, and that the loop goes on after it."""
    client = service()
    model = trained(client)
    told = {}
    for loss, config in (("no_such_loss", None), ("stable_reinforce", None), ("ppo", {"colour": 1.0})):
        try:
            model.forward_backward(data("ppo"), loss, config).result()
        except Exception as error:
            told[loss] = f"{type(error).__name__}: {error}"
    told["step"] = sorted(model.optim_step(ADAM).result().metrics)
    return told


def custom():
    """A step with a loss of the user's own, from weights that are published, with a new optimizer."""

    def loss_of(data, logprobs):
        """The datums do not contribute alone, and no target linearly."""
        margin = logprobs[0].sum() - logprobs[1].sum()
        loss = -torch.nn.functional.logsigmoid(0.1 * margin) + 0.01 * sum(
            (each**2).sum() for each in logprobs
        )
        return loss, {"margin": float(margin.detach())}

    client = service()
    model = trained(client)
    model.forward_backward(data("cross_entropy"), "cross_entropy")
    model.optim_step(ADAM).result()
    published = model.save_weights_for_sampler("start").result().path
    again = there(client.create_training_client_from_state(model.save_state("start").result().path))
    done = again.forward_backward_custom(data("cross_entropy"), loss_of)
    done = done.result() if hasattr(done, "result") else done
    stepped = again.optim_step(ADAM).result()
    return {
        "published": published,
        "metrics": done.metrics,
        "logprobs": [each["logprobs"].tolist() for each in done.loss_fn_outputs],
        "grad_norm": stepped.metrics["grad_norm"],
        "after": passed(again.forward(data("ppo"), "ppo"))["logprobs"],
    }


def loop():
    """As many steps as STEPS says, two passes in each, submitted ahead; weights published now and then."""
    client = service()
    model = trained(client)
    done, scores = [], []
    for step in range(int(os.environ["STEPS"])):
        pending = [
            model.forward_backward(data(loss), loss) for loss in ("cross_entropy", "importance_sampling")
        ]
        pending.append(model.optim_step(ADAM))
        done.append([pending[0].result().metrics["loss:sum"], pending[2].result().metrics["grad_norm"]])
        if step % 5 == 4:
            sampler = there(model.save_weights_and_get_sampling_client())
            scores.append(sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result())
        print("step", step, file=sys.stderr, flush=True)
    return {"steps": done, "scores": scores, "end": passed(model.forward(data("ppo"), "ppo"))}


def bridge():
    """Learn from what agents did; the weights are those that sampled, so both log-probabilities are equal."""
    from weir.tinker import datums, recorded

    model = trained(service())
    made = datums(recorded(os.environ["TINKER_BASE_URL"], os.environ["WEIR_ADMIN_KEY"]))
    done = model.forward_backward([each for each, _ in made], "importance_sampling")
    outputs = done.result().loss_fn_outputs
    differences = [
        abs(now - then)
        for (each, _), output in zip(made, outputs, strict=True)
        for now, then, advantage in zip(
            output["logprobs"].tolist(),
            each.loss_fn_inputs["logprobs"].tolist(),
            each.loss_fn_inputs["advantages"].tolist(),
            strict=True,
        )
        if advantage
    ]
    stepped = model.optim_step(ADAM).result()
    tokens = sum(sum(row.mask_R) for _, row in made)
    return {
        "rows": len(made),
        "tokens": [tokens, len(differences)],
        "difference": max(differences),
        "grad_norm": stepped.metrics["grad_norm"],
    }


def methods():
    """What has come of each public method."""
    import asyncio
    import warnings

    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parent))
    from methods import play

    return asyncio.run(play())


if __name__ == "__main__":
    scenes = {each.__name__: each for each in (losses, steps, errors, custom, methods, loop, bridge)}
    print(json.dumps(scenes[sys.argv[1]]()))
