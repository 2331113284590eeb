"""Calls every public method of the `tinker` SDK once, and tells what has come of each."""

import asyncio
import os
from datetime import UTC, datetime

import httpx
import tinker
from tinker import types
from tinker.lib.public_interfaces.rest_client import RestClient

CLIENTS = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, RestClient)
BASE = os.environ["MODEL"]
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([5, 6, 7]),
    loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 1.0]},
)
ADAM = types.AdamParams(learning_rate=1e-3)
PROMPT = types.ModelInput.from_ints([11, 12, 13])
DAY = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
SHORT = types.SamplingParams(max_tokens=2)


async def there(answer):
    """The value of what a method returns: itself, what it promises, or the promise's promise."""
    while True:
        if hasattr(answer, "result_async"):
            answer = await answer.result_async()
        elif hasattr(answer, "result"):
            answer = await asyncio.to_thread(answer.result)
        elif asyncio.iscoroutine(answer) or hasattr(answer, "__await__"):
            answer = await answer
        else:
            return answer


def size_of(url):
    """How many bytes are at a URL, for a program without a key."""
    return len(httpx.get(url, timeout=60).raise_for_status().content)


class Made:
    """An argument that is made anew for each call."""

    def __init__(self, make):
        self.make = make


class Calls:
    """What has come of each method: "" if it answered, else its error."""

    def __init__(self):
        self.told = {}
        self.downloaded = {}

    async def of(self, client, name, *given, **named):
        """Call a method, and its twin with _async."""
        found = None
        for method in (name, f"{name}_async"):
            if not hasattr(client, method):
                continue
            made = [await there(each.make()) if isinstance(each, Made) else each for each in given]
            key = f"{type(client).__name__.removeprefix('Backcompat')}.{method}"
            try:
                if method == name:  # the SDK refuses to be called like this from an event loop
                    found = await there(await asyncio.to_thread(getattr(client, method), *made, **named))
                else:
                    found = await there(getattr(client, method)(*made, **named))
                self.told[key] = ""
            except Exception as error:
                self.told[key] = f"{type(error).__name__}: {error}"
        return found


def loss_of(_data, logprobs):
    return sum(each.sum() for each in logprobs), {}


def negated(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/negated:sum": loss}


async def play():
    calls = Calls()
    service = tinker.ServiceClient()
    await calls.of(service, "get_server_capabilities")
    model = await calls.of(service, "create_lora_training_client", BASE, rank=4)
    for method in ("get_info", "get_tokenizer", "get_telemetry", "get_console_url"):
        await calls.of(model, method)
        await calls.of(service, method)
    await calls.of(model, "forward", [DATUM], "cross_entropy")
    await calls.of(model, "forward_backward", [DATUM], "cross_entropy")
    await calls.of(model, "forward_backward_custom", [DATUM], loss_of)
    await calls.of(model, "optim_step", ADAM)
    names = iter(f"name-{number}" for number in range(99))
    name = Made(lambda: next(names))
    saved = (await calls.of(model, "save_state", name)).path
    await calls.of(model, "load_state", saved)
    await calls.of(model, "load_state_with_optimizer", saved)
    await calls.of(service, "create_training_client_from_state", saved)
    await calls.of(service, "create_training_client_from_state_with_optimizer", saved)
    published = (await calls.of(model, "save_weights_for_sampler", name)).path
    await calls.of(model, "create_sampling_client", published)
    exported = await calls.of(model, "save_weights_external", name)
    sampler = await calls.of(model, "save_weights_and_get_sampling_client")
    await calls.of(service, "create_sampling_client", published)
    await calls.of(sampler, "sample", PROMPT, 1, SHORT)
    await calls.of(sampler, "compute_logprobs", PROMPT)
    for method in ("get_base_model", "get_tokenizer", "get_telemetry"):
        await calls.of(sampler, method)
    handle = await calls.of(sampler, "get_sampler_handle")
    if handle is not None:
        await calls.of(sampler, "from_sampler_handle", handle)
    await calls.of(sampler, "create", service.holder, base_model=BASE)
    await calls.of(sampler, "on_queue_state_change", "active", None)
    await rest_calls(calls, service, model, saved, published, names, exported)
    await calls.of(tinker.ServiceClient(project_id="project"), "copy_weights", saved)
    await calls.of(service, "create_custom_loss", negated, {"logprobs": 1, "weights": 1})
    await calls.of(service, "close", "success")
    offered = {
        f"{client.__name__}.{method}"
        for client in CLIENTS
        for method, code in vars(client).items()
        if not method.startswith("_") and (callable(code) or isinstance(code, staticmethod))
    }
    not_called = sorted(offered - set(calls.told))
    return {"told": calls.told, "not_called": not_called, "downloaded": calls.downloaded}


async def rest_calls(calls, service, model, saved, published, names, exported):
    rest = await calls.of(service, "create_rest_client")
    run, session = saved.split("/")[2], saved.split("/")[2].partition(":")[0]

    def checkpoint():
        """Another checkpoint, to be deleted."""
        return model.save_state(next(names)).result().path

    async def other():
        return await asyncio.to_thread(checkpoint)

    async def other_id():
        return (await other()).partition(run + "/")[2]

    await calls.of(rest, "get_server_capabilities")
    await calls.of(rest, "get_training_run", run)
    await calls.of(rest, "get_training_run_by_tinker_path", saved)
    await calls.of(rest, "get_weights_info_by_tinker_path", saved)
    await calls.of(rest, "list_training_runs")
    await calls.of(rest, "list_checkpoints", run)
    await calls.of(rest, "list_user_checkpoints")
    await calls.of(rest, "list_sessions")
    await calls.of(rest, "get_session", session)
    sampler_id = (await rest.get_session_async(session)).sampler_ids[0]
    await calls.of(rest, "get_sampler", sampler_id)
    await calls.of(rest, "set_checkpoint_ttl_from_tinker_path", saved, 7200)
    await calls.of(rest, "publish_checkpoint_from_tinker_path", saved)
    await calls.of(rest, "unpublish_checkpoint_from_tinker_path", saved)
    await calls.of(rest, "delete_checkpoint", run, Made(other_id))
    await calls.of(rest, "delete_checkpoint_from_tinker_path", Made(other))
    await calls.of(rest, "get_telemetry")
    await calls.of(rest, "whoami")
    await calls.of(rest, "copy_weights", saved, destination_project_id="project")
    await calls.of(rest, "assign_session_project", session, "project")
    await calls.of(rest, "export_session_trace", session)
    await calls.of(rest, "get_audit_log", *DAY)
    await calls.of(rest, "get_billing_usage", *DAY)
    await calls.of(rest, "get_current_checkpoint_storage_usage")
    await calls.of(rest, "get_checkpoint_archive_url", run, saved.partition(run + "/")[2])
    await calls.of(rest, "get_checkpoint_archive_url_from_tinker_path", published)
    if exported is not None:  # the first version has no exports
        found = await calls.of(rest, "get_external_weights_urls", exported.path)
        calls.downloaded = {name: await asyncio.to_thread(size_of, url) for name, url in found.urls.items()}
    if hasattr(rest, "search_sessions"):
        await calls.of(rest, "search_sessions", types.SessionSearchRequest())
