"""Train a pair of encoder-decoder models on the jobs of the bundled pair: `target`, then `draft`, then `score`.

python encoder_decoder.py target --data DATA --out PAIR [--part 0 for letters to sounds alone]
python encoder_decoder.py draft  --data DATA --out PAIR
python encoder_decoder.py score  --data DATA --out PAIR

`PAIR/tokenizer` is that of `train.py tokenizer`, or the bundled target's (PAIR/tokenizer may be a copy of its files). The
draft has the target's encoder, which then reads for both, and one layer of a decoder that learns the target's law.
"""

import copy
import random
from pathlib import Path
from typing import Annotated

import sacrebleu
import torch
import typer
from batches import SourceBatch, SourceRows
from corpus import Example, sounds, translations
from torch import Tensor
from torch.nn import functional
from train import DEVICE, Data, Recipe, fit, training_texts
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

import specbeam as sb
from specbeam.lab.evaluate.intervals import share_interval

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Out = Annotated[Path, typer.Option(help="folder of the pair: tokenizer/ is in it, target/ and draft/ are made in it")]
Part = Annotated[float, typer.Option(help="part of the sentences seen per epoch; 0: words alone")]
SoundsPart = Annotated[float, typer.Option(help="part of the pronunciations seen per epoch")]
Resume = Annotated[bool, typer.Option(help="go on behind the last finished epoch")]


@app.command()
def target(
    data: Data,
    out: Out,
    layers: Annotated[int, typer.Option(help="layers of the encoder, and of the decoder")] = 4,
    hidden: int = 256,
    epochs: int = 3,
    rate: float = 0.015,
    embedding_rate: float = 0.02,
    tokens_per_batch: int = 8_000,
    part: Part = 1.0,
    sounds_part: SoundsPart = 0.3,
    seed: int = 1,
    resume: Resume = False,
) -> None:
    """Train the target on the answers' negative log-likelihood."""
    torch.manual_seed(seed)
    vocabulary = AutoTokenizer.from_pretrained(out / "tokenizer")
    model = new_model(vocabulary, layers, hidden).to(DEVICE)

    def loss(batch: SourceBatch) -> Tensor:
        return functional.cross_entropy(logits_of(model, batch).flatten(0, 1), batch.next_tokens.flatten())

    recipe = Recipe(epochs, rate, embedding_rate, tokens_per_batch, part, sounds_part, seed)
    train(model, vocabulary, loss, data, recipe, out / "target", resume)


@app.command()
def draft(
    data: Data,
    out: Out,
    epochs: int = 1,
    rate: float = 0.015,
    embedding_rate: float = 0.003,
    tokens_per_batch: int = 8_000,
    part: Part = 1.0,
    sounds_part: SoundsPart = 0.3,
    seed: int = 2,
    resume: Resume = False,
) -> None:
    """Train one decoder layer on the target's law: half the total variation and half the cross-entropy."""
    torch.manual_seed(seed)
    vocabulary = AutoTokenizer.from_pretrained(out / "target")
    teacher = T5ForConditionalGeneration.from_pretrained(out / "target", dtype=torch.float32).to(DEVICE).eval()
    model = small_sibling(teacher).to(DEVICE)

    def loss(batch: SourceBatch) -> Tensor:
        with torch.no_grad():
            law = logits_of(teacher, batch).softmax(-1)
        drafted = logits_of(model, batch).log_softmax(-1)
        variation = (law - drafted.exp()).abs().sum(-1) / 2
        cross_entropy = -(law * drafted).sum(-1)
        each = (variation + cross_entropy) / 2
        return each[batch.next_tokens >= 0].mean()

    recipe = Recipe(epochs, rate, embedding_rate, tokens_per_batch, part, sounds_part, seed)
    train(model, vocabulary, loss, data, recipe, out / "draft", resume)


@app.command()
def score(
    data: Data,
    out: Out,
    rows: Annotated[int, typer.Option(help="held-out rows of each job, drawn at random")] = 1000,
    sentences: Annotated[bool, typer.Option(help="score translation, too")] = True,
    beside: Annotated[
        Path | None, typer.Option(help="folder of a pair of one decoder each, scored on the same rows")
    ] = None,
    drafted: Annotated[bool, typer.Option(help="score the methods with drafts, too")] = True,
) -> None:
    """Print word and phoneme errors, BLEU, and how many tokens a pass of the target gives, with 95 % intervals.

    A word is wrong if no accepted pronunciation is the answer. Phoneme errors are edits to the nearest accepted
    pronunciation for each of its phonemes. Intervals are bootstrapped over rows.
    """
    rng = random.Random(0)
    words = some(sounds(data, "valid"), rows, rng)
    german = some(translations(data, "valid"), rows, rng) if sentences else []
    print(f"{len(words)} words, {len(german)} sentences")
    for folder in (out, beside):
        if folder is None:
            continue
        pair = sb.load(folder / "target", draft=folder / "draft" if drafted else None)
        methods = [sb.greedy(), sb.sampling(), sb.beam_search(beams=4)]
        if drafted:
            methods += [sb.speculative_beam_search(beams=4), sb.dsbd()]
        for method in methods:
            print(f"{folder.name} {method.name}: {errors_of(pair, words, method)}", flush=True)
            if german:
                made = answers(pair, german, method)
                references = [[one.answers[0] for one in german]]
                print(f"    BLEU {sacrebleu.corpus_bleu([text for text, _ in made], references).score:.2f}", flush=True)


