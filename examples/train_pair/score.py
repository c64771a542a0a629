"""Score a trained model with transformers' own decoding: BLEU and exact match on held-out data.

python score.py --data DATA --model PAIR/target
"""

from pathlib import Path
from typing import Annotated

import sacrebleu
import torch
import typer
from corpus import Example, sounds, translations
from transformers import AutoTokenizer, LlamaForCausalLM

MODES = {"sampling": {"do_sample": True, "top_k": 0}, "greedy": {"do_sample": False}, "beam 4": {"num_beams": 4}}


def main(
    data: Annotated[Path, typer.Option(help="folder that holds tatoeba_deu_eng/ and cmudict/")],
    model: Annotated[Path, typer.Option(help="a trained model with its tokenizer")],
    rows: int = 1625,
    batch: int = 256,
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(model)
    lm = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    torch.manual_seed(0)
    for mode, options in MODES.items():
        english = answers(lm, tokenizer, translations(data, "valid")[:rows], batch, options)
        references = [one.answers[0] for one in translations(data, "valid")[:rows]]
        bleu = sacrebleu.corpus_bleu(english, [references]).score
        words = sounds(data, "valid")[:rows]
        spoken = answers(lm, tokenizer, words, batch, options)
        right = sum(text in one.answers for text, one in zip(spoken, words, strict=True)) / len(words)
        print(f"{mode:9s} BLEU {bleu:.2f}  exact match {right:.3f}", flush=True)


def answers(lm, tokenizer, examples: list[Example], batch: int, options: dict) -> list[str]:
    texts = []
    for start in range(0, len(examples), batch):
        prompts = [one.prompt for one in examples[start : start + batch]]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to(lm.device)
        output = lm.generate(**inputs, max_new_tokens=80, **options)
        texts += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


if __name__ == "__main__":
    typer.run(main)
