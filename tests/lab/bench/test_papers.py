"""The experiments of the papers: what is asked, what counts as right, and how a run goes on."""

import dataclasses
import json
import sqlite3

import pytest

import specbeam as sb
from specbeam.core.errors import BadSetting
from specbeam.lab.bench import paper_tasks
from specbeam.lab.bench.method_figures import Figure
from specbeam.lab.bench.paper_report import as_markdown, pareto_front, plot
from specbeam.lab.bench.paper_tasks import (  # fmt: skip
    PaperQuestion,
    mt_bench_task,
    rows_of,
    spider_match,
    spider_task,
    squad_match,
    squad_task,
)
from specbeam.lab.bench.papers import (
    PAPERS,
    AnswerLog,
    PaperGrid,
    PaperLine,
    answers_for_judge,
    contenders_of,
    lines_of_paper,
    run_paper,
)
from tests.support import words

SMALL = PaperGrid(widths=(1, 2), thresholds=(0.7,), depths=(2,), max_new_tokens=6).of("dsbd")


@pytest.fixture(scope="module")
def pair():
    return words.pair(max_position_embeddings=1024)


def lines(path, records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def squad_lines(path):
    rows = [{"id": f"{number}", "context": f"a b{number}", "question": "what", "answers": [f"the b{number}"]} for number in range(4)]  # fmt: skip
    return lines(path, rows)


def test_squad_asks_after_one_example_and_reads_both_of_its_formats(tmp_path):
    task = squad_task(squad_lines(tmp_path / "dev.jsonl"))
    official = {"data": [{"paragraphs": [{"context": f"a b{number}", "qas": [{"id": f"{number}", "question": "what", "answers": [{"text": f"the b{number}"}]}]} for number in range(4)]}]}  # fmt: skip
    (tmp_path / "dev.json").write_text(json.dumps(official))
    assert squad_task(tmp_path / "dev.json").questions == task.questions
    assert [one.id for one in task.questions] == ["1", "2", "3"]
    (prompt,) = task.questions[0].turns
    assert "Text: a b0\nQuestion: what\nAnswer: the b0\n\nText: a b1\nQuestion: what\nAnswer:" in prompt


@pytest.mark.parametrize(
    ("text", "right"),
    [(" the Denver Broncos!\nText: more", 1.0), (" denver  broncos", 1.0), (" Denver\nBroncos", 0.0), ("", 0.0)],
)
def test_squad_compares_the_text_before_the_first_newline_as_its_script_does(text, right):
    assert squad_match(PaperQuestion("", ("",), ["Denver Broncos", "Broncos of Denver"]), text) == right


@pytest.fixture
def spider(tmp_path):
    (tmp_path / "db" / "pets").mkdir(parents=True)
    database = sqlite3.connect(tmp_path / "db" / "pets" / "pets.sqlite")
    database.execute("create table dog(name, age)")
    database.executemany("insert into dog values (?, ?)", [("Rex", 3), ("Ada", 5), ("Bo", 5)])
    database.commit()
    database.close()
    schema = {"table_names_original": ["dog"], "column_names_original": [[-1, "*"], [0, "name"], [0, "age"]]}
    lines(tmp_path / "tables.jsonl", [schema | {"db_id": name} for name in ("pets", "cars")])
    asked = [
        {"db_id": "cars", "question": "How many?", "query": "SELECT count(*) FROM dog"},
        {"db_id": "pets", "question": "Who is 5?", "query": "SELECT name FROM dog WHERE age = 5"},
        {"db_id": "cars", "question": "Left out", "query": "SELECT 1"},
        {"db_id": "pets", "question": "In order?", "query": "SELECT name FROM dog ORDER BY name"},
    ]
    return spider_task(lines(tmp_path / "dev.jsonl", asked), tmp_path / "tables.jsonl", tmp_path / "db")


def test_spider_asks_with_schemas_and_leaves_out_what_has_no_database(spider):
    assert [one.id for one in spider.questions] == ["1", "3"]
    assert spider.left_out[0] == 1
    (prompt,) = spider.questions[0].turns
    assert prompt.startswith("Database cars:\ndog(name, age)\nQuestion: How many?\nSQL: SELECT count(*) FROM dog;\n\n")
    assert prompt.endswith("Database pets:\ndog(name, age)\nQuestion: Who is 5?\nSQL:")


@pytest.mark.parametrize(
    ("place", "text", "right"),
    [
        (0, " select name from dog where age > 4; select 1", 1.0),
        (0, " select name from dog where age > 4 order by name desc", 1.0),
        (0, "```sql\nSELECT name FROM dog WHERE age=5\n```", 1.0),
        (0, " SELECT name FROM dog", 0.0),
        (0, " SELECT nothing FROM dog", 0.0),
        (0, "", 0.0),
        (1, " SELECT name FROM dog ORDER BY name", 1.0),
        (1, " SELECT name FROM dog ORDER BY name DESC", 0.0),
    ],
)
def test_spider_compares_the_rows_that_queries_return(place, text, right, spider):
    assert spider_match(spider.questions[place], text) == right


def test_queries_cannot_change_a_database_nor_run_for_ever(spider, monkeypatch):
    file, _ = spider.questions[0].gold
    assert rows_of(file, "DELETE FROM dog") is None
    assert rows_of(file, "ATTACH '/tmp/x.sqlite' AS x") is None
    monkeypatch.setattr(paper_tasks, "LONGEST_QUERY_S", 0.05)
    assert rows_of(file, "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n") is None  # fmt: skip
    assert len(rows_of(file, "SELECT * FROM dog")) == 3


@pytest.mark.parametrize("paper", PAPERS)
def test_each_experiment_compares_its_own_methods_with_sampling(paper):
    found = contenders_of(paper, PaperGrid())
    names = [one.name for one in found]
    assert names[0] == "sampling"
    assert len({*names}) == len(names)
    assert {one.against for one in found} <= {*names}
    own = {"dsbd": "DSBD, 5 beams, auto", "mtad": "MTAD, 4 beams, depth 4, threshold 0.5", "rsd": "RSD-S, 4 sequences, depth 5"}  # fmt: skip
    assert own[paper] in names


class Stopped(Exception):
    pass


def test_a_run_that_was_interrupted_goes_on_where_it_stopped(pair, tmp_path, monkeypatch):
    task = squad_task(squad_lines(tmp_path / "dev.jsonl"))
    contenders = contenders_of("dsbd", SMALL)
    settings = {"paper": "dsbd"}
    whole = AnswerLog.of(None, settings)
    run_paper(pair, [task], contenders, SMALL, whole)
    assert len(whole.answers) == 3 * len(contenders)
    left = [2 * len(contenders) - 3]

    def add(log, answer, right=AnswerLog.add):
        right(log, answer)
        left[0] -= 1
        if not left[0]:
            raise Stopped

    monkeypatch.setattr(AnswerLog, "add", add)
    with pytest.raises(Stopped):
        run_paper(pair, [task], contenders, SMALL, AnswerLog.of(tmp_path / "out", settings))
    with (tmp_path / "out" / "runs.jsonl").open("a") as file:
        file.write('{"half": ')  # a process that was killed while it wrote
    log = AnswerLog.of(tmp_path / "out", settings)
    assert len(log.answers) == 2 * len(contenders) - 3
    run_paper(pair, [task], contenders, SMALL, log)
    again = AnswerLog.of(tmp_path / "out", settings)
    assert again.answers.keys() == whole.answers.keys()
    assert all(again.answers[key].texts == one.texts for key, one in whole.answers.items())
    with pytest.raises(BadSetting, match="other settings: paper was 'dsbd' and is 'rsd'"):
        AnswerLog.of(tmp_path / "out", {"paper": "rsd"})


def test_the_figures_are_those_of_the_answers(pair, tmp_path):
    task = squad_task(squad_lines(tmp_path / "dev.jsonl"))
    chat = mt_bench_task(lines(tmp_path / "q.jsonl", [{"question_id": 81, "turns": ["abc", "de"]}]))
    contenders = contenders_of("dsbd", SMALL)
    log = AnswerLog()
    run_paper(pair, [task, chat], contenders, SMALL, log)
    found = lines_of_paper([task, chat], contenders, log)
    assert len(found) == 2 * len(contenders)
    by_name = {(line.task, line.contender): line for line in found}
    plain = by_name["SQuAD", "sampling"]
    assert plain.ratio is None
    assert plain.passes_per_token == pytest.approx(1, abs=0.2)
    fixed = by_name["SQuAD", "DSBD, 2 beams, depth 2"]
    beams = by_name["SQuAD", "beam sampling, 2 beams"]
    assert fixed.perplexity == pytest.approx(beams.perplexity)  # the same seed gives the same beams
    assert fixed.ratio.value == pytest.approx(fixed.speed.value / beams.speed.value)
    assert fixed.passes_per_token <= beams.passes_per_token
    assert by_name["MT-bench", "sampling"].quality is None
    table = as_markdown(found)
    assert "| SQuAD | exact match | tokens/s |" in table
    assert "| MT-bench | tokens/s |" in table
    (record,) = [json.loads(line) for line in answers_for_judge(chat, contenders[0], log).splitlines()]
    assert record["question_id"] == 81
    assert record["choices"] == [{"index": 0, "turns": log.answers["MT-bench", "81", "sampling"].texts}]
    plot(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_the_front_is_what_no_other_contender_beats():
    one = PaperLine("t", "", "f", 1, "m", None, Figure(1, 1, 1), "", None, 1, None, 1, 1, 1, 1, 1, None)
    made = {(speed, share): dataclasses.replace(one, speed=Figure(speed, 0, 0), quality=Figure(share, 0, 0)) for speed, share in [(1, 0.9), (2, 0.5), (3, 0.5), (4, 0.1), (2.5, 0.9)]}  # fmt: skip
    front = pareto_front(list(made.values()))
    assert [(line.speed.value, line.quality.value) for line in front] == [(2.5, 0.9), (3, 0.5), (4, 0.1)]


def test_a_pair_without_a_tokenizer_is_refused(tmp_path):
    task = squad_task(squad_lines(tmp_path / "dev.jsonl"))
    pair = words.pair()
    bare = sb.Pair(pair.target_model, None, None, pair.target, pair.draft)
    with pytest.raises(sb.SpecbeamError, match="has no tokenizer"):
        run_paper(bare, [task], contenders_of("dsbd", SMALL), SMALL, AnswerLog())
