"""Catalogues: answers are items and nothing else, with the beams of transformers and the renormalised law."""

import json

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.decode import decode
from specbeam.core.items import ItemConstraint, trie_of
from specbeam.core.laws.warp import Warp
from specbeam.errors import BadSetting, MissingFile, NotSupported
from tests.support.exact import beam_sampling_law, distance, exact_law
from tests.support.examples import completed, law_and_mean, one_turn
from tests.support.programs import outcome_of, random_table
from tests.support.tiny_models import tiny
from tests.support.tiny_sources import tiny_reader

END = (3,)
EOS = 2
VOCAB = 61


def random_items(seed, count, longest=4, first=6, last=40):
    """Distinct lists of 2 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    found = {tuple(rng.integers(first, last, rng.integers(2, longest + 1)).tolist()) for _ in range(count)}
    return {f"item {number}": list(one) for number, one in enumerate(sorted(found))}


def after(items, path):
    """Tokens that continue an item after a path, and whether an item is complete; by looking at all items."""
    path = tuple(path)
    longer = [item for item in items if len(item) > len(path) and tuple(item[: len(path)]) == path]
    return sorted({item[len(path)] for item in longer}), path in {tuple(item) for item in items}


def constraint_of(items, vocab, chosen=None):
    longest = max(map(len, items))
    tokens = np.array([[*item, *[-1] * (longest - len(item))] for item in items])
    trie, order = trie_of(tokens)
    return ItemConstraint(trie, None if chosen is None else np.asarray(chosen)[order], vocab)


@pytest.mark.parametrize("seed", range(6))
def test_a_trie_allows_what_continues_an_item(seed):
    items = list(random_items(seed, 60, 5, 0, 6).values())
    rng = np.random.default_rng(seed)
    chosen = rng.random(len(items)) < (1 if seed % 2 else 0.4)
    left = [item for item, is_chosen in zip(items, chosen, strict=True) if is_chosen]
    constraint = constraint_of(items, 9, chosen if seed % 2 == 0 else None)
    bans = constraint.processor((7,), 0, "items")
    for item in left:
        for length in range(len(item) + 1):
            path = np.array([item[:length]], dtype=np.int64).reshape(1, length)
            tokens, is_complete = after(left, item[:length])
            allowed = np.flatnonzero(bans.allowed(path, 9)[0]).tolist()
            assert allowed == sorted([*tokens, *([7] if is_complete else [])])
            walker = constraint.start()
            for token in item[:length]:
                walker.take(token)
            bits = np.unpackbits(constraint.allowed([walker]), axis=1, count=9, bitorder="little")[0]
            assert np.flatnonzero(bits).tolist() == tokens
            assert constraint.complete([walker]) == [is_complete]
            bans.keep(path)
            rows = rng.normal(size=(1, 9)).astype(np.float32)
            kept = rows.copy()
            bans.ban_below(kept, np.zeros(1, dtype=np.int64), np.array([-1]), np.zeros(1, dtype=np.int64))
            assert np.flatnonzero(np.isfinite(kept[0])).tolist() == allowed
            assert (kept[0][allowed] == rows[0][allowed]).all()


SMALL = [(0, 1), (0, 2, 1), (1,), (1, 1), (2, 0, 0)]


def renormalised(table):
    """The table's law over what continues an item. Straight from the definition."""

    def law(path):
        tokens, is_complete = after(SMALL, path)
        kept = np.zeros(4)
        some = [*tokens, *(END if is_complete else ())]
        kept[some] = np.asarray(table(path))[some]
        return kept / kept.sum()

    return law


def small_warp():
    bans = constraint_of(SMALL, 4).processor(END, 1, "catalogue")
    from transformers import LogitsProcessorList

    return Warp(LogitsProcessorList([bans]), constraint=bans)


@pytest.mark.parametrize("method", [sb.speculative_sampling(2), sb.rsd_s(2, 2), sb.traversal(), sb.specinfer()])
def test_drawn_texts_have_the_renormalised_law(method):
    target, draft = random_table(1, 4), random_table(2, 4)
    program = one_turn(lambda lm: method, target, draft, eos=END, warp=small_warp)
    found, _ = law_and_mean(program, renormalised(target), 4, END)
    assert distance(found, completed(renormalised(target), (), 4, END)) < 1e-12


