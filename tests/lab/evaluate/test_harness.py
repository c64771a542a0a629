"""lm-evaluation-harness with our model class: its numbers are those of the target, its texts those of transformers."""

import json
from types import SimpleNamespace

import pytest
import torch

import specbeam as sb
from specbeam.errors import BadSetting, NotSupported
from tests.support import words

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install lm-eval)")
WORDS = ["abc def", "hello", "no. and then", "why, oh why", "x"]


@pytest.fixture(scope="module")
def pair():
    return words.pair(check=False)


@pytest.fixture
def model(pair):
    from specbeam.lab.evaluate.harness import HarnessModel

    return HarnessModel(pair)


def asked(*arguments):
    return SimpleNamespace(args=arguments)


def logp(pair, ids, start):
    """log p of the tokens from `start` on, by a plain forward, and whether each is the likeliest."""
    with torch.no_grad():
        logits = pair.target_model(torch.tensor([ids])).logits[0, :-1].double()
    rows = torch.log_softmax(logits, -1)[start - 1 :]
    tokens = torch.tensor(ids[start:])
    return float(rows.gather(1, tokens[:, None]).sum()), bool((rows.argmax(1) == tokens).all())


def test_log_likelihoods_are_those_of_plain_forwards(pair, model):
    encode = lambda text: pair.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    best = sb.generate(pair, "abc", sb.greedy(), max_new_tokens=2)[0].tokens
    likeliest = pair.tokenizer.decode(best)
    found = model.loglikelihood([asked("abc", " def"), asked("", "hello"), asked("abc ", "x"), asked("abc", likeliest)])
    expected = [
        logp(pair, encode("abc def"), 3),
        logp(pair, [pair.tokenizer.bos_token_id, *encode("hello")], 1),
        logp(pair, encode("abc x"), 3),  # spaces at the end of a context go to the continuation
        logp(pair, [*encode("abc"), *best], 3),
    ]
    for (value, greedy), (true_value, true_greedy) in zip(found, expected, strict=True):
        assert value == pytest.approx(true_value, abs=1e-4)  # sums of a few float32 logits of size 10
        assert greedy == true_greedy
    assert found[3][1]
    assert not found[1][1]


def test_rolling_windows_predict_each_token_once_with_the_most_context(pair):
    from specbeam.lab.evaluate.harness import HarnessModel

    model = HarnessModel(pair, max_length=6)
    text = "abcdefghijklmnop"
    ids = pair.tokenizer(text, add_special_tokens=False)["input_ids"]
    start = pair.tokenizer.bos_token_id
    expected = logp(pair, [start, *ids[:6]], 1)[0]
    for first in range(6, len(ids), 6):
        last = min(first + 6, len(ids))
        window = ids[last - 7 : last]
        expected += logp(pair, window, len(window) - (last - first))[0]
    assert model.loglikelihood_rolling([asked(text)]) == [pytest.approx(expected, abs=1e-4)]


def test_texts_are_those_of_transformers_beam_search_and_end_at_stop_texts(pair, model):
    wanted = {"until": [], "num_beams": 3, "do_sample": False, "max_gen_toks": 8}
    found = model.generate_until([asked(text, wanted) for text in WORDS])
    for text, answer in zip(WORDS, found, strict=True):
        ids = torch.tensor([pair.tokenizer(text)["input_ids"]])
        true = pair.target_model.generate(ids, num_beams=3, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
        assert answer == pair.tokenizer.decode(true, skip_special_tokens=True)
    stop = found[0][2]
    (cut,) = model.generate_until([asked(WORDS[0], wanted | {"until": [stop], "num_beams": 1})])
    (whole,) = model.generate_until([asked(WORDS[0], wanted | {"num_beams": 1})])
    assert cut == whole.split(stop)[0]


def test_an_empty_context_is_the_prefix_token(pair, model):
    (found,) = model.generate_until([asked("", {"max_gen_toks": 4, "until": []})])
    (alone,) = sb.generate(pair, [pair.tokenizer.bos_token_id], sb.greedy(), max_new_tokens=4)
    assert found == alone.text


def test_what_a_task_asks_for_chooses_the_method_or_is_refused(pair, model):
    from specbeam.lab.evaluate.harness import HarnessModel

    method, options = model.method_and_options({"until": ["."], "num_beams": 4})
    assert (method.name, method.beams) == ("speculative_beam_search", 4)
    assert "temperature" not in options
    method, options = model.method_and_options({"do_sample": True, "temperature": 0.7, "top_p": 0.9})
    assert method.name == "speculative_sampling"
    assert (options["temperature"], options["top_p"]) == (0.7, 0.9)
    assert model.method_and_options({})[1]["temperature"] == 0
    own = HarnessModel(pair, method="dsbd", temperature=1.0, beams=3)
    method, options = own.method_and_options({"do_sample": False})
    assert (method.beams, options["temperature"]) == (3, 1.0)
    with pytest.raises(BadSetting, match="asks for 4 beams, and dsbd has 3"):
        own.method_and_options({"num_beams": 4})
    with pytest.raises(NotSupported, match="draws with beams"):
        model.method_and_options({"num_beams": 4, "do_sample": True, "temperature": 1.0})
    with pytest.raises(BadSetting, match="no option magic"):
        model.generate_until([asked("abc", {"magic": 1, "max_gen_toks": 8})])
    with pytest.raises(BadSetting, match="but there is no method"):
        HarnessModel(pair, beams=3)


def test_a_task_runs_offline_and_scores_as_transformers_beam_search_does(pair, model, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager
    from sacrebleu import corpus_chrf

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    answers = ["def", "hello you", "then", "because", "xyz"]
    rows = [{"question": text, "right": answer} for text, answer in zip(WORDS, answers, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "small.yaml").write_text(f"""
task: small
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{right}}}}"
generation_kwargs: {{num_beams: 3, do_sample: false, max_gen_toks: 8, until: []}}
metric_list: [{{metric: chrf, aggregation: chrf, higher_is_better: true}}]
""")
    found = lm_eval.simple_evaluate(
        model, tasks=["small"], task_manager=TaskManager(include_path=str(tmp_path)), bootstrap_iters=0
    )
    texts = []
    for text in WORDS:
        ids = torch.tensor([pair.tokenizer(text)["input_ids"]])
        new = pair.target_model.generate(ids, num_beams=3, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
        texts.append(pair.tokenizer.decode(new, skip_special_tokens=True))
    expected = corpus_chrf(texts, [answers]).score
    assert found["results"]["small"]["chrf,none"] == pytest.approx(expected)
