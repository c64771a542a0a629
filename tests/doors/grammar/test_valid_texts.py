"""What comes out keeps to its form, by judges that know nothing of us."""

import pytest

import specbeam as sb
from tests.doors.grammar.forms import FORMS, PERSON, POINTS, RECIPES, byte_pairs, characters, needs_pair, valid


@pytest.fixture(
    scope="module", params=[characters, pytest.param(byte_pairs, marks=needs_pair)], ids=lambda make: make.__name__
)
def pair(request):
    return request.param()


def generated(pair, form, recipe, count, **options):
    """The valid texts of `count` prompts."""
    prompts = ["abc" + "xyz"[number % 3] * (number // 3) for number in range(count)]
    found = sb.generate(pair, prompts, RECIPES[recipe](), seed=3, max_new_tokens=150, **form, **options)
    return [one.text for one in found if valid(form, one.text)]


@pytest.mark.parametrize(("form", "recipe"), zip(FORMS, RECIPES, strict=False))
def test_texts_are_valid(pair, form, recipe):
    assert len(generated(pair, FORMS[form], recipe, 4)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_two_hundred_texts_are_valid(pair, form, backend):
    """Twenty prompts for each of ten methods, per form, tokenizer and library."""
    found = [text for recipe in RECIPES for text in generated(pair, FORMS[form], recipe, 20, grammar_backend=backend)]
    assert len(found) == 200
    assert len(set(found)) > 20


SCHEMAS = {
    "person": PERSON,
    "points": POINTS,
    "order": {
        "$defs": {"size": {"enum": ["S", "M", "L"]}, "count": {"type": "integer", "minimum": 1, "maximum": 20}},
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "minItems": 1,
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {"size": {"$ref": "#/$defs/size"}, "count": {"$ref": "#/$defs/count"}},
                    "required": ["size", "count"],
                    "additionalProperties": False,
                },
            },
            "gift": {"type": "boolean"},
        },
        "required": ["items"],
        "additionalProperties": False,
    },
    "either": {
        "oneOf": [
            {"type": "null"},
            {"type": "integer", "minimum": -20, "maximum": 20, "multipleOf": 5},
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
        ]
    },
    "words": {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": 5},
        "minItems": 2,
        "maxItems": 4,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
def test_two_hundred_json_texts_are_valid(schema):
    """Twenty prompts for each of ten methods; jsonschema is the judge."""
    pair, form = characters(), {"json_schema": SCHEMAS[schema]}
    assert sum(len(generated(pair, form, recipe, 20)) for recipe in RECIPES) == 200
