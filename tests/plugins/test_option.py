"""An option that another program adds reaches all doors: one entry of the table, and one processor (`stay_short.py`)."""

import json
import subprocess
import sys

import pytest

import specbeam as sb
from specbeam.doors.options import table
from specbeam.errors import BadSetting
from tests.plugins import stay_short
from tests.support import words

# A new process: what the command line and the server take is fixed when they are imported.
DOORS = """
import contextlib, io, json, sys
from tests.plugins import stay_short
stay_short.add()
from specbeam.doors.cli.main import main

def shell(*arguments):
    sys.argv = ["specbeam", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        main()
    return out.getvalue() + err.getvalue()

from specbeam.apps.serve.mapping import order_of
from specbeam.apps.serve.protocol import ChatBody, CompletionBody, parse_body
from specbeam.apps.serve.refusals import Refusal
from specbeam.apps.serve.app import served_of
from specbeam.apps.serve.config import ServerConfig
from tests.support import words

served = served_of(ServerConfig(model="tiny"), words.pair())
asked = {"prompt": "abc", "stay_short": 3, "max_tokens": 4}
order = order_of(parse_body(CompletionBody, json.dumps(asked).encode()), served)
refusals = []
for wrong in ({"stay_short": -1}, {"stay_shor": 1}):
    try:
        parse_body(CompletionBody, json.dumps({"prompt": "abc"} | wrong).encode())
    except Refusal as refusal:
        refusals.append(refusal.message)
answer = {"server": order.settings.stay_short, "refusals": refusals, "help": shell("generate", "--help")}
print(json.dumps(answer | {"refused": shell("generate", "abc", "--stay-short", "-1")}))
"""


@pytest.fixture
def option(monkeypatch):
    monkeypatch.setattr(table, "OPTIONS", table.OPTIONS)
    before = dict(table.OPTIONS)
    stay_short.add()
    yield table.OPTIONS["stay_short"]
    table.OPTIONS.clear()
    table.OPTIONS.update(before)


def test_an_added_option_changes_texts(option):
    pair = words.pair()
    prompts = ["abc", "Hello you"]
    plain, off = (sb.generate(pair, prompts, seed=1, max_new_tokens=40, **more) for more in ({}, {"stay_short": 0.0}))
    assert [one.tokens for one in off] == [one.tokens for one in plain]
    short = sb.generate(pair, prompts, seed=1, max_new_tokens=40, stay_short=30.0)
    assert all(len(one.tokens) <= 3 for one in short)
    assert "".join(sb.stream(pair, "abc", seed=1, max_new_tokens=40, stay_short=30.0)) == short[0].text
    own = stay_short.StayShort(30.0, pair.eos, len(short[0].prompt))
    by_hand = sb.generate(pair, ["abc"], seed=1, max_new_tokens=40, logits_processor=[own])
    assert by_hand[0].tokens == short[0].tokens


def test_an_added_option_is_checked_and_named_like_all_others(option):
    pair = words.pair()
    with pytest.raises(BadSetting, match="stay_short is -1; it must be >= 0"):
        sb.generate(pair, "abc", stay_short=-1)
    with pytest.raises(BadSetting, match=r"no option stay_shor \(did you mean stay_short\?\)"):
        sb.generate(pair, "abc", stay_shor=1)
    assert "stay_short" in table.row_names()
    with pytest.raises(BadSetting, match="there is an option stay_short already"):
        stay_short.add()


def test_an_added_option_reaches_the_command_line_and_the_server():
    done = subprocess.run([sys.executable, "-c", DOORS], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["server"] == 3
    assert "stay_short is -1" in found["refusals"][0]
    assert found["refusals"][1].endswith("did you mean stay_short?")
    assert "--stay-short" in found["help"]
    assert "stay_short is -1.0; it must be >= 0" in found["refused"]
