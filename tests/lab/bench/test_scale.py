"""The model of what a spread target costs: its fit finds the prices that made the passes, and says what it cannot know."""

import json
from dataclasses import asdict, replace

import pytest

from specbeam.doors.cli.bench_scale import DRAFT_1B, TARGET_70B, read_samples
from specbeam.errors import BadSetting, MissingFile
from specbeam.lab.bench.scale import (
    Cluster,
    ModelSize,
    PassPrices,
    PassSample,
    TurnPlan,
    fitted_prices,
    held_out,
    turn_parts,
)
from specbeam.lab.bench.scale_passes import scale_passes
from specbeam.models.loading.models import load_model
from tests.doors.cli.test_commands import specbeam
from tests.support import words

PRICES = PassPrices(layer_s=4e-4, byte_s=1e-10, reduce_s=5e-5, tell_s=8e-4)
SIZES = {
    "small": ModelSize(10, 256, 3e7, 1e4),
    "middle": ModelSize(12, 512, 1.5e8, 2e4),
    "large": ModelSize(24, 768, 6e8, 3e4),
}


def samples(prices=PRICES, ranks=(1, 2), rows=1):
    return [
        PassSample(name, size, count, rows, 128, seconds, seconds, seconds)
        for name, size in SIZES.items()
        for count in ranks
        for seconds in [prices.pass_s(size, count, 128)]
    ]


def test_a_fit_finds_the_prices_that_made_the_passes_and_predicts_models_it_has_not_seen():
    found = fitted_prices(samples())
    for name, value in asdict(PRICES).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name
    both = samples() + samples(replace(PRICES, byte_s=5e-10), rows=20)
    for prediction in held_out(both):
        assert prediction.error == pytest.approx(0, abs=1e-6)
    assert fitted_prices(samples(ranks=(1,))).reduce_s == 0


def test_a_prediction_is_wrong_where_the_passes_do_not_follow_the_model():
    found = samples()
    slow = [replace(one, seconds=1.5 * one.seconds) if one.model == "large" else one for one in found]
    errors = {(one.sample.model, one.sample.ranks): one.error for one in held_out(slow)}
    assert errors["large", 1] == pytest.approx(1 / 1.5 - 1, abs=1e-6)
    assert errors["large", 2] == pytest.approx(1 / 1.5 - 1, abs=1e-6)


def test_no_price_is_below_zero_and_too_few_models_are_refused():
    cheap = [replace(one, seconds=one.seconds - 0.9e-3 * (one.ranks > 1)) for one in samples()]
    found = fitted_prices(cheap)
    assert min(asdict(found).values()) >= 0
    for wrong in ([], samples()[:2], [one for one in samples() if one.ranks == 1 or one.model == "small"]):
        with pytest.raises(BadSetting, match="too few for a fit"):
            fitted_prices(wrong)
    with pytest.raises(BadSetting, match="passes of 1 models on one rank"):
        fitted_prices(2 * samples()[:1])


def test_a_turn_is_the_sum_of_its_parts_and_only_the_target_shrinks_with_devices():
    plan = TurnPlan()
    cluster = Cluster()
    two, eight = (turn_parts(TARGET_70B, DRAFT_1B, ranks, 4, plan, cluster) for ranks in (2, 8))
    assert two.weights == pytest.approx(140e9 / 2 / (0.7 * 3.35e12))
    assert eight.weights == pytest.approx(two.weights / 4)
    assert eight.drafts == two.drafts == pytest.approx(4 * (2e9 + 2048 * 32768) / (0.7 * 3.35e12))
    assert eight.sums > two.sums > 160 * 10e-6
    assert two.turn == pytest.approx(sum((two.weights, two.cache, two.sums, two.drafts, two.host)))
    assert two.arithmetic == 0
    many = turn_parts(TARGET_70B, DRAFT_1B, 2, 4, replace(plan, requests=64), cluster)
    assert many.arithmetic > many.weights  # 1,280 rows: bound by arithmetic
    assert two.layers_per_s(8) == pytest.approx(4 * 3 / two.turn)
    assert eight.layers_per_s(4) == 0  # four devices do not hold it


def test_passes_of_a_whole_model_are_timed_with_their_size(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    target, _ = words.saved(tmp_path)
    found = scale_passes(target, [1, 3], 16, 2)
    assert [(one.model, one.ranks, one.rows, one.stored) for one in found] == [
        ("target", 1, 1, 16),
        ("target", 1, 3, 16),
    ]
    model = load_model(target)
    config = model.config
    keys = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    embeddings = 4 * config.vocab_size * config.hidden_size
    assert not config.tie_word_embeddings
    for one in found:
        assert 0 < one.low <= one.seconds <= one.high
        assert one.size.layers == config.num_hidden_layers
        assert one.size.kv_bytes == 4 * 2 * config.num_hidden_layers * keys
        assert one.size.weight_bytes == 4 * sum(weight.numel() for weight in model.parameters()) - embeddings


def test_the_command_prints_the_table_and_checks_passes_from_files(tmp_path):
    _, out, _ = specbeam("bench", "scale", "--ranks", "2", "--ranks", "8")
    assert "| weights | 29.9 ms | 7.5 ms |" in out
    lines = [json.dumps(asdict(one) | {"provenance": {}}) for one in samples()]
    (tmp_path / "passes.jsonl").write_text("\n".join(lines))
    assert read_samples(tmp_path / "passes.jsonl") == samples()
    _, out, _ = specbeam("bench", "scale", "--samples", str(tmp_path / "passes.jsonl"))
    assert "400 us a layer, 10.00 GB/s, 50 us a sum, 800 us to tell" in out
    assert "largest 0%" in out
    (tmp_path / "wrong.jsonl").write_text("{}\n")
    with pytest.raises(MissingFile, match="does not hold passes"):
        read_samples(tmp_path / "wrong.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(MissingFile, match="is empty"):
        read_samples(tmp_path / "empty.jsonl")
    _, out, _ = specbeam("bench", "scale", "--stored", "204800", "--ranks", "2")
    assert "| keys and values | 1.4 ms |" not in out
    assert "| keys and values | 14.3 ms |" in out


WRONG = {
    "--ranks 0": "--ranks is 0",
    "--ranks 16": "--ranks is 16, and --devices 8",
    "--devices 0 --ranks 1": "--devices is 0",
    "--beams 0": "--beams is 0",
    "--requests 0": "--requests is 0",
    "--depth -1": "--depth is -1",
    "--kept 0": "--kept is 0",
    "--kept nan": "--kept is nan",
    "--stored -1": "--stored is -1",
    "--reduce-us -1": "--reduce-us is -1",
    "--host-ms inf": "--host-ms is inf",
    "--measure x --samples y": "give one of them",
    "--samples y --json": "--json is for the table",
    "--measure x --json": "--json is for the table",
}


@pytest.mark.parametrize("given", WRONG)
def test_numbers_and_options_that_say_nothing_are_refused_by_name(given):
    code, _, said = specbeam("bench", "scale", *given.split())
    assert code != 0
    assert WRONG[given] in " ".join(said.split())
