"""VERIFY: one sequence walks down its tree; each step emits one token."""

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64

from specbeam.core.audit import Audit
from specbeam.core.beams import Beams, Layers, Stop, first_layers, is_end, no_layers
from specbeam.core.control.width import FixedWidths
from specbeam.core.dice import pick
from specbeam.core.errors import LostLaw
from specbeam.core.forest import (
    CHOSEN,
    DISTINCT,
    Forest,
    GroupsUnder,
    Siblings,
    TurnRows,
    check_rows_of,
    find_child,
    groups_by_node,
    scored_rows_of,
    start_of,
)
from specbeam.core.laws.evidence import Evidence, gathers, no_evidence, note_draw
from specbeam.core.laws.listing import listing_for, norms_of
from specbeam.core.laws.named import EXACT
from specbeam.core.laws.ranking import NO_TRUNCATION, Truncation, best_pairs, cuts
from specbeam.core.laws.reduce import SOUND, UNDECIDED, condition_of_norm, exponentials
from specbeam.core.laws.rows import (
    RowLaw,
    best_token_of_row,
    best_under_noise,
    is_law_decided,
    law_of_row,
    logit_of,
    odds_on,
    place_in,
    token_at,
)
from specbeam.core.laws.warp import Rows, check_condition, on_host, processed_rows, row_laws
from specbeam.core.noise import child_key
from specbeam.core.ranked import WHOLE, Listing, Ranked, are_whole, rows_between, whole_rows
from specbeam.core.records import Verdict
from specbeam.core.session import Session
from specbeam.core.steps import Array, borrowed, open_step, step, verb
from specbeam.core.verify.trials import Drafts, try_drafts
from specbeam.core.verify.turns import ScoredTurn, verify_turn

TRY, MATCH_BY_NOISE, MATCH_BY_DICE = range(3)
ONE_SEQUENCE = FixedWidths(1)


@borrowed
class WalkSpec(NamedTuple):
    """The numbers of a rule that walks down a tree."""

    way: int  # TRY: drafts are tried against their laws; MATCH: tokens are drawn, by noise or by dice, and looked up
    greedy: bool
    truncation: Truncation
    stop: Stop


class Emitted(NamedTuple):
    """The layers that a walk has emitted so far, of one token each, and the node where it stands."""

    layers: Layers
    state: Array  # int64[2]: number of layers, node where the walk stands (-1: it left the tree)


COUNT, NODE = range(2)


@verb(0)
def row_at(rows: Any, node: int) -> Ranked:
    """Return the logits of a forest node: a single row, whole or as a list.

    Args:
        rows: the rows of all nodes, or an object that processes rows in Python.
    """
    found: Ranked = rows.at(node)
    return found


@row_at.of(TurnRows)
@step
def row_of_turn(rows: TurnRows, node: int) -> Ranked:
    """Return a row of a turn as a view; see `row_at`."""
    place = rows.places[node]
    if place >= 0:
        return rows_between(rows.fresh, place, place + 1)
    return rows_between(rows.known, -1 - place, -place)


@verb(0)
def law_at_row(rows: Any, row: Ranked, truncation: Truncation) -> RowLaw:
    """Return the law of a row, without tokens if a list does not decide it; `rows` is the argument of `row_at`."""
    found: RowLaw = rows.law(row)
    return found


@law_at_row.of(TurnRows)
@step
def law_at_row_of_turn(rows: TurnRows, row: Ranked, truncation: Truncation) -> RowLaw:
    """Return the law of a row of a turn; see `law_at_row`."""
    return law_of_row(row, 0, truncation)


@verb(0)
def cuts_laws(rows: Any, truncation: Truncation) -> bool:
    """Return whether the laws of these rows leave out tokens of the vocabulary."""
    return bool(rows.cuts)


@cuts_laws.of(TurnRows)
def cuts_laws_of_turn(rows: TurnRows, truncation: Truncation) -> bool:
    """Return whether the truncation cuts anything; see `cuts_laws`."""
    return cuts(truncation)


@verb(0)
def look_at_token(observer: Any, node: int, token: int) -> bool:
    """Return whether an observer in Python finds a stop string after this token; False if `observer` is None."""
    return bool(observer.look(node, token))


@look_at_token.of(NoneType)
def look_at_no_token(observer: None, node: int, token: int) -> bool:
    """Return False: there is no observer."""
    return False


@step
def start_walk(steps: int) -> Emitted:
    """Return a walk that stands at the root, with capacity for `steps` tokens."""
    return Emitted(no_layers(steps, steps), np.zeros(2, dtype=np.int64))


