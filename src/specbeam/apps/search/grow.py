"""The growth of search trees: steps are drawn below nodes of several trees at once, and valued in one call."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specbeam import Method, Pair
from specbeam.apps.search.draws import Draw, Drawn, drawn, seed_of
from specbeam.apps.search.tree import CLOSED, CUT_OFF, FINISHED, OPEN, Node, SearchResult
from specbeam.apps.search.value import Value, checked_values
from specbeam.doors import (
    Request,
    Settings,
    as_prompts,
    check_names,
    is_integer,
    require,
    require_prompts,
    warper_names,
)
from specbeam.errors import BadSetting, BrokenValue, NotSupported, SearchFailed, SpecbeamError

TAKEN = ("max_new_tokens", "stop_strings", "num_return_sequences", "max_length", "min_new_tokens")
NO_LIMIT = 2**62  # tokens of a search without a budget


class Wish(NamedTuple):
    """Draws wanted below a node."""

    number: int  # number of the prompt
    node: int
    wanted: int


@dataclass
class GrowingTrees:
    """The growing trees of all prompts of a search.

    Attributes:
        budget: maximum number of tokens drawn for a prompt; None: no limit.
        step_tokens: maximum number of tokens of a step.
        max_new_tokens: maximum number of tokens of a text; None: 256, or fewer if the models have fewer positions left.
        ends: a step that contains one of these texts is the last one.
        results: result of each prompt.
        lengths: maximum number of tokens of a text, for each prompt.
        repeats: number of equal prompts before each prompt, which have other random numbers.
    """

    pair: Pair
    value: Value
    method: Method
    separator: str
    budget: int | None
    step_tokens: int
    max_new_tokens: int | None
    seed: int
    batch_size: int
    options: dict[str, Any]
    ends: Sequence[str] = ()
    results: list[SearchResult] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raise `BadSetting` or `NotSupported` for invalid settings."""
        require_prompts(self.pair, "a search over steps")
        require(isinstance(self.separator, str) and bool(self.separator), "separator", self.separator, "a text")
        if self.budget is not None:
            require_counts(budget=self.budget)
        require_counts(step_tokens=self.step_tokens, batch_size=self.batch_size)
        if self.max_new_tokens is not None:
            require_counts(max_new_tokens=self.max_new_tokens)
        require(
            callable(self.value), "value", self.value, "a function of a list of texts, or the folder of a classifier"
        )
        are_texts = not isinstance(self.ends, str)
        are_texts = are_texts and all(isinstance(end, str) and end for end in self.ends)
        require(are_texts, "ends", self.ends, "a list of texts")
        for name in TAKEN:
            if self.options.get(name) is not None:
                raise NotSupported(f"a search sets {name} itself; leave it out, or give step_tokens or separator")
        if self.method.greedy or Settings.given(self.options).temperature == 0:
            raise BadSetting(
                f"{self.method.name} gives the same step in each draw, as it does not sample; give a method that samples, "
                "such as 'sampling', and a temperature above 0"
            )
        if self.pair.tokenizer is None:
            raise NotSupported("a search needs texts to find the ends of steps; give load(tokenizer=...)")

    def begin(self, prompts: Any) -> None:
        """Set up a tree for each prompt, with the value of its root. Raises the error of the first invalid prompt."""
        earlier: Counter[tuple[int, ...]] = Counter()
        for number, prompt in enumerate(as_prompts(prompts)):
            ids, length = self._ids(prompt, number)
            self.lengths.append(length)
            self.repeats.append(earlier[tuple(ids)])
            earlier[tuple(ids)] += 1
            text = self.text_of(ids)
            self.results.append(SearchResult(ids, text, nodes=[Node(-1, 0, [], "")]))
        roots = self._values([result.prompt_text for result in self.results])
        for result, value in zip(self.results, roots, strict=True):
            result.nodes[0].value = value
            if value == 0:
                result.nodes[0].status = CLOSED

    def _ids(self, prompt: Any, number: int) -> tuple[list[int], int]:
        """Return the token ids of a prompt, and the maximum number of tokens of its text."""
        settings = Settings(**self.options, max_new_tokens=self.max_new_tokens)
        request = Request.of(self.pair, [prompt], self.method, settings, self.seed)
        for error in request.refused.values():
            raise type(error)(str(error).replace("prompt 0", f"prompt {number}"))
        session = request.sessions[0]
        return session.prompt, session.limits.max_new_tokens

    def text_of(self, tokens: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        assert self.pair.tokenizer is not None
        return str(self.pair.tokenizer.decode(tokens, skip_special_tokens=True))

    def text_at(self, number: int, node: int) -> str:
        """Return the text of the prompt and of the steps down to a node."""
        result = self.results[number]
        return self.text_of([*result.prompt, *result.tokens_to(node)])

    def left(self, number: int) -> int:
        """Return the number of tokens that may still be drawn for a prompt."""
        return NO_LIMIT if self.budget is None else self.budget - self.results[number].spent

    def draw_greedy(self) -> None:
        """Draw the greedy text of each active prompt, and compute the values of finished texts."""
        going = [number for number, result in enumerate(self.results) if not result.ended]
        options = {name: given for name, given in self.options.items() if name not in warper_names()}
        options["temperature"] = 0.0
        draws = [
            Draw(self.results[number].prompt, self.seed, min(self.lengths[number], self.left(number)), None)
            for number in going
        ]
        found = drawn(self.pair, draws, self.method, self.batch_size, options)
        finished = []
        for number, text in zip(going, found, strict=True):
            result = self.results[number]
            if isinstance(text, SpecbeamError):
                self._fail(number, text)
                continue
            self._count(number, text)
            tokens, is_finished = self._to_its_end(text)
            whole = self.text_of([*result.prompt, *tokens])
            result.greedy_text = whole[len(result.prompt_text) :]
            result.greedy_steps = max(1, sum(bool(step.strip()) for step in result.greedy_text.split(self.separator)))
            result.tokens = tokens if is_finished else []
            if is_finished:
                finished.append((number, whole))
        values = self._values([whole for _, whole in finished])
        for (number, _), value in zip(finished, values, strict=True):
            result = self.results[number]
            result.greedy_value = value
            result.value = value
            result.text = result.greedy_text

    def _to_its_end(self, text: Drawn) -> tuple[list[int], bool]:
        """Return the tokens of a text up to the end of its last step, and whether it is finished."""
        if not any(end in text.text for end in self.ends):
            return text.tokens, text.finished
        for length in range(1, len(text.tokens)):
            before = self.text_of(text.tokens[:length])
            places = [before.find(end) for end in self.ends if end in before]
            if places and self.separator in before[min(places) :]:
                return text.tokens[:length], True
        return text.tokens, text.finished

    def extend(self, wishes: Sequence[Wish]) -> list[tuple[int, int]]:
        """Draw steps below nodes, add them to the trees, and compute their values.

        If the budget runs short, there are fewer draws, or shorter ones: each draw reserves its maximum number of tokens.

        Returns:
            The prompt and the node of each step, which was there before if an equal step was drawn.
        """
        draws: list[Draw] = []
        places: list[tuple[int, int]] = []
        for wish in wishes:
            result = self.results[wish.number]
            node = result.nodes[wish.node]
            path = result.tokens_to(wish.node)
            left = self.left(wish.number) - sum(
                draw.most for draw, (number, _) in zip(draws, places, strict=True) if number == wish.number
            )
            for index in range(node.draws, node.draws + wish.wanted):
                most = min(self.step_tokens, self.lengths[wish.number] - len(path), left)
                if most < 1:
                    break
                left -= most
                seed = seed_of(self.seed, self.repeats[wish.number], index)
                draws.append(Draw([*result.prompt, *path], seed, most, self.separator))
                places.append((wish.number, wish.node))
        found = drawn(self.pair, draws, self.method, self.batch_size, self.options)
        reached = []
        new = []
        for (number, parent), step in zip(places, found, strict=True):
            if isinstance(step, SpecbeamError):
                self._fail(number, step)
                continue
            self._count(number, step)
            child, is_new = self._add(number, parent, step)
            reached.append((number, child))
            if is_new:
                new.append((number, child))
        self._value_nodes(new)
        return reached

    def _count(self, number: int, text: Drawn) -> None:
        """Count the cost of a draw."""
        result = self.results[number]
        result.spent += len(text.tokens)
        result.target_passes += text.target_passes
        result.law = text.law

    def _add(self, number: int, parent: int, step: Drawn) -> tuple[int, bool]:
        """Add a step below a node. Returns the number of its node, and whether it is new: equal steps share one."""
        result = self.results[number]
        result.nodes[parent].draws += 1
        result.draws += 1
        for known in result.children(parent):
            if result.nodes[known].tokens == step.tokens:
                result.nodes[known].times += 1
                return known, False
        is_last = step.finished or (step.complete and any(end in step.text for end in self.ends))
        status = OPEN if step.complete else CUT_OFF
        if is_last:
            status = FINISHED
        depth = result.nodes[parent].depth + 1
        result.nodes.append(Node(parent, depth, step.tokens, "", status=status))
        child = len(result.nodes) - 1
        before = len(self.text_at(number, parent))
        result.nodes[child].text = self.text_at(number, child)[before:]
        return child, True

    def _value_nodes(self, new: list[tuple[int, int]]) -> None:
        """Compute the values of nodes that were not cut off; close nodes of value 0 and nodes without room for more."""
        whole = [(number, child) for number, child in new if self.results[number].nodes[child].status != CUT_OFF]
        values = self._values([self.text_at(number, child) for number, child in whole])
        for (number, child), value in zip(whole, values, strict=True):
            result = self.results[number]
            node = result.nodes[child]
            node.value = value
            if node.status == OPEN and value == 0:
                node.status = CLOSED
            if node.status == OPEN and len(result.tokens_to(child)) >= self.lengths[number]:
                node.status = CUT_OFF
            is_better = math.isnan(result.value) or value > result.value
            if node.status == FINISHED and is_better:
                result.value = value
                result.path = result.path_to(child)
                result.tokens = result.tokens_to(child)
                result.text = self.text_at(number, child)[len(result.prompt_text) :]

    def _values(self, texts: list[str]) -> list[float]:
        """Return the values of texts. Raises `SearchFailed` with all trees if the value function fails."""
        try:
            return checked_values(self.value, texts)
        except BrokenValue as error:
            for result in self.results:
                if not result.ended:
                    result.failure = error
                    result.ended = "failed"
            raise SearchFailed([error], self.results) from error

    def _fail(self, number: int, error: SpecbeamError) -> None:
        self.results[number].failure = error
        self.results[number].ended = "failed"

    def end(self) -> list[SearchResult]:
        """Return the results of all prompts. Searches in which no step reached its end have failed; see `checked`."""
        for number, result in enumerate(self.results):
            steps = result.nodes[1:]
            if not result.failure and not result.tokens and steps and all(node.status == CUT_OFF for node in steps):
                self._fail(
                    number,
                    BadSetting(
                        f"none of {result.draws} steps reached its end: the separator {self.separator!r} was not found "
                        f"within {self.step_tokens} tokens; give the separator that this model writes, more step_tokens, "
                        "or a larger budget"
                    ),
                )
        return self.checked()

    def checked(self) -> list[SearchResult]:
        """Return the results of all prompts. Raises `SearchFailed`, with all results, if any search has failed."""
        failures = [result.failure for result in self.results if result.failure is not None]
        if failures:
            raise SearchFailed(failures, self.results)
        return self.results


def given_seed(seed: int | None) -> int:
    """Return the seed of a search; a random one for None."""
    require(seed is None or is_integer(seed), "seed", seed, "an integer, or None for a random seed")
    return int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else abs(int(seed))


def check_options(function: Callable[..., Any], options: dict[str, Any], further: Sequence[str] = ()) -> None:
    """Raise `BadSetting` for options that a search has not. Options that searches set are refused later.

    Args:
        further: options of the search that its signature does not name.
    """
    given = {name: value for name, value in options.items() if name not in TAKEN}
    check_names(function, given, ["sampling"], TAKEN, further)


def require_counts(**counts: object) -> None:
    """Raise `BadSetting` for the first of the named values that is not an integer of at least 1."""
    for name, count in counts.items():
        require(is_integer(count) and int(count) >= 1, name, count, "an integer of at least 1")  # type: ignore[call-overload]


def require_odds(**odds: object) -> None:
    """Raise `BadSetting` for the first of the named values that is not a number from 0 to 1."""
    for name, value in odds.items():
        require(is_number(value) and 0 <= value <= 1, name, value, "a number from 0 to 1")  # type: ignore[operator]


def is_number(value: object) -> bool:
    """Return whether a value is a finite number of Python; True and False do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
