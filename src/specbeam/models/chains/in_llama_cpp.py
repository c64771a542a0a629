"""Targets "llama.cpp:FILE": llama.cpp in this process scores chains; a forest is a set of sequence ids of its cache."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from specbeam.core.errors import BadCheckpoint, MissingFile, MissingPackage, ServerGone, ServerRefused
from specbeam.models.chains.chains import Chain, Likeliest
from specbeam.models.checkpoints.boundary import beginning

TOGETHER = 32  # chains of a pass; as many sequences of the cache hold the chains of the pass before
BATCH = 2048  # tokens of a call of llama.cpp
CONTEXT = 8192  # tokens of the cache, shared by all sequences
_LOGS: list[Any] = []  # the callback that llama.cpp writes its log to; it must outlive every scorer


class HeldText(NamedTuple):
    """A text in the cache, which only chains of its namespace may share."""

    tokens: list[int]
    namespace: str


@dataclass(frozen=True)
class Entry:
    """A token of a pass, which belongs to one or more chains.

    Attributes:
        token: its id.
        position: in the text.
        chains: numbers of the chains that contain it, of one beginning.
    """

    token: int
    position: int
    chains: tuple[int, ...]


def entries_of(chains: Sequence[Chain], known: Sequence[int]) -> list[Entry]:
    """Return the tokens of a pass: those of each chain from position `known` on, each beginning that chains share once.

    Chains of different namespaces share nothing.

    Args:
        known: number of first tokens of each chain that are in the cache already.
    """
    nodes: dict[
        tuple[int, int, int], int
    ] = {}  # by position, token and the node above: the number of a shared beginning
    members: list[list[int]] = []
    tokens: list[tuple[int, int]] = []  # token and position of each node
    roots: dict[tuple[str, tuple[int, ...]], int] = {}  # by namespace and tokens in the cache
    for number, chain in enumerate(chains):
        start = known[number]
        above = -1 - roots.setdefault((chain.namespace, tuple(chain.tokens[:start])), len(roots))
        for position in range(start, len(chain.tokens)):
            key = (position, chain.tokens[position], above)
            if key not in nodes:
                nodes[key] = len(members)
                members.append([])
                tokens.append((chain.tokens[position], position))
            above = nodes[key]
            members[above].append(number)
    found = [Entry(token, position, tuple(of)) for (token, position), of in zip(tokens, members, strict=True)]
    return sorted(found, key=lambda entry: entry.position)


def evened(chains: Sequence[Chain], known: Sequence[int]) -> list[int]:
    """Return numbers of known tokens, lowered so that chains which share a token of the pass begin at the same one.

    llama.cpp refuses a token of several sequences whose caches have different lengths.
    """
    found = [*known]
    pairs = [
        (one, other, common_beginning(chains[one].tokens, chains[other].tokens))
        for one in range(len(chains))
        for other in range(one)
        if chains[one].namespace == chains[other].namespace
    ]
    is_even = False
    while not is_even:
        is_even = True
        for one, other, common in pairs:
            least = min(found[one], found[other])
            if common > max(found[one], found[other]) > least:
                found[one] = least
                found[other] = least
                is_even = False
    return found


class LlamaCppScorer:
    """Scores chains with llama.cpp's low-level API, by llama-cpp-python.

    A pass computes the tokens that the cache does not hold, each once for all chains that share its text: a token has the
    sequence ids of all of them. The logits of wanted tokens are ranked where llama.cpp has left them.

    Args:
        path: a GGUF file.

    Raises:
        MissingPackage: llama-cpp-python is not installed.
        BadCheckpoint: llama.cpp cannot read the file.
    """

    engine = "llama.cpp"
    more_listed = "its lists are of any length"

    def __init__(self, path: Path) -> None:
        try:
            import llama_cpp
        except ImportError as error:
            raise MissingPackage(
                f"llama-cpp-python is not installed: pip install 'specbeam[llamacpp]'; the error is {beginning(error)}"
            ) from error
        self.api: Any = llama_cpp
        self.name = f"llama.cpp ({path.name})"
        self._silence()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise BadCheckpoint(f"llama.cpp could not load {path}; give a GGUF file of a model that it knows")
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab = int(llama_cpp.llama_vocab_n_tokens(vocab))
        self.most_listed = self.vocab
        trained = int(llama_cpp.llama_model_n_ctx_train(self.model))
        self.max_positions: int | None = min(trained, CONTEXT)
        # All tokens that end a generation: besides the end of a text, the end of a turn and others that the file names.
        self.eos = tuple(token for token in range(self.vocab) if llama_cpp.llama_vocab_is_eog(vocab, token))
        self.context = llama_cpp.llama_init_from_model(self.model, self._settings())
        if not self.context:
            raise BadCheckpoint(f"llama.cpp could not make a context for {path}: there may be too little memory")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 2 * TOGETHER)
        self.held: dict[int, HeldText] = {}  # by sequence id, the texts in the cache
        self._is_closed = False

    def _settings(self) -> Any:
        """Return the parameters of a context with one cache for all sequences, in float32."""
        found = self.api.llama_context_default_params()
        found.n_ctx = CONTEXT
        found.n_batch = BATCH
        found.n_seq_max = 2 * TOGETHER
        found.n_threads = len(os.sched_getaffinity(0))
        found.n_threads_batch = found.n_threads
        found.kv_unified = True
        found.type_k = self.api.GGML_TYPE_F32
        found.type_v = self.api.GGML_TYPE_F32
        found.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return found

    def _silence(self) -> None:
        """Keep llama.cpp from writing to the terminal."""
        if not _LOGS:
            _LOGS.append(self.api.llama_log_callback(lambda level, text, data: None))
        self.api.llama_log_set(_LOGS[0], ctypes.c_void_p(0))

    def score(self, chains: Sequence[Chain]) -> list[Likeliest]:
        """See `Scorer.score`; up to `TOGETHER` chains are one pass."""
        if self._is_closed:  # llama.cpp would read memory that is freed
            raise ServerGone(f"{self.name} was freed with its pair; load it again")
        found = []
        for start in range(0, len(chains), TOGETHER):
            found += self._scored(chains[start : start + TOGETHER])
        return found

    def _scored(self, chains: Sequence[Chain]) -> list[Likeliest]:
        ids = self._free_ids(len(chains))
        sources = [self._longest_known(chain) for chain in chains]
        known = evened(chains, [length for _, length in sources])
        for own, (source, _), length in zip(ids, sources, known, strict=True):
            if length > 0:
                self.api.llama_memory_seq_cp(self.memory, source, own, 0, length)
        for own in self.held:
            self.api.llama_memory_seq_rm(self.memory, own, -1, -1)
        self.held = {own: HeldText(chain.tokens, chain.namespace) for own, chain in zip(ids, chains, strict=True)}
        rows: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in chains]
        entries = entries_of(chains, known)
        for start in range(0, len(entries), BATCH):
            part = entries[start : start + BATCH]
            self._fill(part, chains, ids)
            self._decode()
            for place, entry in enumerate(part):
                wanting = [number for number in entry.chains if entry.position >= chains[number].first]
                if wanting:
                    logits = self._row(place)
                    for number in wanting:
                        rows[number].append(best_of(logits, chains[number].listed))
        return [Likeliest(*(np.stack(column) for column in zip(*own, strict=True))) for own in rows]

    def _free_ids(self, count: int) -> list[int]:
        """Return sequence ids that hold no text."""
        return [own for own in range(2 * TOGETHER) if own not in self.held][:count]

    def _longest_known(self, chain: Chain) -> tuple[int, int]:
        """Return the sequence with the longest beginning of a chain, and its length, at most up to the first wanted row."""
        best = 0
        source = -1
        for other, text in self.held.items():
            if text.namespace != chain.namespace:  # response times must not show texts of other clients
                continue
            length = min(common_beginning(text.tokens, chain.tokens), chain.first)
            if length > best:
                best = length
                source = other
        return source, best

    def _fill(self, entries: Sequence[Entry], chains: Sequence[Chain], ids: Sequence[int]) -> None:
        """Write the tokens of a pass into llama.cpp's batch."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for place, entry in enumerate(entries):
            batch.token[place] = entry.token
            batch.pos[place] = entry.position
            batch.n_seq_id[place] = len(entry.chains)
            for number, chain in enumerate(entry.chains):
                batch.seq_id[place][number] = ids[chain]
            batch.logits[place] = any(entry.position >= chains[number].first for number in entry.chains)

    def _decode(self) -> None:
        """Run the batch. Raises `ServerRefused` if llama.cpp refuses it."""
        status = int(self.api.llama_decode(self.context, self.batch))
        if status == 0:
            return
        self.api.llama_memory_clear(self.memory, True)
        self.held = {}
        why = "its cache is full; decode fewer or shorter texts together" if status == 1 else f"status {status}"
        raise ServerRefused(f"{self.name} could not score {self.batch.n_tokens} tokens: {why}")

    def _row(self, place: int) -> Float32[np.ndarray, " vocab"]:
        """Return a view of the logits of a token of the batch."""
        address = self.api.llama_get_logits_ith(self.context, place)
        return np.ctypeslib.as_array(address, shape=(self.vocab,))

    def close(self) -> None:
        """Free the model and its cache."""
        if self._is_closed:
            return
        self._is_closed = True
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


def best_of(logits: Float32[np.ndarray, " vocab"], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of the `count` likeliest tokens in order, and their log-probabilities; equal ones by id."""
    top = float(logits.max())
    norm = top + float(np.log(np.exp(logits - np.float32(top), dtype=np.float64).sum()))
    among = np.arange(len(logits))
    if count < len(logits):
        edge = np.partition(logits, len(logits) - count)[len(logits) - count]
        among = np.flatnonzero(logits >= edge)
    order = among[np.lexsort((among, -logits[among]))][:count]
    return order, logits[order].astype(np.float64) - norm


def common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of first tokens that two texts have in common."""
    equal = 0  # so many tokens are known to be equal
    most = min(len(one), len(other))
    while equal < most:  # slices are compared at once
        middle = (equal + most + 1) // 2
        if one[equal:middle] == other[equal:middle]:
            equal = middle
        else:
            most = middle - 1
    return equal


def opened_file(name: str) -> LlamaCppScorer:
    """Return the scorer of a GGUF file. Raises `MissingFile` if there is none."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise MissingFile(f"{name!r} is no file; give llama.cpp:FILE, with a GGUF file")
    return LlamaCppScorer(path)
