"""Training of a memory (HMT) for a model, from long texts."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbeam import Pair, load
from specbeam.core import weights_key, whole_files_in
from specbeam.doors import OPENERS, is_integer, require, text_of
from specbeam.errors import BadPrompt, BadSetting, MissingFile
from specbeam.lab.train.draft import check_output, trainable_copy
from specbeam.lab.train.folders import digest, keep_options, prefixed, work_folder
from specbeam.lab.train.lessons import Report, warn_of_rounding
from specbeam.lab.train.remembering import MemoryDocument, MemoryPoint, MemorySchedule, MemoryTraining
from specbeam.models import HuggingFaceLM
from specbeam.models.memory import BACKBONE, MemoryLM, MemoryPlan, new_recall, save_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HELD_OUT = 32  # maximum number of held-out pieces of text


@dataclass(frozen=True)
class TrainedMemory:
    """The result of training."""

    folder: Path  # which `hmt` takes
    weights: int  # number of trained weights
    curve: tuple[MemoryPoint, ...]


def train_hmt(
    target: "Pair | str | Path",
    documents: "Sequence[str | Sequence[int] | MemoryDocument]",
    out: str | Path,
    plan: MemoryPlan,
    *,
    width: int | None = None,
    schedule: MemorySchedule | None = None,
    report: Report = lambda *_: None,
) -> TrainedMemory:
    """Train a memory for a model, and write it to a folder that `hmt(pair, folder)` takes.

    Texts are read segment by segment with gradients through all memories (arXiv 2405.06067). The model is trained, too,
    unless it is frozen; it is then written next to its memory, and `hmt(folder)` loads both.

    Call it again with the same arguments to resume a killed run: `out/training` holds the state and the curve, and can be
    deleted afterwards.

    Args:
        target: the model, loaded or a path or hub id. Its object is not changed.
        documents: texts, lists of token ids, or `MemoryDocument`s. A tenth of the documents is held out, at most 32;
            with fewer than ten documents, the last tenth of each.
        out: the folder to write.
        plan: how texts are read. Its query may be "first_half", as in the paper: `hmt` then decodes with another query.
        width: width of queries and keys; None: the size of an embedding.
        schedule: duration and rates.
        report: called with "remembering", the number of finished steps, and of all steps.

    Raises:
        BadSetting: an option is wrong, `out` holds a training with other options, or a stage finds no texts.
        BadPrompt: the documents are empty, or none is longer than a segment.
        MissingFile: the model cannot be loaded, or a text is given and there is no tokenizer.
        UnsupportedModel: the logits are not the output of the head on the last hidden states.
        BadHead, NotSupported: the model cannot have a memory; see `MemoryLM`.
    """
    schedule = schedule or MemorySchedule()
    pair = target if isinstance(target, Pair) else load(target)
    if not isinstance(pair.target, HuggingFaceLM):
        raise BadSetting("the target of this pair has a memory already; give the pair that `load` returned")
    warn_of_rounding(pair)
    size = int(pair.target_model.get_input_embeddings().weight.shape[1])
    width = size if width is None else width
    require(
        is_integer(width) and width >= 1,
        "width",
        width,
        "an integer of at least 1, or None for the size of an embedding",
    )
    encoded = [_encoded(one, pair.tokenizer, number) for number, one in enumerate(documents)]
    learnt, held_out = split_documents(
        encoded, plan.segment, max(segments for segments, _ in schedule.stages), schedule.seed
    )
    folder = Path(out)
    training = folder / "training"
    options = {
        "target": f"{type(pair.target_model).__name__} {weights_key(pair.target_model)}",
        "documents": f"{len(encoded)}, {digest(encoded)}",
        "width": int(width),
        **prefixed("plan", plan),
        **prefixed("schedule", schedule),
    }
    with work_folder(training, options, "state.pt"):
        model = pair.target_model if schedule.frozen else trainable_copy(pair.target_model)
        recall = new_recall(pair.target_model.get_input_embeddings().weight, width, schedule.seed)
        recall.to(pair.target.device)
        _check_fits(pair.target, plan, recall)
        check_output(model)
        keep_options(training, options)
        fit = MemoryTraining(model, recall, plan, schedule, learnt, held_out, training)
        fit.resume()
        report("remembering", fit.step, schedule.steps)
        with _without_gradients(pair.target_model, schedule.frozen):
            for done in fit.run():
                report("remembering", done, schedule.steps)
        if schedule.frozen:
            save_memory(folder, recall, plan, model, getattr(model, "name_or_path", "") or None)
        else:
            with whole_files_in(folder / BACKBONE) as parts:
                model.save_pretrained(parts)
                if pair.tokenizer is not None:
                    pair.tokenizer.save_pretrained(parts)
            save_memory(folder, recall, plan, model, None)
    weights = sum(weight.numel() for group in fit.optimizer.param_groups for weight in group["params"])
    return TrainedMemory(folder, weights, tuple(fit.curve))


@contextmanager
def _without_gradients(model: "PreTrainedModel", frozen: bool) -> Iterator[None]:
    """Turn off the gradients of a frozen model in this context."""
    parameters = list(model.parameters()) if frozen else []
    wanting = [weight for weight in parameters if weight.requires_grad]
    for weight in wanting:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in wanting:
            weight.requires_grad_(True)


def _check_fits(lm: HuggingFaceLM, plan: MemoryPlan, recall: Any) -> None:
    """Raise an error if the model cannot be decoded with such a memory, before anything is trained."""
    decodable = plan if plan.query != "first_half" else MemoryPlan(**{**asdict(plan), "query": "refresh"})
    MemoryLM(lm if lm.runner.takes_vectors else HuggingFaceLM(lm.model, engine="plain"), decodable, recall)


def _encoded(document: "str | Sequence[int] | MemoryDocument", tokenizer: Any, number: int) -> MemoryDocument:
    """Return a document as tokens. Raises `BadPrompt` if it has fewer than two, `MissingFile` if it needs a tokenizer."""
    if isinstance(document, str):
        found = MemoryDocument(_tokens_of(document, tokenizer))
    elif isinstance(document, MemoryDocument):
        found = document
    else:
        found = MemoryDocument([int(token) for token in document])
    if len(found.tokens) < 2:
        raise BadPrompt(f"document {number} has {len(found.tokens)} tokens; training needs at least 2")
    if found.weights is not None and len(found.weights) != len(found.tokens):
        raise BadPrompt(
            f"document {number} has {len(found.tokens)} tokens and {len(found.weights)} weights; give a weight for each"
        )
    return found


def _tokens_of(text: str, tokenizer: "PreTrainedTokenizerBase | None") -> list[int]:
    if tokenizer is None:
        raise MissingFile("a document is text, but there is no tokenizer; give load(tokenizer=...) or token ids")
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def split_documents(
    documents: Sequence[MemoryDocument], segment: int, segments: int, seed: int
) -> tuple[list[MemoryDocument], list[MemoryDocument]]:
    """Return the training documents, and the held-out pieces.

    A tenth of the documents is held out, at most 32; with fewer than ten documents, the last tenth of each. Held-out
    texts without answers are split into pieces of twice as many segments as in training.

    Raises `BadPrompt` if there are no texts, or if all fit into one segment: there is nothing to remember.
    """
    longest = max((len(one.tokens) for one in documents), default=0)
    if longest <= segment:
        raise BadPrompt(
            f"there are {len(documents)} documents, and the longest has {longest} tokens; a memory needs texts longer than "
            f"a segment of {segment} tokens: give longer texts, or shorter segments"
        )
    if len(documents) >= 10:
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
        count = min(HELD_OUT, len(documents) // 10)
        held_out = [documents[place] for place in order[:count]]
        learnt = [documents[place] for place in order[count:]]
    else:
        learnt = []
        held_out = []
        for one in documents:
            size = len(one.tokens)
            cut = size if one.answer else size - size // 10
            learnt.append(_piece(one, 0, cut))
            rest = _piece(one, cut, size)
            if len(rest.tokens) > 1:
                held_out.append(rest)
    most = 2 * segments * segment
    pieces = []
    for one in held_out:
        if one.answer:
            pieces.append(one)
            continue
        starts = range(0, len(one.tokens) - 1, most)
        pieces += [_piece(one, start, start + most) for start in starts]
    return learnt, pieces[:HELD_OUT]


def _piece(document: MemoryDocument, start: int, stop: int) -> MemoryDocument:
    if start == 0 and stop >= len(document.tokens):
        return document
    weights = None if document.weights is None else document.weights[start:stop]
    return MemoryDocument(document.tokens[start:stop], weights)


def read_documents(files: Sequence[Path], tokenizer: Any, prompt_weight: float = 1.0) -> list[MemoryDocument]:
    """Read documents from files, plain or packed (.gz, .xz).

    A file of JSON lines has a document in each: "text", or "prompt" with an "answer". Any other file is one document.

    Args:
        prompt_weight: weight of the tokens of a prompt in the loss; tokens of its answer have weight 1.

    Raises:
        MissingFile: there is no such file, or there is no tokenizer.
        BadPrompt: a file cannot be read, or a line has neither.
    """
    documents = []
    for path in files:
        kind = path.with_suffix("").suffix if path.suffix in OPENERS else path.suffix
        content = text_of(path, "give a text, or JSON lines with a text in each")
        if kind != ".jsonl":
            documents.append(MemoryDocument(_tokens_of(content, tokenizer)))
            continue
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                documents.append(_document_of(line, f"{path}, line {number}", tokenizer, prompt_weight))
    return documents


def _document_of(line: str, where: str, tokenizer: Any, prompt_weight: float) -> MemoryDocument:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise BadPrompt(f"{where}: {error}") from error
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return MemoryDocument(_tokens_of(record["text"], tokenizer))
    has_both = isinstance(record, dict) and all(isinstance(record.get(name), str) for name in ("prompt", "answer"))
    if not has_both:
        raise BadPrompt(f"{where} must have a text, or a prompt and an answer, as strings")
    prompt = _tokens_of(record["prompt"], tokenizer)
    answer = _tokens_of(record["answer"], tokenizer)
    weights = [prompt_weight] * len(prompt) + [1.0] * len(answer)
    return MemoryDocument([*prompt, *answer], weights, len(answer))
