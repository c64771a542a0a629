"""The records of a search: nodes, trees and results, and the rule that limits the draws at a node."""

import math
from dataclasses import dataclass, field

from specbeam.errors import SpecbeamError

# The states of a node.
OPEN = "open"
FINISHED = "finished"
CUT_OFF = "cut off"
CLOSED = "closed"


@dataclass
class Node:
    """A node of a search: a text that consists of the prompt and some steps.

    Attributes:
        parent: number of its parent node; -1 for the root.
        depth: number of steps after the prompt.
        tokens: token ids of the last step; empty for the root.
        text: the text of the last step.
        value: the value of the prompt with the steps; NaN before it is computed.
        status: "open" (it can be continued), "finished" (the model ended the text), "cut off" (the step reached the limit of
            tokens before the separator), or "closed" (its draws are spent, or its value is 0).
        limit: maximum number of draws below it; 0: not computed yet.
        draws: number of draws below it. Equal steps share one child.
        times: number of times that this step was drawn.
    """

    parent: int
    depth: int
    tokens: list[int]
    text: str
    value: float = math.nan
    status: str = OPEN
    limit: int = 0
    draws: int = 0
    times: int = 1


@dataclass
class SearchResult:
    """A search for one prompt: the answer, the tree, and their cost.

    Attributes:
        prompt: token ids of the prompt.
        prompt_text: the text of the prompt.
        text: the answer: the finished text of largest value, including the greedy one; "" if no text was finished.
        tokens: the token ids of the answer.
        value: the value of the answer; NaN if there is none.
        nodes: the tree; node 0 is the root, and parents come before their children.
        path: numbers of the nodes of the answer, from the first step on; empty if it is the greedy text.
        spent: number of drawn tokens, including the greedy text; at most the budget.
        draws: number of steps drawn.
        target_passes: number of passes of the target over all draws.
        ended: why the search ended: "value" (an answer reached the threshold), "budget" (no tokens are left), "iterations",
            "exhausted" (no node can be continued, or all draws are done), "failed", or "" while it runs.
        greedy_text, greedy_value, greedy_steps: the greedy text, its value (NaN if it was cut off), its number of steps.
        law: law of each step given the text before it. The answer is chosen by value, so it does not have this law.
        failure: the error that ended the search; None without an error.
    """

    prompt: list[int]
    prompt_text: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    value: float = math.nan
    nodes: list[Node] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    spent: int = 0
    draws: int = 0
    target_passes: int = 0
    ended: str = ""
    greedy_text: str = ""
    greedy_value: float = math.nan
    greedy_steps: int = 0
    law: str = ""
    failure: SpecbeamError | None = None

    def path_to(self, number: int) -> list[int]:
        """Return the numbers of the nodes from the first step to node `number`; empty for the root."""
        path: list[int] = []
        while number > 0:
            path.append(number)
            number = self.nodes[number].parent
        return path[::-1]

    def tokens_to(self, number: int) -> list[int]:
        """Return the token ids from the first step to the end of node `number`."""
        return [token for node in self.path_to(number) for token in self.nodes[node].tokens]

    def children(self, number: int) -> list[int]:
        """Return the numbers of the nodes that continue node `number`."""
        return [place for place, node in enumerate(self.nodes) if node.parent == number]


@dataclass(frozen=True)
class BudgetRule:
    """The maximum number of draws at a node, by its value (LiteSearch, arXiv 2407.00320).

    Attributes:
        confidence: the probability with which at least one of the draws at a node should be right.
        most: the largest number of draws at a node.
    """

    confidence: float = 0.9
    most: int = 10

    def limit(self, value: float, depth: int) -> int:
        """Return the number of draws at a node of this calibrated value, whose children have this depth; at least 1.

        If each of n independent draws is right with probability v, at least one is right with probability 1 - (1 -
        v)^n. The n at which this equals `confidence` is divided by the depth, because deep nodes were already selected.
        """
        if value <= 0:
            return self.most
        if value >= 1:
            return 1
        wanted = math.log(1 - self.confidence) / (depth * math.log(1 - value))
        return max(1, min(math.ceil(wanted - 1e-9), self.most))


def calibrated(value: float, greedy_value: float, depth: int) -> float:
    """Return the mean of the values of a node and of the greedy text, which weighs less for deeper nodes.

    Args:
        depth: number of steps before the node's children are complete, at least 1.
    """
    return (value + greedy_value / depth) / (1 + 1 / depth)