@step
def emit(walk: Emitted, live: Beams, logp: float, token: int, node: int, ended: bool, drafted: bool) -> None:
    """Emit a token after the node where the walk stands, and move on to `node`, which is -1 if the token has none.

    Args:
        live: the one live beam between two turns.
        logp: log-likelihood of the token, before the truncation.
        drafted: whether a draft supplied it.
    """
    layers = walk.layers
    number = walk.state[COUNT]
    score = live.scores[0]
    key = live.keys[0]
    if number > 0:
        score = layers.beams.scores[number - 1]
        key = layers.beams.keys[number - 1]
    layers.parents[number] = walk.state[NODE]
    layers.ended[number] = ended
    layers.beams.nodes[number] = node
    layers.beams.tokens[number] = token
    layers.beams.scores[number] = score + logp
    layers.beams.counts[number] = live.counts[0]
    layers.beams.keys[number] = child_key(key, token)
    layers.draw_ends[number] = number + 1
    layers.widths[number] = 1
    layers.passed[number] = drafted
    walk.state[COUNT] = number + 1
    walk.state[NODE] = node


@step
def norm_of(row: Ranked) -> float:
    """Return the logsumexp of a whole row; -inf if all of it is -inf, NaN if it holds NaN or +inf."""
    return norms_of(row)[0]


class TokenPath(NamedTuple):
    """Tokens to emit, one after the other."""

    tokens: Array  # int64[n]
    nodes: Array  # int64[n]: their forest nodes; -1: none
    drafted: Array  # bool[n]: whether drafts supplied them


@open_step
def emit_path(
    walk: Emitted, rows: Any, live: Beams, spec: Any, length: int, path: TokenPath, evidence: Evidence, observer: Any
) -> bool:
    """Emit these tokens one after the other, until the text ends. Returns False if it ended.

    Args:
        spec: a record with fields `truncation` and `stop`.
        length: number of tokens before the walk.
        evidence: the tokens are noted in it, for audits.
    """
    for place in range(len(path.tokens)):
        token = path.tokens[place]
        here = walk.state[NODE]
        row = row_at(rows, here)
        if gathers(evidence):
            note_token(evidence, law_at_row(rows, row, spec.truncation), token)
        ended = is_end(token, spec.stop.eos) or look_at_token(observer, here, token)
        logp = logit_of(row, 0, token) - norm_of(row)
        emit(walk, live, logp, token, path.nodes[place], ended, path.drafted[place])
        if ended or length + walk.state[COUNT] >= spec.stop.most:
            return False
    return True


@step
def emitted_layers(walk: Emitted) -> Layers:
    """Return the layers that a walk has emitted."""
    return first_layers(walk.layers, walk.state[COUNT])


@step
def note_token(evidence: Evidence, law: RowLaw, token: int) -> None:
    """Note a token that was drawn from a law, for an audit."""
    note_draw(evidence, law.logp, exponentials(law.logp), place_in(law.tokens, token))


@step
def drafts_under(groups: Siblings, group: int, law: RowLaw) -> Drafts:
    """Return the drafts of one group on trial against the target's law after its parent."""
    first = start_of(groups.draw_ends, group)
    count = groups.draw_ends[group] - first
    start = start_of(groups.law_ends, group)
    stop = groups.law_ends[group]
    own = groups.law_odds[start:stop].copy()
    named = groups.law_pairs[start:stop]
    kind = groups.kinds[group]
    places = np.empty(count, dtype=np.int64)
    own_places = np.zeros(count, dtype=np.int64)
    for draw in range(count):
        token = groups.tokens[first + draw]
        places[draw] = place_in(law.tokens, token)
        if kind == DISTINCT:
            own_places[draw] = np.searchsorted(named, token)
    on_wanted = own[:0]
    if kind != CHOSEN:
        on_wanted = odds_on(law.tokens, len(law.logp), named, own)
    return Drafts(places, own_places, own, on_wanted, kind == DISTINCT, kind == CHOSEN)


@step
def try_groups(
    rest: Array, groups: Siblings, under: GroupsUnder, node: int, law: RowLaw, dice: Any, evidence: Evidence
) -> int:
    """Try all drafts under a node, group by group. Returns the accepted draw, or -1; `rest` becomes the residual."""
    group = under.first[node]
    while group >= 0:
        drafts = drafts_under(groups, group, law)
        found = try_drafts(rest, drafts, 0, dice, evidence)
        if found < len(drafts.places):
            return start_of(groups.draw_ends, group) + found
        group = under.after[group]
    return -1


