"""Sums of three or four numbers, one addition per line, for chat models: what small ones can do in part.

    14 + 2 = 16
    16 + 8 = 24
    Answer: 24

The exact value of a beginning is 1 if all of its lines are right, in the order of the numbers.
"""

import random
import re
from typing import Any

from task import Task

ASKED = "Add, one sum per line: "
SHOWN = ((14, 2, 8), (3, 9, 7, 5))  # the sums that the prompt shows, with their lines
MOST = 15  # the largest number
NUMBERS = re.compile(rf"{ASKED}([\d +]+)")


def lines_of(numbers: tuple[int, ...]) -> list[str]:
    """Return the lines of a solution."""
    lines = []
    total = numbers[0]
    for number in numbers[1:]:
        lines.append(f"{total} + {number} = {total + number}")
        total += number
    return [*lines, f"Answer: {total}"]


def prompt(rng: random.Random, tokenizer: Any) -> str:
    """Return a problem as a chat, behind two that are solved."""
    asked = tuple(rng.randint(1, MOST) for _ in range(rng.randint(3, 4)))
    chat = []
    for numbers in (*SHOWN, asked):
        chat.append({"role": "user", "content": ASKED + " + ".join(map(str, numbers))})
        chat.append({"role": "assistant", "content": "\n".join(lines_of(numbers))})
    return str(tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True))


def _split(text: str) -> tuple[list[str], list[str]]:
    """Return the lines that solve the last problem of a text, and those that the text has."""
    asked = [*NUMBERS.finditer(text)][-1]
    right = lines_of(tuple(map(int, asked[1].split("+"))))
    lines = text[asked.end() :].splitlines()
    return right, [line.strip() for line in lines if re.search(r"\d", line)]  # the others are marks of the chat


def value(text: str) -> float:
    """Return 1 if all lines so far are right, 0 if not."""
    right, written = _split(text)
    return float(written == right[: len(written)])


def is_solved(text: str) -> bool:
    """Return whether a solution is whole and right."""
    right, written = _split(text)
    return written == right


TASK = Task(prompt, value, is_solved, step_tokens=16, max_new_tokens=48, temperature=0.7)
