"""GGUF files: what the compiled forward makes of their blocks is the model of their weights, exactly."""

import json
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core import compiling

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

import gguf
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specbeam.core.errors import BadSetting, NotSupported
from specbeam.core.forest import Forest
from specbeam.engines.blocks import BLOCKS, BlockMatrix
from specbeam.engines.cpu.block_panels import write_blocks
from specbeam.engines.cpu.panels import empty_panels, in_panels, multiply
from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.eligibility import check_takes_heads, output_shape
from specbeam.engines.mapped import is_mapped
from specbeam.engines.packed import PackedLinear, weights_in
from specbeam.lab.train.plan import planned
from specbeam.models.checkpoints.gguf import read_header
from specbeam.models.heads.files import HeadFiles
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.quantised import rounding_of
from tests.doors.cli.test_commands import specbeam
from tests.models.test_compiled_forward import scored
from tests.models.test_huggingface import check_random_turns
from tests.support import words
from tests.support.gguf_files import SCALES_AT, blocks_of, write_gguf
from tests.support.seats import plain_logits
from tests.support.tiny_models import tiny

TEXT = [3, 4, 5, 9, 20]
CLOSE = 3e-5  # both sides add some hundred float32 products in orders of their own
SMALL = {"hidden_size": 64, "intermediate_size": 96}
LARGE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
FOUR, EIGHT = "blocks of 4 bits", "blocks of 8 bits"


def of_about_4_bits(name):
    """As in files of kind Q4_K_M: more bits for values, for the last matrix in some layers, and for embeddings."""
    if name in ("token_embd.weight", "output.weight", "blk.1.ffn_down.weight") or "attn_v" in name:
        return "Q6_K"
    return "Q4_K"


def loaded(path, *drafts, **options):
    return sb.load(path, *drafts, tokenizer=words.tokenizer(), **options)


def last_row(lm, text=TEXT):
    return scored(lm, text, Forest.rooted([text[-1]]))[0]


def spreads_off(found, expected):
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize("number", BLOCKS, ids=[kind.name for kind in BLOCKS.values()])
def test_weights_of_blocks_are_those_of_the_gguf_package_to_the_last_bit(number, tmp_path):
    kind = BLOCKS[number]
    rng = np.random.default_rng(number)
    matrix = rng.standard_normal((70, 512)).astype(np.float32)
    stored = blocks_of(matrix, kind.name, rng)
    (tmp_path / "file").write_bytes(b"before" + stored.tobytes())
    expected = gguf.dequantize(stored, gguf.GGMLQuantizationType(number))
    place = BlockMatrix(tmp_path / "file", "m", 6, number, matrix.shape)
    blocks = place.read()
    assert np.array_equal(blocks.weights(), expected)
    turned = place.in_order(range(69, -1, -1)).in_order([3, *range(69)])
    assert np.array_equal(turned.read().weights(), expected[::-1][[3, *range(69)]])
    for bits in (4, 8)[kind.bits == 8 :]:
        panels = empty_panels(1, 70, 512, FOUR if bits == 4 else EIGHT)[0]
        write_blocks(panels.view(np.int32), blocks, bits)
        plain = in_panels(expected)
        for rows in (1, 7, 13, 200):
            x = rng.standard_normal((rows, 512)).astype(np.float32)
            found, wanted = (np.full((rows, len(panels) * WIDTH), np.nan, dtype=np.float32) for _ in range(2))
            multiply(x, panels, found, 1)
            multiply(x, plain, wanted, 1)
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("kind", "family", "changes", "kinds"),
    [
        ("Q4_1", "llama", SMALL, {FOUR}),
        ("Q4_0", "llama", SMALL, {"nibbles"}),
        ("Q5_0", "qwen2", SMALL, {EIGHT}),
        ("Q5_1", "gemma", SMALL, {EIGHT}),
        ("Q8_0", "phi3", SMALL, {EIGHT}),
        (of_about_4_bits, "qwen3", LARGE, {FOUR, EIGHT}),
        pytest.param("Q5_K", "gemma2", LARGE | {"query_pre_attn_scalar": 64}, {EIGHT}, marks=pytest.mark.slow),
        pytest.param("Q4_K", "gemma3", LARGE | {"query_pre_attn_scalar": 64}, {FOUR}, marks=pytest.mark.slow),
        pytest.param("Q6_K", "mistral", LARGE | {"sliding_window": None}, {EIGHT}, marks=pytest.mark.slow),
        ("BF16", "qwen2", SMALL, {"bfloat16"}),
        ("F16", "llama", SMALL | {"tie_word_embeddings": True}, {"float32"}),
        ("F32", "qwen3", SMALL, {"float32"}),
    ],
)
def test_the_compiled_forward_is_the_float32_model_of_the_weights_in_the_file(
    kind, family, changes, kinds, tmp_path, packed
):
    """To the last bit that of its own float32 panels; on trees that of transformers, up to the order of sums."""
    path = tmp_path / "model.gguf"
    twin = write_gguf(path, tiny(family, **changes), kind)
    target = loaded(path).target
    assert target.engine == "compiled"
    assert target.engine_note == ""
    assert set(target.runner.decoder.kinds_of_matrices) == kinds
    assert weights_in(target.model) == twin.num_parameters()
    assert rounding_of(target) == ("" if kind in ("BF16", "F16", "F32") else "gguf")
    assert torch.equal(last_row(target), last_row(HuggingFaceLM(twin)))
    check_random_turns(HuggingFaceLM(target.model, chunk=5), twin, turns=2)
    assert spreads_off(target.model(torch.tensor([TEXT])).logits[0, -1], plain_logits(twin, [TEXT])[0]) < CLOSE


