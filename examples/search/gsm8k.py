"""LiteSearch on GSM8K (Cobbe et al. 2021), with a value that is computed: the sums that a solution states, and its result.

python gsm8k.py --model MODEL --data test_first.jsonl.gz

Solutions of GSM8K state each sum as <<48/2=24>>, a line for each step, and end with a line "#### 72". A text that states a
wrong sum is lost; one whose sums hold so far may be right; a finished one is right if its result is the one of the data. So
this measures what a search can reach where its value is right; it does not answer questions whose results are not known.
The model must write solutions in this form: one that was trained on GSM8K, or that follows two examples (--shots).
"""

import ast
import gzip
import json
import lzma
import re
from pathlib import Path
from typing import Annotated, Any

import typer

import specbeam as sb

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
SUM = re.compile(r"<<([-+*/(). \d]+)=(-?[\d.]+)>>")
RESULT = re.compile(r"#### *(-?[\d,.]+)")
HOPE = 0.5  # the value of a text whose sums hold, and that is not finished


def read(path: Path) -> list[tuple[str, str]]:
    """Return the questions with their solutions."""
    with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return [(record["question"], record["answer"]) for record in records]


def result_of(text: str) -> float | None:
    """Return the result that a solution ends with; None if it has none yet."""
    found = RESULT.search(text)
    try:
        return float(found[1].replace(",", "").rstrip(".")) if found else None
    except ValueError:
        return None


def holds(sum_text: str, stated: str) -> bool:
    """Return whether a sum has the result that is stated, as far as its digits go."""
    try:
        digits = len(stated.partition(".")[2])
        return abs(_computed(ast.parse(sum_text.strip(), mode="eval").body) - float(stated)) <= 0.5001 * 10.0**-digits
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False


def _computed(node: ast.expr) -> float:
    """Return the value of a sum of numbers. Raises `ValueError` for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _computed(node.operand)
        return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.BinOp):
        first = _computed(node.left)
        second = _computed(node.right)
        if isinstance(node.op, ast.Add):
            return first + second
        if isinstance(node.op, ast.Sub):
            return first - second
        if isinstance(node.op, ast.Mult):
            return first * second
        if isinstance(node.op, ast.Div):
            return first / second
    raise ValueError("no sum")


def value_of(solution: str, right: float) -> float:
    """Return the value of a solution, or of its beginning, to a question of this result."""
    if not all(holds(*stated) for stated in SUM.findall(solution)):
        return 0.0
    result = result_of(solution)
    if result is None:
        return HOPE
    return float(result == right)


def main(
    model: Annotated[str, typer.Option(help="Target model: a path or a hub id.")],
    data: Annotated[Path, typer.Option(help="Questions of GSM8K: .jsonl, plain or packed.")],
    draft: Annotated[str | None, typer.Option(help="Draft model, which makes the search faster.")] = None,
    shots: Annotated[
        int, typer.Option(help="Number of solved questions before each question: the file's last ones.")
    ] = 2,
    rows: Annotated[int, typer.Option(help="Number of questions.")] = 20,
    budget: Annotated[int, typer.Option(help="The most tokens per question.")] = 2000,
    seed: int = 0,
) -> None:
    """Search for solutions, and print how many are right, beside those of the greedy text, and the tokens drawn."""
    questions = read(data)
    solved = "".join(f"Question: {question}\n{answer}\n\n" for question, answer in questions[len(questions) - shots :])
    asked = questions[: min(rows, len(questions) - shots)]
    right = {question: result_of(answer) for question, answer in asked}

    def values(texts: list[str]) -> list[float]:
        found = []
        for text in texts:
            question, _, solution = text.rpartition("Question: ")[2].partition("\n")
            wanted = right[question]
            assert wanted is not None
            found.append(value_of(solution, wanted))
        return found

    pair = sb.load(model, draft)
    prompts = [f"{solved}Question: {question}\n" for question, _ in asked]
    method = "speculative_sampling" if draft else "sampling"
    results = sb.lite_search(
        pair, prompts, values, method, ends=["####"], budget=budget, step_tokens=100, max_new_tokens=300, temperature=0.8,
        seed=seed,
    )  # fmt: skip
    found = sum(result.value == 1.0 for result in results)
    greedy = sum(result.greedy_value == 1.0 for result in results)
    tokens = sum(result.spent for result in results) / len(results)
    print(f"{found} of {len(results)} solved, {greedy} by the greedy text; {tokens:.0f} tokens per question")


if __name__ == "__main__":
    typer.run(main)