def test_dsbd_has_the_law_of_beam_sampling_among_items():
    target, draft = random_table(1, 4), random_table(2, 4)
    method = sb.dsbd(2, 2, 1, "fixed", coupling="rejection")
    found = exact_law(outcome_of(method, target, draft, 2, END, False, small_warp))
    expected = beam_sampling_law(renormalised(target), 2, 2, False, END)
    assert distance(found, expected) < 1e-12


@pytest.fixture(scope="module", params=["llama", "t5"])
def pair(request):
    model = tiny("llama", seed=3, vocab_size=VOCAB) if request.param == "llama" else tiny_reader("t5", seed=3)
    return sb.load(model, tokenizer=False)


PROMPT = [5, 9, 11, 8]


def of_transformers(pair, items, beams, prompt=PROMPT):
    """Beams and scores of transformers with the same trie."""
    start = 1 if pair.target_model.config.is_encoder_decoder else len(prompt)

    def allowed(number, tokens):
        found, is_complete = after(items, tokens[start:].tolist())
        return [*found, *([EOS] if is_complete else [])] or [EOS]

    longest = max(map(len, items))
    out = pair.target_model.generate(
        torch.tensor([prompt]), num_beams=beams, num_return_sequences=beams, do_sample=False, eos_token_id=EOS,
        max_new_tokens=longest + 1, prefix_allowed_tokens_fn=allowed, output_scores=True, return_dict_in_generate=True,
        pad_token_id=1,
    )  # fmt: skip
    texts = [row[start:].tolist() for row in out.sequences]
    return [text[: text.index(EOS) + 1] for text in texts], out.sequences_scores.tolist()


@pytest.mark.parametrize("beams", [4, 20])
def test_beams_are_those_of_transformers_with_the_same_trie(pair, beams):
    items = random_items(1, 200)
    expected, scores = of_transformers(pair, list(items.values()), beams)
    (answer,) = sb.generate(pair, PROMPT, sb.beam_search(beams), catalogue=items, eos_token_id=EOS)
    assert [one.tokens for one in answer.beams] == expected
    assert [one.score for one in answer.beams] == pytest.approx(scores, abs=1e-4)
    assert [items[one.item] for one in answer.beams] == [one[:-1] for one in expected]


def test_levels_of_the_trie_are_scored_in_one_pass(pair):
    """The beams of beam search in fewer passes; a catalogue whose items differ in the first tokens needs two."""
    wide = random_items(8, 300)
    first = {name: [*tokens[:2], 7, 8, 9] for name, tokens in wide.items()}
    distinct = {tuple(tokens): name for name, tokens in first.items()}
    narrow = {name: list(tokens) for tokens, name in distinct.items()}
    for items, passes in ((wide, 5), (narrow, 3)):
        options = {"catalogue": items, "eos_token_id": EOS}
        (plain,) = sb.generate(pair, PROMPT, sb.beam_search(8), **options)
        drafted_method = sb.speculative_beam_search(8, drafter="items", depth=4)
        (drafted,) = sb.generate(pair, PROMPT, drafted_method, **options)
        assert [one.item for one in drafted.beams] == [one.item for one in plain.beams]
        assert [one.score for one in drafted.beams] == pytest.approx([one.score for one in plain.beams], abs=1e-4)
        assert drafted.report.target_passes <= passes
        assert drafted.report.target_passes < plain.report.target_passes
    with pytest.raises(NotSupported, match="give catalogue"):
        sb.generate(pair, PROMPT, sb.speculative_beam_search(8, drafter="items", depth=4))


def test_every_answer_of_every_method_is_an_item(pair):
    shop = sb.catalogue(random_items(2, 300))
    for method in (sb.beam_sampling(8), sb.sampling(), sb.beam_search(8), sb.prompt_lookup()):
        answers = sb.generate(pair, [PROMPT, PROMPT[:2]], method, catalogue=shop, eos_token_id=EOS, seed=4)
        for answer in answers:
            assert all(one.item is not None for one in answer.beams)
            assert all(one.tokens[-1] == EOS for one in answer.beams)
    best = list(sb.best(pair, PROMPT, 5, catalogue=shop, eos_token_id=EOS))
    (wide,) = sb.generate(pair, PROMPT, sb.beam_search(64), catalogue=shop, eos_token_id=EOS, length_penalty=0.0)
    assert [one.item for one in best] == [one.item for one in wide.beams[:5]]
    assert all(one.certain for one in best)


