"""Models that write a given text: each token follows from the one before it."""

import itertools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import specbeam as sb
from tests.support import words

START = ">"  # the last token of a prompt, after which the text begins
SHARP = 40.0  # logit of the next token; all others have 0


def writer(pieces, special=(), template="{{ messages[-1].content }}>{% if tools %}{% endif %}", are_named=True):
    """A pair whose model writes these pieces after `START`, then the end token; each piece is one token, used once.

    Args:
        special: the pieces that are special tokens.
        are_named: whether the tokenizer lists them as its own; otherwise only its `added_tokens_decoder` marks them.
    """
    tokenizer = words.tokenizer(words.JSON)
    tokenizer.add_tokens([piece for piece in pieces if piece not in special])
    if are_named:
        tokenizer.add_special_tokens({"additional_special_tokens": [*special]})
    else:
        tokenizer.add_tokens([*special], special_tokens=True)
        assert not {*special} & {*tokenizer.all_special_tokens}
    tokenizer.chat_template = template
    path = tokenizer.convert_tokens_to_ids([START, *pieces, tokenizer.eos_token])
    size = len(tokenizer) + len(tokenizer) % 2
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size)[: len(tokenizer)])
        model.model.norm.weight.fill_(1.0)
        for before, after in itertools.pairwise(path):
            model.lm_head.weight[after, before] = SHARP / size**0.5
    return sb.load(model, tokenizer=tokenizer, engine="plain")
