"""The command line: what it prints where, and that every mistake ends in one sentence and status 2."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tiered_kv import TieredKVConfig, cli, demo_task, timed
from tiered_kv.options import add_cache_options
from tiered_kv.summary import first_difference

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 512
SMALL = [
    "--token-budget=64", "--window-size=16", "--decode-segment=32", "--num-sink-tokens=4", "--prefill-segment=64",
]  # fmt: skip
REQUIRED = (
    "text prompt_tokens new_tokens ttft_s tokens_per_s token_budget hit_rate recalled_bytes kv_gpu_bytes kv_host_bytes"
    " kv_full_bytes device model"
)
DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 9


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> str:
    """Folder of a random Llama that reads bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LONGEST, initializer_range=0.2,
        bos_token_id=0, eos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def generate(tiny_model, capfd):
    """Run ``tiered-kv generate`` on the tiny model; gives exit status, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(["generate", "--model", tiny_model, "--device", "cpu", *arguments])
        return status, *capfd.readouterr()

    return run


def assert_refused(outcome: tuple[int, str, str], reason: str) -> None:
    """Status 2, nothing on stdout, and one sentence on stderr after the lines that tell of loading."""
    status, out, err = outcome
    assert status == 2
    assert out.strip() == ""
    *before, last = err.strip().splitlines()
    assert last.startswith("tiered-kv: ")
    assert reason in last
    assert "Traceback" not in err
    assert all("load" in line or "prefill" in line for line in before if line)


def test_text_goes_to_stdout_and_the_summary_to_stderr(generate):
    status, out, err = generate("--prompt", DOCUMENT, "--max-new-tokens", "8", *SMALL)
    assert status == 0
    assert out.endswith("\n")
    for row in ("time to first token", "tokens per second after", "hit rate", "KV on the device", "the full KV takes"):
        assert row in err


def test_json_is_one_object_and_all_of_stdout(generate, tiny_model):
    status, out, _ = generate("--prompt", DOCUMENT, "--max-new-tokens", "20", "--json", *SMALL)
    report = json.loads(out)
    assert status == 0
    assert set(REQUIRED.split()) <= set(report)
    assert report["prompt_tokens"] == len(DOCUMENT)
    assert report["new_tokens"] == 20
    assert report["token_budget"] == 64
    assert report["model"] == tiny_model
    assert 0 < report["hit_rate"] <= 1
    assert report["kv_full_bytes"] == (len(DOCUMENT) + 19) * 2 * 2 * 16 * 4  # layers, heads, key and value, float32


def test_streamed_text_is_the_reported_text(generate):
    options = ["--prompt", DOCUMENT, "--max-new-tokens", "12", *SMALL]
    _, streamed, _ = generate(*options)
    _, out, _ = generate(*options, "--json")
    assert streamed == json.loads(out)["text"] + "\n"


def test_with_budget_to_spare_the_full_cache_gives_the_same_text(generate):
    _, out, _ = generate("--prompt", DOCUMENT, "--max-new-tokens", "12", "--compare-full", "--json")
    report = json.loads(out)
    assert report["same_text"]
    assert report["first_difference"] is None
    assert report["full"]["text"] == report["text"]
    assert report["full"]["kv_gpu_bytes"] == report["kv_full_bytes"]


def test_the_comparison_stands_beside_the_run(generate):
    _, _, err = generate("--prompt", DOCUMENT, "--max-new-tokens", "4", "--compare-full")
    assert "full cache" in err
    assert "both runs gave the same text" in err


def test_the_answer_ends_after_the_stop_text(generate):
    options = ["--prompt", DOCUMENT, "--max-new-tokens", "12", "--json", *SMALL]
    whole = json.loads(generate(*options)[1])["text"]
    stopped = json.loads(generate(*options, "--stop", whole[3:6])[1])["text"]
    assert stopped == whole[: whole.index(whole[3:6]) + 3]


def test_sampling_is_repeatable_by_seed(generate):
    options = ["--prompt", DOCUMENT, "--max-new-tokens", "16", "--temperature", "1.5", "--top-p", "0.9"]
    texts = [generate(*options, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_the_file_comes_before_the_question(tmp_path, monkeypatch):
    (tmp_path / "document.txt").write_bytes(b"\xef\xbb\xbfthe document")
    arguments = cli.build_parser().parse_args(
        ["generate", "--prompt-file", str(tmp_path / "document.txt"), "--prompt", "-"]
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("the question é".encode())))
    assert cli._read_prompt(arguments) == "the document\n\nthe question é"


def test_mistakes_about_the_prompt(generate, tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "zeros").write_bytes(b"text\0text")
    (tmp_path / "blank.txt").write_text(" \n\n")
    assert_refused(generate(), "no prompt")
    assert_refused(generate("--prompt", ""), "the prompt is empty")
    assert_refused(generate("--prompt-file", str(tmp_path / "blank.txt")), "the prompt is empty")
    assert_refused(generate("--prompt-file", str(tmp_path / "absent")), "No such file")
    assert_refused(generate("--prompt-file", str(tmp_path)), "Is a directory")
    assert_refused(generate("--prompt-file", str(tmp_path / "picture.png")), "not UTF-8 text: byte 0 is 0x89")
    assert_refused(generate("--prompt-file", str(tmp_path / "zeros")), "not a text file: byte 4 is 0")
    assert_refused(generate("--prompt", "-", "--prompt-file", "-"), "stdin cannot be both")


def test_a_prompt_longer_than_the_model_takes(generate):
    too_long = "x" * (LONGEST - 10)
    assert_refused(generate("--prompt", too_long, "--max-new-tokens", "11"), "give --max-new-tokens 10")
    assert_refused(generate("--prompt", "x" * LONGEST), "shorten the prompt")


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (("--token-budget", "0"), "token_budget: expected at least 1, got 0"),
        (("--token-budget", "many"), "--token-budget: invalid int value: 'many'"),
        (("--tokens-per-cluster", "100"), "tokens_per_cluster: expected at most max_cluster_tokens"),
        (("--policy", "fifo"), "--policy: invalid choice: 'fifo'"),
        (("--host-memory-limit", "much"), "expected bytes, such as 8GiB, got 'much'"),
        (("--max-new-tokens", "0"), "expected a whole number of at least 1"),
        (("--temperature", "-1"), "expected a number of at least 0"),
        (("--top-p", "1.5"), "expected a number above 0 and at most 1"),
        (("--no-such-option",), "unrecognized arguments: --no-such-option"),
        (("--chat",), "no chat template"),
        (("--device", "cuda:97"), "CUDA devices"),
    ],
)
def test_mistakes_about_options(generate, option, reason):
    assert_refused(generate("--prompt", "x", *option), reason)


def test_an_unknown_model(capfd):
    status = cli.main(["generate", "--prompt", "x", "--model", "/no/such/model"])
    assert_refused((status, *capfd.readouterr()), "expected a hub id, a folder or a .gguf file")


def test_no_room_is_one_sentence_before_prefill(generate, monkeypatch):
    monkeypatch.setattr(timed, "prefill", None)
    outcome = generate("--prompt", DOCUMENT, "--host-memory-limit", "10kB", "--max-new-tokens", "8", *SMALL)
    assert_refused(outcome, "tokens would fit")


def test_interrupting_ends_with_130(generate, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(timed, "generate_tiered", interrupt)
    status, _, err = generate("--prompt", "x")
    assert status == 130
    assert "Traceback" not in err


def test_every_option_of_the_config_is_an_option_of_the_command():
    parser = argparse.ArgumentParser()
    add_cache_options(parser)
    actions = {action.dest: action for action in parser._actions}
    for field in dataclasses.fields(TieredKVConfig):
        assert actions[field.name].default == field.default
        assert actions[field.name].help, f"{field.name} is not described in TieredKVConfig's docstring"


@pytest.mark.parametrize(("text", "count"), [("1024", 1024), ("2KiB", 2048), ("1.5GiB", 3 << 29), ("3MB", 3_000_000)])
def test_sizes_in_bytes(text, count):
    arguments = cli.build_parser().parse_args(["generate", "--gpu-memory-limit", text])
    assert arguments.gpu_memory_limit == count


@pytest.mark.parametrize(
    ("tokens", "others", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([1, 2, 3], [1, 2], 2)],
)
def test_first_difference(tokens, others, index):
    assert first_difference(tokens, others) == index


def test_the_demo_holds_the_answer_in_its_middle():
    assert 28_000 < len(demo_task.document()) <= demo_task.CHARACTERS
    words = " ".join(demo_task.document().split())
    assert 0.3 < words.index(demo_task.ANSWER) / len(words) < 0.7


def test_help_needs_neither_torch_nor_transformers():
    code = (
        "import sys; from tiered_kv import cli\n"
        "try: cli.main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_end_to_end_in_a_process_of_its_own(tiny_model):
    command = [sys.executable, "-m", "tiered_kv", "generate", "--model", tiny_model, "--prompt-file", "-", "--json"]
    command += ["--max-new-tokens", "8", "--device", "cpu", *SMALL]
    outcome = subprocess.run(command, cwd=ROOT, input=DOCUMENT.encode(), capture_output=True, check=True)
    assert json.loads(outcome.stdout)["new_tokens"] == 8
    assert b"prefill: 100%" in outcome.stderr
