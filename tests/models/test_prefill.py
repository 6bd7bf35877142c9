"""The prefill runner: skip and paged modes give the same bits, chunks and prefixes the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3Model

from epd.cache.kv.checks import KVSettingsError
from epd.cache.kv.noop import KVPoolAccessError
from epd.cache.types import MediaGrid
from epd.kernels.attention.base import AttentionPass
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.skip_kv import SkipKV
from epd.models.packing import pack
from epd.models.pieces import PrefillSequence
from epd.models.pooling import Pooling, pool
from epd.models.prefill import PrefillRunner
from epd.models.qwen3 import Qwen3LanguageModel
from epd.models.types import PackedBatch
from tests.models.prefill_models import (
    MERGE,
    QWEN3_CONFIG,
    FakeWindowlessBackend,
    bert,
    qwen3,
    qwen3_config,
    qwen3_vl,
    rows_for,
    runner,
    text,
    with_pictures,
)

MIXED = [
    text(17, 1),
    with_pictures(5, [MediaGrid(1, 8, 6), MediaGrid(1, 4, 4)], ["m/a", "m/b"], 2),
    text(1, 3),
    with_pictures(2, [MediaGrid(1, 10, 8)], ["m/c"], 4),
    text(17, 5),
    text(60, 6),
]
LAYERS = 3
WINDOWS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


class FakeFailingModel:
    """A causal model whose forward fails at call `fail_at`."""

    causal = True

    def __init__(self, model: Any, fail_at: int) -> None:
        self._model = model
        self._left = fail_at
        self.device, self.dtype, self.kv_shape = model.device, model.dtype, model.kv_shape

    def forward(self, batch: PackedBatch, attention: AttentionPass) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            raise MemoryError("out of memory")
        states: torch.Tensor = self._model.forward(batch, attention)
        return states


def one_by_one(model: Any, sequences: list[PrefillSequence]) -> list[torch.Tensor]:
    """Each sequence alone through the model, without runner or pool."""
    out = []
    for sequence in sequences:
        batch = pack([sequence.tokens], "cpu", MERGE)
        rows = rows_for([sequence], model.dtype)
        layout = SequenceLayout(batch.lengths)
        out.append(model.forward(batch if rows is None else batch.with_rows(rows), SkipKV(layout)))
    return out


def run(prefill: PrefillRunner, sequences: list[PrefillSequence], pooling: Pooling = "last") -> torch.Tensor:
    states = prefill.run(sequences, rows_for(sequences), pooling).states
    prefill.check_integrity()
    assert prefill.stats()["kv_leases"] == 0
    return states


@pytest.mark.parametrize("pooling", ["last", "first", "mean"])
def test_the_rows_that_pooling_reads_come_back_in_order(pooling: Pooling) -> None:
    """Whatever order the runner chose, the result is each sequence's own."""
    model = qwen3_vl()
    hidden = runner(model).run(MIXED, rows_for(MIXED), pooling)
    alone = one_by_one(model, MIXED)
    want = torch.cat([pool(states, [len(states)], pooling) for states in alone])
    torch.testing.assert_close(pool(hidden.states, hidden.lengths, pooling), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [qwen3_vl, qwen3])
def test_paged_is_bitwise_skipping(make: Callable[[torch.dtype], Any], dtype: torch.dtype) -> None:
    """A whole forward through the pool has the very bits of one that skips it."""
    model = make(dtype)
    batch = MIXED if make is qwen3_vl else [s for s in MIXED if not s.media_keys]
    rows = rows_for(batch, dtype)
    skipping, paged = runner(model), runner(model, kv_cache="paged", skip_kv="off")
    assert torch.equal(skipping.run(batch, rows, "mean").states, paged.run(batch, rows, "mean").states)
    assert skipping.stats()["skip_kv_skipped"] == LAYERS
    assert paged.stats()["skip_kv_switched_off"] == LAYERS
    paged.check_integrity()


