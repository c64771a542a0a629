"""Records of live beams, of the layers that a turn decides and of texts; and the steps that extend and stop them."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.forest import Forest, part, start_of
from specbeam.core.steps import Array, borrowed, step

FEW_ENDS = 16  # up to this many end tokens, comparing one by one is faster than a binary search
BEST_LIVE_MAY_WIN, FIRST_ENOUGH, NEVER = range(3)  # early_stopping False, True and "never"


class Beams(NamedTuple):
    """The live beams of one session: distinct token paths of equal length, which become the roots of the next turn.

    A path that was drawn several times (draws with replacement) is one beam, with its count.
    """

    nodes: Array  # int64[beams]: the forest node of the last token; -1 if it has none yet
    tokens: Array  # int64[beams]: the last token
    scores: Array  # float64[beams]: log-likelihood of the generated tokens
    counts: Array  # int64[beams]: how often each path was drawn
    keys: Array  # uint64[beams]: keys of the paths, which determine their noise (core/noise.py)

    @classmethod
    def start(cls, token: int, key: int) -> "Beams":
        """Return one beam without new tokens; its root is `token`, the last token of the prompt."""
        return cls(
            nodes=np.zeros(1, dtype=np.int64),
            tokens=np.array([token], dtype=np.int64),
            scores=np.zeros(1),
            counts=np.ones(1, dtype=np.int64),
            keys=np.array([key], dtype=np.uint64),
        )

    @property
    def size(self) -> int:
        """The number of beams."""
        return len(self.tokens)

    def pick(self, which: np.ndarray) -> "Beams":
        """Return the beams at the indices `which`, or where the mask `which` is True."""
        return picked_beams(self, which)


@step
def picked_beams(beams: Beams, which: Array) -> Beams:
    """Return the beams at the indices `which`, or where the mask `which` is True."""
    return Beams(beams.nodes[which], beams.tokens[which], beams.scores[which], beams.counts[which], beams.keys[which])


@step
def rooted_beams(beams: Beams) -> Beams:
    """Return the same beams as the roots of the next turn: beam k is at forest node k."""
    return Beams(np.arange(len(beams.tokens)), beams.tokens, beams.scores, beams.counts, beams.keys)


class Layer(NamedTuple):
    """One layer of a turn: the (beam, token) pairs that it drew, and the beam that each became."""

    parents: Array  # int64[draws]: the forest node that each draw extends
    beams: Beams
    ended: Array  # bool[draws]: by an end token, a stop string or the length limit
    width: int  # number of draws that were requested
    passed: bool  # whether every live draw is a draft node, so that the next layer can be judged

    @property
    def live(self) -> Beams:
        """The beams that did not end."""
        return self.beams.pick(~self.ended)


FROM_PASS, FROM_BEFORE, UNSEEN = range(3)  # columns of `Layers.sources`


class Layers(NamedTuple):
    """The layers that a turn decided, one after the other: draw_ends[k] is the index after the last draw of layer k."""

    parents: Array  # int64[draws]: of all layers; the other fields are those of `Layer`
    beams: Beams
    ended: Array
    draw_ends: Array  # int64[layers]
    widths: Array  # int64[layers]
    passed: Array  # bool[layers]
    # int64[layers, 3]: the live beams before each layer, counted by the source of their rows: the turn's pass
    # (FROM_PASS), an earlier turn (FROM_BEFORE), or none, as the layer was decided without them (UNSEEN)
    sources: Array
    # float64[layers]: the value of the last pair that each layer depends on; NaN if values were not compared
    edges: Array

    @property
    def size(self) -> int:
        """The number of layers."""
        return len(self.draw_ends)

    def layer(self, number: int) -> Layer:
        """Return layer `number` as a single layer."""
        here = part(self.draw_ends, number)
        beams = Beams(*(values[here] for values in self.beams))
        return Layer(self.parents[here], beams, self.ended[here], int(self.widths[number]), bool(self.passed[number]))

    def all(self) -> tuple[Layer, ...]:
        """Return all layers as single layers."""
        return tuple(self.layer(number) for number in range(self.size))


@step
def no_layers(draws: int, layers: int) -> Layers:
    """Return uninitialised layers with capacity for `draws` draws in `layers` layers; `add_layer` fills them."""
    beams = Beams(
        np.empty(draws, dtype=np.int64),
        np.empty(draws, dtype=np.int64),
        np.empty(draws),
        np.empty(draws, dtype=np.int64),
        np.empty(draws, dtype=np.uint64),
    )
    return Layers(
        np.empty(draws, dtype=np.int64),
        beams,
        np.zeros(draws, dtype=np.bool_),
        np.empty(layers, dtype=np.int64),
        np.empty(layers, dtype=np.int64),
        np.zeros(layers, dtype=np.bool_),
        np.zeros((layers, 3), dtype=np.int64),
        np.full(layers, np.nan),
    )


@step
def first_layers(room: Layers, count: int) -> Layers:
    """Return the first `count` of the layers that `add_layer` wrote into `room`."""
    draws = start_of(room.draw_ends, count)
    beams = room.beams
    return Layers(
        room.parents[:draws],
        Beams(
            beams.nodes[:draws], beams.tokens[:draws], beams.scores[:draws], beams.counts[:draws], beams.keys[:draws]
        ),
        room.ended[:draws],
        room.draw_ends[:count],
        room.widths[:count],
        room.passed[:count],
        room.sources[:count],
        room.edges[:count],
    )


@step
def add_layer(room: Layers, number: int, layer: Layers, width: int, passed: bool) -> None:
    """Write a single layer into `room` as its layer `number`, with this `width` and this `passed`."""
    start = start_of(room.draw_ends, number)
    stop = start + len(layer.parents)
    copy_numbers(room.parents[start:stop], layer.parents)
    copy_numbers(room.beams.nodes[start:stop], layer.beams.nodes)
    copy_numbers(room.beams.tokens[start:stop], layer.beams.tokens)
    copy_numbers(room.beams.scores[start:stop], layer.beams.scores)
    copy_numbers(room.beams.counts[start:stop], layer.beams.counts)
    copy_numbers(room.beams.keys[start:stop], layer.beams.keys)
    copy_numbers(room.ended[start:stop], layer.ended)
    room.draw_ends[number] = stop
    room.widths[number] = width
    room.passed[number] = passed


@step
def live_of(layer: Layers) -> Beams:
    """Return the live beams of the last layer: its draws, without those that ended."""
    start = start_of(layer.draw_ends, len(layer.draw_ends) - 1)
    stop = layer.draw_ends[len(layer.draw_ends) - 1]
    going = start + np.flatnonzero(~layer.ended[start:stop])
    return picked_beams(layer.beams, going)


@step
def live_parents_of(layer: Layers) -> Array:
    """Return the forest node that each live beam of the last layer extends, int64[beams]."""
    start = start_of(layer.draw_ends, len(layer.draw_ends) - 1)
    stop = layer.draw_ends[len(layer.draw_ends) - 1]
    return layer.parents[start + np.flatnonzero(~layer.ended[start:stop])]


@borrowed
class Finished(NamedTuple):
    """The normalised scores of the ended beams of a session, in a buffer with spare capacity."""

    scores: Array  # float64[capacity]
    held: Array  # int64[1]: number of scores in use


@borrowed
class Stop(NamedTuple):
    """The stop rules of a session as numbers for steps; see `core.limits.Limits`."""

    most: int  # maximum number of new tokens
    keep: int  # number of finished beams to collect
    early: int  # BEST_LIVE_MAY_WIN, FIRST_ENOUGH or NEVER
    penalty: float  # the length penalty, see `normalised_score`
    eos: Array  # int64[ends], ascending


@step
def is_end(token: int, eos: Array) -> bool:
    """Return whether `token` is one of the end tokens `eos`, int64[ends], ascending."""
    if len(eos) > FEW_ENDS:
        place = np.searchsorted(eos, token)
        return bool(place < len(eos) and eos[place] == token)
    found = False
    for end in eos:
        found |= token == end
    return found


@step
def normalised_score(stop: Stop, loglik: float, length: int) -> float:
    """Return loglik / length ** penalty, the score by which texts of different lengths are compared."""
    return loglik / max(length, 1) ** stop.penalty


@step
def is_over(stop: Stop, finished: Array, live: Array, length: int) -> bool:
    """Return whether a session is over, even if it has live beams.

    Args:
        finished: float64[n], normalised scores of the beams that ended.
        live: float64[beams], log-likelihoods of the live beams, whose texts have `length` tokens.
    """
    if length >= stop.most or len(live) == 0:
        return True
    if len(finished) < stop.keep:
        return False
    if stop.early == FIRST_ENOUGH:
        return True
    longest = stop.early == NEVER and stop.penalty > 0
    best = normalised_score(stop, live.max(), stop.most if longest else length)
    better = 0
    for score in finished:
        better += score >= best
    return better >= stop.keep


@step
def add_finished(finished: Finished, stop: Stop, layer: Layers, length: int) -> None:
    """Store the score of each ended draw of a layer as often as it was drawn; its text has `length` tokens."""
    for place in range(len(layer.parents)):
        if layer.ended[place]:
            score = normalised_score(stop, layer.beams.scores[place], length)
            for _ in range(layer.beams.counts[place]):
                finished.scores[finished.held[0]] = score
                finished.held[0] += 1


@step
def is_session_over(finished: Finished, stop: Stop, live: Array, length: int) -> bool:
    """Return whether a session is over: `is_over` with the scores that `finished` holds."""
    return is_over(stop, finished.scores[: finished.held[0]], live, length)


BEAMS, LENGTH, SETTLED = range(3)  # indices into `Texts.sizes`


@borrowed
class Texts(NamedTuple):
    """The new tokens of all live beams, in a buffer with spare capacity."""

    tokens: Array  # int64[rows, columns]: first sizes[BEAMS] rows and sizes[LENGTH] columns in use, a row per beam
    sizes: Array  # int64[3]: number of beams (BEAMS), tokens of each (LENGTH), leading tokens that all share (SETTLED)

    @property
    def settled(self) -> Int64[np.ndarray, " settled"]:
        """The tokens that all live beams share."""
        return self.tokens[0, : self.sizes[SETTLED]]

    @property
    def tails(self) -> Int64[np.ndarray, "beams length"]:
        """The tokens of each beam after those that all live beams share."""
        beams, length, settled = self.sizes.tolist()
        return self.tokens[:beams, settled:length]


def room_for_texts(texts: Texts | None, beams: int, length: int) -> Texts:
    """Return `texts` (None: one empty text), or a longer copy, with capacity for `beams` texts of `length` tokens."""
    if texts is None:
        return Texts(np.zeros((max(beams, 1), length), dtype=np.int64), np.array([1, 0, 0]))
    rows, columns = texts.tokens.shape
    if rows >= beams and columns >= length:
        return texts
    wider = np.zeros((max(rows, beams), columns if columns >= length else length + columns), dtype=np.int64)
    wider[:rows, :columns] = texts.tokens
    return Texts(wider, texts.sizes)


@step
def write_path(row: Array, stop: int, tokens: Array, parents: Array, node: int) -> int:
    """Write the tokens from below the root to `node` into `row`, the last one at stop - 1. Returns the root."""
    while parents[node] >= 0:
        stop -= 1
        row[stop] = tokens[node]
        node = parents[node]
    return node


@step
def depth_of(parents: Array, node: int) -> int:
    """Return the depth of a forest node: the number of nodes above it, 0 for a root."""
    depth = 0
    while parents[node] >= 0:
        node = parents[node]
        depth += 1
    return depth


@step
def text_of(texts: Texts, tokens: Array, parents: Array, parent: int, token: int) -> Array:
    """Return all new tokens of the beam that extends forest node `parent` by `token`, int64[length]."""
    before = texts.sizes[LENGTH]
    depth = depth_of(parents, parent)
    text = np.empty(before + depth + 1, dtype=np.int64)
    text[before + depth] = token
    root = write_path(text, before + depth, tokens, parents, parent)
    copy_numbers(text, texts.tokens[root, :before])
    return text


@step
def prolong_texts(texts: Texts, tokens: Array, parents: Array, above: Array, newest: Array) -> None:
    """Replace the texts by those of the surviving beams, which extend the forest nodes `above`.

    Args:
        above: int64[beams], the forest node that each survivor extends; all have the same depth.
        newest: int64[beams], the token that each survivor adds to it.
    """
    beams = len(above)
    before = texts.sizes[LENGTH]
    settled = texts.sizes[SETTLED]
    former = texts.sizes[BEAMS]
    texts.sizes[BEAMS] = beams
    if beams == 0:
        return
    length = before + depth_of(parents, above[0]) + 1
    old = texts.tokens[:former, settled:before].copy()
    for beam in range(beams):
        row = texts.tokens[beam]
        if beam >= former:
            copy_numbers(row, texts.tokens[0, :settled])
        row[length - 1] = newest[beam]
        root = write_path(row, length - 1, tokens, parents, above[beam])
        copy_numbers(row[settled:before], old[root])
    texts.sizes[LENGTH] = length
    while settled < length and (texts.tokens[:beams, settled] == texts.tokens[0, settled]).all():
        settled += 1
    texts.sizes[SETTLED] = settled


def paths_to(
    texts: Texts, before: Array, forest: Forest, nodes: Int64[np.ndarray, " n"]
) -> Int64[np.ndarray, "n length"]:
    """Return `before` and all new tokens up to and including each node; all nodes must have the same depth."""
    below = forest.below(nodes)
    known = len(before) + int(texts.sizes[LENGTH])
    paths = np.empty((len(nodes), known + below.shape[1]), dtype=np.int64)
    paths[:, : len(before)] = before
    paths[:, len(before) : known] = texts.tokens[forest.root_of(nodes), : texts.sizes[LENGTH]]
    paths[:, known:] = below
    return paths


TEXTS, USED = range(2)  # indices into `EndedTexts.sizes`


@borrowed
class EndedTexts(NamedTuple):
    """The new tokens of beams that ended, one text after the other, in a buffer with spare capacity."""

    tokens: Array  # int64[capacity]
    ends: Array  # int64[capacity]: the index after the last token of each text
    logliks: Array  # float64[capacity]
    sizes: Array  # int64[2]: number of texts (TEXTS) and of tokens (USED)


def room_for_ended(texts: int, length: int) -> EndedTexts:
    """Return an empty buffer with capacity for `texts` texts of `length` tokens each."""
    ends = np.empty(texts, dtype=np.int64)
    return EndedTexts(np.empty(texts * length, dtype=np.int64), ends, np.empty(texts), np.zeros(2, dtype=np.int64))


@step
def add_ended(ended: EndedTexts, text: Array, loglik: float) -> None:
    """Append the text of a beam that ended, and its log-likelihood."""
    number = ended.sizes[TEXTS]
    start = ended.sizes[USED]
    stop = start + len(text)
    copy_numbers(ended.tokens[start:stop], text)
    ended.ends[number] = stop
    ended.logliks[number] = loglik
    ended.sizes[TEXTS] = number + 1
    ended.sizes[USED] = stop


@step
def settle_turn(
    texts: Texts, finished: Finished, ended: EndedTexts, forest: Forest, layers: Layers, survivors: Beams, above: Array,
    stop: Stop,
) -> None:  # fmt: skip
    """Apply the result of a turn: store the beams that ended, and extend the texts of the survivors.

    Args:
        texts, finished, ended: changed in place.
        survivors: the live beams after the turn.
        above: int64[survivors], the forest node that each survivor extends; all have the same depth.
    """
    tokens = forest.tokens
    parents = forest.parents
    before = texts.sizes[LENGTH]
    for number in range(len(layers.draw_ends)):
        for draw in range(start_of(layers.draw_ends, number), layers.draw_ends[number]):
            if not layers.ended[draw]:
                continue
            text = text_of(texts, tokens, parents, layers.parents[draw], layers.beams.tokens[draw])
            loglik = layers.beams.scores[draw]
            for _ in range(layers.beams.counts[draw]):
                add_ended(ended, text, loglik)
                finished.scores[finished.held[0]] = normalised_score(stop, loglik, before + number + 1)
                finished.held[0] += 1
    prolong_texts(texts, tokens, parents, above, survivors.tokens)
