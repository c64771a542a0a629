"""BiTA and Hidden Transfer: what is drafted is what single paths give, where it is drafted, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.control.best_tree import layers_of, ranked_tree, size_of
from specbeam.core.decode import decode
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.errors import BadHead, BadSetting, NotSupported
from specbeam.lab.train.head_files import write_head
from specbeam.models.heads.extra_rows import ExtraHead
from specbeam.models.heads.extra_rows_lm import ExtraLM
from specbeam.models.heads.own import extra_rows_config
from specbeam.models.heads.read import is_head, read_head
from specbeam.models.heads.trees import ScoredTrees, chain_of, lineage
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from specbeam.recipes.tuning.costs import curve_of
from tests.support.extra_rows import DEPTH, KINDS, extra_head, slow_rows
from tests.support.heads import VOCAB, Comparing
from tests.support.tiny_models import tiny
from tests.test_laws_on_models import END, check_each, softened

PROMPTS = [[5, 6, 7, 8, 9, 3], [9], [3, 4]]
OPTIONS = {"max_new_tokens": 10, "eos_token_id": [11], "seed": 3}
MAKE = {"bita": sb.bita, "hidden_transfer": sb.hidden_transfer}


@pytest.fixture(scope="module")
def model():
    return tiny("llama", seed=1, vocab_size=VOCAB)


class Checked(Comparing, ExtraLM):
    """A head whose drafts are compared with the rows of single paths."""

    def features_of(self, tokens):
        return None

    def expected(self, tokens, features, is_scored):
        start = is_scored.index(False)
        return slow_rows(self.head, tokens[:start])[min(len(tokens) - start, self.head.depth) - 1]


METHODS = {
    "beams": sb.dsbd(3, 5, 3),
    "deeper than the head": sb.dsbd(2, 3, 5),
    "beams by rejection": sb.dsbd(3, 5, 3, coupling="rejection"),
    "search": sb.speculative_beam_search(3, 5, depth=2),
    "chain": sb.speculative_sampling(3, controller="fixed"),
    "tree": sb.specinfer((2, 2), controller="fixed"),
    "tree that is cut": sb.opt_tree(4, 3, controller="fixed"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_drafts_are_read_from_the_rows_below_the_nearest_scored_node(name, kind, model):
    draft = Checked(extra_head(model, kind), VOCAB).of(model)
    pair = Pair(model, None, None, HuggingFaceLM(model, engine="plain"), draft)
    settings = {"max_new_tokens": 12} if name == "search" else {**OPTIONS, "max_new_tokens": 16}
    sb.generate(pair, PROMPTS, METHODS[name], **settings)
    assert draft.compared > 20
    assert draft.largest < 1e-3
    assert draft.missed == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["plain", "compiled"])
def test_same_seed_same_beams(engine, kind, model):
    draft = ExtraLM(extra_head(model, kind), VOCAB)
    pair = Pair(model, None, None, HuggingFaceLM(model, engine=engine), draft)
    plain = sb.generate(pair, PROMPTS, sb.beam_sampling(3), **OPTIONS)
    for method in (sb.dsbd(3, 5, 3), sb.dsbd(3, width="auto", depth=2)):
        expected = (
            plain if method.fills_beams else sb.generate(pair, PROMPTS, sb.beam_sampling(3, width="auto"), **OPTIONS)
        )
        for batch_size in (1, 3):
            found = sb.generate(pair, PROMPTS, method, batch_size=batch_size, **OPTIONS)
            assert [[one.tokens for one in each.beams] for each in found] == [
                [one.tokens for one in each.beams] for each in expected
            ]
            assert sum(one.report.draft_passes for one in found) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", ["streamlined", "measured", "odds"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_tree_gives_the_text_of_sampling(tree, kind, temperature, model):
    head = extra_head(model, kind)
    head.ranks = ((0.5, 0.2, 0.1), (0.4, 0.3))
    pair = Pair(model, None, None, HuggingFaceLM(model, engine="compiled"), ExtraLM(head, VOCAB))
    options = {"seed": 4, "max_new_tokens": 20, "temperature": temperature, "eos_token_id": []}
    plain = sb.generate(pair, PROMPTS, sb.sampling(), **options)
    for rule in ("match", "path", "traversal"):
        found = sb.generate(pair, PROMPTS, MAKE[kind](6, 3, tree=tree, rule=rule), **options)
        if rule == "match" or temperature == 0:
            assert [one.tokens for one in found] == [one.tokens for one in plain]
        assert all(one.report.draft_passes > 0 for one in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_goes_on_from_a_node_without_rows_has_no_draft_next_and_that_is_counted(kind, model):
    """With `least` of 1 only roots have rows. A head with the target's own law as its first law has drafts accepted."""
    pair = Pair(model, None, None, HuggingFaceLM(model, engine="compiled"), ExtraLM(extra_head(model, kind), VOCAB))
    method = MAKE[kind](30, 1, tree="measured", least=1.0, controller="fixed")
    settings = Settings.given({"max_new_tokens": 40, "eos_token_id": []}, None)
    (session,) = Request.of(pair, [PROMPTS[0]], method, settings, 5).sessions
    draft = pair.draft.choosing(1.0)
    assert draft is pair.draft.choosing(1.0)
    sizes, accepted = [], []
    for done in decode(pair.target, [session]):
        for _, turn in done:
            sizes.append(turn.forest.size)
            accepted.append(turn.verdict.accepted)
            rows = 0 if turn.scored.extra is None else len(turn.scored.extra.logits)
            assert rows == DEPTH
    assert sizes[0] == 1
    for before, size in zip(accepted, sizes[1:-1], strict=False):  # there may be no room for a draft in the last turn
        assert (size == 1) == (before > 0)
    assert draft.missed == sum(count > 0 for count in accepted) > 0
    plain = sb.generate(pair, [PROMPTS[0]], sb.sampling(), seed=5, max_new_tokens=40, eos_token_id=[])
    assert session.settled == plain[0].tokens


