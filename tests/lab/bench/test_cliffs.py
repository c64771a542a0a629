"""The table of cliffs measures what is asked for, flags what falls off, and says what cannot be done."""

import json

import pytest

from specbeam.errors import MissingPackage
from specbeam.lab.bench.baselines import transformers
from specbeam.lab.bench.cliffs import (
    RANDOM_TOKENS,
    Attempt,
    CliffPlan,
    SpeedCell,
    cliffs,
    contenders_of,
    flagged,
    prompts_of,
    random_prompts,
    replaced_mode,
    settings_of,
    why_not_ours,
    why_not_theirs,
    with_rates,
)
from specbeam.lab.bench.cliffs_report import as_markdown, figures, overview, summary
from specbeam.lab.bench.outcome import Contender, Outcome
from specbeam.lab.words import CLIFF_METHODS, CLIFF_OPTIONS
from tests.doors.cli.test_commands import specbeam
from tests.support import words

SENTENCES = ["abc", "Hello", "no"]


def cell(option, ours, theirs, method="dsbd", size=1, kind="trained"):
    """A cell of made-up figures, tokens per second by round."""
    empty = SpeedCell(method, option, size, kind, "beam_sampling")
    return with_rates(empty, ours, theirs)


def quick(**changes):
    known = {"methods": ["sampling", "dsbd"], "options": ["none", "top_p"], "batch_sizes": [1], "rows": 1, "repeats": 2}
    return CliffPlan(**{**known, "max_new_tokens": 5, **changes})


def measured(plan, pair=None):
    return [one for some in cliffs(pair or words.pair(), plan, SENTENCES) for one in some]


def test_ratios_are_taken_round_by_round():
    found = cell("none", [10, 30, 20], [10, 10, 40])
    assert (found.ours.median, found.theirs.median) == (20, 10)
    assert (found.ratio.low, found.ratio.median, found.ratio.high) == (0.5, 1, 3)


def test_what_is_slower_than_transformers_is_flagged():
    quicker, slower, equal = flagged(
        [cell("none", [20, 21], [10, 10]), cell("top_p", [19, 19], [20, 38]), cell("min_p", [15, 15], [15, 15])]
    )
    assert quicker.flags == equal.flags == ()
    assert slower.flags == ("slower",)


def test_what_falls_below_half_of_the_methods_best_is_a_cliff():
    best, half, below = flagged([cell("none", [100], [1]), cell("top_p", [50], [1]), cell("audit", [49], [])])
    assert [one.of_best for one in (best, half, below)] == [1, 0.5, 0.49]
    assert [one.flags for one in (best, half, below)] == [(), (), ("cliff",)]
    both = flagged([cell("none", [100], [1]), cell("top_p", [10], [20])])[1]
    assert both.flags == ("slower", "cliff")


def test_the_best_is_that_of_the_same_method_prompts_and_batch_size():
    others = [
        cell("none", [900], [1], method="sampling"),
        cell("none", [900], [1], size=16),
        cell("none", [900], [1], kind="random"),
    ]
    own = flagged([*others, cell("none", [100], [1]), cell("top_p", [90], [1])])[-1]
    assert own.of_best == 0.9
    assert own.flags == ()


def test_a_cell_without_figures_has_no_flags():
    ours, theirs = flagged([cell("stream", [], []), cell("grammar", [5], [])])
    assert (ours.ours, ours.of_best, ours.flags) == (None, None, ())
    assert (theirs.theirs, theirs.ratio, theirs.flags) == (None, None, ())


def test_what_cannot_be_done_says_why():
    assert why_not_ours("greedy", "top_p", 1) == why_not_ours("beam_search", "min_p", 4) == "no draws"
    assert why_not_ours("dsbd", "stream", 4) == "one prompt"
    assert why_not_ours("dsbd", "stream", 1) == why_not_ours("dsbd", "grammar", 64) == ""
    assert why_not_theirs("sampling", "grammar", 1) == "no grammar"
    assert why_not_theirs("greedy", "audit", 1) == "no audit"
    assert why_not_theirs("beam_sampling", "stream", 1) == "no beams"
    assert why_not_theirs("assisted", "stop_strings", 1) == "no stops"
    assert why_not_theirs("sampling", "stream", 1) == why_not_theirs("beam_search", "stop_strings", 4) == ""


