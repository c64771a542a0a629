"""llama.cpp as a target: beams of a float32 model in a GGUF file are those of specbeam's own engine."""

import numpy as np
import pytest

import specbeam as sb
from specbeam.errors import BadCheckpoint, MissingFile, MissingPackage, ServerGone
from specbeam.models.chains.chains import Chain
from specbeam.models.chains.in_llama_cpp import best_of, common_beginning, entries_of, evened
from tests.support.tiny_models import tiny

PROMPTS = [[3, 9, 27, 5], [8, 8, 40], [3, 9, 27, 6, 1, 7]]


def test_tokens_that_chains_share_are_computed_once():
    texts = [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 3]]
    entries = entries_of([Chain(text, 1, 4) for text in texts], [1, 1, 1])
    found = [(one.position, one.token, one.chains) for one in entries]
    assert sorted(found) == [(1, 6, (0, 1, 2)), (2, 3, (2,)), (2, 7, (0, 1)), (3, 8, (0,)), (3, 9, (1,))]
    assert [position for position, *_ in found] == [1, 2, 2, 3, 3]
    assert len(entries_of([Chain(text, 1, 4) for text in texts], [3, 2, 1])) == 5
    assert evened([Chain(text, 1, 4) for text in texts], [2, 1, 1]) == [1, 1, 1]
    assert evened([Chain(text, 1, 4) for text in texts], [3, 2, 1]) == [3, 2, 1]
    assert common_beginning([5, 6, 7], [5, 6, 9, 1]) == 2
    rng = np.random.default_rng(0)
    for _ in range(200):
        one, other = ([int(token) for token in rng.integers(0, 2, rng.integers(0, 9))] for _ in range(2))
        expected = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), -1)
        assert common_beginning(one, other) == (min(len(one), len(other)) if expected < 0 else expected)


def test_chains_of_different_namespaces_share_no_token():
    chains = [Chain([5, 6, 7], 1, 4, "a"), Chain([5, 6, 7], 1, 4, "b"), Chain([5, 6, 8], 1, 4, "a")]
    found = [(one.position, one.token, one.chains) for one in entries_of(chains, [0, 0, 0])]
    assert sorted(found) == [
        (0, 5, (0, 2)), (0, 5, (1,)), (1, 6, (0, 2)), (1, 6, (1,)), (2, 7, (0,)), (2, 7, (1,)), (2, 8, (2,)),
    ]  # fmt: skip
    assert evened(chains, [1, 1, 0]) == [0, 1, 0]
    assert evened(chains, [1, 2, 1]) == [1, 2, 1]  # the second one shares nothing


def test_the_tokens_of_long_chains_are_found_in_linear_time():
    """Twenty chains of 8,000 tokens that share all but the last hundred."""
    common = [*range(8000)]
    chains = [Chain([*common, *range(number, number + 100)], 8000, 4) for number in range(20)]
    counted = 0

    class Counting(list):
        def __getitem__(self, place):
            nonlocal counted
            if isinstance(place, slice):
                counted += len(range(*place.indices(len(self))))
            return super().__getitem__(place)

    counting = [chain._replace(tokens=Counting(chain.tokens)) for chain in chains]
    entries = entries_of(counting, [0] * 20)
    assert len(entries) == 8000 + 20 * 100
    assert counted <= 20 * 8100


def test_the_likeliest_tokens_come_first_and_equal_ones_by_id():
    logits = np.array([1.0, 3.0, 3.0, -2.0, 2.0], dtype=np.float32)
    tokens, logp = best_of(logits, 3)
    assert tokens.tolist() == [1, 2, 4]
    assert np.allclose(np.exp(logp), np.exp(logits[tokens]) / np.exp(logits).sum())
    assert best_of(logits, 5)[0].tolist() == [1, 2, 4, 0, 3]
    assert np.isclose(np.exp(best_of(logits, 5)[1]).sum(), 1)


