"""The examples of searches: the game and its value, the value of solutions, and a search from training to figures."""

import random
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent.parent / "examples" / "search"


@pytest.fixture
def examples(monkeypatch):
    """The modules of the examples, which are gone afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ["countdown", "train", "measure", "gsm8k", "train_value"]
    import countdown
    import gsm8k
    import measure
    import train
    import train_value

    yield countdown, train, measure, gsm8k, train_value
    for name in names:
        del sys.modules[name]


def test_the_value_of_a_game_is_whether_it_can_be_won(examples):
    countdown = examples[0]
    rng = random.Random(3)
    for _ in range(40):
        game, solution = countdown.play(rng)
        lines = solution.splitlines(keepends=True)
        for length in range(len(lines) + 1):
            assert countdown.value(game.prompt + "".join(lines[:length])) == 1.0
        assert countdown.is_solved(game.prompt + solution)
        assert not countdown.is_solved(game.prompt + "".join(lines[:-1]))
    start = "numbers 1 2 3 10 to 60:\n"
    assert countdown.value(start) == 1.0  # 1 * 2 * 3 * 10
    assert countdown.value(start + "10-3=7 left 1 2 7\n") == 0.0
    assert countdown.value(start + "2*3=6 left 1 6 10\n") == 1.0
    for wrong in ("2*3=7 left 1 7 10\n", "2*4=8 left 1 8 10\n", "2*3=6 left 1 6\n", "so it is\n"):
        assert countdown.value(start + wrong) == 0.0


def test_the_value_of_a_solution_is_that_of_its_sums_and_its_result(examples):
    gsm8k = examples[3]
    good = "He sold 48/2 = <<48/2=24>>24 clips.\nIn all <<48+24=72>>72.\n#### 72"
    assert gsm8k.value_of(good, 72) == 1.0
    assert gsm8k.value_of(good, 73) == 0.0
    assert gsm8k.value_of(good.split("\n")[0], 72) == gsm8k.HOPE
    assert gsm8k.value_of(good.replace("=24>>", "=25>>"), 72) == 0.0
    assert gsm8k.value_of("It is <<10/3=3.33>>3.33 each, <<-(+2)*3=-6>>.", 1) == gsm8k.HOPE
    assert gsm8k.value_of("It is <<1/0=3>>3.", 3) == 0.0
    assert gsm8k.result_of("#### 1,200.") == 1200


@pytest.mark.slow
def test_a_model_is_trained_and_searches_are_compared(examples, tmp_path):
    _, train, measure, _, train_value = examples
    train.main(tmp_path, minutes=0.05)
    train_value.main(tmp_path, tmp_path / "value", games=40, draws=2, epochs=1)
    measure.main(tmp_path, games=3, learnt=tmp_path / "value", plot_file=tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