def test_assisted_decoding_stands_beside_one_prompt_only():
    assert replaced_mode("speculative_sampling", 1) == "assisted"
    assert replaced_mode("speculative_sampling", 2) == "sampling"
    ours, theirs = contenders_of(CliffPlan(options=["none"]), 1)
    assert len(ours) == len(CLIFF_METHODS)
    assert sorted(mode for mode, _ in theirs) == ["assisted", "beam_sampling", "beam_search", "greedy", "sampling"]


def test_random_prompts_hold_no_special_tokens():
    pair = words.pair()
    prompts = random_prompts(pair, 40)
    assert {len(one) for one in prompts} == {RANDOM_TOKENS}
    special = {*pair.eos, *pair.tokenizer.all_special_ids}
    assert not special & {token for one in prompts for token in one}
    assert prompts == random_prompts(pair, 40)
    assert prompts[0] != prompts[1]


def test_batches_are_full():
    assert prompts_of(words.pair(), "trained", SENTENCES, 5) == ["abc", "Hello", "no", "abc", "Hello"]
    seen = []
    plan = quick(methods=["sampling"], options=["none"], batch_sizes=[4], rows=5)
    list(cliffs(words.pair(), plan, SENTENCES, lambda: seen.append(1)))
    assert len(seen) == 2 * plan.runs(4) == 2 * (1 + 2 * 2)


@pytest.mark.parametrize(
    ("size", "methods"),
    [(1, [*CLIFF_METHODS]), (2, ["dsbd", "beam_search"]), pytest.param(2, [*CLIFF_METHODS], marks=pytest.mark.slow)],
    ids=["1", "2", "2, all"],
)
def test_every_option_of_every_method_is_measured(size, methods):
    """Or says why not: no contender breaks."""
    plan = quick(methods=methods, options=CLIFF_OPTIONS, batch_sizes=[size], repeats=1)
    cells = measured(plan)
    assert len(cells) == len(methods) * len(CLIFF_OPTIONS)
    for one in cells:
        assert one.message == "", one
        assert (one.ours is None) == bool(one.why_not_ours) == bool(why_not_ours(one.method, one.option, size))
        assert (one.theirs is None) == bool(one.why_not_theirs)
        assert (one.ratio is None) == (one.ours is None or one.theirs is None)


def test_random_prompts_are_measured_beside_the_others():
    cells = measured(quick(kinds=["trained", "random"], batch_sizes=[1, 2]))
    assert {(one.kind, one.batch_size) for one in cells} == {
        ("trained", 1), ("trained", 2), ("random", 1), ("random", 2)
    }  # fmt: skip
    assert all(one.ratio.low <= one.ratio.median <= one.ratio.high for one in cells)


def test_what_breaks_costs_its_own_cell_only():
    cells = measured(quick(methods=["speculative_sampling", "sampling"]), words.pair(draft_seed=None))
    broken = [one for one in cells if one.method == "speculative_sampling"]
    assert {one.why_not_ours for one in broken} == {"NotSupported"}
    assert all("drafts with a model" in one.message for one in broken)
    assert all(one.ratio is not None for one in cells if one.method == "sampling")
    assert "What broke:" in as_markdown(cells)


def test_a_contender_that_broke_is_not_asked_again():
    asked = []

    def run(prompts, seed):
        asked.append(seed)
        if seed == 1:
            raise RuntimeError("no more")
        return Outcome([[1, 2]])

    attempt = Attempt(lambda: Contender("fragile", run))
    assert [attempt.run(["abc"], seed).tokens for seed in range(4)] == [[[1, 2]], [], [], []]
    assert asked == [0, 1]
    assert attempt.why_not == "RuntimeError"
    assert Attempt(lambda: Contender("x", run), failure=MissingPackage("pip")).why_not == "not installed"