def test_bidirectional_paged_is_bitwise_skipping() -> None:
    """The same for a model whose tokens see their whole sequence."""
    model, batch = bert(), [text(n, n) for n in (3, 30, 30, 64)]
    skipping, paged = runner(model), runner(model, kv_cache="paged", skip_kv="off")
    assert torch.equal(run(skipping, batch, "mean"), run(paged, batch, "mean"))
    assert paged.stats()["skip_kv_switched_off"] == LAYERS


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_give_the_plain_result(chunk: int, pooling: Pooling) -> None:
    """Token ids, M-RoPE positions, media rows and deepstack are cut alike."""
    model = qwen3_vl()
    chunked = runner(model, kv_cache="paged", prefill_chunk_tokens=chunk)
    plain = run(runner(model), MIXED, pooling)
    torch.testing.assert_close(run(chunked, MIXED, pooling), plain, atol=1e-5, rtol=0)
    stats = chunked.stats()
    assert stats["skip_kv_partial_chunk"] > 0
    assert stats["prefill_tokens"] == sum(s.num_tokens for s in MIXED)


def test_sequences_shorter_than_a_chunk_still_batch_and_skip() -> None:
    """Four short ones run in one forward and skip; the long one takes three of its own."""
    chunked = runner(qwen3(), kv_cache="paged", prefill_chunk_tokens=24)
    run(chunked, [text(6, 1), text(60, 2), text(6, 3), text(6, 4), text(6, 5)])
    stats = chunked.stats()
    assert stats["prefill_forwards"] == 1 + 3
    assert stats["skip_kv_skipped"] == LAYERS
    assert stats["skip_kv_partial_chunk"] == 3 * LAYERS


def test_long_sequences_share_forwards() -> None:
    """Two of 30 tokens in chunks of 20: 20, then 10 and 10, then 20."""
    chunked = runner(qwen3(), kv_cache="paged", prefill_chunk_tokens=20)
    run(chunked, [text(30, 1), text(30, 2)])
    assert chunked.stats()["prefill_forwards"] == 3


@pytest.mark.parametrize("chunk", [None, 10])
def test_a_prefix_hit_runs_fewer_tokens(chunk: int | None) -> None:
    """The second prompt starts like the first: 16 tokens come from the pool, the result is the plain one."""
    model = qwen3()
    reusing = runner(model, kv_cache="paged", prefix_cache=True, prefill_chunk_tokens=chunk)
    start = text(18, 1).tokens.token_ids.tolist()
    first, second = text(40, 2, start), text(50, 3, start)
    run(reusing, [first])
    before = reusing.stats()["prefill_tokens"]
    out = run(reusing, [second])
    torch.testing.assert_close(out, run(runner(model), [second]), atol=1e-5, rtol=0)
    stats = reusing.stats()
    assert stats["prefill_tokens"] - before == 50 - 16
    assert stats["prefix_hit_tokens"] == 16
    assert stats["skip_kv_cached_prefix"] > 0
    assert stats["skip_kv_skipped"] == 0


@pytest.mark.parametrize("length", [40, 42])
def test_a_full_hit_still_runs_the_last_token(length: int) -> None:
    """The same prompt again: one token where pages end with it, else what its last page lacks."""
    model, sequence = qwen3(), text(length, 1)
    reusing = runner(model, kv_cache="paged", prefix_cache=True)
    first = run(reusing, [sequence])
    again = run(reusing, [sequence])
    torch.testing.assert_close(again, first, atol=1e-5, rtol=0)
    assert reusing.stats()["prefill_tokens"] == length + (1 if length == 40 else 2)


def test_pictures_of_one_size_are_told_apart() -> None:
    """Equal token ids and positions, another media key: nothing from the picture on is reused."""
    model = qwen3_vl()
    reusing = runner(model, kv_cache="paged", prefix_cache=True)
    cat = with_pictures(9, [MediaGrid(1, 8, 8)], ["m/cat"])
    dog = with_pictures(9, [MediaGrid(1, 8, 8)], ["m/dog"])
    run(reusing, [cat])
    out = run(reusing, [dog])
    assert reusing.stats()["prefix_hit_tokens"] == 8
    plain = run(runner(model), [dog])
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=0)
    assert not torch.allclose(out, run(runner(model), [cat]), atol=1e-2)


