"""`catalogue`: a list of items to which answers are confined, from memory or from a file."""

import csv
import hashlib
import json
import mmap
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Integer

from specbeam.core.items import ALL, ItemConstraint, Items, ItemTrie, states_after, trie_of
from specbeam.core.whole_files import whole as whole_file
from specbeam.errors import BadSetting, MissingFile, NotSupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = b"specbeam catalogue 1\n"  # the first line of a saved catalogue
KEPT = 8  # tries cached per catalogue, for other tokenizers and end tokens
_ROWS = 2**16  # items looked at together, so that temporary arrays stay small
_FORMATS = ".json, .txt, .csv, .tsv, .npz or .catalogue"


class Catalogue:
    """Items with names, as texts or as lists of token ids. Made by `catalogue`.

    Texts become tokens when the catalogue is first used with a tokenizer.
    """

    def __init__(
        self,
        names: Sequence[Any] | None,
        tokens: Integer[np.ndarray, "items longest"] | None,
        texts: Sequence[str] | None = None,
        chosen: Bool[np.ndarray, " items"] | None = None,
        whole: "Catalogue | None" = None,
    ) -> None:
        self._names = names
        self._tokens = tokens
        self._texts = texts
        self._chosen = chosen
        self._whole = self if whole is None else whole
        self._places: dict[Any, int] | None = None
        self._tries: OrderedDict[Any, tuple[ItemTrie, Any]] = OrderedDict()
        self._token_lists: OrderedDict[int | None, _TokenLists] = OrderedDict()  # by tokenizer

    @property
    def size(self) -> int:
        """The number of items of the whole catalogue, whatever subset this is."""
        if self._tokens is not None:
            return len(self._tokens)
        return len(self._texts or ())

    def __len__(self) -> int:
        return self.size if self._chosen is None else int(self._chosen.sum())

    def __repr__(self) -> str:
        among = "" if self._chosen is None else f" of {self.size:,}"
        return f"<Catalogue of {len(self):,}{among} items, {self.digest}>"

    @cached_property
    def digest(self) -> str:
        """A hash of the items, their names and the subset; jobs are resumed only with the same."""
        parts = [json.dumps([None if self._names is None else list(self._names), self._texts], default=str).encode()]
        parts += [np.ascontiguousarray(part).tobytes() for part in (self._tokens, self._chosen) if part is not None]
        return hashlib.sha256(b"".join(parts)).hexdigest()[:12]

    def name(self, item: int) -> Any:
        """Return the name of an item: the one given, its text, or its index."""
        if self._names is not None:
            return self._names[item]
        return item if self._texts is None else self._texts[item]

    def only(self, items: Iterable[Any] | Bool[np.ndarray, " items"] | bytes) -> "Catalogue":
        """Return the catalogue with only some of its items; it shares the trie.

        Args:
            items: names of items; or a bitmap: bool[items], or bytes with a bit per item, item 0 in the lowest bit.

        Raises `BadSetting` for an unknown name, or a bitmap of another size.
        """
        if isinstance(items, bytes):
            items = np.unpackbits(np.frombuffer(items, dtype=np.uint8), bitorder="little").view(bool)
            items = items[: self.size] if 0 <= len(items) - self.size < 8 else items
        chosen = np.zeros(self.size, dtype=bool)
        if isinstance(items, np.ndarray) and items.dtype == bool:
            if items.shape != (self.size,):
                raise BadSetting(f"the bitmap has {items.size} bits, and the catalogue has {self.size} items")
            chosen[:] = items
        else:
            for one in items:
                chosen[self._place(one)] = True
        if self._chosen is not None:
            chosen &= self._chosen
        return Catalogue(self._names, self._tokens, self._texts, chosen, self._whole)

    def _place(self, name: Any) -> int:
        """Return the index of the item with a name. Raises `BadSetting` if there is none."""
        whole = self._whole
        if whole._names is None and whole._texts is None:
            if isinstance(name, int | np.integer) and 0 <= name < self.size:
                return int(name)
            raise BadSetting(f"the catalogue has no item {name!r}; its items are the numbers 0 to {self.size - 1}")
        if whole._places is None:
            whole._places = {whole.name(item): item for item in range(whole.size)}
        if name not in whole._places:
            raise BadSetting(f"the catalogue has no item {name!r}")
        return whole._places[name]

    def longest(self, tokenizer: "PreTrainedTokenizerBase | None", eos: tuple[int, ...]) -> int:
        """Return the number of tokens of the longest item, without end tokens."""
        trie, _ = self._whole._trie(tokenizer, eos)
        return _depth(trie)

    def constraint(
        self, tokenizer: "PreTrainedTokenizerBase | None", vocab: int, eos: tuple[int, ...], limit: int | None = None
    ) -> ItemConstraint:
        """Return the constraint to these items.

        Args:
            tokenizer: of the model, for items given as texts.
            vocab: number of tokens of the model.
            eos: the end tokens; they come after an item.
            limit: maximum number of new tokens that the caller asked for; None: none.

        Raises:
            BadSetting: an item has tokens outside of the vocabulary, no item is left, two items have equal tokens, or
                nothing can end items of different lengths.
            NotSupported: the items are texts, and there is no tokenizer.
        """
        trie, order = self._whole._trie(tokenizer, eos)
        most = int(trie.tokens.max(initial=-1))
        if most >= vocab:
            raise BadSetting(f"an item of the catalogue has token {most}; the model's vocabulary is 0 to {vocab - 1}")
        if len(self) == 0:
            raise BadSetting("no item of the catalogue is left; choose at least one")
        if not eos and not _are_of_one_length(trie):
            raise BadSetting("the items have different lengths, and there is no end token; set eos_token_id")
        if not eos and limit is not None and limit != _depth(trie):
            raise BadSetting(
                f"max_new_tokens is {limit}, and without an end token texts end there; the items have {_depth(trie)} tokens"
            )
        if limit is not None and eos and limit <= _depth(trie):
            least = _depth(trie) + 1
            raise BadSetting(f"max_new_tokens is {limit}; the longest item and its end token take {least}: raise it")
        subset = None if self._chosen is None else self._chosen[order]
        return ItemConstraint(trie, subset, vocab)

    def item_of(self, tokenizer: "PreTrainedTokenizerBase | None", tokens: Sequence[int], eos: tuple[int, ...]) -> Any:
        """Return the name of the item with these tokens and an end token, if there is one; None for other texts."""
        if eos and (len(tokens) == 0 or tokens[-1] not in eos):
            return None
        trie, _ = self._whole._trie(tokenizer, eos)
        path = np.array([list(tokens[:-1] if eos else tokens)], dtype=np.int64).reshape(1, -1)
        state = int(states_after(Items(trie, ALL), path)[0])
        item = int(trie.items[state]) if state >= 0 else -1
        return None if item < 0 else self.name(item)

    def _trie(
        self, tokenizer: "PreTrainedTokenizerBase | None", eos: tuple[int, ...]
    ) -> tuple[ItemTrie, Integer[np.ndarray, " items"]]:
        """Return the trie of all items, and the order of their tokens."""
        key = (None if self._tokens is not None else id(tokenizer), self.tokens_among(tokenizer, eos))
        if key not in self._tries:
            lists = self._lists(tokenizer)
            self._tries[key] = trie_of(_without_ends(lists.tokens, key[1]))
            while len(self._tries) > KEPT:
                self._tries.popitem(last=False)
        self._tries.move_to_end(key)
        return self._tries[key]

    def tokens_among(self, tokenizer: "PreTrainedTokenizerBase | None", tokens: Sequence[int]) -> tuple[int, ...]:
        """Return those of the given tokens that items of the whole catalogue contain, ascending."""
        if not tokens:
            return ()
        known = self._whole._lists(tokenizer).known
        return tuple(sorted(token for token in {*tokens} if token in known))

    def _lists(self, tokenizer: "PreTrainedTokenizerBase | None") -> "_TokenLists":
        """Return the tokens of all items."""
        own = None if self._tokens is not None else id(tokenizer)
        if own not in self._token_lists:
            tokens = _tokenized(self._texts or (), tokenizer) if self._tokens is None else self._tokens
            self._token_lists[own] = _TokenLists(tokenizer, tokens, _known(tokens))
            while len(self._token_lists) > KEPT:
                forgotten, _ = self._token_lists.popitem(last=False)
                for key in [key for key in self._tries if key[0] == forgotten]:
                    del self._tries[key]
        self._token_lists.move_to_end(own)
        return self._token_lists[own]

    def save(self, path: "str | Path") -> None:
        """Write the trie and the names to a file, which `catalogue` maps into memory. The items must be token ids.

        Raises `NotSupported` for texts, whose tokens depend on the model, and for subsets.
        """
        if self._tokens is None or self._chosen is not None:
            what = "texts, whose tokens depend on the model" if self._tokens is None else "a subset"
            raise NotSupported(f"a catalogue of {what} cannot be saved; save the whole catalogue as token ids")
        trie, order = self._trie(None, ())
        names = json.dumps(None if self._names is None else list(self._names)).encode()
        with whole_file(Path(path)) as part, part.open("wb") as file:
            file.write(MARK)
            for array in (self._tokens, order, *trie, np.frombuffer(names, dtype=np.uint8)):
                file.write(b"\0" * (-file.tell() % 64))
                np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


