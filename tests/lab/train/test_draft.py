"""A draft trained from prompts alone: it learns, it goes on after a kill, it is loaded, and wrong input is refused."""

import io
import json
import shutil

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.errors import BadPrompt, BadSetting, MissingFile, VocabularyMismatch
from specbeam.lab.train import DrawPlan, Schedule, drawing, fitting, train_draft
from specbeam.lab.train.draft import principal_components
from specbeam.lab.train.lessons import split
from tests.support import words
from tests.support.tiny_models import tiny

DRAWS = DrawPlan(beams=2, max_new_tokens=4, seed=2)
SCHEDULE = Schedule(epochs=3, rate=0.02, embedding_rate=0.01, batch_tokens=200, seed=3)
PROMPTS: list = [[1 + number % 7, 2 + number % 5, 3 + number % 11] for number in range(60)]


@pytest.fixture(scope="module")
def pair():
    return sb.load(tiny("llama"))


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(drawing, "FILE_TREES", 16)


def trained(pair, out, **changes):
    return train_draft(pair, PROMPTS, out, layers=1, hidden=64, draws=DRAWS, schedule=SCHEDULE, **changes)


def weights_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_a_draft_learns_and_is_used(pair, small_files, tmp_path):
    seen = []
    done = trained(pair, tmp_path, report=lambda *what: seen.append(what))
    acceptances = [point.acceptance for point in done.curve]
    assert acceptances[-1] > acceptances[0] + 0.02
    assert done.curve[-1].epoch == 3
    assert seen[-1] == ("training", 12, 12)
    assert [json.loads(line)["epoch"] for line in (tmp_path / "training" / "curve.jsonl").open()] == [0, 1, 2, 3]
    loaded = sb.load(pair.target_model, draft=tmp_path)
    ours = sb.generate(loaded, [PROMPTS[0]], sb.dsbd(2, width="fixed"), seed=1, max_new_tokens=6)
    plain = sb.generate(loaded, [PROMPTS[0]], sb.beam_sampling(2), seed=1, max_new_tokens=6)
    assert ours[0].tokens == plain[0].tokens
    assert done.weights == sum(weight.numel() for weight in loaded.draft_model.parameters())


def test_a_training_that_was_killed_goes_on_where_it_was(pair, small_files, tmp_path, monkeypatch):
    """Killed while drawing, and again while learning: the weights are those of a training that was not disturbed."""
    trained(pair, tmp_path / "whole")
    monkeypatch.setattr(fitting, "STATE_S", 0.0)

    class Killed(BaseException):
        pass

    def kill_at(what, when):
        def report(name, done, total):
            if (name, done) == (what, when):
                raise Killed

        return report

    drawn = tmp_path / "parts" / "training" / "trees"
    with pytest.raises(Killed):
        trained(pair, tmp_path / "parts", report=kill_at("drawing", 32))
    before = {path: path.stat().st_mtime_ns for path in drawn.glob("trees-*.npz")}
    assert len(before) == 2
    with pytest.raises(Killed):
        trained(pair, tmp_path / "parts", report=kill_at("training", 6))
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    done = trained(pair, tmp_path / "parts")
    assert [point.epoch for point in done.curve] == [0, 1, 2, 3]
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_half_written_file_is_none(pair, small_files, tmp_path):
    """Killed while a file was written: it is drawn again, and is the same."""
    trained(pair, tmp_path)
    trees = tmp_path / "training" / "trees"
    whole = (trees / "trees-00000.npz").read_bytes()
    (trees / "trees-00000.npz").rename(trees / "trees-00000.npz.part")
    (trees / "trees-00000.npz.part").write_bytes(whole[:100])
    trained(pair, tmp_path)
    assert not (trees / "trees-00000.npz.part").exists()
    np.testing.assert_array_equal(np.load(trees / "trees-00000.npz")["tokens"], np.load(io.BytesIO(whole))["tokens"])


def test_a_folder_with_another_training_is_refused(pair, small_files, tmp_path):
    trained(pair, tmp_path)
    with pytest.raises(BadSetting, match=r"variation 0.5 \(now 1.0\)"):
        trained(pair, tmp_path, variation=1.0)