def test_greedy_and_beam_search_write_the_texts_of_transformers(tmp_path):
    path = tmp_path / "model.gguf"
    twin = write_gguf(path, tiny("llama", **SMALL), "Q4_1")
    pair = loaded(path)
    for method, options in (("greedy", {}), (sb.beam_search(3), {"num_beams": 3})):
        found = sb.generate(pair, TEXT, method, max_new_tokens=20)[0].tokens
        given = torch.tensor([TEXT])
        expected = twin.generate(given, do_sample=False, max_new_tokens=20, pad_token_id=2, **options)
        assert found == expected[0, len(TEXT) :].tolist()[: len(found)]
        assert len(found) == 20 or found[-1] == 1


def test_a_folder_with_one_file_is_that_file_and_says_which_matrices_keep_their_bits(tmp_path):
    write_gguf(tmp_path / "tiny-Q5_0.gguf", tiny("llama", **SMALL, tie_word_embeddings=True), "Q5_0")
    target = loaded(tmp_path).target
    assert (
        target.weights_note == "15 matrices keep the bits of the file (15 in Q5_0); the embedding is widened to float32"
    )
    write_gguf(tmp_path / "other.gguf", tiny("llama", **SMALL), "Q5_0")
    with pytest.raises(sb.SpecbeamError, match="holds 2 GGUF files"):
        loaded(tmp_path)
    with pytest.raises(sb.SpecbeamError, match=r"there is no file .*third.gguf"):
        loaded(tmp_path / "third.gguf")


def test_roles_that_are_no_blocks_in_some_layers_are_widened(tmp_path):
    path = tmp_path / "model.gguf"
    twin = write_gguf(path, tiny("llama", **SMALL), lambda name: "F16" if name == "blk.1.attn_v.weight" else "Q4_0")
    target = loaded(path).target
    kinds = target.runner.decoder.kinds_of_matrices
    assert (kinds.qkv, kinds.down) == ("float32", "nibbles")
    assert torch.equal(last_row(target), last_row(HuggingFaceLM(twin)))
    assert "5 matrices are widened to float32 (5 in Q4_0), as others of their role are floats" in target.weights_note


def test_engines_that_read_no_blocks_get_floats(tmp_path):
    path = tmp_path / "model.gguf"
    twin = write_gguf(path, tiny("llama", **SMALL), "Q8_0")
    target = loaded(path, engine="plain").target
    assert target.engine == "plain"
    assert not [module for module in target.model.modules() if isinstance(module, PackedLinear)]
    assert spreads_off(last_row(target), plain_logits(twin, [TEXT])[0]) < CLOSE
    assert target.weights_note.startswith("15 matrices are widened to float32")


def test_large_models_of_16_bits_stay_in_the_mapped_file(tmp_path, monkeypatch):
    monkeypatch.setattr("specbeam.engines.mapped.LARGEST_WIDENED", 0)
    path = tmp_path / "model.gguf"
    twin = write_gguf(path, tiny("qwen2", **SMALL), "F16")
    target = loaded(path).target
    assert is_mapped(target.model)
    assert (target.engine, target.runner.decoder.kind) == ("compiled", "float16")
    assert spreads_off(last_row(target), plain_logits(twin, [TEXT])[0]) < CLOSE