class _TokenLists(NamedTuple):
    """The tokens of all items.

    Attributes:
        tokenizer: of the texts. It is kept, so that no other one gets its address.
        tokens: int32[items, longest], with -1 after the last token.
        known: the tokens in any item.
    """

    tokenizer: Any
    tokens: Integer[np.ndarray, "items longest"]
    known: frozenset[int]


def catalogue(items: Any) -> Catalogue:
    """Return a catalogue: items to which the answers of ``generate(..., catalogue=...)`` are confined.

    Args:
        items: one of
            - a mapping of names to token lists or to texts;
            - a list, array or table column of token lists or texts; their names are their indices, or the texts;
            - a file: .json (a mapping or a list), .txt (a text per line), .csv or .tsv (names, then texts; or texts alone),
              .npz (`tokens`: int[items, longest] with -1 after the last token; optionally `names`), or .catalogue, as
              `Catalogue.save` wrote it.

    Raises:
        BadSetting: the items have another form, or two of them are equal.
        MissingFile: there is no such file.
    """
    if isinstance(items, Catalogue):
        return items
    if isinstance(items, str | Path):
        return _read(Path(items))
    if isinstance(items, Mapping):
        return _of_values(list(items), list(items.values()))
    if hasattr(items, "to_list"):  # a column of pandas or polars
        items = items.to_list()
    if isinstance(items, np.ndarray) and items.ndim == 2 and items.dtype.kind in "iu":
        return Catalogue(None, _as_tokens(items))
    if not isinstance(items, Iterable) or isinstance(items, bytes):
        raise BadSetting(f"a catalogue is made of a mapping, a list or a file, and not of {type(items).__name__}")
    return _of_values(None, list(items))


