"""What commands take as a model is what `load` takes, and it is known before anything heavy is imported."""

import pytest

from specbeam.doors.model_files import check_model, has_chat_template
from specbeam.errors import MissingFile, NotSupported


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for folder in ("one", "two", "adapter", "memory"):
        (tmp_path / folder).mkdir()
    for file in ("one/model.gguf", "two/first.gguf", "two/second.gguf"):
        (tmp_path / file).write_bytes(b"GGUF")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "memory" / "memory.json").write_text("{}")


@pytest.mark.parametrize(
    "name",
    [
        "model.gguf",
        "./model.gguf",
        "one",
        "adapter",
        "memory",
        "organisation/name",
        "name-1.5",
        "vllm:organisation/name",
        "openai:http://127.0.0.1:8000",
        "llama.cpp:model.gguf",
        "llama.cpp:/some/folder/model.gguf",
        "a-plug-in:anything at all",
    ],
)
def test_every_kind_of_model_is_left_to_loading(name, here):
    check_model(name)
    assert has_chat_template(name)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("missing.gguf", MissingFile, "there is no file missing.gguf"),
        ("two", MissingFile, r"holds 2 GGUF files \(first.gguf, second.gguf\)"),
        ("some folder", MissingFile, "there is no folder some folder"),
        ("a/b/c", MissingFile, "there is no folder a/b/c"),
        ("C:", MissingFile, "there is no folder C:"),
    ],
)
def test_a_name_that_can_be_no_model_is_explained(name, error, said, here):
    with pytest.raises(error, match=said):
        check_model(name)


def test_a_part_of_a_gguf_model_is_refused(here, tmp_path):
    (tmp_path / "model-00001-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(NotSupported, match="is part 1 of 2 of a split GGUF model"):
        check_model("model-00001-of-00002.gguf")