def test_a_hit_inside_a_picture_takes_the_rest_of_its_rows() -> None:
    """The prefix ends in the middle of a picture; its other rows and their deepstack still run."""
    model = qwen3_vl()
    reusing = runner(model, kv_cache="paged", prefix_cache=True, prefill_chunk_tokens=7)
    first = with_pictures(5, [MediaGrid(1, 6, 6), MediaGrid(1, 4, 8)], ["m/a", "m/b"])
    other = with_pictures(5, [MediaGrid(1, 6, 6), MediaGrid(1, 4, 8)], ["m/a", "m/z"])
    run(reusing, [first])
    out = run(reusing, [other, first])
    torch.testing.assert_close(out, run(runner(model), [other, first]), atol=1e-5, rtol=0)
    assert reusing.stats()["prefix_hit_tokens"] > 0


def test_a_salt_keeps_prefixes_apart() -> None:
    """Another caller's equal prompt finds nothing."""
    reusing = runner(qwen3(), kv_cache="paged", prefix_cache=True)
    run(reusing, [text(30, 1, salt="a")])
    run(reusing, [text(30, 1, salt="b")])
    assert reusing.stats()["prefix_hit_tokens"] == 0


def test_mean_pooling_reuses_nothing() -> None:
    """It reads hidden states of all tokens, so all of them run."""
    reusing = runner(qwen3(), kv_cache="paged", prefix_cache=True)
    run(reusing, [text(30, 1)], "mean")
    run(reusing, [text(30, 1)], "mean")
    assert reusing.stats()["prefill_tokens"] == 60


def test_more_prompts_than_pages_still_finish() -> None:
    """A pool of 64 tokens, prefixes kept, and ten prompts of up to 64 tokens in one call."""
    model = qwen3()
    batch = [text(n, n) for n in (64, 10, 33, 64, 5, 48, 20, 64, 31, 7)]
    small = runner(model, kv_cache="paged", prefix_cache=True, max_total_tokens=64, prefill_chunk_tokens=16)
    torch.testing.assert_close(run(small, batch), run(runner(model), batch), atol=1e-5, rtol=0)
    torch.testing.assert_close(run(small, batch), run(runner(model), batch), atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"kv_cache": "paged"}, {"kv_cache": "paged", "skip_kv": "off"}])
def test_the_cap_holds_with_and_without_skipping(settings: dict[str, Any]) -> None:
    """max_total_tokens bounds each forward; a longer sequence is refused with both numbers."""
    model, batch = qwen3(), [text(n, n) for n in (30, 30, 30, 1, 1, 1)]
    capped = runner(model, max_total_tokens=64, **settings)
    torch.testing.assert_close(run(capped, batch), run(runner(model), batch), atol=1e-5, rtol=0)
    assert capped.stats()["prefill_forwards"] == 2
    assert capped.max_sequence_tokens == 64
    with pytest.raises(ValueError, match="65 tokens exceeds the capacity of 64"):
        run(capped, [text(65)])


def test_fp8_storage_is_close_to_the_plain_result() -> None:
    """3 bits of mantissa: cosine above 0.995 on a random model, and not the same bits."""
    model, batch = qwen3(), [text(n, n) for n in (8, 30, 60)]
    fp8 = runner(model, kv_cache="paged", kv_cache_dtype="float8_e4m3fn")
    out, plain = run(fp8, batch), run(runner(model), batch)
    assert not torch.equal(out, plain)
    assert torch.cosine_similarity(out, plain).min() > 0.995
    assert fp8.stats()["skip_kv_pool_not_verbatim"] == LAYERS


def windowed() -> Qwen3LanguageModel:
    """Two of three layers see 8 tokens back."""
    return qwen3(**WINDOWS)


def test_windows_are_what_transformers_makes_of_them() -> None:
    """Each sequence alone through transformers' own attention and masks."""
    config = qwen3_config(**WINDOWS)
    torch.manual_seed(0)
    theirs = Qwen3Model._from_config(config, attn_implementation="sdpa").eval()
    for sequence in (text(5), text(30)):
        with torch.inference_mode():
            ids = torch.from_numpy(sequence.tokens.token_ids)[None]
            want = theirs(input_ids=ids).last_hidden_state[0, -1:]
        torch.testing.assert_close(
            run(runner(windowed(), kv_cache="paged"), [sequence]), want, atol=1e-5, rtol=0
        )