def _of_values(names: list[Any] | None, values: list[Any]) -> Catalogue:
    """Return the catalogue of token lists or texts."""
    if not values:
        raise BadSetting("the catalogue has no items")
    if all(isinstance(one, str) for one in values):
        for number, text in enumerate(values):
            if not text.strip():
                raise BadSetting(f"item {number} of the catalogue is an empty text; leave it out")
        return Catalogue(names, None, values)
    lists = [one.tolist() if hasattr(one, "tolist") else one for one in values]
    for number, one in enumerate(lists):
        is_list = isinstance(one, list | tuple) and len(one) > 0
        if not is_list or not all(isinstance(token, int) and not isinstance(token, bool) for token in one):
            name = number if names is None else names[number]
            raise BadSetting(
                f"item {name!r} of the catalogue is {str(one)[:60]!r}; all items must be texts, or all non-empty lists of "
                "token ids"
            )
        if min(one) < 0:
            raise BadSetting(f"item {number} of the catalogue has token {min(one)}; token ids are at least 0")
    return Catalogue(names, _padded(lists))


def _padded(lists: list[list[int]]) -> Integer[np.ndarray, "items longest"]:
    """Return lists of token ids as rows, with -1 after the last token."""
    lengths = np.array([len(one) for one in lists])
    tokens = np.full((len(lists), int(lengths.max())), -1, dtype=np.int32)
    tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = np.concatenate([np.asarray(one) for one in lists])
    return tokens


def _as_tokens(tokens: np.ndarray) -> Integer[np.ndarray, "items longest"]:
    """Return token ids, -1 after the last one of each item. Raises `BadSetting` if a token comes after a -1."""
    found = tokens.astype(np.int32)
    found[found < 0] = -1
    if ((found[:, 1:] >= 0) & (found[:, :-1] < 0)).any():
        raise BadSetting("an item of the catalogue has a token after a -1, which marks its end")
    return found


def _tokenized(
    texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase | None"
) -> Integer[np.ndarray, "items longest"]:
    """Return the tokens of texts. Raises `NotSupported` without a tokenizer."""
    if tokenizer is None:
        raise NotSupported("the items of the catalogue are texts, and there is no tokenizer; give load(tokenizer=...)")
    ids = tokenizer(text_target=list(texts), add_special_tokens=False)["input_ids"]
    return _padded([list(map(int, one)) for one in ids])