@step
def is_drafted(groups: Siblings, under: GroupsUnder, node: int, token: int) -> bool:
    """Return whether a token was drafted under a node; end tokens are drafted without a node."""
    group = under.first[node]
    while group >= 0:
        for draw in range(start_of(groups.draw_ends, group), groups.draw_ends[group]):
            if groups.tokens[draw] == token:
                return True
        group = under.after[group]
    return False


@open_step
def draw_by_noise(rows: Any, row: Ranked, key: Array, truncation: Truncation) -> int:
    """Return the token of largest log-odds plus noise: a draw from the law of a row; -1 if a list does not decide it."""
    temperature = truncation.temperature
    if cuts_laws(rows, truncation):
        law = law_at_row(rows, row, truncation)
        return best_under_noise(row, 0, law.tokens, temperature, key)[0]
    if not are_whole(row):
        token, value = best_under_noise(row, 0, row.tokens[0], temperature, key)
        return token if row.by_noise and value > row.rest[0] else -1
    nothing = np.zeros(1)
    keys = np.full(1, key)
    every = np.ones(1, dtype=np.bool_)
    return best_pairs(row.logits, nothing, temperature, nothing, keys, every, 1)[0]


@open_step
def drawn_token(walk: Emitted, rows: Any, row: Ranked, live: Beams, spec: WalkSpec, dice: Any) -> int:
    """Return the target's token after the node where the walk stands: the likeliest at temperature 0, else a draw.

    Returns -1 if a list does not decide it.
    """
    if spec.greedy:
        return best_token_of_row(row, 0)
    if spec.way == MATCH_BY_DICE:
        law = law_at_row(rows, row, spec.truncation)
        if not is_law_decided(law):
            return -1
        place = pick(dice, exponentials(law.logp))
        return token_at(law, place)
    number = walk.state[COUNT]
    key = live.keys[0] if number == 0 else walk.layers.beams.keys[number - 1]
    return draw_by_noise(rows, row, key, spec.truncation)


@step
def walk_down(spec: WalkSpec, turn: ScoredTurn, dice: Any, evidence: Evidence, observer: Any) -> tuple[Layers, int]:
    """Walk down from the root until the text leaves the tree or ends.

    At each node the drafts are tried in order, each against its own law, or the target's own token is drawn and looked up.

    Returns the layers, of one token each, and SOUND; or DEAD or BROKEN if the target had no law to draw the next token from;
    or UNDECIDED if a list does not decide a token, and the turn has to be judged by whole rows.

    Args:
        turn: with one live beam. Its rows are those of all forest nodes, or an object that processes rows in Python; see
            `row_at`. Its `widths` and `finished` are for rules that judge beams.
        evidence: trials and tokens are noted in it, for audits.
        observer: see `look_at_token`.
    """
    rows = turn.rows
    forest = turn.forest
    live = turn.live
    length = turn.length
    groups = forest.siblings
    under = groups_by_node(groups, len(forest.tokens))
    walk = start_walk(max(min(len(forest.tokens), spec.stop.most - length), 1))
    going = True
    while going:
        node = walk.state[NODE]
        row = row_at(rows, node)
        norm = norm_of(row)
        condition = condition_of_norm(norm)
        if condition != SOUND:
            return emitted_layers(walk), condition
        child = -1
        if spec.way == TRY and not spec.greedy:
            law = law_at_row(rows, row, spec.truncation)
            if not is_law_decided(law):
                return emitted_layers(walk), UNDECIDED
            rest = exponentials(law.logp)
            draw = try_groups(rest, groups, under, node, law, dice, evidence)
            if draw >= 0:
                token = groups.tokens[draw]
                child = groups.nodes[draw]
            else:
                place = pick(dice, rest)
                token = token_at(law, place)
        else:
            token = drawn_token(walk, rows, row, live, spec, dice)
            if token < 0:
                return emitted_layers(walk), UNDECIDED
            child = find_child(forest.tokens, forest.parents, node, token)
        if gathers(evidence):
            note_token(evidence, law_at_row(rows, row, spec.truncation), token)
        ended = is_end(token, spec.stop.eos) or look_at_token(observer, node, token)
        drafted = child >= 0 or (ended and is_drafted(groups, under, node, token))
        emit(walk, live, logit_of(row, 0, token) - norm, token, child, ended, drafted)
        going = child >= 0 and not ended and length + walk.state[COUNT] < spec.stop.most
    return emitted_layers(walk), SOUND


verify_turn.of(WalkSpec)(walk_down)


