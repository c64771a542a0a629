"""Any causal language model of transformers, scoring forests of many sessions in one pass."""

import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.clock import lap
from specbeam.errors import NotSupported, UnsupportedModel
from specbeam.forest import Forest
from specbeam.lm.attention import Masks
from specbeam.lm.compiled import CompiledDecoder, Rows, compiled_decoder
from specbeam.lm.kv_store import KVStore, Place
from specbeam.lm.kv_trie import BLOCK, WASTE, Feed, KVTrie
from specbeam.lm.lean import LARGEST, LeanDecoder, lean
from specbeam.probs import picked
from specbeam.records import Turn
from specbeam.session import Seat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 512  # prompt tokens per pass
Nodes = Int64[np.ndarray, " nodes"]


class Lane:
    """One session in one model: its trie, the row of the store's buffers that is its own, and logits at hand."""

    def __init__(self, row: int, prompt: list[int]) -> None:
        self.row = row
        self.trie = KVTrie(prompt)
        self.answered = 0  # forest nodes whose logits were handed out in this turn
        # By ascending local nodes: those of roots that were stored in an earlier turn, then those of this turn's passes.
        self._blocks: list[tuple[Nodes, Float[torch.Tensor, "n vocab"]]] = []

    def enter(self, forest: Forest) -> Nodes:
        """Take in new nodes; give the local nodes whose logits a pass has to compute."""
        self.trie.enter(forest)
        wanted = self.trie.local[self.answered :]
        return wanted[wanted >= self.trie.stored]

    def learn(self, nodes: Nodes, rows: Float[torch.Tensor, "n vocab"]) -> None:
        if (nodes[1:] < nodes[:-1]).any():  # roots stand in the order of their beams
            order = nodes.argsort()
            nodes, rows = nodes[order], picked(rows, order)
        self._blocks.append((nodes, rows))

    def answer(self) -> Float[torch.Tensor, "nodes vocab"]:
        """Logits of the forest nodes not handed out yet."""
        wanted = self.trie.local[self.answered :]
        self.answered = len(self.trie.local)
        nodes, rows = self._blocks[-1]
        return rows if np.array_equal(nodes, wanted) else self._rows(wanted)

    def settle(self, turn: Turn) -> None:
        before, now = self.trie.settle(turn), self.trie.root_at
        kept = np.flatnonzero(now < self.trie.stored)
        kept = kept[now[kept].argsort()]
        self._blocks = [(now[kept], self._rows(before[kept]))] if len(kept) else []
        self.answered = 0

    def _rows(self, wanted: Nodes) -> Float[torch.Tensor, "n vocab"]:
        found: list[tuple[Nodes, Float[torch.Tensor, "m vocab"]]] = []
        for nodes, rows in self._blocks:
            at = np.minimum(nodes.searchsorted(wanted), len(nodes) - 1)
            mine = np.flatnonzero(nodes[at] == wanted)
            if len(mine) == len(wanted):
                return picked(rows, at)
            found.append((mine, picked(rows, at[mine])))
        if sum(len(mine) for mine, _ in found) != len(wanted):
            raise IndexError(f"local nodes {wanted} were asked for, of which some were not scored")
        out = found[0][1].new_empty(len(wanted), found[0][1].shape[1])
        for mine, rows in found:
            out[torch.from_numpy(mine).to(out.device)] = rows
        return out