def test_transformers_is_given_the_same_options():
    pair = words.pair()

    def answer(prompt, **options):
        return transformers(pair, "greedy", max_new_tokens=12, **options).run([prompt], 0).tokens[0]

    assert len(answer("abc")) == 1  # ends at once
    free = answer("abc", min_new_tokens=12)
    assert len(free) == 12
    assert answer("abc", min_new_tokens=12, repetition_penalty=5.0) != free
    assert answer(pair.tokenizer("abc")["input_ids"], min_new_tokens=12) == free
    assert settings_of("min_new_tokens", 24) == {"max_new_tokens": 24, "min_new_tokens": 12}
    assert settings_of("top_p", 5) == {"max_new_tokens": 5, "top_p": 0.9, "temperature": 0.7}


def test_what_fills_a_stopped_row_is_not_counted():
    """The first row stops; what stands behind until the other one ends are no tokens of its answer."""
    pair, options = words.pair(), {"max_new_tokens": 12, "min_new_tokens": 12}
    free = transformers(pair, "greedy", **options).run(["abc", "Hello"], 0).tokens
    stop = pair.tokenizer.decode(free[0][:3])
    assert stop not in pair.tokenizer.decode(free[1])
    stopped = transformers(pair, "greedy", **options, stop_strings=[stop]).run(["abc", "Hello"], 0).tokens
    assert stopped == [free[0][:3], free[1]]


def test_the_tables_show_figures_flags_and_reasons():
    refused = SpeedCell("dsbd", "stream", 1, "trained", "beam_sampling", why_not_ours="one prompt")
    lonely = with_rates(SpeedCell("dsbd", "audit", 1, "trained", "beam_sampling", why_not_theirs="no audit"), [40], [])
    cells = flagged([cell("none", [100, 120, 110], [50, 60, 50]), cell("top_p", [20], [40]), lonely, refused])
    assert summary(cells).startswith("3 cells of 4 measured: 1 of 2 slower than transformers, 2 below half")
    shown = overview(cells).splitlines()
    assert shown[0] == "| ratio to transformers | none | top_p | audit | stream |"
    assert shown[2] == "| dsbd | 2.00 | 0.50 **slower** **cliff** | (no audit) **cliff** | one prompt |"
    lines = figures(cells).splitlines()
    assert len(lines) == 2 + len(cells)
    assert "| 110.0 (100.0 to 120.0) | beam sampling | 50.0 (50.0 to 60.0) | 2.00 (2.00 to 2.20) | 1.00 |" in lines[2]
    assert as_markdown(cells).count("## trained prompts, 1 at once") == 1


def test_the_command_measures_and_writes(tmp_path):
    target, draft = words.saved(tmp_path)
    asked = ["bench", "cliffs", "-m", target, "-d", draft, "--methods", "sampling, dsbd width=dynamic"]
    asked += ["--options", "none,stream", "--batch-sizes", "1,2", "--kinds", "trained,random", "--rows", "2"]
    asked += ["--repeats", "1", "--max-new-tokens", "4"]
    code, out, err = specbeam(*asked, "--markdown", str(tmp_path / "x.md"), "--json", str(tmp_path / "x.jsonl"))
    assert code == 0, err
    assert out == (tmp_path / "x.md").read_text()
    assert "## random prompts, 2 at once" in out
    assert "commit: " in out
    records = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert len(records) == 2 * 2 * 2 * 2
    assert records[0]["method"] == "sampling"
    assert records[0]["ratio"]["median"] > 0
    assert records[0]["provenance"]["command"].startswith("specbeam bench cliffs")
    assert {one["why_not_ours"] for one in records if one["option"] == "stream"} == {"", "one prompt"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "sampling,magic"], "--methods is 'magic'; it must be one of sampling"),
        (["--options", "top_q"], "--options is 'top_q'; it must be one of none"),
        (["--kinds", "nice"], "--kinds is 'nice'; it must be one of trained, random"),
        (["--batch-sizes", "1,many"], "--batch-sizes is '1,many'; it must be numbers of at least 1, like 1,4,16"),
        (["--batch-sizes", "0"], "--batch-sizes is '0'; it must be numbers of at least 1, like 1,4,16"),
        (["--repeats", "0"], "Invalid value for '--repeats'"),
        (["--json", "nowhere/x.jsonl"], "there is no folder nowhere for x.jsonl"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_loaded(arguments, message):
    code, _, err = specbeam("bench", "cliffs", *arguments)
    assert code == 2
    assert message in err
