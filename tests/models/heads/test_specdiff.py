"""SpecDiff heads: blocks with some drafts known, rows in trees, masks that are never drafted, and what they learn."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.forest import CHOSEN, INDEPENDENT, LOST, Forest
from specbeam.errors import LostLaw
from specbeam.lab.train.plan import planned
from specbeam.lab.train.specdiff import denoising_loss, masked_lesson, nodes_below
from specbeam.models.heads.lm import DenoiserLM
from specbeam.models.heads.trees import chain_of
from specbeam.models.huggingface import HuggingFaceLM
from tests.support.checking import refused
from tests.support.heads import VOCAB, Comparing, block_logits, block_rows, denoiser_of
from tests.support.tiny_models import tiny

PROMPTS = [[5, 6, 7, 8, 9, 3], [9], [3, 4]]
OPTIONS = {"max_new_tokens": 10, "eos_token_id": [11], "seed": 3}


@pytest.fixture(scope="module")
def model():
    return tiny("llama", seed=1, vocab_size=VOCAB)


def pair_of(model, draft):
    return replace(sb.load(model), target=HuggingFaceLM(model, chunk=3, engine="plain"), draft=draft)


class Checked(Comparing, DenoiserLM):
    """A denoiser whose rows are compared with those of chains, with all drafts masked and with some known."""

    def expected(self, tokens, features, is_scored):
        return block_logits(self.head, tokens, features, is_scored.index(False))

    @torch.inference_mode()
    def denoised(self, sessions, forests, known):
        answers = super().denoised(sessions, forests, known)
        for session, forest, given, rows in zip(sessions, forests, known, answers, strict=True):
            for root in range(forest.roots):
                above = session.texts.tokens[root, : session.length - 1].tolist()
                text = [*session.prompt, *above] if session.length else session.prompt[:-1]
                tokens = [*text, int(forest.tokens[root])]
                if len(tokens) == 1:
                    continue
                every = torch.full((self.block_depth,), -1)
                every[: given.shape[1]] = torch.from_numpy(given[root])
                block = block_rows(self.head, tokens, self.features_of(tokens), len(text), every)
                expected = self.head.lm_head(block[1 : 1 + given.shape[1]])
                self.largest = max(self.largest, float((expected - rows[root]).abs().max()))
                self.compared += 1
        return answers


METHODS = {
    "beams": sb.dsbd(3, 5, 3),
    "deeper than a block": sb.dsbd(2, 3, 5),
    "beams by rejection": sb.dsbd(3, 5, 3, coupling="rejection"),
    "one step": sb.specdiff(1, 3),
    "several steps": sb.specdiff(3, 3),
    "fewer drafts than a block has": sb.specdiff(2, 2, order="random"),
    "search": sb.speculative_beam_search(3, 5, depth=3),
}


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_the_tree_are_those_of_chains(name, model):
    """Over several turns, with beams that end, and prompts of one token."""
    head = Checked(denoiser_of(model), VOCAB).of(model)
    sb.generate(pair_of(model, head), PROMPTS, METHODS[name], batch_size=3, **OPTIONS)
    assert head.compared > 10
    assert head.largest < 2e-5


@pytest.mark.parametrize("draft_vocab", [None, 20])
def test_beams_are_those_without_a_draft(draft_vocab, model):
    """The same beams with the same seed, one prompt at a time and sixteen."""
    head = denoiser_of(model, draft_vocab=draft_vocab)
    if draft_vocab:
        head.tokens = torch.arange(draft_vocab) * 3
    pair = pair_of(model, DenoiserLM(head, VOCAB))
    prompts = [[number, number + 5, 7][: 1 + number % 3] for number in range(1, 17)]
    options = {**OPTIONS, "max_new_tokens": 5}
    plain = sb.generate(pair, prompts, sb.beam_sampling(2), **options)
    for batch_size in (1, 16):
        found = sb.generate(pair, prompts, sb.dsbd(2, 3, 2), batch_size=batch_size, **options)
        assert [one.tokens for one in found] == [one.tokens for one in plain]


SEVERAL = [
    {"steps": 1, "tokens": "best"},
    {"steps": 9, "order": "random"},
    *(
        {"steps": 2, "order": order, "tokens": tokens}
        for order in ("confidence", "random", "left to right")
        for tokens in ("drawn", "best")
    ),
]


def test_matched_drafts_give_the_text_of_sampling_whatever_the_order_and_the_steps(model):
    """DF-1 end to end; and DF-5: what is drafted are tokens that the head knows, whatever the masks."""
    head = denoiser_of(model, draft_vocab=20)
    head.tokens = torch.arange(20) * 3
    known = set(head.tokens.tolist())
    pair = pair_of(model, DenoiserLM(head, VOCAB))
    options = {**OPTIONS, "max_new_tokens": 7}
    plain = sb.generate(pair, PROMPTS[:2], sb.sampling(), **options)
    greedy = sb.generate(pair, PROMPTS[:2], sb.greedy(), max_new_tokens=7, eos_token_id=[11])
    forests = []
    for settings in SEVERAL:
        method = sb.specdiff(depth=3, rule="match", **settings)
        drafter = method.parts(pair.target, pair.draft).drafter
        for temperature, expected in ((1.0, plain), (0.0, greedy)):

            class Noting:
                models = drafter.models

                def draft(self, sessions, shapes, drafter=drafter):
                    found = drafter.draft(sessions, shapes)
                    forests.extend(found)
                    return found

                settle = staticmethod(drafter.settle)
                close = staticmethod(drafter.close)

            own = method.with_parts(drafter=Noting())
            found = sb.generate(pair, PROMPTS[:2], own, batch_size=3, temperature=temperature, **options)
            assert [one.tokens for one in found] == [one.tokens for one in expected]
            assert sum(one.report.draft_passes for one in found) > 0
    drafted = {token for forest in forests for token in forest.siblings.tokens.tolist()}
    assert drafted <= known
    assert len(drafted) > 5


def test_kinds_of_drafts(model):
    """What is stated of the law of drafts: the law itself, that they were chosen, or that it is lost."""
    kinds = {
        (1, "confidence", "drawn"): INDEPENDENT,
        (2, "left to right", "drawn"): INDEPENDENT,
        (2, "confidence", "drawn"): LOST,
        (2, "random", "drawn"): LOST,
        (2, "confidence", "best"): CHOSEN,
        (1, "confidence", "best"): CHOSEN,
    }
    seen = {}

    class Rule(sb.specdiff(2).parts(None, DenoiserLM(denoiser_of(model), VOCAB)).rule.__class__):
        law = "exact: plain sampling"

        def verify(self, session, forest, scored):
            seen.setdefault(key, set()).update(forest.siblings.kinds.tolist())
            return super().verify(session, forest, scored)

    pair = pair_of(model, DenoiserLM(denoiser_of(model), VOCAB))
    for key in kinds:
        steps, order, tokens = key
        method = sb.specdiff(steps, 3, order=order, tokens=tokens, rule=Rule())
        sb.generate(pair, PROMPTS[:1], method, **OPTIONS)
    assert {key: {kind} for key, kind in kinds.items()} == seen


def test_rules_that_need_a_law_are_refused_where_there_is_none():
    for rule in ("path", "traversal"):
        for order in ("confidence", "random"):
            with pytest.raises(LostLaw, match=r"specdiff draws tokens before those to their left, .* rule='match'"):
                sb.specdiff(2, order=order, rule=rule)
        assert sb.specdiff(2, order="left to right", rule=rule).lossless
        assert sb.specdiff(2, tokens="best", rule=rule).lossless
        assert sb.specdiff(1, rule=rule).lossless


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"order": "backwards"}, "order is 'backwards'; it must be one of confidence, random, left to right"),
        ({"tokens": "worst"}, "tokens is 'worst'; it must be one of drawn, best"),
        ({"steps": 2, "controller": "confidence"}, "specdiff unmasks all tokens of a draft together"),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    with refused(said):
        sb.specdiff(**settings)


def test_a_prompt_shorter_than_a_block_is_padded_by_nothing(model):
    """DF-4: rows of a batch look at their own context alone, however long the others are."""
    head = denoiser_of(model)
    draft = DenoiserLM(head, VOCAB)
    pair = pair_of(model, draft)
    options = {"seed": 4, "max_new_tokens": 8, "eos_token_id": []}
    prompts = [[3], [4, 5], [number % VOCAB for number in range(7, 40)]]
    method = sb.specdiff(2, 3, tokens="best")
    together = sb.generate(pair, prompts, method, batch_size=3, **options)
    alone = sb.generate(pair, prompts, method, batch_size=1, **options)
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.report.accepted for one in together] == [one.report.accepted for one in alone]


def test_known_drafts_change_the_law_of_all_masks(model):
    """Both to their left and to their right: the rows of a block see each other."""
    head = denoiser_of(model)
    features = torch.randn(4, model.config.hidden_size)
    masks = torch.full((3,), -1)
    plain = block_rows(head, [3, 4, 5, 6, 7], features, 4, masks)
    for place in range(3):
        known = masks.clone()
        known[place] = 9
        changed = block_rows(head, [3, 4, 5, 6, 7], features, 4, known)
        for row in range(1, 4):
            assert not torch.allclose(changed[row], plain[row], atol=1e-6)
    torch.testing.assert_close(block_rows(head, [3, 4, 5, 6, 7], features, 4), plain)


def trees_of(model, tokens):
    width = model.config.hidden_size
    generator = torch.Generator().manual_seed(5)
    return chain_of(
        torch.tensor(tokens), {tap: torch.randn(len(tokens), width, generator=generator) for tap in (0, 1, 2)}
    )


def test_random_paths_below_nodes():
    """Each is a path of the tree, which ends where the tree does, and each child has its turn."""
    parents = torch.tensor([[-1, 0, 1, 1, 2, 2, 3, -1]])
    ways = set()
    torch.manual_seed(0)
    for _ in range(60):
        paths = nodes_below(parents, 3)[0].tolist()
        for node, path in enumerate(paths):
            for below in path:
                if below == -1:
                    assert node not in parents[0].tolist()
                else:
                    assert parents[0, below] == node
                node = below if below >= 0 else 7
        ways.add(tuple(paths[0]))
        assert paths[7] == [-1, -1, -1]
    assert ways == {(1, 2, 4), (1, 2, 5), (1, 3, 6)}


def test_the_loss_of_a_lesson_is_the_bound_of_masked_diffusion(model, monkeypatch):
    """Against a sum over blocks, drafts and masks, with the same random numbers; only what the target drew is learnt."""
    head = denoiser_of(model)
    trees = trees_of(model, [3, 4, 5, 6, 7, 8])
    learnt = torch.tensor([[False, False, True, True, True, False]])  # the prompt has three tokens
    plan = planned(model, {"depth": 3}, {"shown": 0.5})
    torch.manual_seed(7)
    lesson = masked_lesson(head, trees, learnt, plan)
    torch.manual_seed(7)
    is_whole = torch.rand(1, 6)[0] >= 0.5
    share = 1 - torch.rand(1, 6)[0]
    torch.rand(1, 6)  # of the path, of which there is one
    lots = torch.rand(1, 6, 3)[0]
    assert 0 < int(is_whole.sum()) < 6
    total, count = 0.0, 0
    context = head.features(trees.states_at(head.taps))[0]
    with torch.no_grad():
        for root in range(6):
            if is_whole[root]:
                continue
            below = [trees.tokens[0, root + 1 + place].item() if root + 1 + place < 6 else -1 for place in range(3)]
            masked = [bool(lots[root, place] < share[root]) for place in range(3)]
            known = torch.tensor([-1 if masked[place] else below[place] for place in range(3)])
            rows = block_rows(head, trees.tokens[0, : root + 1].tolist(), context, root, known)
            for place in range(3):
                if root + 1 + place < 6 and learnt[0, root + place]:
                    count += 1
                    if masked[place]:
                        law = head.lm_head(rows[1 + place]).log_softmax(-1)
                        total -= float(law[below[place]]) * min(1 / float(share[root]), 10.0)
    assert count > 0
    assert float(lesson.other.detach()) == pytest.approx(total / count, rel=1e-4)
    whole = set(is_whole.nonzero()[:, 0].tolist())
    for deep, rows in enumerate(lesson.drafts, 1):
        assert set(rows.nodes.tolist()) == {node for node in (2, 3, 4) if node - deep + 1 in whole and node >= deep}
    assert masked_lesson(head, trees, learnt, planned(model, {"depth": 3}, {"shown": 0.0})).other is None


def test_a_denoiser_learns_a_pair_that_one_step_cannot_draft(model):
    """Two drafts that are always equal: in one step half of the pairs fit, in two steps nearly all of them."""
    torch.manual_seed(3)
    head = denoiser_of(model, rows=3).train()
    for weight in head.parameters():
        weight.requires_grad_(True)
    head.embed_tokens = torch.nn.Embedding.from_pretrained(head.embed_tokens.weight.detach().clone())
    states = {tap: torch.randn(16, 4, model.config.hidden_size) for tap in (0, 1, 2)}
    one = trees_of(model, [3, 4, 0, 0])
    optimizer = torch.optim.AdamW([weight for weight in head.parameters() if weight.requires_grad], 3e-3)
    plan = planned(model, {"depth": 2}, {"shown": 0.99})
    learnt = torch.tensor([[False, True, True, False]]).expand(16, -1)
    for _ in range(60):
        twins = torch.randint(20, 22, (16, 1)).expand(-1, 2)
        tokens = torch.cat([torch.tensor([[3, 4]]).expand(16, -1), twins], 1)
        trees = type(one)(
            tokens,
            one.parents.expand(16, -1),
            one.depths.expand(16, -1),
            one.sees.expand(16, -1, -1),
            {tap: rows * 0 for tap, rows in states.items()},
        )
        optimizer.zero_grad()
        masked_lesson(head, trees, learnt, plan).other.backward()
        optimizer.step()
    draft = DenoiserLM(head.eval(), VOCAB)

    class Owner:
        prompt = [3, 4]
        state: dict = {}

    owner = Owner()
    owner.state[draft] = draft.new_cache(owner.prompt, head.features(torch.zeros(1, head.states_size)).detach())
    root = Forest.rooted(owner.prompt[-1:])
    (masked,) = draft.denoised([owner], [root], [np.array([[-1, -1]])])
    alone = masked[0].softmax(-1)[:, 20:22]
    assert alone.sum(-1).min() > 0.9
    assert alone.max() < 0.75
    for token in (20, 21):
        for place in (0, 1):
            known = np.array([[-1, -1]])
            known[0, place] = token
            (given,) = draft.denoised([owner], [root], [known])
            assert given[0, 1 - place].softmax(-1)[token] > 0.9


def test_drafts_that_the_head_does_not_know_are_not_learnt(model):
    head = denoiser_of(model, draft_vocab=4)
    head.tokens = torch.tensor([2, 5, 8, 11])
    rows = torch.randn(1, 1, 3, model.config.hidden_size)
    tokens = torch.tensor([[[5, 6, 11]]])
    ones = torch.ones(1, 1, 3)
    with torch.no_grad():
        found = denoising_loss(head, rows, tokens, ones, ones > 0)
        law = head.lm_head(rows[0, 0]).log_softmax(-1)
    assert float(found) == pytest.approx(-float(law[0, 1] + law[2, 3]) / 3, rel=1e-5)