class HuggingFaceLM:
    """Scores forests with a transformers model; one KV trie per session, all in one preallocated store.

    `check_scores_forests` (see `load`) has made sure that the model honours masks and positions.

    Args:
        chunk: prompt tokens per pass.
        engine: "plain" calls the model; "lean" and "compiled" run its layers themselves (see lm/lean.py, lm/compiled.py);
            "auto" takes the fastest of these that fits; "int8" runs it with rounded weights, which is another model. Raises
            `NotSupported` where it cannot.
    """

    def __init__(self, model: "PreTrainedModel", chunk: int = CHUNK, engine: str = "auto") -> None:
        self.model = model
        self.engine, self.compiled, self.lean = _engine(model, engine)
        self.chunk = chunk
        config = model.config.get_text_config()
        self.vocab = int(model.get_output_embeddings().weight.shape[0])
        self.max_positions: int | None = _max_positions(config)
        self.device = model.get_input_embeddings().weight.device
        self.masks = Masks(config, config._attn_implementation or "eager", model.dtype)
        self.store = KVStore(config.num_hidden_layers) if self.compiled is None else self.compiled.store()
        self.lanes: list[Lane] = []
        self.passes = 0
        self.curves: dict[int, Any] = {}  # what a pass costs, by context; see `tune`
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def extend(self, sessions: Sequence[Seat], forests: Sequence[Forest]) -> list[Float[torch.Tensor, "nodes vocab"]]:
        """See `LM.extend`."""
        lanes = [self._lane(session) for session in sessions]
        self._prefill(lanes)
        nodes = {lane.row: lane.enter(forest) for lane, forest in zip(lanes, forests, strict=True)}
        self._pass([lane for lane in lanes if lane.trie.waiting], nodes)
        return [lane.answer() for lane in lanes]

    def settle(self, session: Seat, turn: Turn) -> None:
        lane = self._lane(session)  # new, if nothing was drafted so far: what is pending waits for the first draft
        lane.settle(turn)
        if lane.trie.extent > 2 * lane.trie.held + BLOCK:
            self.compact(session)

    def peak(self, session: Seat) -> int:
        return session.state[self].trie.peak

    def close(self, session: Seat) -> None:
        """Give the lane back: the last lane moves into its place, so that the lanes in use stay together."""
        lane = session.state.pop(self, None)
        if lane is None:
            return
        last = self.lanes.pop()
        if last is not lane:
            if last.row < self.store.lanes:  # otherwise it has stored nothing so far
                self.store.move_lane(last.row, lane.row)
            last.row = lane.row
            self.lanes[lane.row] = last

    def compact(self, session: Seat) -> None:
        """Close the holes in the session's lane. New nodes fill holes anyway, so this is for forests that shrank."""
        lane = session.state[self]
        source, goal = lane.trie.compact()
        if len(source):
            self.store.move_slots(lane.row, *(torch.from_numpy(x).to(self.device) for x in (source, goal)))

    def held(self, session: Seat) -> int:
        """Tokens stored for the session now."""
        return session.state[self].trie.held

    def _lane(self, session: Seat) -> Lane:
        lane = session.state.get(self)
        if lane is None:
            lane = Lane(len(self.lanes), session.prompt)
            self.lanes.append(lane)
            session.state[self] = lane
        return lane

    def _prefill(self, lanes: list[Lane]) -> None:
        """Long prompts go ahead in chunks, so that a pass stays small whatever the prompt."""
        while long := [lane for lane in lanes if lane.answered == 0 and self._is_long(lane.trie)]:
            feeds = {lane.row: lane.trie.feed(min(self.chunk, lane.trie.ahead)) for lane in long}
            self._forward(feeds, dict.fromkeys(feeds, np.zeros(0, dtype=np.int64)))
            for lane in long:
                lane.trie.forget_inner()

    def _is_long(self, trie: KVTrie) -> bool:
        return trie.waiting > self.chunk and trie.ahead > 0

    def _pass(self, lanes: list[Lane], nodes: dict[int, Nodes]) -> None:
        """Store all pending nodes; learn the logits of these local nodes among them."""
        if not lanes:
            return
        wanted = {lane.row: nodes[lane.row] - lane.trie.stored for lane in lanes}
        feeds = {lane.row: lane.trie.feed(lane.trie.waiting) for lane in lanes}
        found = self._forward(feeds, wanted)
        for lane in lanes:
            lane.learn(nodes[lane.row], found[lane.row])

    def _forward(self, feeds: dict[int, Feed], wanted: dict[int, Nodes]) -> dict[int, Float[torch.Tensor, "n vocab"]]:
        """One pass over the lanes that have a feed; the logits of the `wanted` places of each feed, which ascend."""
        self.passes += 1
        if self.compiled is not None:
            return self._forward_compiled(self.compiled, feeds, wanted)
        return self._forward_padded(feeds, wanted)

    def _forward_compiled(
        self, decoder: CompiledDecoder, feeds: dict[int, Feed], wanted: dict[int, Nodes]
    ) -> dict[int, Float[torch.Tensor, "n vocab"]]:
        tries, fed = [self.lanes[row].trie for row in feeds], list(feeds.values())
        extent = -(-max(trie.extent for trie in tries) // BLOCK) * BLOCK
        self.store.reserve(len(self.lanes), extent)
        starts = list(accumulate((len(feed) for feed in fed), initial=0))
        sessions = np.array([*zip(feeds, starts, starts[1:], strict=False)], dtype=np.int64)
        rows = Rows(
            _joined([feed.tokens for feed in fed]),
            _joined([feed.positions for feed in fed]),
            _joined([feed.slots for feed in fed]),
            sessions,
            self.masks.flat(fed, tries, extent),
        )
        which = _joined([wanted[row] + start for row, start in zip(feeds, starts, strict=False)])
        with lap("model"):
            logits = decoder.forward(rows, self.store, which)
        ends = [*accumulate(len(wanted[row]) for row in feeds)]
        return {row: logits[end - len(wanted[row]) : end] for row, end in zip(feeds, ends, strict=True)}

    @torch.inference_mode()
    def _forward_padded(
        self, by_row: dict[int, Feed], wanted: dict[int, Nodes]
    ) -> dict[int, Float[torch.Tensor, "n vocab"]]:
        """Over these lanes, and those between them where these are few: lanes side by side are read in place."""
        rows: Sequence[int] = range(min(by_row), max(by_row) + 1)
        if sparse := len(rows) > 2 * len(by_row):
            rows = sorted(by_row)
        feeds, tries = [by_row.get(row, _NOTHING) for row in rows], [self.lanes[row].trie for row in rows]
        width = max(len(feed) for feed in feeds)
        extent = -(-max(trie.extent for trie in tries) // BLOCK) * BLOCK
        self.store.reserve(len(self.lanes), extent)
        inputs = np.zeros((3, len(feeds), width), dtype=np.int64)
        inputs[2] = WASTE
        for one, feed in enumerate(feeds):
            if len(feed):
                inputs[:, one, -len(feed) :] = feed.tokens, feed.positions, feed.slots
        slots = torch.from_numpy(inputs[2]).to(self.device)
        which = torch.tensor(rows, device=self.device) if sparse else slice(rows[0], rows[-1] + 1)
        self.store.place = Place(which, slots, extent)
        masks = self.masks.build(feeds, tries, width, extent, self.device, additive=self.lean is not None)
        last = max(len(feed) - int(wanted[row].min(initial=len(feed) - 1)) for row, feed in by_row.items())
        with lap("model"):
            logits = self._logits(inputs, masks, last)
        return {row: picked(logits[rows.index(row)], wanted[row] + last - len(feed)) for row, feed in by_row.items()}

    def _logits(self, inputs: np.ndarray, masks: Any, wanted: int) -> Float[torch.Tensor, "batch wanted vocab"]:
        ids, places, _ = torch.from_numpy(inputs).to(self.device)
        if self.lean is not None:
            real = torch.from_numpy(np.flatnonzero(inputs[2])) if (inputs[2] == WASTE).any() else None
            return self.lean.forward(ids, places, masks, self.store, wanted, real)
        output = self.model(
            input_ids=ids,
            attention_mask=masks,
            position_ids=places,
            past_key_values=self.store,
            use_cache=True,
            **({"logits_to_keep": wanted} if self._keeps_rows else {}),
        )
        return output.logits[:, -wanted:]


def _joined(parts: list[Int64[np.ndarray, " _"]]) -> Int64[np.ndarray, " n"]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


_NOTHING = Feed(
    np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=bool)
)


def _engine(model: "PreTrainedModel", wanted: str) -> tuple[str, CompiledDecoder | None, LeanDecoder | None]:
    """What runs the model's layers, by name; both None: the model itself."""
    small = model.num_parameters() <= LARGEST
    if wanted in ("compiled", "int8") or (wanted == "auto" and small):
        compiled = compiled_decoder(model, int8=wanted == "int8")
        if compiled is not None:
            return "compiled" if wanted == "auto" else wanted, compiled, None
    if wanted == "lean" or (wanted == "auto" and small):
        decoder = lean(model)
        if decoder is not None:
            return "lean", None, decoder
    if wanted not in ("auto", "plain"):
        raise NotSupported(
            f"{_NAMES[wanted]} is for Llama, Mistral and Qwen2 models in float32 on a CPU; this is "
            f"{type(model).__name__} in {model.dtype} on {model.device}"
        )
    return "plain", None, None


_NUMBA = ", which needs numba (pip install 'specbeam[fast]'),"
_NAMES = {"int8": f"quantize='int8'{_NUMBA}", "lean": "the lean forward", "compiled": f"the compiled forward{_NUMBA}"}


def _max_positions(config: object) -> int | None:
    for name in ("max_position_embeddings", "n_positions"):
        if (most := getattr(config, name, None)) is not None:
            return int(most)
    return None


def check_decoder_only(model: "PreTrainedModel") -> None:
    """Refuse models that no mask and no position can make score a forest."""
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; specbeam decodes causal language models")
    text = config.get_text_config()
    if getattr(text, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise UnsupportedModel(
            f"{name} uses ALiBi: it derives positions from cache slots and cannot score a token tree; "
            "choose a model with rotary or learned positions"
        )
    kinds = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    recurrent = getattr(model, "_is_stateful", False) or kinds
    if recurrent:
        raise UnsupportedModel(
            f"{name} keeps a recurrent or compressed state ({', '.join(sorted(kinds)) or 'stateful'}) that cannot be "
            "rolled back to a branch of a token tree; choose a model whose layers are all attention"
        )
