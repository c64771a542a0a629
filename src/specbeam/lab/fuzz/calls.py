"""Random calls: a recipe with settings, options and prompts, and the entry point that is called."""

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch

import specbeam
from specbeam.lab.fuzz.worlds import World
from specbeam.recipes import HEAD_RECIPES, RECIPES

DOORS = (
    "generate",
    "again",
    "one by one",
    "stream",
    "cancelled stream",
    "streamer",
    "turns",
    "cancelled turns",
    "audit",
)
_ODDS_OF_DOORS = (0.4, 0.1, 0.1, 0.08, 0.08, 0.08, 0.04, 0.04, 0.08)
_MANY = 1000  # replaced by one more than the number of tokens

# The values that a setting of a recipe is drawn from; settings that are not here keep their defaults.
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "beams": (1, 2, 3, 4, 7, _MANY),
    "draft_beams": (None, None, 1, 5, 9),
    "depth": (1, 2, 3, 5),
    "min_beams": (None, None, 1, 2),
    "mass": (None, None, None, 0.9),
    "threshold": (None, 0.0, 0.5, 0.7, 1.0),
    "coupling": ("noise", "noise", "rejection"),
    "replacement": (False, False, True),
    "collapse": (False, False, False, True),
    "semantics": ("paper", "paper", "hf"),
    "counts": ((1,), (2, 1), (3, 2, 1), (1, 1, 1, 1), (4, 4)),
    "nodes": (1, 3, 8, 17, 40),
    "top": (1, 2, 5, _MANY),
    "children": (1, 2, 3),
    "controller": ("fixed", "fixed", "auto", "confidence", "thompson", "cost", "calibrated", "survival"),
    "rule": ("path", "match", "traversal"),
    "chains": (1, 2, 3),
    "mode": ("argmax", "sample"),
    "bonus": ("sample", "none"),
    "longest": (1, 2, 3),
    "k": (1, 4, 8),
    "steps": (1, 2),
    "siblings": (True, False),
}
_OF_RECIPE: dict[tuple[str, str], tuple[Any, ...]] = {
    ("dsbd", "width"): ("fixed", "dynamic"),
    ("beam_sampling", "width"): ("fixed", "dynamic"),
    ("rsd_s", "width"): (1, 2, 4),
    ("mtad", "threshold"): (0.1, 0.5, 0.9),
    ("mjsd", "threshold"): (0.1, 0.5),
    ("mmtad", "threshold"): (0.1, 0.5),
    ("traversal", "children"): ("distinct", "drawn"),
    ("mtjd", "depth"): (1, 2),
    ("mtjd", "top"): (None, 2, 5),
}
# Recipes whose drafter, rule and controller are parts, not words: random calls keep their own.
_TAKE_PARTS = ("beam_search", "speculative_beam_search", "beam_sampling", "dsbd")
_OF_RECIPE |= {(recipe, part): (None,) for recipe in _TAKE_PARTS for part in ("rule", "controller")}
# The values of options that cut off unlikely tokens, besides top_k, whose values depend on the vocabulary.
_CUTS: dict[str, tuple[float, ...]] = {"top_p": (0.1, 0.5, 0.95, 1.0), "min_p": (0.02, 0.3, 1.0)}
_ODDS_OF_SETTING = 0.4
_ODDS_OF_OPTION = 0.12


@dataclass(frozen=True)
class RandomCall:
    """A random call.

    Attributes:
        method, settings: the recipe and its settings.
        prompts: token ids, or features of audio.
        options: keyword arguments of `generate`.
        door: the entry point, one of `DOORS`.
    """

    method: str
    settings: dict[str, Any]
    prompts: list[Any]
    options: dict[str, Any]
    door: str

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        prompts = [prompt if isinstance(prompt, list) else [*prompt.shape] for prompt in self.prompts]
        return f"{self.door}: {self.method}({settings}) on {prompts} with {self.options}"

    def make(self) -> "specbeam.Method":
        """Return the method. Raises the errors of its recipe for contradictory settings."""
        recipe = {make.__name__: make for make in (*RECIPES, *HEAD_RECIPES)}[self.method]
        return recipe(**self.settings)


def random_call(world: World, name: str, seed: int, number: int) -> RandomCall:
    """Return call `number` of a world: the same for the same name and seed."""
    rng = np.random.default_rng([seed, crc32(name.encode()), number])
    method = _one_of(rng, world.methods)
    door = str(rng.choice(DOORS, p=_ODDS_OF_DOORS))
    if world.reads == "features" or not world.texts:
        door = door.replace("cancelled stream", "cancelled turns").replace("streamer", "generate")
        door = door.replace("stream", "turns")
    single = door in ("stream", "cancelled stream", "streamer", "turns", "cancelled turns")
    count = 1 if single else int(rng.choice([1, 1, 2, 3, 5]))
    prompts = [world.prompt(rng) for _ in range(count)]
    settings = _random_settings(rng, world, method)
    options = _random_options(rng, world, method, single, settings.get("beams", 4))
    return RandomCall(method, settings, prompts, options, door)