@dataclass(eq=False)
class RowsInPython:
    """The rows of a turn where Python has to see them, for logits processors and custom warpers."""

    session: Session
    forest: Forest
    rows: Rows

    @property
    def cuts(self) -> bool:
        """Whether laws leave out tokens of the vocabulary."""
        warp = self.session.warp
        return bool(warp.others) or bool(cuts(warp.cut))

    def at(self, node: int) -> Ranked:
        """Return the processed logits of a forest node, a whole row. Raises `BrokenLaw`, `BrokenProcessor`."""
        nodes = np.array([node])
        rows = self.rows[node : node + 1]
        processed = processed_rows(rows, self.session.warp, lambda: self.session.paths(self.forest, nodes))
        return whole_rows(processed)

    def law(self, row: Ranked) -> RowLaw:
        """Return the law of a processed row."""
        (law,) = row_laws(row.logits, self.session.warp)
        assert law is not None, "the walk stops at rows from which everything is banned"
        return law


@dataclass(eq=False)
class TokenObserver:
    """An observer of the tokens of a walk, which looks for stop strings."""

    session: Session
    forest: Forest

    def look(self, node: int, token: int) -> bool:
        """Return whether a token after a node completes a stop string."""
        before = self.session.new_tokens(self.forest, np.array([node]))[0].tolist()
        return self.session.limits.stopped_by([*before, int(token)]) is not None