def test_wrong_files_are_explained(tmp_path):
    with pytest.raises(MissingFile, match=r"is no file; give llama\.cpp:FILE"):
        sb.load(f"llama.cpp:{tmp_path}/missing.gguf", tokenizer=False)


def test_without_its_package_llama_cpp_is_named(tmp_path):
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        with pytest.raises(MissingPackage, match=r"pip install 'specbeam\[llamacpp\]'"):
            sb.load(f"llama.cpp:{tmp_path}/model.gguf", tokenizer=False)


def write_gguf(path, model):
    """Write a Llama as llama.cpp reads it, in float32 and without a tokenizer."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for part, name in parts.items():
            names[f"model.layers.{layer}.{part}.weight"] = f"blk.{layer}.{name}.weight"
    for name, weight in model.state_dict().items():
        values = weight.detach().numpy()
        count = next((number for part, number in heads.items() if part in name), 0)
        if count:  # llama.cpp rotates neighbouring numbers
            values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(names[name], np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = tiny("llama", seed=4, tie_word_embeddings=False)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, model)
    draft = tiny("llama", seed=5)
    ends = {"tokenizer": False}
    return sb.load(f"llama.cpp:{path}", draft=draft, **ends), sb.load(model, draft=draft, **ends)


def texts(pair, method, **options):
    answers = sb.generate(pair, PROMPTS, method, max_new_tokens=12, eos_token_id=[1], **options)
    return [[beam.tokens for beam in one.beams] for one in answers]


def test_beams_on_llama_cpp_are_those_of_our_engine(pairs):
    served, own = pairs
    for method in (sb.greedy(), sb.beam_search(3), sb.speculative_beam_search(3, depth=3)):
        assert texts(served, method) == texts(own, method)


def test_seeds_give_the_same_beams_with_drafts_on_llama_cpp(pairs):
    served, _ = pairs
    settings = {"seed": 3, "temperature": 0.9}
    drafted = texts(served, sb.dsbd(3, depth=3, width="fixed"), **settings)
    assert drafted == texts(served, sb.beam_sampling(3), **settings)


def test_texts_of_other_namespaces_are_not_known_and_change_no_row(pairs):
    served, _ = pairs
    scorer = served.target.scorer
    text = [3, 9, 27, 5, 8, 8]
    (expected,) = scorer.score([Chain(text, 4, 6, "a")])
    assert scorer._longest_known(Chain(text, 4, 6, "a"))[1] == 4
    assert scorer._longest_known(Chain(text, 4, 6, "b"))[1] == 0
    both = scorer.score([Chain(text, 4, 6, "b"), Chain(text, 4, 6, "a")])
    for found in both:
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert np.allclose(found.logp, expected.logp, atol=1e-5)


def test_every_token_that_ends_a_turn_in_the_file_ends_a_text(tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from tests.support import gguf_files as with_tokenizer

    model = tiny("llama", seed=4, tie_word_embeddings=False)
    path = tmp_path / "ends.gguf"
    names = [f"w{number}" for number in range(model.config.vocab_size)]
    kinds = [3 if number in (0, 1, 5, 7) else 1 for number in range(len(names))]  # control tokens, and usual ones
    names[7] = "<|im_end|>"  # known by its text

    def add_ends(writer):
        writer.add_eot_token_id(5)

    with_tokenizer.write_gguf(path, model, "F32", tokens=(names, kinds, ["w 1"]), change=add_ends)
    with sb.load(f"llama.cpp:{path}", tokenizer=False) as pair:
        assert {*pair.eos} == {1, 5, 7}
    with pytest.raises(ServerGone, match="was freed with its pair; load it again"):
        sb.generate(pair, [3, 9], sb.greedy(), max_new_tokens=2)


def test_a_file_that_llama_cpp_cannot_read_is_refused(tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    (tmp_path / "model.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(BadCheckpoint, match=r"llama\.cpp could not load"):
        sb.load(f"llama.cpp:{tmp_path}/model.gguf", tokenizer=False)
