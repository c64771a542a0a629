"""A server whose model translates: a prompt is the source, and the answer is the text about it."""

import dataclasses

import pytest

import specbeam as sb

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from tests.apps.serve.test_server import CONFIG, running, settle  # noqa: E402
from tests.support import words  # noqa: E402
from tests.support.tiny_sources import tiny_reader  # noqa: E402

TOKENS = 8
PROMPTS = ["abc", "Hello there", "no"]


@pytest.fixture(scope="module")
def translator():
    tokenizer = words.tokenizer()
    models = [tiny_reader("t5", seed=seed, layers=2 - seed, vocab_size=len(tokenizer)) for seed in (0, 1)]
    return sb.load(*models, tokenizer=tokenizer)


def test_a_server_answers_about_sources_as_the_library_does(translator):
    """Searches, draws and streams of several sources; what reads prompts again is refused with a sentence."""
    searched = sb.generate(translator, PROMPTS, sb.speculative_beam_search(3), max_new_tokens=TOKENS)
    drawn = sb.generate(translator, PROMPTS, sb.dsbd(3, 5, 3), max_new_tokens=TOKENS, seed=7)
    given = {"model": "tiny", "max_tokens": TOKENS, "seed": 7}
    with running(dataclasses.replace(CONFIG, model="translator"), translator) as (url, server):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        found = client.completions.create(prompt=PROMPTS, n=3, extra_body={"use_beam_search": True}, **given)
        assert [choice.text for choice in found.choices[::3]] == [one.text for one in searched]
        body = {"specbeam": {"method": "dsbd", "beams": 3, "draft_beams": 5, "depth": 3}}
        found = client.completions.create(prompt=PROMPTS, extra_body=body, **given)
        assert [choice.text for choice in found.choices] == [one.text for one in drawn]
        parts = client.completions.create(prompt=PROMPTS[1], stream=True, extra_body=body, **given)
        assert "".join(part.choices[0].text for part in parts if part.choices) == drawn[1].text
        with pytest.raises(openai.BadRequestError, match="needs a source for each prompt"):
            client.completions.create(prompt=PROMPTS[0], echo=True, logprobs=1, extra_body=body, **given)
        settle(server)
        assert translator.target.runner.cross.lengths == []
        client.close()