@dataclass(eq=False)
class WalkInputs:
    """The arguments of a walk's steps, which run as source if Python has to see rows or tokens, compiled otherwise."""

    rows: Any  # a `TurnRows` or `RowsInPython`
    dice: Any
    evidence: Evidence
    observer: TokenObserver | None

    @classmethod
    def of(cls, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> "WalkInputs":
        """Return the inputs for one turn of a session."""
        rows = on_host(scored)
        draws = len(forest.siblings.tokens)
        dice = session.dice.ready(2 * (draws + forest.size + 1))
        evidence = no_evidence(session.audited and not session.warp.greedy)
        observer = None
        if session.limits.stop_strings:
            observer = TokenObserver(session, forest)
        if session.warp.takes_raw_rows:
            return cls(scored_rows_of(forest, rows), dice, evidence, observer)
        check_rows_of(forest, rows)
        return cls(RowsInPython(session, forest, rows), dice, evidence, observer)

    def run(self, one: Callable[..., Any], *given: Any) -> Any:
        """Run a step, or its source."""
        if self.observer is None and isinstance(self.rows, TurnRows):
            return one(*given)
        return getattr(one, "py_func", one)(*given)

    def take_turn(self, walk: Callable[..., Any], session: Session, forest: Forest, spec: Any) -> tuple[Layers, int]:
        """Return the layers and the condition of a turn by `walk_down`, or another step with its arguments."""
        finished = session.finished_with_room(1)
        turn = ScoredTurn(self.rows, forest, session.beams, ONE_SEQUENCE, session.length, finished)
        found: tuple[Layers, int] = self.run(walk, spec, turn, self.dice, self.evidence, self.observer)
        return found

    def emit(
        self,
        walk: Emitted,
        session: Session,
        tokens: Int64[np.ndarray, " n"],
        nodes: Int64[np.ndarray, " n"],
        drafted: Bool[np.ndarray, " n"],
    ) -> bool:
        """Emit tokens that a rule has chosen in Python; see `emit_path`."""
        spec = WalkSpec(MATCH_BY_DICE, session.warp.greedy, session.warp.cut, session.limits.stop)
        path = TokenPath(tokens, nodes, drafted)
        given = (walk, self.rows, session.beams, spec, session.length, path, self.evidence, self.observer)
        return bool(self.run(emit_path, *given))

    def audit(self, session: Session) -> Audit | None:
        """Return the audit of the session's turn; None if it is not audited."""
        return Audit.of(self.evidence) if session.audited else None


def checked(layers: Layers, condition: int, session: Session, scored: Float[torch.Tensor, "nodes vocab"]) -> Layers:
    """Return the layers of a walk.

    Raises `BrokenLaw`, and `DeadEnd` if every next token is banned. If tokens were emitted before, they are returned, and
    the next turn raises.
    """
    if condition != SOUND and layers.size == 0:
        check_condition(condition, on_host(scored)[:1], session.warp)
    return layers


def walked(session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"], spec: WalkSpec) -> Verdict:
    """Return the verdict of `walk_down`. Raises `BrokenLaw` and `DeadEnd`, see `checked`."""
    inputs = WalkInputs.of(session, forest, scored)
    layers, condition = inputs.take_turn(walk_down, session, forest, spec)
    return Verdict(checked(layers, condition, session, scored), audit=inputs.audit(session))


def verdict_by_step(
    session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"], spec: Any, widths: Any = ONE_SEQUENCE
) -> Verdict:
    """Return the verdict of the step that a spec has registered for `verify_turn`, for the `verify` of a user's own rule.

    If Python has to see rows, all rows of the forest are processed first; if there are stop strings, the source of the step
    runs. Raises `BrokenLaw` and `DeadEnd`, see `checked`.
    """
    inputs = WalkInputs.of(session, forest, scored)
    rows = inputs.rows
    if not isinstance(rows, TurnRows):
        processed = np.concatenate([rows.at(node).logits for node in range(forest.size)])
        rows = scored_rows_of(forest, processed)
    one = verify_turn.step_of(type(spec))
    if inputs.observer is not None:
        one = getattr(one, "py_func", one)
    finished = session.finished_with_room(2 * forest.size + widths.most)
    before = int(finished.held[0])
    turn = ScoredTurn(rows, forest, session.beams, widths, session.length, finished)
    layers, condition = one(spec, turn, inputs.dice, inputs.evidence, inputs.observer)
    finished.held[0] = before  # the session adds them when it moves on
    return Verdict(checked(layers, condition, session, scored), audit=inputs.audit(session))


def listing_of_law(session: Session) -> Listing:
    """Return the lists that nearly always decide the law of the next token; WHOLE if it is on the whole vocabulary."""
    warp = session.warp
    if warp.greedy:
        return listing_for(NO_TRUNCATION, False, 1)
    return listing_for(warp.cut, False, 1) if warp.cut.cuts else WHOLE


def check_has_laws(forest: Forest, rule: str) -> None:
    """Raise `LostLaw` if the law of a draft is unknown."""
    if not forest.siblings.have_laws:
        raise LostLaw(
            f"{rule} tries drafts against the law they were drawn from, but the law of these drafts is lost "
            "(pruned by content, merged or retrieved); verify them with MatchRule"
        )


@dataclass(frozen=True)
class PathRule:
    """At each node try the drafts in order, each against its own law; go down to the accepted one, or leave the tree.

    The rule of speculative sampling (arXiv 2211.17192), SpecInfer (2305.09781), RSD (2402.14160), Sequoia (2402.12374),
    SpecHub and greedy + 1 (2411.05289, 2502.18779), which differ in the laws of their drafts.

    Law: exact: the target's.
    """

    law: ClassVar[str] = EXACT
    most_beams: ClassVar[int] = 1
    tries: ClassVar[bool] = True

    def ignores_drafts(self, session: Session) -> bool:
        """Return whether texts are independent of the drafts: at temperature 0, where nothing is drawn."""
        return session.warp.greedy

    def spec(self, session: Session) -> WalkSpec:
        """Return the spec by which steps judge the trees of a session."""
        return WalkSpec(TRY, session.warp.greedy, session.warp.cut, session.limits.stop)

    def listing(self, session: Session) -> Listing:
        """Return the lists of tokens by which drafts are tried; see `Rule`."""
        return listing_of_law(session)

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        """Return the verdict on a tree. Raises `LostLaw` if the law of a draft is unknown."""
        check_has_laws(forest, "PathRule")
        return walked(session, forest, scored, self.spec(session))


@dataclass(frozen=True)
class MatchRule:
    """Draw the next token from the target's law; go down if it is among the drafts, else leave the tree with it.

    The law of the drafts does not matter, so drafts may be greedy, pruned, merged or retrieved.

    Args:
        coupling: "noise" draws by the noise of (seed, path, token): the text equals that of plain sampling with the same
            seed. "dice" draws by the session's dice.

    Law: exact: the target's.
    """

    law: ClassVar[str] = EXACT
    most_beams: ClassVar[int] = 1
    coupling: str = "noise"

    def ignores_drafts(self, session: Session) -> bool:
        """Return whether texts are independent of the drafts: if the noise draws, or nothing is drawn."""
        return self.coupling == "noise" or session.warp.greedy

    def spec(self, session: Session) -> WalkSpec:
        """Return the spec by which steps judge the trees of a session."""
        way = MATCH_BY_NOISE if self.coupling == "noise" else MATCH_BY_DICE
        return WalkSpec(way, session.warp.greedy, session.warp.cut, session.limits.stop)

    def listing(self, session: Session) -> Listing:
        """Return the lists of tokens by which the next token is drawn; see `Rule`."""
        warp = session.warp
        if self.coupling == "noise" and not warp.greedy and not warp.cut.cuts:
            return listing_for(warp.cut, True, 1)
        return listing_of_law(session)

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        """Return the verdict on a tree."""
        return walked(session, forest, scored, self.spec(session))
