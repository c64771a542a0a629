"""Worlds: pairs of tiny random models, with their methods and prompts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from specbeam import Pair, hmt, load
from specbeam.doors import HEAD_KINDS
from specbeam.errors import one_of
from specbeam.lab.fuzz.tiny import FRAMES, MELS, VOCAB, byte_tokenizer, tiny_decoder, tiny_reader
from specbeam.lab.train.heads import KINDS
from specbeam.lab.train.plan import planned
from specbeam.models.memory import MemoryPlan, new_recall

ALONE = ("greedy", "sampling", "beam_search", "beam_sampling", "mtjd")
BY_LOOKUP = ("prompt_lookup", "suffix_match", "token_recycling")
OF_BEAMS = ("dsbd", "speculative_beam_search")
OF_SEQUENCES = (
    "speculative_sampling", "block_verification", "specinfer", "rsd_c", "rsd_s", "sequoia", "spechub", "traversal",
    "multi_draft", "opt_tree", "dyspec", "gsd", "propd",
)  # fmt: skip
JOINT = ("mtad", "mjsd", "mmtad")
OF_MODELS = (*ALONE, *OF_BEAMS, "speculative_sampling", "specinfer", "rsd_s", "prompt_lookup")
# The recipes for each kind of head, in addition to recipes that take any draft.
HEAD_METHODS = {
    "eagle3": ("eagle", "dsbd"),
    "peagle": ("eagle", "speculative_sampling"),
    "dspark": ("speculative_sampling", "dsbd"),
    "eagle": ("eagle",),
    "fspad": ("fspad",),
    "medusa": ("medusa", "specinfer"),
    "chimera": ("chimera",),
    "specdiff": ("specdiff",),
    "eesd": ("eesd",),
    "bita": ("bita",),
    "hidden_transfer": ("hidden_transfer",),
}


@dataclass(frozen=True, eq=False)
class World:
    """A pair, and the calls to make with it.

    Attributes:
        methods: names of recipes, repeated in proportion to their frequency.
        vocab: number of tokens in prompts.
        longest: number of tokens of the longest prompt.
        reads: "tokens", or "features" of audio.
        texts: whether there is a tokenizer, which stop strings and streamed text need.
        forms: whether calls may have constraints (regex, JSON schema, grammar).
        is_plain: whether the target's logits equal its model object's, so that scores can be recomputed.
        same_alone: whether a text is bit-identical in a batch and alone, with drafts and without, as in the compiled
            forward.
    """

    pair: Pair
    methods: tuple[str, ...]
    vocab: int = VOCAB
    longest: int = 24
    reads: str = "tokens"
    texts: bool = False
    forms: bool = False
    is_plain: bool = True
    same_alone: bool = True

    def prompt(self, rng: np.random.Generator) -> Any:
        """Return a random prompt: token ids, or float32[channels, frames] of audio."""
        if self.reads == "features":
            return torch.from_numpy(rng.standard_normal((MELS, FRAMES), dtype=np.float32))
        length = int(rng.integers(1, self.longest + 1))
        if rng.random() < 0.2:  # fills the context
            length = self.longest
        if rng.random() < 0.2:  # a repetitive prompt
            few = rng.integers(0, self.vocab, 3)
            return few[np.arange(length) % 3].tolist()
        return rng.integers(0, self.vocab, length).tolist()


def _of_family(family: str, **changes: Any) -> World:
    target = tiny_decoder(family, 0, **changes)
    draft = tiny_decoder(family, 1, **changes)
    pair = load(target, draft)
    vocab = int(target.config.vocab_size)
    same_alone = pair.target.engine != "plain"
    return World(pair, OF_MODELS, vocab, same_alone=same_alone)


def _every_method() -> World:
    pair = load(tiny_decoder("llama", 0), tiny_decoder("llama", 1, num_hidden_layers=1))
    return World(pair, (*ALONE, *BY_LOOKUP, *OF_BEAMS, *OF_BEAMS, *OF_SEQUENCES, *JOINT))


def _alone() -> World:
    return World(load(tiny_decoder("llama", 0)), (*ALONE, *BY_LOOKUP))


def _with_words() -> World:
    tokenizer = byte_tokenizer()
    models = [tiny_decoder("llama", seed, vocab_size=len(tokenizer)) for seed in (0, 1)]
    pair = load(models[0], models[1], tokenizer=tokenizer)
    return World(pair, (*ALONE, *BY_LOOKUP, *OF_BEAMS, "specinfer", "rsd_s"), len(tokenizer), texts=True)


def _with_forms() -> World:
    tokenizer = byte_tokenizer()
    models = [tiny_decoder("llama", seed, vocab_size=len(tokenizer)) for seed in (0, 1)]
    pair = load(models[0], models[1], tokenizer=tokenizer)
    methods = ("greedy", "sampling", "beam_search", "beam_sampling", "dsbd", "speculative_beam_search", "specinfer")
    return World(pair, methods, len(tokenizer), texts=True, forms=True)


def _short_context() -> World:
    models = [tiny_decoder("llama", seed, max_position_embeddings=20) for seed in (0, 1)]
    return World(load(models[0], models[1]), OF_MODELS, longest=20)


def _padded(target: int, draft: int) -> World:
    """Return a world of two models with the same tokenizer, whose vocabularies are padded by these numbers of tokens."""
    tokenizer = byte_tokenizer()
    models = []
    with TemporaryDirectory() as folder:
        for seed, padding in enumerate((target, draft)):
            place = Path(folder, str(seed))
            tiny_decoder("llama", seed, vocab_size=len(tokenizer) + padding).save_pretrained(place)
            tokenizer.save_pretrained(place)
            models.append(str(place))
        pair = load(models[0], models[1])
    return World(pair, (*OF_BEAMS, *OF_BEAMS, *OF_SEQUENCES, *JOINT), len(tokenizer), texts=True)


def _same_model() -> World:
    model = tiny_decoder("llama", 0)
    return World(load(model, model), OF_MODELS)


def _rounded(bits: str, draft: str | None) -> World:
    target = tiny_decoder("llama", 0, hidden_size=64, intermediate_size=96)
    own = tiny_decoder("llama", 1) if draft is None else draft
    pair = load(target, own, quantize=bits if draft is None else None)  # type: ignore[arg-type]
    return World(pair, (*ALONE, *OF_BEAMS, "specinfer", "speculative_sampling"), is_plain=draft is not None)


def _rounded_kv() -> World:
    pair = load(tiny_decoder("llama", 0), tiny_decoder("llama", 1), kv="bfloat16")
    return World(pair, (*ALONE, *OF_BEAMS, "specinfer"), is_plain=False)


def _skipping() -> World:
    pair = load(tiny_decoder("llama", 0, num_hidden_layers=4), "swift")
    return World(pair, ("swift", "swift", "speculative_sampling", "dsbd", "greedy"))


def _remembering() -> World:
    models = [tiny_decoder("llama", seed) for seed in (0, 1)]
    plan = MemoryPlan(5, 2, 3, 0.5, "attention", "refresh")
    recall = new_recall(models[0].get_input_embeddings().weight, 8, 0)
    pair = hmt(load(models[0], models[1]), (plan, recall))
    return World(pair, (*ALONE, *OF_BEAMS, "speculative_sampling", "prompt_lookup"), is_plain=False, same_alone=False)


def _with_head(kind: str) -> World:
    target = tiny_decoder("llama", 0, num_hidden_layers=3)
    asked = {"exit_layer": 1} if kind == "eesd" else {"depth": 3}
    plan = planned(target, HEAD_KINDS[kind].usual, asked)
    torch.manual_seed(2)
    head = KINDS[kind].new(target, plan, None)
    with TemporaryDirectory() as folder:
        KINDS[kind].save(head, target, plan, Path(folder))
        pair = load(target, folder, probe=False)
    return World(pair, (*HEAD_METHODS[kind], *HEAD_METHODS[kind], "greedy", "sampling"))


def _reading(family: str, draft: str) -> World:
    target = tiny_reader(family, 0)
    own: Any = tiny_reader(family, 1) if draft == "reader" else None
    if draft == "decoder":
        own = tiny_decoder("llama", 1, bos_token_id=0, eos_token_id=2, pad_token_id=1)
    pair = load(target, own)
    methods: tuple[str, ...] = ("greedy", "sampling", "beam_search", "beam_sampling", "prompt_lookup")
    if own is not None:
        methods += ("dsbd", "speculative_beam_search", "specinfer")
    reads = "features" if family == "whisper" else "tokens"
    return World(pair, methods, reads=reads, is_plain=False, same_alone=False)


WORLDS: dict[str, Callable[[], World]] = {
    "every method": _every_method,
    "no draft": _alone,
    "words": _with_words,
    "forms": _with_forms,
    "short context": _short_context,
    "the target drafts": _same_model,
    "padded draft": lambda: _padded(0, 7),
    "padded target": lambda: _padded(7, 0),
    "two tokens": lambda: _of_family("llama", vocab_size=2),
    "200,000 tokens": lambda: _of_family("llama", vocab_size=200_000, hidden_size=16, num_hidden_layers=1),
    **{family: lambda family=family: _of_family(family) for family in ("qwen3", "gemma2", "gpt2", "mistral")},  # type: ignore[misc]
    **{family: lambda family=family: _of_family(family) for family in ("opt", "bloom", "mixtral", "falcon", "phi")},  # type: ignore[misc]
    "int8": lambda: _rounded("int8", None),
    "int4": lambda: _rounded("int4", None),
    "int8 drafts": lambda: _rounded("int8", "int8"),
    "int4 drafts": lambda: _rounded("int4", "int4"),
    "bfloat16 keys": _rounded_kv,
    "swift": _skipping,
    "memory": _remembering,
    **{f"{kind} head": lambda kind=kind: _with_head(kind) for kind in KINDS},  # type: ignore[misc]
    "bart": lambda: _reading("bart", "reader"),
    "marian": lambda: _reading("marian", "decoder"),
    "t5": lambda: _reading("t5", "reader"),
    "whisper": lambda: _reading("whisper", "none"),
}


def world(name: str) -> World:
    """Return a new world of this name. Raises `BadSetting` for an unknown name."""
    one_of("world", name, WORLDS)
    return WORLDS[name]()