def _without_ends(tokens: Integer[np.ndarray, "items longest"], eos: tuple[int, ...]) -> Integer[np.ndarray, "items n"]:
    """Return the tokens without end tokens at the end of items."""
    if not eos or not np.isin(tokens, eos).any():
        return tokens
    found = tokens.copy()
    lengths = (found >= 0).sum(1)
    last = found[np.arange(len(found)), lengths - 1]
    ends = np.isin(last, eos)
    found[np.flatnonzero(ends), lengths[ends] - 1] = -1
    if np.isin(found, eos).any():
        number = int(np.isin(found, eos).any(1).argmax())
        raise BadSetting(f"item {number} of the catalogue has an end token before its last token; leave it out")
    return found


def _known(tokens: Integer[np.ndarray, "items longest"]) -> frozenset[int]:
    """Return the tokens in any item."""
    is_known = np.zeros(int(tokens.max(initial=-1)) + 2, dtype=bool)
    for start in range(0, len(tokens), _ROWS):
        is_known[tokens[start : start + _ROWS]] = True  # -1 marks the last entry
    return frozenset(np.flatnonzero(is_known[:-1]).tolist())


def _depth(trie: ItemTrie) -> int:
    """Return the number of tokens of the longest item."""
    depth = 0
    start = 0
    stop = 1
    while trie.first[stop] > trie.first[start]:
        below = int(trie.first[start]) + 1
        stop = int(trie.first[stop]) + 1
        start = below
        depth += 1
    return depth


def _are_of_one_length(trie: ItemTrie) -> bool:
    """Return whether items are complete only at the last level."""
    is_inner = np.diff(trie.first) > 0
    return bool((trie.items[is_inner] < 0).all()) and _leaves_are_level(trie)


def _leaves_are_level(trie: ItemTrie) -> bool:
    """Return whether all states without tokens below them are at the same level."""
    start = 0
    stop = 1
    while trie.first[stop] > trie.first[start]:
        if (np.diff(trie.first[start : stop + 1]) == 0).any():
            return False
        below = int(trie.first[start]) + 1
        stop = int(trie.first[stop]) + 1
        start = below
    return True


def _read(path: Path) -> Catalogue:
    """Return the catalogue in a file."""
    if not path.is_file():
        raise MissingFile(f"there is no catalogue {path}; give a file ({_FORMATS}), a mapping or a list")
    if path.suffix == ".catalogue":
        return _mapped(path)
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            if "tokens" not in arrays:
                raise BadSetting(f"{path} has the arrays {', '.join(arrays)}; a catalogue has an array `tokens`")
            names = [str(name) for name in arrays["names"]] if "names" in arrays else None
            return Catalogue(names, _as_tokens(arrays["tokens"]))
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return catalogue(json.loads(text))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadSetting(f"{path} is not a catalogue: {error}") from error
    if path.suffix in (".csv", ".tsv"):
        rows = [row for row in csv.reader(text.splitlines(), delimiter="," if path.suffix == ".csv" else "\t") if row]
        if len({len(row) for row in rows}) > 1 or len(rows[0]) > 2:
            raise BadSetting(f"{path} must have one column of texts, or one of names and one of texts, in every row")
        names = [row[0] for row in rows] if len(rows[0]) == 2 else None
        return _of_values(names, [row[-1] for row in rows])
    if path.suffix == ".txt":
        return _of_values(None, [line for line in text.splitlines() if line.strip()])
    raise BadSetting(f"{path} must be a file of the kinds {_FORMATS}")


def _mapped(path: Path) -> Catalogue:
    """Return a saved catalogue, whose arrays stay in the file."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if memory[: len(MARK)] != MARK:
        raise BadSetting(f"{path} was not written by Catalogue.save of this version")
    arrays = []
    memory.seek(len(MARK))
    for _ in range(9):
        memory.seek(memory.tell() + -memory.tell() % 64)
        np.lib.format.read_magic(memory)
        shape, _, dtype = np.lib.format.read_array_header_1_0(memory)
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(memory, dtype=dtype, count=count, offset=memory.tell()).reshape(shape))
        memory.seek(memory.tell() + count * dtype.itemsize)
    tokens, order, *trie, names = arrays
    found = Catalogue(json.loads(names.tobytes()), tokens)
    found._tries[None, ()] = (ItemTrie(*trie), order)
    return found