@pytest.mark.parametrize("kind", KINDS)
def test_rows_beyond_the_models_last_position_are_left_out(kind):
    """So a text may go on to the very end; without any rows it is decoded as without a draft."""
    model = tiny("llama", vocab_size=VOCAB, max_position_embeddings=12)
    for engine in ("plain", "compiled"):
        pair = Pair(model, None, None, HuggingFaceLM(model, engine=engine), ExtraLM(extra_head(model, kind), VOCAB))
        options = {"seed": 4, "max_new_tokens": 6, "eos_token_id": []}
        plain = sb.generate(pair, PROMPTS[:1], sb.sampling(), **options)
        found = sb.generate(pair, PROMPTS[:1], MAKE[kind](4, 2), **options)
        assert [one.tokens for one in found] == [one.tokens for one in plain]


def trees_of(parents, vocab=VOCAB, seed=0):
    """Trees with random tokens."""
    parents = np.array(parents)
    depths, sees = lineage(parents)
    tokens = np.random.default_rng(seed).integers(0, vocab, parents.shape)
    return ScoredTrees(*(torch.from_numpy(one) for one in (tokens, parents, depths, sees)), {})


TREES = [[-1, 0, 1, 1, 2, 2, 3, 6, 7], [-1, 0, 1, 2, 3, 4, -1, -1, -1]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma3", "mistral"])
def test_what_is_learnt_on_trees_is_what_is_drafted(family, kind):
    """All nodes of trees at once, and groups that do not see each other, against single paths."""
    model = tiny(family, vocab_size=VOCAB)
    head = extra_head(model, kind)
    trees = trees_of(TREES)
    wanted = trees.parents >= 0
    with torch.no_grad():
        drafts = head.drafts(trees, DEPTH + 2, wanted)
    assert len(drafts) == DEPTH
    for far, rows in enumerate(drafts, 1):
        assert len(rows.nodes) == int((wanted & (trees.depths >= far)).sum())
        for node, found in zip(rows.nodes.tolist(), rows.logits, strict=True):
            row, column = divmod(node, trees.tokens.shape[1])
            path = [column]
            while trees.parents[row, path[0]] >= 0:
                path.insert(0, int(trees.parents[row, path[0]]))
            above = trees.tokens[row, path[: len(path) - far]].tolist()
            torch.testing.assert_close(found, slow_rows(head, above)[far - 1], atol=2e-4, rtol=2e-4)


class CountingOn(ExtraHead):
    """A head for a language in which each token is the one before plus one: extra row j stands for a token j further on.

    Args:
        shift: added to what it says the next token is; 0: it says what comes in this language.
    """

    def __init__(self, target, depth, shift):
        super().__init__(target, depth)
        self.shift = shift

    def rows(self, trees, anchors, depth):
        further = torch.arange(1, depth + 1) + 1 + self.shift
        said = trees.tokens.gather(1, anchors)[..., None] + further
        return torch.nn.functional.one_hot(said, VOCAB).float()


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_extra_row_j_is_taught_the_token_that_is_j_and_one_further_on(shift):
    """A head that counts right is right everywhere, and one that is a token off nowhere (BI-3)."""
    model = tiny("llama", vocab_size=VOCAB, hidden_size=VOCAB, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(torch.eye(VOCAB))
    trees = trees_of(TREES)
    trees = trees._replace(tokens=trees.depths + 3)
    wanted = trees.parents >= 0
    drafts = CountingOn(model, DEPTH, shift).drafts(trees, DEPTH, wanted)
    assert [len(rows.nodes) for rows in drafts] == [int((wanted & (trees.depths >= far)).sum()) for far in (1, 2, 3)]
    for rows in drafts:
        right = rows.logits.argmax(-1) == trees.tokens.flatten()[rows.nodes] + 1
        assert right.float().mean() == (shift == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_the_head_alone(kind, model):
    """And the target's own weights are as they were, and may still want gradients."""
    head = extra_head(model, kind)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    rows = head.drafts(trees_of(TREES), DEPTH, torch.ones(2, 9, dtype=torch.bool))
    sum(one.logits.square().mean() for one in rows).backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in head.parameters())
    for name, weight in model.named_parameters():
        assert weight.grad is None
        assert weight.requires_grad
        assert torch.equal(weight, before[name])
    names = {name.split(".")[0] for name, _ in head.named_parameters()}
    assert names == ({"keys", "values", "masks"} if kind == "bita" else {"maps"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_removed_leaves_the_target_as_it_was(kind, model):
    target = HuggingFaceLM(model, engine="plain")
    alone = Pair(model, None, None, target, None)
    before = sb.generate(alone, PROMPTS, sb.beam_sampling(2), **OPTIONS)
    pair = replace(alone, draft=ExtraLM(extra_head(model, kind), VOCAB))
    sb.generate(pair, PROMPTS, sb.dsbd(2, 3, 2), **OPTIONS)
    after = sb.generate(alone, PROMPTS, sb.beam_sampling(2), **OPTIONS)
    assert [one.beams for one in before] == [one.beams for one in after]
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert target.caches == []


def written(head, folder, **changes):
    write_head(head, extra_rows_config(head) | changes, folder, head.target)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read_as_they_were_written(kind, model, tmp_path):
    head = extra_head(model, kind)
    head.ranks = ((0.5, 0.25), (0.125,))
    written(head, tmp_path)
    assert is_head(tmp_path)
    found = read_head(tmp_path, model)
    assert type(found) is type(head)
    assert found.ranks == head.ranks
    assert found.described == head.described
    for one, other in zip(head.parameters(), found.parameters(), strict=True):
        assert torch.equal(one.bfloat16().float(), other)  # as it is written
    pair = sb.load(model, draft=tmp_path)
    assert isinstance(pair.draft, ExtraLM)
    assert pair.draft.extra_inputs.model is model


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"depth": None}, "config.json has no depth"),
        (
            {"target": {"model_type": "llama", "width": 64, "layers": 2}},
            r"target\.width is 64 in config\.json; it must be the target's, 32",
        ),
        (
            {"target": {"model_type": "gpt2", "width": 32, "layers": 2}},
            r"target\.model_type is 'gpt2' in config\.json; it must be the target's, 'llama'",
        ),
        ({"target": None}, "config.json has no target"),
        ({"ranks": [["high"]]}, r"ranks is \[\['high'\]\] in config\.json; it must be a table of probabilities"),
        ({"ranks": [[1.5]]}, r"ranks is \[\[1\.5\]\] in config\.json; it must be a table of probabilities"),
        ({"enters": 2}, r"enters is 2 in config\.json; it must be below 2"),
        ({"depth": 2}, "holds tensors that are not known: maps.2"),
    ],
)
def test_broken_files_are_refused_by_name(changes, said, model, tmp_path):
    with pytest.raises(BadHead, match=said):
        read_head(written(extra_head(model, "hidden_transfer"), tmp_path, **changes), model)


