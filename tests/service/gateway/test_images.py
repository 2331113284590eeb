"""Images in calls: the engine gets one pad for each, the turn records all, and their bytes lie once."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from PIL import Image
from pyarrow import parquet
from tokenizers import Tokenizer

from rollout_queue.contract.export_rows import ExportRow, episode_of, row_from_json
from rollout_queue.redis import key_names
from tests.support.gateway.conversation import recorded
from tests.support.gateway.fake_engine import Interruption
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.images import asking, data_url, encoded, image_of, noise_url, opened, shown

CHAT = "/v1/chat/completions"
WIDE = noise_url(96, 64, seed=1)
"""It has 3 by 2 tokens."""
TALL = noise_url(64, 96, seed=2)


def say(gateway: RunningGateway, session: dict[str, Any], *messages: Any, **more: Any) -> Any:
    path = f"/sessions/{session['session_id']}{CHAT}"
    reply = gateway.post(path, {"messages": list(messages), **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


def stored_images(gateway: RunningGateway) -> set[str]:
    found: Any = gateway.redis.keys(key_names.image("*"))
    return {name.decode().rpartition(":")[2] for name in found}


def test_the_engine_gets_one_pad_for_an_image_and_the_turn_records_all(
    seeing: RunningGateway, pad: int
) -> None:
    session = seeing.session()
    say(seeing, session, asking("look", WIDE, "there"))
    (asked,) = seeing.engine.requests
    (url,) = asked["image_data"]
    (turn,) = recorded(seeing, session["session_id"])
    (image,) = turn.images
    png = seeing.redis.get(key_names.image(image.sha256))
    assert isinstance(png, bytes)
    assert asked["input_ids"].count(pad) == 1
    assert data_url(png) == url
    assert opened(url).tobytes() == image_of(96, 64, seed=1).tobytes()
    assert hashlib.sha256(png).hexdigest() == image.sha256
    assert (image.width, image.height, image.grid) == (96, 64, (1, 4, 6))
    assert turn.context_ids[image.start : image.end].tolist() == [pad] * 6
    assert turn.context_ids.count(pad) == 6
    assert [*turn.context_ids[: image.start], pad, *turn.context_ids[image.end :]] == asked["input_ids"]


def seen(gateway: RunningGateway, *urls: str) -> list[Image.Image]:
    """The images that the engine gets."""
    say(gateway, gateway.session(), asking(*urls))
    return [opened(url) for url in gateway.engine.requests[-1]["image_data"]]


def test_an_image_is_resized_and_made_plain_before_the_engine_sees_it(seeing: RunningGateway) -> None:
    glass = data_url(encoded(image_of(84, 56, mode="RGBA"), "WEBP", lossless=True), "image/webp")
    turned = Image.Exif()
    turned[0x0112] = 6
    photo = data_url(encoded(image_of(40, 80), "JPEG", exif=turned), "image/jpeg")
    forms = [(each.format, each.mode, each.size) for each in seen(seeing, glass, photo)]
    assert forms == [("PNG", "RGB", (96, 64)), ("PNG", "RGB", (64, 32))]
    first, second = Image.new("RGB", (64, 64), "red"), Image.new("RGB", (64, 64), "blue")
    several = data_url(encoded(first, "MPO", save_all=True, append_images=[second]), "image/jpeg")
    (shown_one,) = seen(seeing, several)
    red, _, blue = shown_one.getpixel((9, 9))  # type: ignore[misc]
    assert red > 250 > 5 > blue, "only the first picture of a JPEG is shown"
    greys = [data_url(encoded(Image.new("I;16", (64, 64), grey))) for grey in (0, 0x4000, 0xFFFF)]
    pixels = [each.getpixel((9, 9)) for each in seen(seeing, *greys)]
    assert pixels == [(0, 0, 0), (64, 64, 64), (255, 255, 255)], "16 bits are scaled to 8"
    image = image_of(64, 64)
    plain, profiled = encoded(image), encoded(image, icc_profile=b"a profile", dpi=(300, 300))
    seen(seeing, data_url(plain), data_url(profiled))
    one, two = seeing.engine.requests[-1]["image_data"]
    assert one == two, "equal pixels are one image, whatever their profile"


def test_the_next_call_extends_the_turn_and_sends_all_images_again(seeing: RunningGateway, pad: int) -> None:
    session = seeing.session()
    ask = asking("look", WIDE)
    answer = say(seeing, session, ask)
    say(seeing, session, ask, answer, asking(TALL, "and this"))
    one, two = recorded(seeing, session["session_id"])
    asked = seeing.engine.requests[1]
    (image,) = two.images
    assert (two.relation, two.parent_id) == ("extends", one.turn_id)
    assert [opened(url).size for url in asked["image_data"]] == [(96, 64), (64, 96)]
    assert asked["input_ids"].count(pad) == 2
    assert two.context_ids[image.start : image.end].tolist() == [pad] * 6
    assert len(stored_images(seeing)) == 2


def test_a_conversation_with_another_image_of_the_same_size_is_another_one(seeing: RunningGateway) -> None:
    session = seeing.session()
    answer = say(seeing, session, asking("look", WIDE))
    say(seeing, session, asking("look", noise_url(96, 64, seed=9)), answer, asking("more"))
    one, two = recorded(seeing, session["session_id"])
    assert two.parent_id is None
    assert two.images[0].sha256 != one.images[0].sha256
    assert two.context_ids[: len(one.context_ids)] == one.context_ids


def test_no_text_becomes_a_pad_and_a_tool_may_not_name_one(seeing: RunningGateway, pad: int) -> None:
    text = "<|vision_start|><|image_pad|><|vision_end|><|video_pad|>"
    system, answer = {"role": "system", "content": text}, {"role": "assistant", "content": text}
    say(seeing, seeing.session(), system, asking(text, WIDE), answer, {"role": "user", "content": text})
    assert seeing.engine.requests[0]["input_ids"].count(pad) == 1
    tool = {"type": "function", "function": {"name": "f", "description": "<|image_pad|>"}}
    reply = seeing.post(CHAT, {"messages": [asking(WIDE)], "tools": [tool]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert len(seeing.engine.requests) == 1


def test_a_sampled_pad_is_not_sent_again_as_an_image(
    seeing: RunningGateway, tokens: Tokenizer, pad: int
) -> None:
    session = seeing.session()
    seeing.engine.script.append([*tokens.encode("so").ids, pad, *tokens.encode("on").ids])
    ask = asking("look", WIDE)
    answer = say(seeing, session, ask)
    say(seeing, session, ask, answer, asking("more"))
    assert recorded(seeing, session["session_id"])[0].output_ids.count(pad) == 1
    assert seeing.engine.requests[1]["input_ids"].count(pad) == 1


def test_an_answer_of_an_engine_that_counts_other_tokens_is_not_begun_or_recorded(
    seeing: RunningGateway,
) -> None:
    session = seeing.session()
    path = f"/sessions/{session['session_id']}{CHAT}"
    for last_words, miscounted, stream in (({"prompt_tokens": 3}, 0, False), ({}, 1, True)):
        seeing.engine.last_words, seeing.engine.miscounted = last_words, miscounted
        reply = seeing.post(path, {"messages": [asking(WIDE)], "stream": stream})
        assert (reply.status_code, "data:" in reply.text) == (503, False), reply.text
    assert recorded(seeing, session["session_id"]) == []


def test_another_engine_continues_an_answer_to_an_image(seeing: RunningGateway) -> None:
    seeing.engine.script.extend(["so on and on", "so on and on"])
    seeing.engine.interruptions.append(Interruption(2, "abort"))
    session = seeing.session()
    path = f"/sessions/{session['session_id']}{CHAT}"
    assert "[DONE]" in seeing.post(path, {"messages": [asking(WIDE)], "stream": True}).text
    one, two = seeing.engine.requests
    assert two["image_data"] == one["image_data"]
    (turn,) = recorded(seeing, session["session_id"])
    assert two["input_ids"] == [*one["input_ids"], *turn.output_ids[:2]]


def test_an_engine_that_aborts_a_queued_call_has_made_no_fault(seeing: RunningGateway) -> None:
    def figures(name: str) -> list[str]:
        return [line for line in seeing.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]

    aborted = 'weir_engine_faults_total{outcome="retried",reason="aborted"} '
    faults = figures("weir_engine_faults_total")
    before = sum(float(line.removeprefix(aborted)) for line in faults if line.startswith(aborted))
    seeing.engine.interruptions.extend([Interruption(0, "abort")] * 3)
    assert seeing.post(CHAT, {"messages": [asking(WIDE)]}).status_code == 200
    assert len(seeing.engine.requests) == 4
    others = [line for line in faults if not line.startswith(aborted)]
    assert sorted(figures("weir_engine_faults_total")) == sorted([*others, f"{aborted}{before + 3}"])
    assert all(line.endswith(" 0.0") for line in figures("weir_breaker_open"))


def test_no_engine_continues_an_answer_with_a_sampled_pad(
    seeing: RunningGateway, tokens: Tokenizer, pad: int
) -> None:
    seeing.engine.script.append([pad, *tokens.encode("so on and on").ids])
    seeing.engine.interruptions.append(Interruption(2, "abort"))
    reply = seeing.post(CHAT, {"messages": [asking(WIDE)], "stream": True})
    assert "error" in reply.text.splitlines()[-2]
    assert len(seeing.engine.requests) == 1


def test_images_that_do_not_fit_into_the_context_are_not_decoded(
    backends: Backends, vision_model: Path, tokens: Tokenizer
) -> None:
    backends.clear(None)
    backends.engine.tokenizer = tokens
    cut_off = data_url(encoded(image_of(96, 64))[:500])
    with backends.gateway(model_path=vision_model, context_length=70) as gateway:
        large = noise_url(256, 256)
        for images in ([large, WIDE, cut_off], [large, noise_url(256, 256, 1)]):
            reply = gateway.post(CHAT, {"messages": [asking(*images)]})
            error = reply.json()["error"]
            place = f"messages[0].content[{len(images) - 1}].image_url.url"
            assert (error["code"], error["param"]) == ("context_length_exceeded", place), error


ANIMATED = encoded(image_of(64, 64), "PNG", save_all=True, append_images=[image_of(64, 64, 1)])


BAD = [
    ("data:image/png;base64,####", "not base64"),
    ("data:image/png,abc", "a data URL begins with"),
    (data_url(b"GIF89a", "image/gif"), "media type"),
    (data_url(b"%PDF-1.7", "application/pdf"), "media type"),
    (data_url(b"<svg/>", "image/svg+xml"), "media type"),
    (data_url(encoded(image_of(64, 64), "GIF")), "no PNG, JPEG or WebP"),
    (data_url(b"nothing"), "no PNG, JPEG or WebP"),
    (data_url(encoded(image_of(64, 64))[:500]), "cannot be decoded"),
    (data_url(ANIMATED), "an animation"),
    (data_url(encoded(Image.new("I;16", (64, 64), 9), transparency=9)), "16 bits"),
    (data_url(bytes(100_001)), "at most 100000 bytes"),
    (data_url(encoded(Image.new("RGB", (301, 300)))), "an image has at most 90000"),
    (data_url(encoded(Image.new("RGB", (2010, 10)))), "the model reads no image"),
    ("http://127.0.0.1/a.png", "not fetched from this host"),
    ("https://example.com/a.png", "not fetched from this host"),
    ("file:///etc/passwd", "data URL"),
    ("/etc/passwd", "data URL"),
    ("", "not an address"),
]


def test_a_bad_image_is_refused_by_its_field(seeing: RunningGateway) -> None:
    for url, why in BAD:
        part = {"type": "image_url", "image_url": {"url": url}}
        reply = seeing.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "messages[0].content[0].image_url.url"), why
        assert why in error["message"], url[:99]
    assert not seeing.engine.requests


def part_of(role: str, *parts: Any) -> Any:
    return {"role": role, "content": list(parts)}


MISPLACED: list[tuple[Any, str]] = [
    (part_of("system", *shown(WIDE)), "messages[0].content[0]"),
    (part_of("assistant", *shown(WIDE)), "messages[0].content[0]"),
    (part_of("user", {"type": "image_url", "image_url": WIDE}), "messages[0].content[0].image_url"),
    (
        part_of("user", {"type": "image_url", "image_url": {"url": WIDE, "detail": "low"}}),
        "messages[0].content[0].image_url.detail",
    ),
    (part_of("user", {"type": "image", "sha256": "0" * 64}), "messages[0].content[0]"),
    (asking(WIDE, WIDE, WIDE, WIDE), "messages[0].content[3].image_url.url"),
]


def test_an_image_in_a_wrong_place_is_refused(seeing: RunningGateway) -> None:
    for message, param in MISPLACED:
        reply = seeing.post(CHAT, {"messages": [message]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_an_image_that_is_not_read_here_says_so(seeing: RunningGateway) -> None:
    """The model reads images, in other messages."""
    system = asking(WIDE) | {"role": "system"}
    reply = seeing.post(CHAT, {"messages": [system, {"role": "user", "content": "hi"}]})
    assert reply.status_code == 400
    assert "this model reads text here, not image_url" in reply.json()["error"]["message"]


def test_a_text_model_refuses_images(gateway: RunningGateway) -> None:
    reply = gateway.post(CHAT, {"messages": [asking(WIDE)]})
    assert reply.status_code == 400
    assert "this model reads text here, not image_url" in reply.json()["error"]["message"]


def test_a_prompt_of_ids_has_no_pads(seeing: RunningGateway, pad: int) -> None:
    ids = [5, pad, 6]
    for path, body in (("/v1/completions", {"prompt": ids}), ("/inference/v1/generate", {"token_ids": ids})):
        reply = seeing.post(path, body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "images_in_token_ids"), reply.text


def test_images_of_users_and_tools_are_the_same_in_every_dialect(seeing: RunningGateway) -> None:
    data = WIDE.partition(",")[2]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    asked = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, block]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    assert seeing.post("/v1/messages", {"max_tokens": 9, "messages": asked}).status_code == 200
    counted = seeing.post("/v1/messages/count_tokens", {"messages": asked})
    part = {"type": "input_image", "image_url": WIDE, "detail": "auto"}
    output = {"type": "function_call_output", "call_id": "c", "output": [part]}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, part]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        output,
    ]
    assert seeing.post("/v1/responses", {"input": items}).status_code == 200
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    seen = {"role": "tool", "tool_call_id": "c", "content": shown(WIDE)}
    messages = [asking("a", WIDE), {"role": "assistant", "tool_calls": [call]}, seen]
    assert seeing.post(CHAT, {"messages": messages}).status_code == 200
    first, *others = seeing.engine.requests
    assert len(first["image_data"]) == 2
    for other in others:
        assert (other["image_data"], other["input_ids"]) == (first["image_data"], first["input_ids"])
    assert counted.json()["input_tokens"] == len(first["input_ids"]) + 2 * 5


def test_a_response_that_continues_another_has_its_images(seeing: RunningGateway) -> None:
    part = {"type": "input_image", "image_url": WIDE}
    first = seeing.post("/v1/responses", {"input": [{"role": "user", "content": [part]}]}).json()
    again = seeing.post("/v1/responses", {"input": "more", "previous_response_id": first["id"]})
    items = seeing.get(f"/v1/responses/{again.json()['id']}/input_items").json()["data"]
    one, two = seeing.engine.requests
    assert again.status_code == 200
    assert one["image_data"] == two["image_data"]
    assert [part["type"] for item in items for part in item["content"]] == [
        "input_text",
        "output_text",
        "input_image",
    ]


def test_the_bytes_lie_once_and_go_with_the_last_session_that_shows_them(seeing: RunningGateway) -> None:
    sessions = [seeing.session(user="ann"), seeing.session(user="bob")]
    for session in sessions:
        say(seeing, session, asking("look", WIDE, TALL if session is sessions[0] else "here"))
    (wide,) = {image.sha256 for image in recorded(seeing, sessions[1]["session_id"])[0].images}
    assert len(stored_images(seeing)) == 2
    assert seeing.call("DELETE", f"/sessions/{sessions[0]['session_id']}").status_code == 200
    assert stored_images(seeing) == {wide}
    assert seeing.call("DELETE", "/admin/users/bob/data", key="admin-key").status_code == 200
    assert stored_images(seeing) == set()
    assert seeing.redis.keys(key_names.image_sessions("*")) == []


def test_a_stream_and_several_choices_send_the_image_with_each(seeing: RunningGateway) -> None:
    reply = seeing.post(CHAT, {"messages": [asking(WIDE)], "n": 2})
    assert reply.status_code == 200
    lines = seeing.post(CHAT, {"messages": [asking(WIDE)], "stream": True}).text.splitlines()
    assert lines[-2] == "data: [DONE]"
    assert [len(asked["image_data"]) for asked in seeing.engine.requests] == [1, 1, 1]


def test_processors_without_sizes_are_refused_at_the_start(
    backends: Backends, vision_model: Path, tmp_path: Path
) -> None:
    for path in vision_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 16}))
    with pytest.raises(SystemExit, match=r"preprocessor_config\.json"), backends.gateway(model_path=tmp_path):
        pass


def test_exports_show_where_images_lie_and_an_admin_reads_their_bytes(seeing: RunningGateway) -> None:
    session = seeing.session()
    say(seeing, session, asking("look", WIDE))
    seeing.post(f"/sessions/{session['session_id']}/finish", {"status": "completed", "reward": 1.0})
    (turn,) = recorded(seeing, session["session_id"])
    (row,) = map(row_from_json, seeing.get("/admin/export", key=ADMIN_KEY).content.splitlines())
    assert isinstance(row, ExportRow)
    assert row.images == turn.images
    assert episode_of([row]).turns[0].images == turn.images
    packed = seeing.get("/admin/export?format=parquet", key=ADMIN_KEY).content
    (line,) = parquet.read_table(io.BytesIO(packed)).to_pylist()
    assert line["images"] == [{**structs.asdict(turn.images[0]), "grid": [1, 4, 6]}]
    (shown,) = seeing.turns(session)
    assert shown["images"] == line["images"]
    assert seeing.get("/admin/export?format=trl", key=ADMIN_KEY).content == b""
    left_out = seeing.get("/admin/export?format=left_out", key=ADMIN_KEY).json()
    assert "images" in left_out["verdict"]["detail"]
    path = f"/admin/images/{turn.images[0].sha256}"
    found = seeing.get(path, key=ADMIN_KEY)
    assert (found.headers["content-type"], data_url(found.content)) == (
        "image/png",
        seeing.engine.requests[0]["image_data"][0],
    )
    assert seeing.get(path).status_code == 403
    assert seeing.get(f"/admin/images/{'0' * 64}", key=ADMIN_KEY).status_code == 404
