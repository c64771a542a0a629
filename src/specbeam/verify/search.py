"""VERIFY: beam search and beam sampling as transformers does them, layer by layer, whatever was drafted."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from specbeam.dice import child_keys
from specbeam.errors import DeadEnd
from specbeam.forest import Forest
from specbeam.laws import JointLaw, Pairs, candidates, running
from specbeam.probs import joint_law, picked
from specbeam.records import Beams, Step, Verdict
from specbeam.session import Session
from specbeam.verify.beam import dead_end


@dataclass(frozen=True)
class SearchRule:
    """Each layer takes the target's own candidates; it passes if those that go on are drafts.

    The semantics are those of transformers 5: per step max(2, 1 + end tokens) x `beams` candidates, the best ones or, in
    beam sampling, drawn without replacement from the softmax over all scores; of the candidates the first `beams` may
    finish, and the best-scored ones that did not end go on. A score is the sum of processed log-probabilities, which are not
    normalised again.

    Args:
        beams: beams that go on.
        coupling: "noise" draws by the noise of (seed, path, token), so drafts that were made with it pass more often;
            "dice" draws one pair after the other. The law is the same.

    Law: what is emitted never depends on the drafts, so it is the target's beam search or beam sampling, whatever they are.
    """

    beams: int
    coupling: str = "noise"

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        live, ended = session.beams, list(session.ended)
        steps: list[Step] = []
        while not steps or steps[-1].passed:
            try:
                steps.append(self._step(session, forest, live, scored, len(steps) + 1))
            except DeadEnd as error:
                steps += dead_end(error, steps, ended)
                break
            live = steps[-1].live
            ended += session.retired(forest, steps[-1])
            if session.limits.enough(ended, live.scores, session.length + len(steps)):
                break
        return Verdict(tuple(steps))

    def _step(
        self, session: Session, forest: Forest, live: Beams, scored: Float[torch.Tensor, "nodes vocab"], number: int
    ) -> Step:
        rows = picked(scored, live.nodes)
        law = joint_law(rows, live.scores, live.counts, session.warp, lambda: session.paths(forest, live.nodes))
        limits = session.limits
        pairs = self._candidates(session, law, live)
        beams, tokens = np.divmod(pairs, law.vocab)
        parents = live.nodes[beams]
        ended = limits.ended(tokens, lambda: np.column_stack([session.new_tokens(forest, parents), tokens]))
        finishing = np.flatnonzero(ended[: self.beams])
        if session.length + number >= limits.max_new_tokens:  # the limit ends all; only the first may be answers
            going = running(law, pairs[: self.beams], ended[: self.beams], self.beams)
        else:
            going = running(law, pairs, ended, self.beams)
        chosen = np.concatenate([going, finishing])
        nodes = forest.find(parents[chosen], tokens[chosen])
        taken = Beams(
            nodes,
            tokens[chosen],
            law.logj_at(pairs[chosen]),
            np.ones_like(chosen),
            child_keys(live.keys[beams[chosen]], tokens[chosen]),
        )
        passed = len(going) > 0 and bool((nodes[: len(going)] >= 0).all())
        return Step(parents[chosen], taken, ended[chosen], self.beams, passed)

    def _candidates(self, session: Session, law: JointLaw, live: Beams) -> Pairs:
        """Best first, or in draw order."""
        count = candidates(self.beams, len(session.limits.eos))
        if session.warp.greedy:
            return law.best(count)
        if self.coupling == "noise":
            return law.best(count, live.keys, lambda: session.coarse_noise(live.keys, law.vocab))
        left, drawn = law.p.ravel().copy(), list[int]()
        while len(drawn) < count and left.any():
            drawn.append(session.dice.pick(left))
            left[drawn[-1]] = 0.0
        return np.array(drawn, dtype=np.int64)
