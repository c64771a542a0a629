"""Forms, the models and methods that keep to them, and judges that know nothing of us."""

import json
import re

import jsonschema
import pytest
from transformers import AutoTokenizer

import specbeam as sb
from specbeam.models.pair import BUNDLED
from tests.support import words
from tests.support.tiny_models import tiny

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", None]}, "maxItems": 3},
        "home": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                    "required": ["zip"],
                    "additionalProperties": False,
                },
            ]
        },
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
POINTS = {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "array", "prefixItems": [
    {"type": "boolean"}, {"type": "integer", "minimum": -99, "maximum": 99}], "minItems": 2, "maxItems": 2,
    "items": False}}  # fmt: skip
WORDS = r"[a-z]{2,5}( [a-z]{2,5}){0,3}[.!]"
CODE = r"([A-Z][0-9]{2}|x+){1,3}=(yes|no)?"
SUM = """
start: term (op term){0,3}
op: " + " | " - " | "*"
term: NUMBER | "(" NUMBER op NUMBER ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
FORMS = {
    "person": {"json_schema": PERSON},
    "points": {"json_schema": json.dumps(POINTS)},
    "words": {"regex": WORDS},
    "code": {"regex": CODE},
    "sum": {"grammar": SUM},
}
RECIPES = {
    "sampling": sb.sampling,
    "dsbd": lambda: sb.dsbd(3, 5, 3, width="dynamic"),
    "dsbd, rejection": lambda: sb.dsbd(3, 5, 3, coupling="rejection", width="dynamic"),
    "search": lambda: sb.speculative_beam_search(3, 5, 3),
    "hf sampling": lambda: sb.dsbd(3, 5, 3, "fixed", semantics="hf"),
    "rsd_s": sb.rsd_s,
    "traversal": sb.traversal,
    "sequoia": sb.sequoia,
    "lookup": sb.prompt_lookup,
    "recycling": sb.token_recycling,
}
needs_pair = pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled pair is not in this checkout")


def characters():
    """Models of which each token is a character."""
    tokenizer = words.tokenizer(words.JSON)
    models = [tiny("llama", seed=seed, vocab_size=len(tokenizer)) for seed in (0, 1)]
    return sb.load(*models, tokenizer=tokenizer)


def byte_pairs():
    """Models with more logits than their byte-level tokenizer has tokens."""
    models = [tiny("llama", seed=seed, vocab_size=6160, eos_token_id=2) for seed in (0, 1)]
    return sb.load(*models, tokenizer=AutoTokenizer.from_pretrained(BUNDLED / "target"))


def valid(form, text):
    if "json_schema" in form:
        schema = form["json_schema"]
        jsonschema.Draft202012Validator(json.loads(schema) if isinstance(schema, str) else schema).validate(
            json.loads(text)
        )
    elif "regex" in form:
        assert re.fullmatch(form["regex"], text)
    else:
        assert re.fullmatch(r"[0-9+*() -]+", text)
        eval(text)  # what Python reads as a sum is one
    return True