def test_a_file_drafts_for_a_full_target_and_changes_no_beam(tmp_path):
    model = tiny("llama", **SMALL)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "Q4_1")
    pair = loaded(model, path)
    assert pair.draft.engine == "compiled"
    plain = sb.generate(pair, "abc", sb.beam_sampling(3), seed=1, max_new_tokens=12)[0]
    drafted = sb.generate(pair, "abc", sb.dsbd(3, 5, 3), seed=1, max_new_tokens=12)[0]
    assert [beam.tokens for beam in drafted.beams] == [beam.tokens for beam in plain.beams]
    assert drafted.report.target_passes < plain.report.target_passes
    assert "of the target in" not in drafted.report.law


def test_a_target_in_blocks_is_rounded_again_on_request_and_the_law_says_so(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama", **SMALL), "Q5_0")
    pair = loaded(path, "int4")
    assert (pair.target.engine, pair.draft.engine) == ("compiled", "int4")
    assert sb.generate(pair, "abc", sb.dsbd(3), max_new_tokens=4)[0].report.law.endswith("of the target in gguf")
    assert rounding_of(pair.draft) == "gguf and int4"


def test_divisors_of_rotary_angles_are_those_of_llama_3_1(tmp_path):
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}  # fmt: skip
    model = tiny("llama", **SMALL, rope_parameters=scaled)
    angles = model.model.rotary_emb.inv_freq
    size = model.config.head_dim
    plain = 500_000.0 ** (-torch.arange(0, size, 2) / size)

    def change(writer):
        writer.add_tensor("rope_freqs.weight", (plain / angles).numpy())

    twin = write_gguf(tmp_path / "a.gguf", model, "Q8_0", change=change)
    target = loaded(tmp_path / "a.gguf").target
    assert torch.allclose(target.model.model.rotary_emb.inv_freq, angles)
    assert spreads_off(last_row(target), plain_logits(twin, [TEXT])[0]) < CLOSE


def spelled():
    """A vocabulary of bytes with two merges and a control token in front: words, types and merges."""
    letters = [*bytes_to_unicode().values()]
    tokens = ["<s>", "</s>", *letters, "ab", "abc"]
    return tokens, [3, 3, *[1] * (len(tokens) - 2)], ["a b", "ab c"]


def test_the_tokenizer_and_the_chat_template_are_those_of_the_file(tmp_path):
    tokens = spelled()
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama", **SMALL, vocab_size=len(tokens[0])), "Q8_0", tokens=tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pair = sb.load(path, path)
    assert pair.tokenizer("abcb</s>")["input_ids"] == [len(tokens[0]) - 1, tokens[0].index("b"), 1]
    assert pair.tokenizer.decode([len(tokens[0]) - 1]) == "abc"
    assert pair.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert pair.eos == (1,)
    assert sb.load(pair.target_model).tokenizer("abc")["input_ids"] == pair.tokenizer("abc")["input_ids"]
    assert sb.generate(pair, "abc", sb.dsbd(2), max_new_tokens=3)[0].text


def test_the_command_line_takes_a_file_and_a_folder_with_one(tmp_path):
    tokens = spelled()
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama", **SMALL, vocab_size=len(tokens[0])), "Q8_0", tokens=tokens)
    expected = sb.generate(sb.load(path), "abc", "greedy", max_new_tokens=3)[0].tokens
    for name in (path, tmp_path):
        arguments = ("-m", str(name), "abc", "--method", "greedy", "--max-new-tokens", "3", "--json")
        code, out, _ = specbeam("generate", *arguments)
        assert code == 0
        assert json.loads(out)["tokens"] == expected