def errors_of(pair: sb.Pair, words: list[Example], method: sb.Method) -> str:
    """Return the errors of a method on words, and its tokens per pass, as a line."""
    made = answers(pair, words, method)
    wrong = [float(text not in one.answers) for (text, _), one in zip(made, words, strict=True)]
    nearest = [
        min((edits(text.split(), answer.split()), len(answer.split())) for answer in one.answers)
        for (text, _), one in zip(made, words, strict=True)
    ]
    tokens = [report.tokens for _, report in made]
    passes = [report.target_passes for _, report in made]
    return (
        f"words wrong {shown(wrong, [1.0] * len(wrong))}, "
        f"phoneme errors {shown([float(one) for one, _ in nearest], [float(length) for _, length in nearest])}, "
        f"{sum(tokens) / sum(passes):.2f} tokens a pass"
    )


def shown(above: list[float], below: list[float]) -> str:
    """Return a share in percent, with its interval."""
    low, high = share_interval(above, below)
    return f"{100 * sum(above) / sum(below):.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def edits(text: list[str], answer: list[str]) -> int:
    """Return the least number of insertions, deletions and replacements that make one row of phonemes the other."""
    costs = list(range(len(answer) + 1))
    for row, one in enumerate(text, 1):
        before = costs
        costs = [row]
        for place, other in enumerate(answer, 1):
            costs.append(min(before[place] + 1, costs[-1] + 1, before[place - 1] + (one != other)))
    return costs[-1]


def train(
    model: T5ForConditionalGeneration,
    vocabulary: PreTrainedTokenizerFast,
    loss: object,
    data: Path,
    recipe: Recipe,
    folder: Path,
    resume: bool,
) -> None:
    def rows(epoch: int) -> SourceRows:
        return SourceRows(training_texts(data, recipe, epoch), vocabulary, DEVICE)

    heldout = SourceRows(heldout_texts(data, recipe), vocabulary, DEVICE)
    fit(model, vocabulary, loss, rows, heldout, recipe, folder, resume)


def heldout_texts(data: Path, recipe: Recipe) -> list[Example]:
    """Held-out texts of the jobs that are trained."""
    sentences = translations(data, "valid") if recipe.part > 0 else []
    words = sounds(data, "valid")[:500] if recipe.sounds_part > 0 else []
    return sentences + words


def some(examples: list[Example], count: int, rng: random.Random) -> list[Example]:
    return rng.sample(examples, min(count, len(examples)))


def new_model(vocabulary: PreTrainedTokenizerFast, layers: int, hidden: int) -> T5ForConditionalGeneration:
    """A T5 with heads of 64, gated layers and one embedding for all."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(vocabulary),
            d_model=hidden,
            d_kv=64,
            d_ff=2 * hidden,
            num_layers=layers,
            num_decoder_layers=layers,
            num_heads=hidden // 64,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=True,
            decoder_start_token_id=vocabulary.bos_token_id,
            bos_token_id=vocabulary.bos_token_id,
            eos_token_id=vocabulary.eos_token_id,
            pad_token_id=vocabulary.pad_token_id,
        )
    )


def small_sibling(teacher: T5ForConditionalGeneration) -> T5ForConditionalGeneration:
    """Build a model with the encoder and the embedding of another, which do not learn, and its first decoder layer."""
    config = copy.deepcopy(teacher.config)
    config.num_decoder_layers = 1
    model = T5ForConditionalGeneration(config)
    own = model.state_dict()
    model.load_state_dict({name: value for name, value in teacher.state_dict().items() if name in own})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("decoder.") and "embed" not in name)
    return model


def logits_of(model: T5ForConditionalGeneration, batch: SourceBatch) -> Tensor:
    """Return the logits of the tokens that come next, float32[rows, length, vocabulary]."""
    output = model(
        input_ids=batch.sources,
        attention_mask=batch.is_source.long(),
        decoder_input_ids=batch.tokens,
        use_cache=False,
    )
    return output.logits.float()


def answers(pair: sb.Pair, examples: list[Example], method: sb.Method) -> list[tuple[str, sb.Report]]:
    """Return the text of each answer, and the report of how it was made."""
    prompts = [one.prompt for one in examples]
    made = sb.generate(pair, prompts, method, seed=0, max_new_tokens=80, batch_size=16)
    return [(one.text.strip(), one.report) for one in made]


if __name__ == "__main__":
    app()
