"""Wide beams under a catalogue, in turns with transformers and the same trie as `prefix_allowed_tokens_fn`.

python examples/catalogue/speed.py --items 100000 --beams 20 --beams 128

The models are random: a T5 of 17 M weights and a Llama of 60 M. Items have four tokens of 256 each, as semantic ids do.
"""

import statistics
import time
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import specbeam as sb

CODES = 256
LEVELS = 4
FIRST = 3  # tokens 0 to 2 are padding, start and end
VOCAB = FIRST + LEVELS * CODES
END = 2
PROMPT = 60  # tokens


def main(
    items: int = 100_000,
    beams: Annotated[list[int], typer.Option()] = [20, 128, 512],  # noqa: B006
    rounds: int = 3,
    threads: int = 1,
    model: Annotated[list[str], typer.Option()] = ["t5", "llama"],  # noqa: B006
) -> None:
    torch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    tokens = np.unique(rng.integers(0, CODES, (items + items // 10, LEVELS)), axis=0)
    tokens = FIRST + CODES * np.arange(LEVELS) + rng.permutation(tokens)[:items]
    began = time.perf_counter()
    shop = sb.catalogue(tokens)
    shop.longest(None, (END,))
    print(f"{items:,} items; trie in {time.perf_counter() - began:.1f} s\n")
    print(
        "| model | beams | transformers, ms | specbeam, ms | ratio | illegal | equal items |\n| --- "
        + "| --- " * 6
        + "|"
    )
    for name in model:
        made = MODELS[name]()
        pair = sb.load(made, tokenizer=False)
        for count in beams:
            print(
                row(
                    f"{name}, {sum(one.numel() for one in made.parameters()) / 1e6:.0f} M",
                    pair,
                    shop,
                    tokens,
                    count,
                    rounds,
                )
            )


def t5() -> Any:
    """Return a T5 of 17 M weights."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB, d_model=256, d_kv=64, d_ff=1024, num_layers=8, num_decoder_layers=8, num_heads=4, pad_token_id=0,
        eos_token_id=END, decoder_start_token_id=1,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def llama() -> Any:
    """Return a Llama of 60 M weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=640, intermediate_size=1792, num_hidden_layers=12, num_attention_heads=10,
        bos_token_id=1, eos_token_id=END, pad_token_id=0, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


MODELS = {"t5": t5, "llama": llama}


def row(name: str, pair: sb.Pair, shop: sb.Catalogue, tokens: np.ndarray, beams: int, rounds: int) -> str:
    """Return a row of the table: medians over rounds in which both take turns."""
    rng = np.random.default_rng(1)
    below = by_prefix(tokens)
    ours: list[float] = []
    theirs: list[float] = []
    illegal = 0
    equal = 0
    texts = 0
    for number in range(rounds + 1):
        prompt = rng.integers(FIRST, VOCAB, PROMPT).tolist()
        began = time.perf_counter()
        (answer,) = sb.generate(pair, prompt, sb.beam_search(beams), catalogue=shop, eos_token_id=END)
        middle = time.perf_counter()
        expected = of_transformers(pair, prompt, below, beams)
        end = time.perf_counter()
        if number == 0:
            continue
        ours.append(middle - began)
        theirs.append(end - middle)
        illegal += sum(one.item is None for one in answer.beams)
        equal += len({tuple(one.tokens) for one in answer.beams} & set(expected))
        texts += beams
    ratios = [slow / fast for slow, fast in zip(theirs, ours, strict=True)]
    cells = [name, beams, f"{1000 * statistics.median(theirs):.0f}", f"{1000 * statistics.median(ours):.0f}"]
    cells += [
        f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})",
        illegal,
        f"{equal} of {texts}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def by_prefix(tokens: np.ndarray) -> dict[tuple[int, ...], list[int]]:
    """Return the next tokens after each prefix of an item."""
    found: dict[tuple[int, ...], set[int]] = {}
    for item in tokens.tolist():
        for length in range(LEVELS):
            found.setdefault(tuple(item[:length]), set()).add(item[length])
    return {prefix: sorted(after) for prefix, after in found.items()}


def of_transformers(
    pair: sb.Pair, prompt: list[int], below: dict[tuple[int, ...], list[int]], beams: int
) -> list[tuple[int, ...]]:
    """Return the beams of transformers."""
    start = 1 if pair.target_model.config.is_encoder_decoder else len(prompt)

    def allowed(_: int, tokens: torch.Tensor) -> list[int]:
        return below.get(tuple(tokens[start:].tolist()), [END])

    with torch.inference_mode():
        out = pair.target_model.generate(
            torch.tensor([prompt]), num_beams=beams, num_return_sequences=beams, do_sample=False,
            max_new_tokens=LEVELS + 1, eos_token_id=END, pad_token_id=0, prefix_allowed_tokens_fn=allowed,
        )  # fmt: skip
    return [tuple(one) for one in out[:, start : start + LEVELS + 1].tolist()]


if __name__ == "__main__":
    typer.run(main)