def test_a_prefix_of_another_size_is_refused(model, tmp_path):
    with pytest.raises(BadHead, match=r"keys is \[2, 2, 5, 8\], and \[2, 2, 6, 8\] was expected"):
        read_head(written(extra_head(model, "bita"), tmp_path, prefix=6), model)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prefix": "many"}))
    with pytest.raises(BadHead, match=r"prefix is 'many' in config\.json; it must be an integer"):
        read_head(tmp_path, model)


def test_settings_are_checked():
    with pytest.raises(BadSetting, match="least is 2"):
        sb.bita(least=2)
    with pytest.raises(BadSetting, match="tree 'measured' ignores top=3"):
        sb.hidden_transfer(top=3)


def test_time_of_reading_drafts_is_measured(model):
    draft = ExtraLM(extra_head(model, "bita"), VOCAB)
    assert curve_of(draft).pass_s(4) > 0


def paths_of(topology, above=()):
    for rank, below in enumerate(topology):
        yield (*above, rank)
        yield from paths_of(below, (*above, rank))


@pytest.mark.parametrize("spine", [False, True])
def test_a_ranked_tree_is_the_best_there_is(spine):
    """Against all trees of its size, which are grown node by node."""
    ranks = ((0.5, 0.3, 0.05), (0.45, 0.2), (0.7, 0.1))

    def odds(path):
        return float(np.prod([ranks[layer][rank] for layer, rank in enumerate(path)]))

    def may_grow(tree):
        for path in (*tree, ()):
            may_branch = not spine or not any(path)
            rank = sum(len(one) == len(path) + 1 and one[: len(path)] == path for one in tree)
            if may_branch and len(path) < len(ranks) and rank < len(ranks[len(path)]):
                yield frozenset({*tree, (*path, rank)})

    level = {frozenset()}
    for nodes in range(1, 8):
        level = {larger for tree in level for larger in may_grow(tree)}
        found = set(paths_of(ranked_tree(ranks, nodes, spine)))
        best = max(sum(odds(path) for path in tree) for tree in level)
        assert sum(odds(path) for path in found) == pytest.approx(best)
        assert frozenset(found) in level
    assert size_of(ranked_tree(ranks, 100)) == 3 + 3 * 2 + 6 * 2
    assert layers_of(ranked_tree(ranks, 100, spine=True)) == (3, 2, 2)
    assert ranked_tree((), 5) == ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_bundled_size_gives_transformers_greedy_text(kind):
    check_bundled(kind, ["Ein Hund läuft.", "Wo ist der Bahnhof?"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_bundled_size_gives_transformers_greedy_text_of_many_prompts(kind):
    words = ["Hund", "Hut", "Buch", "Tisch", "Vogel", "Apfel", "Bruder", "Garten", "Zug", "Freund"]
    said = ["Wo ist mein {}?", "Der {} ist hier.", "Ich sehe keinen {}.", "Das ist nicht mein {}.", "{}"]
    check_bundled(kind, [one.format(word) for word in words for one in said])


def check_bundled(kind, prompts):
    """The weights are random: drafts are nearly always wrong, but rows are in every pass."""
    pair = sb.load("bundled")
    head = extra_head(pair.target_model, kind, prefix=16)
    pair = replace(pair, draft=ExtraLM(head, pair.target.vocab))
    for method in (MAKE[kind](), sb.speculative_sampling(3)):
        found = sb.generate(pair, prompts, method, temperature=0.0, max_new_tokens=30)
        for prompt, one in zip(prompts, found, strict=True):
            ids = torch.tensor([one.prompt])
            theirs = pair.target_model.generate(
                ids, do_sample=False, max_new_tokens=30, attention_mask=torch.ones_like(ids)
            )
            assert one.tokens == theirs[0, ids.shape[1] :].tolist(), prompt


LAWS = {
    "chain": lambda kind: sb.speculative_sampling(2),
    "tree without replacement": lambda kind: sb.rsd_c((2, 2)),
    "traversal": lambda kind: sb.traversal((2, 2)),
    "its own recipe": lambda kind: MAKE[kind](5, 2),
    "its own recipe, tried, few rows": lambda kind: MAKE[kind](5, 2, rule="path", least=0.3),
    "one beam by rejection": lambda kind: sb.dsbd(1, 3, 2, coupling="rejection"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_have_the_law_of_plain_sampling(kind):
    check_laws("llama", kind, draws=60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_drafts_have_the_law_of_plain_sampling_closely(family, kind):
    check_laws(family, kind, draws=20_000)


def check_laws(family, kind, draws):
    small = {"vocab_size": 6, "eos_token_id": END, "bos_token_id": 0, "pad_token_id": 0}
    model = softened(tiny(family, seed=3, **small))
    pair = replace(sb.load(model), draft=ExtraLM(extra_head(model, kind), 6))
    check_each(pair, {name: make(kind) for name, make in LAWS.items()}, {"temperature": 0.5}, draws)


def test_a_chain_is_a_tree(model):
    """The rows of a text are those of a tree of one path."""
    head = extra_head(model, "bita")
    tokens = torch.arange(3, 9)
    everywhere = torch.ones(1, 6, dtype=torch.bool)
    with torch.no_grad():
        (first, *_) = head.drafts(chain_of(tokens, {}), 2, everywhere)
    assert first.nodes.tolist() == [1, 2, 3, 4, 5]
    assert head.drafts(chain_of(tokens, {}), 2, ~everywhere) == []
    with pytest.raises(NotSupported, match="of kind BiTA"):
        sb.medusa().parts(HuggingFaceLM(model), ExtraLM(head, VOCAB))
