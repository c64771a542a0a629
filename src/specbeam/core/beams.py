"""Live beams, the layers of draws that a turn decides, the tokens of beams from turn to turn, and when these end."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from specbeam.core.forest import Forest, part, start_of
from specbeam.core.steps import Array, step

BEST_LIVE_MAY_WIN, FIRST_ENOUGH, NEVER = range(3)  # early_stopping False, True and "never"


class Beams(NamedTuple):
    """Live beams of one session: distinct token paths of equal length, best guess of the next roots.

    A path that was drawn several times (draws with replacement) stands here once, with its count.
    """

    nodes: Array  # int64[beams]: forest nodes; -1 where the last token has no node yet
    tokens: Array  # int64[beams]: the last token
    scores: Array  # float64[beams]: log-likelihood of the generated tokens
    counts: Array  # int64[beams]
    keys: Array  # uint64[beams]: names of the paths, for their noise

    @classmethod
    def start(cls, token: int, key: int) -> "Beams":
        """Return one empty path after the prompt, whose last token is the root."""
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
        """Return the beams at these indices or where this mask is True."""
        return picked_beams(self, which)


@step
def picked_beams(beams: Beams, which: Array) -> Beams:
    """Return the beams at these indices or where this mask is True."""
    return Beams(beams.nodes[which], beams.tokens[which], beams.scores[which], beams.counts[which], beams.keys[which])


@step
def rooted_beams(beams: Beams) -> Beams:
    """Return the same beams at the start of the next turn, where beam k is root k."""
    return Beams(np.arange(len(beams.tokens)), beams.tokens, beams.scores, beams.counts, beams.keys)


class Layer(NamedTuple):
    """What one layer drew, and what each drawn pair became."""

    parents: Array  # int64[draws]: forest nodes
    beams: Beams
    ended: Array  # bool[draws]: by an end token, a stop string or the length limit
    width: int  # draws that were asked for
    passed: bool  # every live draw was a draft node, so that the next layer can be judged

    @property
    def live(self) -> Beams:
        """The draws that did not end."""
        return self.beams.pick(~self.ended)


class Layers(NamedTuple):
    """What a turn decided, layer by layer: the draws of layer k are draw_ends[k - 1] .. draw_ends[k]."""

    parents: Array  # int64[draws], and so on, as in `Layer`
    beams: Beams
    ended: Array
    draw_ends: Array  # int64[layers]
    widths: Array  # int64[layers]
    passed: Array  # bool[layers]

    @property
    def size(self) -> int:
        """The number of layers."""
        return len(self.draw_ends)

    def layer(self, number: int) -> Layer:
        """Return one layer."""
        here = part(self.draw_ends, number)
        beams = Beams(*(values[here] for values in self.beams))
        return Layer(self.parents[here], beams, self.ended[here], int(self.widths[number]), bool(self.passed[number]))

    def all(self) -> tuple[Layer, ...]:
        """Return each layer."""
        return tuple(self.layer(number) for number in range(self.size))


@step
def no_layers(draws: int, layers: int) -> Layers:
    """Return room for so many draws in so many layers; `add_layer` fills it."""
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
    )


@step
def first_layers(room: Layers, count: int) -> Layers:
    """Return the first `count` layers of a room."""
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
    )


@step
def add_layer(room: Layers, number: int, layer: Layers, width: int, passed: bool) -> None:
    """Write one layer as layer `number` into a room."""
    start = start_of(room.draw_ends, number)
    stop = start + len(layer.parents)
    room.parents[start:stop] = layer.parents
    room.beams.nodes[start:stop] = layer.beams.nodes
    room.beams.tokens[start:stop] = layer.beams.tokens
    room.beams.scores[start:stop] = layer.beams.scores
    room.beams.counts[start:stop] = layer.beams.counts
    room.beams.keys[start:stop] = layer.beams.keys
    room.ended[start:stop] = layer.ended
    room.draw_ends[number] = stop
    room.widths[number] = width
    room.passed[number] = passed


@step
def live_of(layer: Layers) -> Beams:
    """Return the draws of the last layer that did not end."""
    start = start_of(layer.draw_ends, len(layer.draw_ends) - 1)
    stop = layer.draw_ends[len(layer.draw_ends) - 1]
    going = start + np.flatnonzero(~layer.ended[start:stop])
    return picked_beams(layer.beams, going)


@step
def live_parents_of(layer: Layers) -> Array:
    """Return the forest nodes above the draws of the last layer that did not end."""
    start = start_of(layer.draw_ends, len(layer.draw_ends) - 1)
    stop = layer.draw_ends[len(layer.draw_ends) - 1]
    return layer.parents[start + np.flatnonzero(~layer.ended[start:stop])]


class Finished(NamedTuple):
    """The normalised scores of the beams of a session that ended, with room for more."""

    scores: Array  # float64[room]
    held: Array  # int64[1]


class Stop(NamedTuple):
    """The numbers that stop a session."""

    most: int  # new tokens
    keep: int  # finished beams that are wanted
    early: int  # BEST_LIVE_MAY_WIN, FIRST_ENOUGH or NEVER
    penalty: float
    eos: Array  # int64[ends]


@step
def is_end(token: int, eos: Array) -> bool:
    """Return whether a token is one of the end tokens, int64[ends]."""
    found = False
    for end in eos:
        found |= token == end
    return found


@step
def normalised_score(stop: Stop, loglik: float, length: int) -> float:
    """Return the score by which texts of different length are compared."""
    return loglik / max(length, 1) ** stop.penalty


@step
def is_over(stop: Stop, finished: Array, live: Array, length: int) -> bool:
    """Return whether a session is over, though beams may be alive.

    Args:
        finished: float64[n], normalised scores of the beams that ended.
        live: float64[beams], log-likelihoods of the others, which are `length` tokens long.
    """
    if length >= stop.most or len(live) == 0:
        return True
    if len(finished) < stop.keep:
        return False
    if stop.early == FIRST_ENOUGH or stop.keep == 1:  # one beam is greedy search or sampling, which ends at an end
        return True
    longest = stop.early == NEVER and stop.penalty > 0
    best = normalised_score(stop, live.max(), stop.most if longest else length)
    return best <= np.sort(finished)[len(finished) - stop.keep]


@step
def add_finished(finished: Finished, stop: Stop, layer: Layers, length: int) -> None:
    """Add the draws of one layer that ended, each as often as it was drawn; their texts have so many tokens."""
    for place in range(len(layer.parents)):
        if layer.ended[place]:
            score = normalised_score(stop, layer.beams.scores[place], length)
            for _ in range(layer.beams.counts[place]):
                finished.scores[finished.held[0]] = score
                finished.held[0] += 1


@step
def is_session_over(finished: Finished, stop: Stop, live: Array, length: int) -> bool:
    """Return whether a session with these live log-likelihoods, of texts of that length, is over."""
    return is_over(stop, finished.scores[: finished.held[0]], live, length)


BEAMS, LENGTH, SETTLED = range(3)  # of `Texts.sizes`


class Texts(NamedTuple):
    """The new tokens of all live beams, with room for more."""

    tokens: Array  # int64[room, room]: a row per beam
    sizes: Array  # int64[3]: BEAMS, LENGTH of each, and how many first tokens they share (SETTLED)

    @property
    def settled(self) -> Int64[np.ndarray, " settled"]:
        """The tokens that all live beams share."""
        return self.tokens[0, : self.sizes[SETTLED]]

    @property
    def tails(self) -> Int64[np.ndarray, "beams length"]:
        """What each beam has after the shared tokens."""
        beams, length, settled = self.sizes.tolist()
        return self.tokens[:beams, settled:length]


def room_for_texts(texts: Texts | None, beams: int, length: int) -> Texts:
    """Return the texts with room for so many beams of so many tokens; None: one empty text."""
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
    """Write the tokens on the path to a forest node into row[..stop]. Returns the root that it hangs under."""
    while parents[node] >= 0:
        stop -= 1
        row[stop] = tokens[node]
        node = parents[node]
    return node


@step
def depth_of(parents: Array, node: int) -> int:
    """Return how many nodes stand above a forest node."""
    depth = 0
    while parents[node] >= 0:
        node = parents[node]
        depth += 1
    return depth


@step
def text_of(texts: Texts, tokens: Array, parents: Array, parent: int, token: int) -> Array:
    """Return all new tokens of a beam that prolongs forest node `parent` by a token, int64[length]."""
    before = texts.sizes[LENGTH]
    depth = depth_of(parents, parent)
    text = np.empty(before + depth + 1, dtype=np.int64)
    text[before + depth] = token
    root = write_path(text, before + depth, tokens, parents, parent)
    text[:before] = texts.tokens[root, :before]
    return text


@step
def prolong_texts(texts: Texts, tokens: Array, parents: Array, above: Array, newest: Array) -> None:
    """Move on to the surviving beams, which hang under the forest nodes `above`, equally deep, by their newest tokens."""
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
            row[:settled] = texts.tokens[0, :settled]
        row[length - 1] = newest[beam]
        root = write_path(row, length - 1, tokens, parents, above[beam])
        row[settled:before] = old[root]
    texts.sizes[LENGTH] = length
    while settled < length and (texts.tokens[:beams, settled] == texts.tokens[0, settled]).all():
        settled += 1
    texts.sizes[SETTLED] = settled


def paths_to(
    texts: Texts, head: Array, forest: Forest, nodes: Int64[np.ndarray, " n"]
) -> Int64[np.ndarray, "n length"]:
    """Return the head, then all new tokens up to and with each node; the nodes must be equally deep."""
    below = forest.below(nodes)
    known = len(head) + int(texts.sizes[LENGTH])
    paths = np.empty((len(nodes), known + below.shape[1]), dtype=np.int64)
    paths[:, : len(head)] = head
    paths[:, len(head) : known] = texts.tokens[forest.root_of(nodes), : texts.sizes[LENGTH]]
    paths[:, known:] = below
    return paths


TEXTS, USED = range(2)  # of `EndedTexts.sizes`


class EndedTexts(NamedTuple):
    """The new tokens of beams that ended, one text after the other, with room for more."""

    tokens: Array  # int64[room]
    ends: Array  # int64[room]: where each text ends
    logliks: Array  # float64[room]
    sizes: Array  # int64[2]: number of texts (TEXTS), and of tokens (USED)


def room_for_ended(texts: int, length: int) -> EndedTexts:
    """Return room for so many texts of so many tokens each."""
    ends = np.empty(texts, dtype=np.int64)
    return EndedTexts(np.empty(texts * length, dtype=np.int64), ends, np.empty(texts), np.zeros(2, dtype=np.int64))


@step
def add_ended(ended: EndedTexts, text: Array, loglik: float) -> None:
    """Add the text of a beam that ended."""
    number = ended.sizes[TEXTS]
    start = ended.sizes[USED]
    stop = start + len(text)
    ended.tokens[start:stop] = text
    ended.ends[number] = stop
    ended.logliks[number] = loglik
    ended.sizes[TEXTS] = number + 1
    ended.sizes[USED] = stop


@step
def settle_turn(
    texts: Texts, finished: Finished, ended: EndedTexts, forest: Forest, layers: Layers, survivors: Beams, above: Array,
    stop: Stop,
) -> None:  # fmt: skip
    """Move on to where a turn leads: beams that ended are put aside, the survivors are prolonged.

    Args:
        above: int64[survivors], the forest nodes that they hang under, equally deep.
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
