"""A tiny character tokenizer and pairs that speak it."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import specbeam as sb
from tests.support.tiny_models import tiny

JSON = "{}[]\":_-+*=<>()'0123456789"
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!"


def tokenizer(more: str = "") -> PreTrainedTokenizerFast:
    """Tokens 0 to 3 are special; every character is a token; 61 in all, and one for each of `more`."""
    vocab = {token: number for number, token in enumerate(["<s>", "</s>", "<pad>", "<unk>", *CHARACTERS])}
    for character in "\n" + more:
        vocab[character] = len(vocab)
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
    )


def pair(family: str = "llama", draft_seed: int | None = 1, check: bool = True, **changes: object) -> sb.Pair:
    target = tiny(family, seed=0, **changes)
    draft = None if draft_seed is None else tiny(family, seed=draft_seed, num_hidden_layers=1, **changes)
    return sb.load(target, draft, tokenizer=tokenizer(), check=check)


def saved(folder, draft_seed: int = 1) -> tuple[str, str]:
    """Paths of a target and a draft on disk."""
    paths = []
    for name, seed in (("target", 0), ("draft", draft_seed)):
        model = tiny("llama", seed=seed)
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
        paths.append(str(folder / name))
    return paths[0], paths[1]