def test_a_file_without_a_tokenizer_takes_token_ids_with_a_warning(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama", **SMALL), "Q8_0")
    with pytest.warns(UserWarning, match="holds no tokenizer"):
        pair = sb.load(path)
    assert pair.tokenizer is None


def cut(path, size):
    content = path.read_bytes()
    path.write_bytes(content[:size] if size >= 0 else content[: len(content) + size])


def test_the_shape_of_a_head_in_blocks_is_known_without_reading_its_weights(tmp_path, monkeypatch):
    """Heads and their training ask for it; reading would widen the whole matrix each time."""
    model = tiny("llama", tie_word_embeddings=False, **SMALL)
    write_gguf(tmp_path / "m.gguf", model, "Q8_0")
    pair = loaded(tmp_path / "m.gguf")
    assert isinstance(pair.target_model.get_output_embeddings(), PackedLinear)

    def reads(self):
        raise AssertionError("the weights were read")

    monkeypatch.setattr(PackedLinear, "weight", property(reads))
    check_takes_heads(pair.target_model)
    assert output_shape(pair.target_model) == (model.config.vocab_size, SMALL["hidden_size"])
    assert HeadFiles("a head", {}, {}, pair.target_model).vocab == model.config.vocab_size
    assert planned(pair.target_model, {}, {}).draft_vocab <= model.config.vocab_size


@pytest.mark.parametrize("size", [0, 3, 20, 30, 200, 900, 2000, 20_000, -64])
def test_a_file_that_ends_too_early_is_found_before_work(size, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama", **SMALL), "Q8_0", tokens=spelled())
    cut(path, size)
    with pytest.raises(sb.SpecbeamError, match="download it again"):
        loaded(path)


@pytest.mark.parametrize("seed", range(40))
def test_broken_headers_end_in_a_sentence(seed, tmp_path):
    """Random bytes of a header are changed: a specbeam error, or a model."""
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama", **SMALL), "Q8_0")
    rng = np.random.default_rng(seed)
    content = bytearray(path.read_bytes())
    for place in rng.integers(4, 1800, 1 + seed % 3):
        content[place] = rng.integers(256)
    path.write_bytes(content)
    with suppress(sb.SpecbeamError):
        loaded(path, check=False)


def set_split(writer):
    writer.add_uint16("split.count", 3)


def two_experts(writer):
    writer.add_expert_count(8)


def add_tensor(writer):
    writer.add_tensor("blk.0.strange.weight", np.zeros(4, dtype=np.float32))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architecture": "mamba2"}, "has the architecture 'mamba2', and specbeam reads GGUF files of llama, qwen2"),
        ({"change": set_split}, "one of 3 parts of a split GGUF model"),
        ({"change": two_experts}, "holds a mixture of experts"),
        ({"change": add_tensor}, "holds blk.0.strange.weight, which LlamaForCausalLM does not have"),
        ({"block_count": 3}, "lacks blk.2.attn_k.weight"),
        ({"block_count": None}, "has no llama.block_count"),
        ({"feed_forward_length": 64}, "blk.0.ffn_gate.weight is [96, 64], and [64, 64] by the metadata"),
        ({"attention__head_count": [4, 4, 2]}, "another llama.attention.head_count in each layer"),
        ({"attention__head_count_kv": 3}, "4 heads, 3 heads of keys"),
        ({"rope__scaling__type": "su"}, "scales rotary positions by 'su'"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_what_was_found(options, said, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama", **SMALL), "Q8_0", **options)
    with pytest.raises(sb.SpecbeamError) as caught:
        loaded(path)
    assert said in str(caught.value)


def test_parts_of_a_model_and_unknown_types_are_refused(tmp_path):
    part = tmp_path / "model-00001-of-00002.gguf"
    write_gguf(part, tiny("llama", **SMALL), "Q8_0")
    with pytest.raises(NotSupported, match=r"is part 1 of 2 of a split GGUF model.*llama-gguf-split --merge"):
        loaded(part)
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama", **SMALL), "Q8_0")
    content = path.read_bytes()
    place = content.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    path.write_bytes(content[:place] + b"\x0a" + content[place + 1 :])
    with pytest.raises(NotSupported, match=r"blk.0.ffn_up.weight is in Q2_K, and specbeam reads Q4_0"):
        loaded(path)


def test_options_that_do_not_fit_a_file_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama", **SMALL), "Q8_0")
    with pytest.raises(BadSetting, match="leave 'torchao-int8' out"):
        loaded(path, quantize="torchao-int8")
    with pytest.raises(sb.SpecbeamError, match="device_map"):
        loaded(path, device_map="auto")


def test_a_header_is_read_with_all_its_kinds_of_values(tmp_path):
    path = tmp_path / "model.gguf"

    def change(writer):
        writer.add_array("x.names", ["é", "b"])
        writer.add_array("x.numbers", [1.5, -2.0])
        writer.add_bool("x.yes", True)
        writer.add_int64("x.low", -(2**40))

    write_gguf(path, tiny("llama", **SMALL), "Q8_0", change=change)
    found = read_header(path)
    assert found.architecture == "llama"
    given = [found.metadata[f"x.{name}"] for name in ("names", "numbers", "yes", "low")]
    assert given == [["é", "b"], [1.5, -2.0], True, -(2**40)]
    assert SCALES_AT.keys() <= {kind.name for kind in BLOCKS.values()}
    expected = {
        one.name: (int(one.tensor_type), int(one.data_offset), int(one.n_bytes))
        for one in gguf.GGUFReader(path).tensors
    }
    assert {name: (one.type, one.start, one.bytes) for name, one in found.tensors.items()} == expected