def test_a_subset_by_names_and_by_bitmap_confines_answers(pair):
    items = random_items(3, 200)
    shop = sb.catalogue(items)
    names = list(items)[10:40]
    bitmap = np.zeros(len(items), dtype=bool)
    bitmap[10:40] = True
    packed = np.packbits(bitmap, bitorder="little").tobytes()
    found = []
    for chosen in (shop.only(names), shop.only(bitmap), shop.only(packed)):
        assert len(chosen) == 30
        (answer,) = sb.generate(pair, PROMPT, sb.beam_search(12), catalogue=chosen, eos_token_id=EOS)
        assert {one.item for one in answer.beams} <= set(names)
        found.append([one.item for one in answer.beams])
    assert found[0] == found[1] == found[2]
    one = shop.only(names).only(names[:1])
    (answer,) = sb.generate(pair, PROMPT, "sampling", catalogue=one, eos_token_id=EOS, seed=1)
    assert answer.beams[0].item == names[0]


def test_items_of_one_length_need_no_end_token(pair):
    items = [[6, 7, 8], [6, 7, 9], [10, 7, 8]]
    (answer,) = sb.generate(pair, PROMPT, sb.beam_search(3), catalogue=items, eos_token_id=[])
    assert sorted(one.item for one in answer.beams) == [0, 1, 2]
    assert all(one.tokens == items[one.item] for one in answer.beams)
    assert [one.item for one in sb.best(pair, PROMPT, catalogue=items, eos_token_id=[], length_penalty=1.0)] == [
        one.item for one in answer.beams
    ]
    with pytest.raises(BadSetting, match="different lengths"):
        sb.generate(pair, PROMPT, catalogue=[[6], [7, 8]], eos_token_id=[])


def test_scores_may_be_renormalised_over_the_items(pair):
    items = list(random_items(5, 40).values())
    (answer,) = sb.generate(
        pair, PROMPT, sb.beam_search(64), catalogue=items, eos_token_id=EOS, renormalize_logits=True, length_penalty=0.0
    )
    assert sum(np.exp(one.score) for one in answer.beams) == pytest.approx(1, abs=1e-4)


def test_runs_find_what_turns_find(pair):
    """Compiled runs ban by the trie without a set of allowed tokens."""
    from specbeam.doors.options.settings import Settings
    from specbeam.doors.request import Request

    items = random_items(6, 300)
    found = []
    for ahead in (0, 32):
        settings = Settings(catalogue=items, eos_token_id=EOS)
        request = Request.of(pair, PROMPT, sb.beam_sampling(6), settings, seed=3)
        for _ in decode(pair.target, request.sessions, ahead=ahead):
            pass
        found.append([(one.item, one.tokens) for one in request.result(request.sessions[0])[0].beams])
    assert found[0] == found[1]


def test_all_formats_give_the_same_items(tmp_path):
    items = random_items(7, 50)
    tokens = sb.catalogue(items)._tokens
    (tmp_path / "a.json").write_text(json.dumps(items))
    np.savez(tmp_path / "a.npz", tokens=tokens, names=list(items))
    sb.catalogue(items).save(tmp_path / "a.catalogue")
    given = [items, tmp_path / "a.json", str(tmp_path / "a.npz"), tmp_path / "a.catalogue"]
    for shop in map(sb.catalogue, given):
        assert len(shop) == len(items)
        assert shop.longest(None, ()) == 4
        for name, tokens in items.items():
            assert shop.item_of(None, [*tokens, 2], (2,)) == name
        assert shop.item_of(None, [1, 1, 2], (2,)) is None
        assert shop.item_of(None, tokens, (2,)) is None
    texts = ["red shoes", "blue shoes"]
    (tmp_path / "b.txt").write_text("\n".join(texts))
    (tmp_path / "b.tsv").write_text("1\tred shoes\n2\tblue shoes\n")
    assert [sb.catalogue(tmp_path / "b.txt").name(number) for number in (0, 1)] == texts
    assert [sb.catalogue(tmp_path / "b.tsv").name(number) for number in (0, 1)] == ["1", "2"]
    pandas = pytest.importorskip("pandas")
    assert len(sb.catalogue(pandas.Series(texts))) == 2