def test_a_finished_training_is_not_done_again(pair, small_files, tmp_path):
    first = trained(pair, tmp_path)
    before = weights_of(tmp_path)
    again = trained(pair, tmp_path)
    assert again.curve[1:] == first.curve[1:]
    assert all(torch.equal(before[name], weights_of(tmp_path)[name]) for name in before)


def test_it_goes_on_from_a_model(pair, small_files, tmp_path):
    """A draft that is the target itself starts with an acceptance of 1, and of its own size."""
    pair.target_model.save_pretrained(tmp_path / "start")
    done = trained(pair, tmp_path / "out", start=tmp_path / "start")
    assert done.curve[0].acceptance == pytest.approx(1, abs=1e-3)
    assert done.weights == sum(weight.numel() for weight in pair.target_model.parameters())


@pytest.mark.parametrize("rows", [64, 72])
def test_it_goes_on_from_a_model_with_a_padded_vocabulary(small_files, tmp_path, rows):
    target = sb.load(tiny("llama"), tokenizer=words.tokenizer())
    tiny("llama", seed=4, vocab_size=rows).save_pretrained(tmp_path / "start")
    words.tokenizer().save_pretrained(tmp_path / "start")
    done = trained(target, tmp_path / "out", start=tmp_path / "start")
    assert done.curve[-1].acceptance > done.curve[0].acceptance
    assert sb.load(target.target_model, tmp_path / "out", tokenizer=target.tokenizer).draft.shared is None


def test_a_model_with_other_tokens_is_refused(pair, small_files, tmp_path):
    tiny("llama", vocab_size=99).save_pretrained(tmp_path / "start")
    with pytest.raises(VocabularyMismatch):
        trained(pair, tmp_path / "out", start=tmp_path / "start")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"hidden": 65}, "hidden is 65; it must be a multiple of 64"),
        ({"variation": 2}, "variation is 2"),
    ],
)
def test_wrong_options_are_refused(pair, tmp_path, changes, said):
    with pytest.raises(BadSetting, match=said):
        train_draft(pair, PROMPTS, tmp_path, **changes)
    assert not tmp_path.joinpath("training").exists()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DrawPlan(beams=0), "beams is 0"),
        (lambda: DrawPlan(temperature=0), "temperature is 0"),
        (lambda: Schedule(epochs=0), "epochs is 0"),
        (lambda: Schedule(rate=0), "rate is 0"),
        (lambda: Schedule(batch_tokens=0), "batch_tokens is 0"),
        (lambda: Schedule(warm=0.0), "warm is 0"),
        (lambda: Schedule(decay=2.0), "decay is 2"),
        (lambda: DrawPlan(top_p=0.0), "top_p is 0"),
        (lambda: DrawPlan(max_new_tokens=0), "max_new_tokens is 0"),
    ],
)
def test_wrong_schedules_and_draws_are_refused(make, said):
    with pytest.raises(BadSetting, match=said):
        make()


def test_prompts_that_nothing_can_be_drawn_below_are_refused(pair, tmp_path, monkeypatch):
    with pytest.raises(BadSetting, match="1 distinct prompts; training needs at least 2"):
        train_draft(pair, [[1, 2], [1, 2]], tmp_path / "few")
    longer = [[1] * 5000, [2] * 5000]
    with pytest.raises(BadPrompt, match="can continue none of the 1 held-out prompts"):
        train_draft(pair, longer, tmp_path / "long")
    monkeypatch.setattr(drawing, "FILE_TREES", 16)
    mixed = [*PROMPTS, *([3] * 5000 + [number] for number in range(20))]  # a file may hold none that can be continued
    done = train_draft(pair, mixed, tmp_path / "mixed", layers=1, hidden=64, draws=DRAWS, schedule=Schedule(epochs=1))
    assert done.curve[-1].epoch == 1


def test_what_fails_before_the_drawing_does_not_lock_the_folder(pair, small_files, tmp_path):
    with pytest.raises(MissingFile):
        trained(pair, tmp_path, start=tmp_path / "typo")
    trained(pair, tmp_path)


