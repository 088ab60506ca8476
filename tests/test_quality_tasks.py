"""Generators of the quality benchmark: right length, answer in the text, the same every time, with and without data."""

from __future__ import annotations

import json

import pytest

from benchmarks.quality.tasks import TASKS
from benchmarks.quality.tasks.data import Data, MissingData, python_help, sentences, unwrapped
from benchmarks.quality.tasks.haystack import hide
from benchmarks.quality.tasks.items import Encoder, Item, Maker
from benchmarks.quality.tasks.reading import read_babi

LENGTH = 6000


class Bytes:
    """A tokenizer of one token a byte; special id 256 opens a text."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True, verbose=True):
        if isinstance(text, list):
            return type("Encoding", (), {"input_ids": [self._ids(t, False) for t in text]})
        return type("Encoding", (), {"input_ids": self._ids(text, add_special_tokens)})

    def _ids(self, text, special):
        return [256] * special + list(text.encode())


def decode(ids) -> str:
    return bytes(i for i in ids if i < 256).decode(errors="replace")


BOOK = "\n".join(f"Sentence {i} speaks of word{i % 400} and\nof word{7 * i % 400}." for i in range(3000))
LINES = "\n".join(f"line key-{i}: REGISTER_CONTENT is <{10000 + i}>" for i in range(300))
TALK = "Now the record start. USER: I would like to discuss the topic of tea. ASSISTANT: Sure. Now the record ends."
TOPIC = {"prompt": TALK, "answer": "The tea", "topics": ["The tea"]}
SOURCE = "\n".join(f"def function_{i}(argument):\n    return other_{i * 37 % 500}(argument, {i})" for i in range(200))
FACTS = "1 John went to the hallway.\n2 Mary went to the garden.\n3 Where is John? |hallway|1\n" * 5
PASSAGES = [
    {"id": 7 * i, "question": f"who is {i}", "answers": [f"person {i}"], "title": f"T{i}", "text": f"He is person {i}."}
    for i in range(200)
]
SHOTS = [
    {"split": ("train", "test")[i % 5 == 0], "text": f"text number {i}", "label": f"label_{i % 7}"} for i in range(300)
]
FILES = {
    "text/book_katrine.txt": BOOK,
    "text/book_jack_sheppard.txt": BOOK,
    "text/book_middlemarch.txt": BOOK,
    "text/book_austen_emma.txt": BOOK,
    "text/book_austen_persuasion.txt": BOOK,
    "text/book_critical_historical_essays.txt": BOOK,
    "text/book_pianoforte_sonata.txt": BOOK,
    "text/manual_sqlite.txt": BOOK,
    "code/click_8.5.1.jsonl": [{"path": f"click/{i}.py", "text": SOURCE} for i in range(3)],
    "code/accelerate_1.15.0.jsonl": [{"path": f"accelerate/{i}.py", "text": SOURCE} for i in range(3)],
    "retrieval/longeval_lines_200.jsonl": [{"prompt": f"Start:\n\n{LINES}\n\nEnd"}],
    "retrieval/longeval_lines_400.jsonl": [{"prompt": f"Start:\n\n{LINES}\n\nEnd"}],
    "retrieval/longeval_lines_680.jsonl": [{"prompt": f"Start:\n\n{LINES}\n\nEnd"}],
    "retrieval/longeval_topics_5.jsonl": [TOPIC] * 3,
    "retrieval/longeval_topics_10.jsonl": [TOPIC] * 3,
    "retrieval/longeval_topics_20.jsonl": [TOPIC] * 3,
    "retrieval/litm_kv_75.jsonl": [{"ordered_kv_records": [[f"key{i:04d}", f"value{i:04d}"] for i in range(300)]}],
    "qa/nq_open_oracle_1500.jsonl": PASSAGES,
    "qa/babi_qa1_single-supporting-fact_test.txt": FACTS,
    "qa/babi_qa2_two-supporting-facts_test.txt": FACTS.replace("|", "\t"),
    "icl/banking77.jsonl": SHOTS,
    "icl/clinc150.jsonl": SHOTS,
    "icl/subjectivity.jsonl": SHOTS,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Data:
    """A small likeness of every file the tasks read."""
    root = tmp_path_factory.mktemp("data")
    for name, content in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, content)))
    return Data(root)


def make(name: str, data: Data, count: int = 3) -> list[Item]:
    return list(TASKS[name].make(Maker(Encoder(Bytes()), data, LENGTH, count)))


@pytest.mark.parametrize("name", TASKS)
def test_items_have_the_length_asked_for_and_come_again(name, data):
    items = make(name, data)
    assert len(items) == 3
    for item in items:
        assert item.prompt[0] == 256
        assert len(item.prompt) + len(item.forced) <= LENGTH + 700  # answers come on top
        if name not in ("topics", "long_generation"):  # as long as their files, and shorter by what is generated
            assert len(item.prompt) >= 0.8 * LENGTH
        assert all(0 < begin < end <= len(item.forced) for begin, end in item.answers)
        assert item.answers or item.greedy
    assert make(name, data) == items
    assert items[0] != items[1] or name == "topics"


ANSWERED_IN_TEXT = ("passkey", "niah_single", "niah_noise", "niah_multikey", "niah_multivalue", "key_value", "lines",
                    "topics", "babi_qa1", "documents", "banking77", "copying", "multi_turn")  # fmt: skip


@pytest.mark.parametrize("name", ANSWERED_IN_TEXT)
def test_the_prompt_holds_the_answer(name, data):
    for item in make(name, data):
        prompt = decode(item.prompt)
        for begin, end in item.answers:
            answer = decode(item.forced[begin:end])
            parts = [answer] if name == "copying" else answer.replace(" and ", " ").split(",")
            assert all(part.strip() in prompt for part in parts)


def test_needles_stay_out_of_the_end_and_spread_over_depths(data):
    items = make("niah_single", data, count=8)
    depths = sorted(item.meta["depth"] for item in items)
    assert depths == pytest.approx([0.95 * (i + 0.5) / 8 for i in range(8)], abs=1e-3)
    for item in items:
        prompt = decode(item.prompt)
        number = decode(item.forced[slice(*item.answers[0])]).strip()
        body = prompt.index("numbers afterwards.\n"), prompt.rindex("\nWhat are all")
        place = (prompt.index(f"is: {number}") - body[0]) / (body[1] - body[0])
        assert place == pytest.approx(item.meta["depth"], abs=0.05)


def test_multi_turn_asks_for_several_old_facts_in_decode_steps(data):
    for item in make("multi_turn", data):
        asked = decode(item.forced)
        assert len(item.answers) == 4
        assert asked.count("USER: What is the access code of") == 4
        assert "What is the access code" not in decode(item.prompt)


def test_copying_repeats_what_the_prompt_holds(data):
    for item in make("copying", data):
        text = item.prompt + item.forced
        passage = text[-160:]
        assert any(text[i : i + 160] == passage for i in range(len(text) - 320))


def test_continuations_split_one_text(data):
    (item,) = make("ppl_manual", data, count=1)
    text = decode(item.prompt + item.forced)
    assert text in data.text("text/manual_sqlite.txt")
    assert item.answers == [(1, len(item.forced))]


@pytest.mark.parametrize("name", ["passkey", "niah_single", "copying", "ppl_python", "variable_tracking"])
def test_some_tasks_need_no_data(name, tmp_path):
    assert len(make(name, Data(tmp_path / "nothing"))) == 3


@pytest.mark.parametrize("name", ["ppl_books", "lines", "banking77"])
def test_missing_data_is_said_plainly(name, tmp_path):
    with pytest.raises(MissingData, match=r"is not there \(set --data or TIERED_KV_DATA\)"):
        make(name, Data(tmp_path / "nothing"))


def test_babi_is_read_with_bars_and_with_tabs():
    for bar in "|\t":
        story, later = read_babi(f"1 A ran.\n2 Who ran? {bar}A{bar}1\n3 B ran.\n4 Who? {bar}B{bar}3\n")
        assert story == (["A ran."], "Who ran?", "A")
        assert later == (["A ran.", "B ran."], "Who?", "B")


def test_hide_puts_needles_at_their_depth():
    assert hide(list("abcd"), [(0.6, "X"), (0.0, "Y"), (0.5, "Z")], joint="") == "YabZcXd"


def test_prose_helpers():
    assert unwrapped("one\ntwo\n\nthree") == "one two\n\nthree"
    assert sentences("One two. Three! Four?") == ["One two.", "Three!", "Four?"]
    assert len(python_help()) > 300_000
