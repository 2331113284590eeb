"""With flash-attn, a pack is one call with the bounds of its rows, and each row gets the result that packed
attention gives it."""

from pathlib import Path

import pytest
import torch

from tests.support.tolerances import BFLOAT16, ulps
from tests.support.trainer_service.fake_flash import CALLS, install_fake_flash
from tests.support.trainer_service.model_families import FAMILIES, Family, made
from tests.support.trainer_service.random_rows import row_of
from trainer_service.model.attention.packed_attention import Packing, packing_of
from trainer_service.model.forward import scores
from trainer_service.model.huggingface import load_model
from trainer_service.rows.rows import MicroBatch, micro_batches

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
LENGTHS = [23, 17, 9, 9, 2]


def pack() -> MicroBatch:
    (batch,) = micro_batches([row_of(length, seed) for seed, length in enumerate(LENGTHS)], 1000)
    return batch


@pytest.mark.parametrize("family", FAMILIES[:6], ids=lambda family: f"{family.name}-{len(family.options)}")
def test_flash_attention_gets_the_bounds_and_gives_what_packed_attention_gives(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(family, tmp_path)
    packed = load_model(tmp_path, torch.bfloat16).eval()
    install_fake_flash(monkeypatch)
    model = load_model(tmp_path, torch.bfloat16, flash=True).eval()
    assert packing_of(model) is Packing.FLASH
    batch = pack()
    found, *_ = scores(model, batch, packing_of(model), CPU)
    expected, *_ = scores(packed, batch, packing_of(packed), CPU)
    # Each of two layers rounds some ten results to bfloat16, perhaps not the same way.
    allowed = ulps(20, of=float(expected.detach().abs().max()), unit=BFLOAT16)
    torch.testing.assert_close(found, expected, atol=allowed, rtol=0)
    windows = [family.options.get("sliding_window"), None]
    if "layer_types" not in family.options:
        windows = windows[:1] * 2
    assert [call.window for call in CALLS] == [(-1, -1) if w is None else (w - 1, w - 1) for w in windows]
    for call in CALLS:
        assert (call.bounds, call.longest) == ([0, 23, 40, 49, 58, 60], 23)
        assert (call.heads, call.key_heads, call.dtype) == (4, 2, torch.bfloat16)


def test_the_gradient_through_flash_attention_is_that_of_packed_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(FAMILIES[0], tmp_path)
    gradients = []
    for on_cuda in (False, True):
        if on_cuda:
            install_fake_flash(monkeypatch)
        model = load_model(tmp_path, torch.bfloat16, flash=on_cuda).eval()
        lp_T, *_ = scores(model, pack(), packing_of(model), CPU)
        lp_T.mean().backward()  # type: ignore[no-untyped-call]
        gradients.append(torch.cat([each.grad.float().flatten() for each in model.parameters()]))
    assert CALLS
    packed, flash = gradients
    assert (flash - packed).norm() < ulps(20, of=float(packed.norm()), unit=BFLOAT16)


def test_attention_sinks_are_not_left_to_a_kernel_that_ignores_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (family,) = [each for each in FAMILIES if each.name == "GptOss"]
    made(family, tmp_path)
    install_fake_flash(monkeypatch)
    model = load_model(tmp_path, torch.bfloat16, flash=True).eval()
    assert packing_of(model) is Packing.SEGMENTS
    scores(model, pack(), packing_of(model), CPU)
    assert not CALLS


def test_without_the_package_the_log_names_the_fallback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainer_service")
    made(FAMILIES[0], tmp_path)
    model = load_model(tmp_path, torch.bfloat16, flash=True)
    assert packing_of(model) is Packing.SEGMENTS
    assert "flash-attn is not installed; using torch's attention, row by row" in caplog.text
