"""VERIFY: what the rules for one sequence share. One beam walks down its tree; each step emits one token."""

from collections.abc import Iterator
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64

from specbeam.dice import path_keys
from specbeam.errors import LostLaw
from specbeam.forest import Forest, Group, Row
from specbeam.laws import JointLaw, log_norm
from specbeam.probs import cut, cut_at_once, joint_law, on_host
from specbeam.records import Audit, Beams, Step, Verdict
from specbeam.session import Session
from specbeam.truncation import NO_TRUNCATION
from specbeam.verify.draws import Candidate, drawn, sure

Coupling = Literal["noise", "dice"]
FEW = 12  # nodes of a tree whose laws are made before anybody knows which are needed


class Emitted(NamedTuple):
    parent: int  # forest node
    node: int  # -1 if it is none
    token: int
    logp: float
    ended: bool
    drafted: bool


class Walk:
    """The target's laws on one tree, and the tokens emitted so far in this turn."""

    def __init__(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> None:
        self.session, self.forest, self.scored = session, forest, scored
        self.node = int(session.beams.nodes[0])  # where the walk stands; -1 once it left the tree
        self._emitted: list[Emitted] = []
        self.audit: Audit | None = Audit() if session.audited else None
        self._laws: dict[int, JointLaw] = {}
        self._rows: dict[int, Row] = {}

    @cached_property
    def _at_once(self) -> dict[int, Row]:
        """Rows of all nodes, where one loop makes them; nobody goes to all of a large tree."""
        warp = self.session.warp
        if len(self.forest) > FEW or warp.processors or warp.search or not on_host(self.scored):
            return {}
        return {node: row for node, row in enumerate(cut_at_once(self.scored, warp) or []) if row is not None}

    @cached_property
    def _numbers(self) -> Float32[np.ndarray, "nodes vocab"]:
        return self.scored.numpy()

    @cached_property
    def _norms(self) -> Float64[np.ndarray, " nodes"]:
        return log_norm(self.scored)

    def _logp(self, token: int) -> float:
        """Log-likelihood of a token where the walk stands, before the truncation."""
        if self.node in self._at_once:
            return float(self._numbers[self.node, token]) - float(self._norms[self.node])
        return float(self.law(self.node).logj_at(np.array([token]))[0])

    def law(self, node: int) -> JointLaw:
        """The target's law of the token after a node, one row."""
        if node not in self._laws:
            nodes = np.array([node])
            self._laws[node] = joint_law(
                self.scored[node : node + 1],
                np.zeros(1),
                np.ones(1, dtype=np.int64),
                self.session.warp,
                lambda: self.session.paths(self.forest, nodes),
            )
        return self._laws[node]

    def row(self, node: int) -> Row:
        """The same law on the tokens that it keeps; what is tried is a place in it. At temperature 0: the best token."""
        if node in self._at_once:
            return self._at_once[node]
        if node not in self._rows:
            self._rows[node] = self._row(self.law(node))
        return self._rows[node]

    def _row(self, law: JointLaw) -> Row:
        if self.session.warp.greedy:
            return Row(np.zeros(1), law.vocab, law.best(1))
        if law.truncation == NO_TRUNCATION:  # its sum is known
            return Row(law.logits[0].double().numpy() - law.log_norm[0], law.vocab)
        return cut(law.logits, self.session.warp)[0]

    def drawn(self, coupling: Coupling) -> int:
        """The target's own choice where the walk stands: the best token at temperature 0; else a draw by the noise of the
        place ("noise") or by the session's dice ("dice").
        """
        law, session = self.law(self.node), self.session
        if session.warp.greedy:
            return int(law.best(1)[0])
        if coupling == "dice":
            row = self.row(self.node)
            return row.token(session.dice.pick(row.p))
        keys = path_keys(session.beams.keys, self._tokens)[-1:]
        return int(law.best(1, keys, lambda: session.coarse_noise(keys, law.vocab))[0])

    def candidates(self, node: int) -> list[tuple[int, int]]:
        """(token, node) of the drafts under a node, in the order of their trials; -1 for a draft that needs no node."""
        groups = self.forest.groups_under(node)
        return [pair for g in groups for pair in zip(g.draw_tokens.tolist(), g.draw_nodes.tolist(), strict=True)]

    def trials_under(self, node: int) -> Iterator[Candidate]:
        """The same drafts by their places in `row(node)`, with the law of each on it, given the drafts before it."""
        row = self.row(node)
        for group in self.forest.groups_under(node):
            places = [row.place(token) for token in group.draw_tokens.tolist()]
            if group.sure:
                yield from sure(places, len(row))
            else:
                yield from drawn(places, group.masses.tolist(), _on(row, group), group.replacement)

    def watch(self, r: Float64[np.ndarray, " vocab"], law: Float64[np.ndarray, " vocab"], accepted: bool) -> None:
        """Note a trial, if the session is audited."""
        if self.audit is not None and not self.session.warp.greedy:
            self.audit += Audit.of_trial(r, law, accepted)

    def watch_odds(self, r: Float64[np.ndarray, " vocab"], law: Float64[np.ndarray, " vocab"], odds: float) -> None:
        """Note what a candidate is worth, if the session is audited."""
        if self.audit is not None and not self.session.warp.greedy:
            self.audit += Audit.of_odds(r, law, odds)

    def emit(self, token: int, node: int, drafted: bool | None = None) -> bool:
        """Emit a token, which is forest node `node` or no draft (-1). True if the text may go on.

        Args:
            drafted: whether it was; None: whether the forest has it, be it as an end token without a node.
        """
        if self.audit is not None and not self.session.warp.greedy:
            self.audit += Audit.of_draw(self.law(self.node).logp[0], token)
        return self.took(node, token, self._logp(token), drafted)

    def took(self, node: int, token: int, logp: float, drafted: bool | None = None) -> bool:
        """The same, where the token's log-likelihood is known and nobody watches."""
        session, limits = self.session, self.session.limits
        ended = token in limits.eos
        if limits.stop_strings:
            path = np.append(session.new_tokens(self.forest, np.array([self.node]))[0], token)
            ended |= limits.stopped_by(path.tolist()) is not None
        if drafted is None:
            drafted = node >= 0 or (ended and self._drafted(token))
        self._emitted.append(Emitted(self.node, node, token, logp, ended, drafted))
        self.node = node
        return not ended and session.length + len(self._emitted) < limits.max_new_tokens

    @property
    def _tokens(self) -> Int64[np.ndarray, " emitted"]:
        return np.array([one.token for one in self._emitted], dtype=np.int64)

    def _drafted(self, token: int) -> bool:
        """Whether an end token was drafted; such a draft has no node."""
        return any(token == drafted for drafted, _ in self.candidates(self.node))

    def verdict(self) -> Verdict:
        live, tokens = self.session.beams, self._tokens
        parents, nodes = (
            np.array(one, dtype=np.int64) for one in zip(*[step[:2] for step in self._emitted], strict=True)
        )
        scores = np.cumsum([live.scores[0], *[one.logp for one in self._emitted]])[1:]
        keys, ended = path_keys(live.keys, tokens)[1:], np.array([one.ended for one in self._emitted])
        steps = list[Step]()
        for number, one in enumerate(self._emitted):
            here = slice(number, number + 1)
            beams = Beams(nodes[here], tokens[here], scores[here], live.counts, keys[here])
            steps.append(Step(parents[here], beams, ended[here], 1, one.drafted))
        return Verdict(tuple(steps), audit=self.audit)


def _on(row: Row, group: Group) -> Float64[np.ndarray, " n"]:
    """The draft law on the tokens that a target law keeps."""
    assert group.law is not None
    return group.law.row(0) if row.tokens is None else group.law.odds(np.zeros_like(row.tokens), row.tokens)


def check_lawful(forest: Forest, rule: str) -> None:
    if not forest.lawful:
        raise LostLaw(
            f"{rule} tries drafts against the law they were drawn from, but the law of these drafts is lost "
            "(pruned by content, merged or retrieved); verify them with MatchRule"
        )