def _one_of(rng: np.random.Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _random_settings(rng: np.random.Generator, world: World, method: str) -> dict[str, Any]:
    """Return values for some of a recipe's settings."""
    recipe = {entry.name: entry for entry in specbeam.methods()}[method]
    settings = {}
    for name in recipe.defaults:
        values = _OF_RECIPE.get((method, name), _SETTINGS.get(name))
        if values is None or rng.random() > _ODDS_OF_SETTING:
            continue
        value = _one_of(rng, values)
        settings[name] = _more_than(world) if value == _MANY else value
    return settings


def _more_than(world: World) -> int:
    """Return a number of beams or candidates above the size of the vocabulary, if that is small."""
    return min(world.vocab + 3, 80)


def _random_options(rng: np.random.Generator, world: World, method: str, single: bool, beams: int) -> dict[str, Any]:
    """Return options of `generate`: some common ones often, and each of the others rarely."""
    vocab = world.vocab
    options: dict[str, Any] = {"max_new_tokens": int(rng.integers(1, 13)), "seed": int(rng.integers(1 << 30))}
    draws = method not in ("greedy", "beam_search", "speculative_beam_search", "mtjd")
    if rng.random() < 0.5 and draws:
        options["temperature"] = _one_of(rng, (0.0, 0.3, 1.0, 2.5))
    if not single and rng.random() < 0.2:
        options["batch_size"] = int(rng.integers(1, 4))
    if not single and rng.random() < 0.25:
        options["num_return_sequences"] = int(rng.integers(1, max(2, min(beams, 4) + 1)))
    ends: tuple[Any, ...] = (None, [], [1, 2], list(range(vocab // 2)), 1, 0)
    if rng.random() < 0.5:
        options["eos_token_id"] = _one_of(rng, ends)
    rare: dict[str, Any] = {
        "min_new_tokens": int(rng.integers(0, 8)),
        "repetition_penalty": _one_of(rng, (0.7, 1.3, 2.0)),
        "no_repeat_ngram_size": int(rng.integers(1, 4)),
        "length_penalty": _one_of(rng, (-1.0, 0.0, 0.6, 2.0)),
        "early_stopping": _one_of(rng, (True, False, "never")),
        "bad_words_ids": [rng.integers(0, vocab, int(rng.integers(1, 3))).tolist() for _ in range(2)],
        "suppress_tokens": rng.integers(0, vocab, 3).tolist(),
        "begin_suppress_tokens": rng.integers(0, vocab, 2).tolist(),
        "forced_eos_token_id": int(rng.integers(0, vocab)),
        "forced_bos_token_id": int(rng.integers(0, vocab)),
        "prefix_allowed_tokens_fn": AllowedAfter(int(rng.integers(1 << 30)), vocab),
        "logits_processor": [Shifted(int(rng.integers(1 << 30)))],
    }
    if draws:
        rare["top_k"] = _one_of(rng, (1, 2, 5, vocab, vocab + 9))
        rare |= {name: _one_of(rng, values) for name, values in _CUTS.items()}
    if world.texts:
        rare["stop_strings"] = _one_of(rng, ("a", ["ab", "e"], ["\n"], [chr(200)]))
    options |= {name: value for name, value in rare.items() if rng.random() < _ODDS_OF_OPTION}
    if world.forms and rng.random() < 0.7:
        options |= _random_form(rng)
    return options


def _random_form(rng: np.random.Generator) -> dict[str, Any]:
    """Return a constraint on texts, and the library that enforces it."""
    form: dict[str, Any] = _one_of(
        rng,
        (
            {"regex": "[ab]{1,4}"},
            {"regex": "(yes|no|maybe)"},
            {"regex": "[0-9]+"},
            {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
            {"json_schema": {"enum": ["x", "yy"]}},
            {"grammar": 'start: "a" start "b" | "c"'},
        ),
    )
    return form | {"grammar_backend": _one_of(rng, ("llguidance", "llguidance", "xgrammar"))}


@dataclass(frozen=True)
class AllowedAfter:
    """A `prefix_allowed_tokens_fn` that allows some tokens, which depend on the last one."""

    seed: int
    vocab: int

    def __call__(self, number: int, tokens: torch.Tensor) -> list[int]:
        last = int(tokens[-1]) if len(tokens) else 0
        rng = np.random.default_rng([self.seed, last])
        allowed: list[int] = sorted({*rng.integers(0, self.vocab, 4).tolist()})
        return allowed


@dataclass(frozen=True)
class Shifted:
    """A logits processor that adds a number to each score, which depends on the last token."""

    seed: int

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        table = torch.randn(7, scores.shape[1], generator=generator)
        last = tokens[:, -1] if tokens.shape[1] else torch.zeros(len(tokens), dtype=torch.int64)
        return scores + table[last % 7].to(scores.dtype)