@pytest.mark.parametrize(
    "name", ["options.json", "trees/options.json", "trees/held_out.npz", "trees/trees-00001.npz", "state.pt"]
)
@pytest.mark.parametrize("content", [b"", b"broken", b"{}"])
def test_a_broken_file_is_named(pair, small_files, tmp_path, name, content):
    trained(pair, tmp_path)
    path = tmp_path / "training" / name
    path.write_bytes(content)
    emptied = name.endswith("options.json") and content == b"{}"
    said = "holds work with beams None" if emptied else f"{path.name} is broken"
    with pytest.raises(BadSetting, match=said):
        trained(pair, tmp_path)


def test_trees_of_an_unknown_training_are_not_taken(pair, small_files, tmp_path):
    trained(pair, tmp_path)
    (tmp_path / "training" / "options.json").unlink()
    with pytest.raises(BadSetting, match=r"state.pt, but no options.json"):
        trained(pair, tmp_path)
    (tmp_path / "training" / "state.pt").unlink()
    (tmp_path / "training" / "trees" / "options.json").unlink()
    with pytest.raises(BadSetting, match=r"trees-\*.npz, but no options.json"):
        trained(pair, tmp_path)


def test_a_folder_that_is_a_file_is_refused(pair, tmp_path):
    (tmp_path / "file").write_text("a text")
    with pytest.raises(BadSetting, match="cannot be written"):
        trained(pair, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "a text"


def test_other_prompts_of_the_same_number_are_another_training(pair, small_files, tmp_path):
    trained(pair, tmp_path)
    with pytest.raises(BadSetting, match="prompts '60, "):
        train_draft(
            pair, [[2, *PROMPTS[0]], *PROMPTS[1:]], tmp_path, layers=1, hidden=64, draws=DRAWS, schedule=SCHEDULE
        )


def test_a_model_with_dropout_learns_without_it(small_files, tmp_path):
    pair = sb.load(tiny("gpt2"))
    tiny("gpt2", resid_pdrop=0.5).save_pretrained(tmp_path / "start")
    done = train_draft(
        pair, PROMPTS, tmp_path / "out", start=tmp_path / "start", draws=DRAWS, schedule=Schedule(epochs=1, rate=1e-4)
    )
    assert done.curve[0].acceptance == pytest.approx(1, abs=1e-3)


def test_a_prompt_is_not_on_both_sides():
    learnt, held = split(["a", "b", "a", "b", "a", [1, 2], [1, 2]], 0)
    assert sorted(map(str, learnt + held)) == ["[1, 2]", "a", "b"]


def test_a_tenth_is_held_out_and_nothing_is_lost():
    learnt, held = split([str(number) for number in range(50)], 0)
    assert len(held) == 5
    assert sorted([*learnt, *held], key=int) == [str(number) for number in range(50)]
    assert split(["a", "b"], 0)[1]


def test_principal_components_keep_what_is_similar():
    torch.manual_seed(0)
    vectors = torch.randn(40, 3) @ torch.randn(3, 16)
    found = principal_components(vectors, 8, 0.02)
    assert found.shape == (40, 8)
    assert found[:, :3].std().item() == pytest.approx(0.02 * (8 / 3) ** 0.5, rel=0.01)
    near = torch.cdist(vectors, vectors)
    kept = torch.cdist(found, found)
    assert np.corrcoef(near.flatten(), kept.flatten())[0, 1] > 0.99
    assert principal_components(vectors, 20, 0.02).shape == (40, 20)


def test_the_command_trains_and_prints_the_curve(tmp_path, capsys):
    from typer.testing import CliRunner

    from specbeam.doors.cli.main import app

    sentences = tmp_path / "sentences.txt"
    sentences.write_text("Ein Hund läuft.\nWo ist mein Hut?\nSie liest ein Buch.\nEr schläft.\n", encoding="utf-8")
    out = tmp_path / "draft"
    args = ["train", "draft", "--data", str(sentences), "-o", str(out), "--layers", "1", "--hidden", "64"]
    done = CliRunner().invoke(app, [*args, "--epochs", "1", "--max-new-tokens", "4", "--rows", "4"])
    assert done.exit_code == 0, done.output
    assert "acceptance, held out" in done.output
    assert (out / "model.safetensors").exists()
    shutil.rmtree(out)
    done = CliRunner().invoke(app, ["train", "draft", "-o", str(out)])
    assert isinstance(done.exception, BadSetting)
    assert "--data is missing" in str(done.exception)
