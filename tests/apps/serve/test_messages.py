"""The words of the server: its log while it starts, its configuration, and its refusals."""

import json
import logging
import re

import pytest

pytest.importorskip("fastapi")

from specbeam.apps.serve import logs
from specbeam.apps.serve.asking import _name_constraint
from specbeam.apps.serve.config import ServerConfig, read_config
from specbeam.apps.serve.protocol import ChatBody, CompletionBody, parse_body
from specbeam.apps.serve.refusals import Refusal, invalid
from specbeam.doors.progress import CompilationWatch
from specbeam.errors import BadSetting


def image(kind):
    return {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "u"}}]}]
    }


@pytest.mark.parametrize(
    ("body", "given", "message"),
    [
        (ChatBody, image("image_url"), "messages.0.content.1 is of type 'image_url': images are not supported; send parts of type 'text'"),
        (ChatBody, image("input_audio"), "messages.0.content.1 is of type 'input_audio': sounds are not supported; send parts of type 'text'"),
        (CompletionBody, {"prompt": 5}, "prompt is 5: it must be a string or a list"),
        (CompletionBody, {"prompt": "a", "specbeam": "dsbd"}, "specbeam is 'dsbd': it must be an object"),
        (CompletionBody, {"prompt": "a", "seed": "x"}, "seed is 'x': it must be an integer"),
        (CompletionBody, {"prompt": "a", "echo": 3}, "echo is 3: it must be a boolean"),
    ],
    ids=["image", "sound", "union", "object", "integer", "boolean"],
)  # fmt: skip
def test_a_wrong_type_is_named_in_the_words_of_json(body, given, message):
    with pytest.raises(Refusal) as refused:
        parse_body(body, json.dumps(given).encode())
    assert refused.value.message == message


def test_a_wrong_setting_of_the_operator_gets_the_nearest_name_and_all_allowed_levels(tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("modle: bundled\nthread: 2\n")
    with pytest.raises(BadSetting, match=r"modle \(did you mean model\?\), thread \(did you mean threads\?\)"):
        read_config(file, {})
    with pytest.raises(BadSetting, match="it must be one of debug, info, warning, error"):
        ServerConfig(log_level="loud")
    with pytest.raises(BadSetting, match="threads is -1"):
        ServerConfig(threads=-1)


def test_a_missing_package_of_a_constraint_is_named_by_the_field_of_the_request():
    refusal = invalid("json_schema needs llguidance: pip install llguidance", None, "not_supported")
    _name_constraint(refusal, "response_format")
    assert refusal.message == "response_format needs llguidance: pip install llguidance"
    assert refusal.param == "response_format"


def test_the_log_says_that_steps_are_compiled_at_once_and_from_time_to_time(monkeypatch, caplog):
    watch = CompilationWatch()
    monkeypatch.setattr(logs, "compilation_watch", lambda: watch)
    log = logs.CompilationLog(lambda: ["cmpl-1"])
    with caplog.at_level(logging.INFO, "specbeam.serve"):
        log.look(100.0)
        assert caplog.records == []
        assert logs.compilation_text() == ""
        watch.note(True)
        for now in (101.0, 102.0, 101.0 + logs.EVERY_S):
            log.look(now)
    lines = [json.loads(logs.JsonLines().format(record)) for record in caplog.records]
    lines = [line for line in lines if line.get("requests") == ["cmpl-1"]]  # not those of servers of other tests
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(
            r"compiling for this processor, once(: \d+ of \d+ steps| per kind of call: \d+ steps so far)",
            line["message"],
        )