def test_catalogues_of_other_items_have_other_descriptions():
    """Jobs compare descriptions before they are resumed."""
    shop = sb.catalogue({"a": [1, 2], "b": [3]})
    others = [sb.catalogue({"a": [1, 2], "b": [4]}), sb.catalogue({"a": [1, 2], "c": [3]}), shop.only(["a"])]
    assert repr(shop) == repr(sb.catalogue({"a": [1, 2], "b": [3]}))
    assert repr(shop) not in map(repr, others)


def test_wrong_catalogues_are_refused(tmp_path):
    with pytest.raises(BadSetting, match="have the same tokens"):
        sb.catalogue([[1, 2], [3], [1, 2]]).longest(None, ())
    with pytest.raises(BadSetting, match="has no items"):
        sb.catalogue([])
    with pytest.raises(BadSetting, match="all items must be texts, or all non-empty lists"):
        sb.catalogue(["a", [1]])
    with pytest.raises(BadSetting, match="has token -4"):
        sb.catalogue([[1, -4]])
    with pytest.raises(MissingFile):
        sb.catalogue(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(BadSetting, match="is not a catalogue"):
        sb.catalogue(tmp_path / "bad.json")
    with pytest.raises(NotSupported, match="cannot be saved"):
        sb.catalogue(["a"]).save(tmp_path / "c.catalogue")
    with pytest.raises(BadSetting, match="has no item 'x'"):
        sb.catalogue({"a": [1]}).only(["x"])
    with pytest.raises(BadSetting, match="the bitmap has 3 bits"):
        sb.catalogue({"a": [1]}).only(np.ones(3, dtype=bool))


def test_wrong_calls_are_refused(pair):
    with pytest.raises(BadSetting, match="the model's vocabulary is 0 to 60"):
        sb.generate(pair, PROMPT, catalogue=[[70]], eos_token_id=EOS)
    with pytest.raises(BadSetting, match="take 4: raise it"):
        sb.generate(pair, PROMPT, catalogue=[[6, 7, 8]], eos_token_id=EOS, max_new_tokens=3)
    with pytest.raises(BadSetting, match="give only one"):
        sb.generate(pair, PROMPT, catalogue=[[6]], regex="a", eos_token_id=EOS)
    with pytest.raises(NotSupported, match="no tokenizer"):
        sb.generate(pair, PROMPT, catalogue=["a text"], eos_token_id=EOS)


def test_a_trie_takes_less_than_a_hundred_bytes_per_item():
    rng = np.random.default_rng(0)
    tokens = np.unique(rng.integers(0, 64, (60_000, 4)), axis=0) + 64 * np.arange(4)
    trie, order = trie_of(rng.permutation(tokens))
    assert (sum(one.nbytes for one in trie) + order.nbytes) / len(tokens) < 100


def test_end_tokens_that_no_item_contains_share_one_trie(pair):
    """So nobody who varies them makes a trie anew, or evicts one."""
    items = sb.catalogue({"a": [3, 4, 5], "b": [3, 6, 2]})
    usual, _ = items._trie(None, (2,))
    others = [items._trie(None, (2, other))[0] for other in range(7, 60)]
    assert all(one is usual for one in others)
    assert items._trie(None, ())[0] is not usual
    assert items._trie(None, (9, 2))[0] is usual
    assert items.tokens_among(None, (2, 3, 9)) == (2, 3)


def test_a_trie_that_is_in_use_is_not_evicted_by_tries_for_other_end_tokens():
    items = sb.catalogue([[token, 30 + token] for token in range(20)])
    usual, _ = items._trie(None, ())
    for token in range(20):
        items._trie(None, (30 + token,))
        assert items._trie(None, ())[0] is usual
    assert len(items._tries) <= 8