def test_layers_whose_window_the_skip_path_does_not_build_are_paged() -> None:
    """They take the paged path and the others skip; the result is that of a path that builds windows."""
    batch = [text(n, n) for n in (6, 30, 60)]
    building = runner(windowed(), kv_cache="paged")
    paged = runner(windowed(), kv_cache="paged", backend=FakeWindowlessBackend())
    out = run(paged, batch)
    torch.testing.assert_close(out, run(building, batch), atol=1e-5, rtol=0)
    assert not torch.allclose(out, run(runner(qwen3()), batch), atol=1e-3)
    assert building.stats()["skip_kv_skipped"] == LAYERS
    stats = paged.stats()
    assert (stats["skip_kv_sliding_window"], stats["skip_kv_skipped"]) == (2, 1)


def test_a_generation_model_keeps_its_keys_and_values() -> None:
    """Its batch takes the paged path; values are the plain ones."""
    model, batch = qwen3(), [text(9, 1), text(30, 2)]
    plain = runner(model, kv_cache="paged")
    generating = runner(model, config={**QWEN3_CONFIG, "is_decoder": True}, kv_cache="paged")
    assert torch.equal(run(generating, batch), run(plain, batch))
    assert generating.stats()["skip_kv_generation_model"] == LAYERS


def test_the_environment_switches_skipping_off() -> None:
    """EPD_SKIP_KV=0 over `auto`, read when the runner is built."""
    paged = runner(qwen3(), {"EPD_SKIP_KV": "0"}, kv_cache="paged")
    run(paged, [text(5)])
    assert paged.stats()["skip_kv_switched_off"] == LAYERS
    assert paged.info()["skip_kv"] == "off"


@pytest.mark.parametrize("settings", [{"prefix_cache": True}, {"prefill_chunk_tokens": 8}])
def test_a_bidirectional_model_takes_no_prefix_and_no_chunks(settings: dict[str, Any]) -> None:
    """Its first tokens depend on its last."""
    with pytest.raises(KVSettingsError, match="bidirectional"):
        runner(bert(), kv_cache="paged", **settings)


def test_a_refused_write_fails_that_call_only() -> None:
    """A layer that the config did not tell of wants the pool that is not there: that batch raises, the next
    runs, and no page is lost.
    """
    prefill = runner(windowed(), backend=FakeWindowlessBackend())
    with pytest.raises(KVPoolAccessError, match="embedding models"):
        prefill.run([text(9)])
    assert torch.equal(run(prefill, [text(8)]), run(runner(windowed()), [text(8)]))
    stats = prefill.stats()
    assert stats["skip_kv_sliding_window"] == 1
    assert stats["kv_pages_free"] == stats["kv_pages"]


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_failed_forward_leaves_no_page_behind(fail_at: int) -> None:
    """Leases end whichever forward fails, and what was half done is not kept."""
    model = qwen3()
    failing = FakeFailingModel(model, fail_at)
    reusing = runner(failing, kv_cache="paged", prefix_cache=True, prefill_chunk_tokens=16)
    with pytest.raises(MemoryError):
        reusing.run([text(40, 1), text(8, 2)])
    reusing.check_integrity()
    assert reusing.stats()["kv_leases"] == 0
    batch = [text(40, 1), text(8, 2)]
    torch.testing.assert_close(run(reusing, batch), run(runner(model), batch), atol=1e-5, rtol=0)


def test_info_tells_mode_and_memory() -> None:
    """For `/info`: settings in force, capacity, bytes, and decisions by reason."""
    told, held = runner(qwen3()).info(), runner(qwen3(), kv_cache="paged").info()
    assert (told["kv_cache"], told["capacity_tokens"], told["k_bytes"], told["v_bytes"]) == (
        "none",
        512,
        0,
        0,
    )
    assert held["k_bytes"] == held["v_bytes"] == 3 * 512 * 2 * 16 * 4
    assert held["decisions"]["skipped"] == 0


@pytest.mark.parametrize("count", [0, 3])
def test_wrong_media_rows_are_refused(count: int) -> None:
    """As many rows as the spans want."""
    with pytest.raises(ValueError, match="media rows"):
        runner(qwen3_vl()).run(MIXED, torch.zeros(count, 192))


def test_nothing_to_run_is_refused() -> None:
    """An empty batch is the caller's mistake."""
    with pytest.raises(ValueError, match="no sequence"):
        runner(qwen3()).run([])
