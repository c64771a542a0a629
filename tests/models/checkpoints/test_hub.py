"""Names on the hub without a network: one sentence, at once, and what the cache holds is found."""

import socket
import time

import huggingface_hub
import pytest
from huggingface_hub import constants
from transformers import PreTrainedModel

import specbeam as sb
from specbeam.core import compiling
from specbeam.errors import MissingFile
from specbeam.models.checkpoints import hub
from specbeam.models.heads.read import is_head
from specbeam.models.loading import known_folders
from specbeam.models.stand_ins import StandInModel
from tests.support import words
from tests.support.tiny_models import tiny


@pytest.fixture
def unreachable(monkeypatch):
    """A hub at a port of this machine where nothing listens; a try that is repeated is an error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_FOUND", {})

    def repeats(seconds):
        raise AssertionError(f"a request was to be repeated after {seconds} s")

    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", repeats)
    return port


@pytest.mark.parametrize(
    "given",
    [
        {"target": "org/none"},
        {"target": "bundled", "draft": "org/none"},
        {"target": "bundled", "tokenizer": "org/none"},
        {"target": "org/none", "draft": "org/none-eagle"},
    ],
    ids=["target", "draft", "tokenizer", "both"],
)
def test_an_unknown_name_without_a_network_is_one_sentence_at_once(unreachable, given):
    began = time.monotonic()
    with pytest.raises(MissingFile, match="org/none") as raised:
        sb.load(**given)
    assert time.monotonic() - began < 10
    assert "\n" not in str(raised.value)
    assert constants.HF_HUB_OFFLINE is False


def test_a_name_that_is_not_found_says_that_the_hub_was_not_asked(unreachable, monkeypatch):
    with pytest.raises(MissingFile, match=r"; 127\.0\.0\.1 cannot be reached from here, so only the hub's cache"):
        sb.load("org/none")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MissingFile, match="; HF_HUB_OFFLINE is set, so only the hub's cache was looked at"):
        sb.load("org/none")
    assert constants.HF_HUB_OFFLINE is True


def keep_revision(cache, revision, folder):
    """Make a folder the present revision of org/kept in a cache of the hub."""
    kept = cache / "models--org--kept"
    for part in ("snapshots", "refs"):
        (kept / part).mkdir(parents=True, exist_ok=True)
    (kept / "snapshots" / revision).symlink_to(folder)
    (kept / "refs" / "main").write_text(revision)


def test_a_name_in_the_cache_loads_without_a_network(unreachable, tmp_path, monkeypatch):
    saved, _ = words.saved(tmp_path / "saved")
    keep_revision(tmp_path / "cache", "0" * 40, saved)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert not is_head("org/kept")
    found = sb.load("org/kept")
    assert sb.generate(found, "abc", "greedy", max_new_tokens=3)[0].tokens


@pytest.mark.skipif(not compiling.AVAILABLE, reason="needs numba")
def test_a_name_that_was_loaded_before_has_stand_ins_of_its_present_revision(unreachable, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for seed, revision in ((1, "a" * 40), (2, "b" * 40)):
        folder = tmp_path / revision
        tiny("llama", seed=seed).save_pretrained(folder)
        keep_revision(tmp_path / "cache", revision, folder)
        asked = [sb.load(name, "org/kept", tokenizer=False) for name in (folder, "org/kept")]
        assert isinstance(vars(asked[1])["target_model"], StandInModel)
        assert vars(asked[1])["target_model"].name_or_path == "org/kept"
        texts = [sb.generate(pair, [5, 6, 7], seed=3, max_new_tokens=12)[0].tokens for pair in asked]
        assert texts[0] == texts[1]
        assert isinstance(asked[1].target_model, PreTrainedModel)


def test_the_names_of_ways_to_draft_are_not_looked_up(monkeypatch):
    monkeypatch.setattr(known_folders, "snapshot_of", lambda name: pytest.fail(f"{name} was looked up"))
    for name in ("swift", "mtp", "int8", "bitsandbytes-nf4"):
        assert not known_folders.is_model_folder(name)


def test_a_hub_that_answers_is_asked_and_a_proxy_stands_for_it(unreachable, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert not hub.can_be_reached()
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        assert hub.can_be_reached()
        assert hub.hub_note() == ""
        with hub.hub_lookups("org/none"):
            assert constants.HF_HUB_OFFLINE is False


def test_nothing_is_asked_about_a_folder(tmp_path, monkeypatch):
    def asks(*given):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "_connects", asks)
    monkeypatch.setattr(hub, "_FOUND", {})
    target, draft = words.saved(tmp_path)
    sb.load(target, draft)
