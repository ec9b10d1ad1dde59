import json
import subprocess
import sys
from itertools import islice

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kapell.trainer.config_load import load_config
from kapell.trainer.data import LoaderState, PromptDataset, PromptLoader, encode_prompt, in_batches, truncate
from kapell.trainer.prepare import prepare
from kapell.trainer.reward import builtin_reward
from kapell.trainer.rows import DataError, PromptRow, read_rows
from kapell.trainer.tasks import reverse_digits
from kapell.trainer.tokenizer import build_character_tokenizer, load_tokenizer

ROW = {
    "data_source": "mine",
    "prompt": [{"role": "user", "content": "12"}],
    "reward_model": {"style": "rule", "ground_truth": "21"},
    "extra_info": {"index": 0},
}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_and_parquet_give_the_same_rows(tmp_path):
    jsonl = write_jsonl(tmp_path / "rows.jsonl", [ROW, ROW])
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([ROW, ROW]), parquet)
    both = [read_rows([path]) for path in (jsonl, parquet)]
    assert [(row.text, row.ground_truth, row.data_source, row.extra_info) for row in both[0]] == [
        (row.text, row.ground_truth, row.data_source, row.extra_info) for row in both[1]
    ]
    assert both[0][1].origin == f"{jsonl} row 2"


def test_a_ground_truth_of_zero_is_one(tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", [{**ROW, "reward_model": {"ground_truth": 0}}])
    assert read_rows([file])[0].ground_truth == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward_model": {"style": "rule"}}, "row 2 has no reward_model.ground_truth"),
        ({"reward_model": None}, "row 2 has no reward_model.ground_truth"),
        ({"data_source": None}, "row 2 has no text in `data_source`"),
        ({"prompt": ""}, "row 2: `prompt` must be text or chat messages and not empty"),
        ({"extra_info": '{"a": 1}'}, "row 2: `extra_info` must be an object, got '{\"a\": 1}'"),
        ({"extra_info": [1]}, "row 2: `extra_info` must be an object, got [1]"),
        ({"prompt": [{"content": "x"}]}, "row 2: each message in `prompt` needs `role` and `content`"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_number(tmp_path, change, message):
    file = write_jsonl(tmp_path / "rows.jsonl", [ROW, {**ROW, **change}])
    with pytest.raises(DataError) as caught:
        read_rows([file])
    assert f"{file} {message}" in str(caught.value)


def test_a_row_without_a_prompt_lists_its_fields(tmp_path):
    row = {key: value for key, value in ROW.items() if key != "prompt"}
    with pytest.raises(DataError, match="has no `prompt`; fields: data_source, reward_model, extra_info"):
        read_rows([write_jsonl(tmp_path / "rows.jsonl", [row])])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", "{not json}\n", "line 1 is not valid JSON"),
        ("rows.jsonl", "[1]\n", "row 1 is a list"),
        ("rows.jsonl", "\n", "holds no rows"),
        ("rows.parquet", "no parquet", "is not a parquet file"),
        ("rows.csv", "a,b\n", "unknown ending '.csv'; known: .jsonl"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        read_rows([file])


def test_a_file_in_another_encoding_is_named_with_its_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\n{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl line 2 is not UTF-8"):
        read_rows([file])


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW), encoding="utf-8-sig")
    assert len(read_rows([file])) == 1


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"no data file nowhere\.jsonl"):
        read_rows(["nowhere.jsonl"])


def test_the_bundled_task_holds_validation_prompts_out_and_follows_its_seed(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "kapell.trainer.tasks.reverse_digits", tmp_path, "--seed", "5", "--num-val", "50"],
        check=True,
    )
    train, val = read_rows([tmp_path / "train.jsonl"]), read_rows([tmp_path / "val.jsonl"])
    assert (len(train), len(val)) == (9950, 50)
    assert not {row.text for row in train} & {row.text for row in val}
    assert all(row.ground_truth == row.text[::-1] for row in [*train, *val])
    again = reverse_digits.make_rows(seed=5, num_val=50)[1]
    assert [row.text for row in val] == [row["prompt"][0]["content"] for row in again]
    assert again != reverse_digits.make_rows(seed=6, num_val=50)[1]


@pytest.mark.parametrize(
    ("response", "score"), [("4321", 1.0), ("4300", 0.5), ("43", 0.5), ("43219", 0.8), ("", 0.0), ("1234", 0.0)]
)
def test_the_bundled_reward_is_the_share_of_right_positions(response, score):
    assert reverse_digits.score("reverse_digits", response, "4321") == score


def test_text_and_messages_of_the_same_words_encode_alike(tokenizer):
    text = PromptRow("42", "24", "mine")
    messages = PromptRow([{"role": "user", "content": "42"}], "24", "mine")
    assert encode_prompt(text, tokenizer) == encode_prompt(messages, tokenizer)


def test_a_character_without_a_token_is_named_with_its_row(tokenizer):
    with pytest.raises(DataError, match=r"file row 3: the tokenizer has no token for \['\+', 'x'\]"):
        encode_prompt(PromptRow("1+x", "1", "mine", origin="file row 3"), tokenizer)


def test_the_character_tokenizer_survives_saving(tmp_path):
    tokenizer = build_character_tokenizer("ab \nä")
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    ids = tokenizer("b ä\na")["input_ids"]
    assert loaded("b ä\na")["input_ids"] == ids
    assert loaded.decode(ids, skip_special_tokens=True) == "b ä\na"
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.chat_template) == (0, 1, tokenizer.chat_template)


def test_an_overlong_prompt_is_an_error_or_left_out(tokenizer):
    rows = [PromptRow(text, "1", "mine", origin=f"row {text}") for text in ("1", "12345")]
    with pytest.raises(DataError, match=r"row 12345: the prompt has 6 tokens, more than data.max_prompt_length=4"):
        PromptDataset(rows, tokenizer, max_prompt_length=4)
    dataset = PromptDataset(rows, tokenizer, max_prompt_length=4, filter_overlong=True)
    assert (len(dataset), dataset.num_filtered) == (1, 1)
    with pytest.raises(DataError, match=r"all 2 have more than data.max_prompt_length=1 tokens; raise it, or set"):
        PromptDataset(rows, tokenizer, max_prompt_length=1, filter_overlong=True)


def test_a_batch_is_padded_on_the_left_and_keeps_rows_together(tokenizer):
    rows = [PromptRow(text, text[::-1], f"source {text}") for text in ("1", "23", "456")]
    batch = PromptDataset(rows, tokenizer, max_prompt_length=9).batch([2, 0])
    assert batch.column("prompt_mask").tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert batch.column("prompts")[1].tolist()[:2] == [tokenizer.pad_token_id] * 2
    assert batch.column("index").tolist() == [2, 0]
    assert batch.column("ground_truth").tolist() == ["654", "1"]
    assert batch.column("data_source").tolist() == ["source 456", "source 1"]


def test_each_epoch_deals_every_prompt_once_in_a_new_order():
    loader = PromptLoader(5, batch_size=2, shuffle=True, seed=1)
    epochs = [[index for _ in range(3) for index in loader.next_batch()] for _ in range(3)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert loader.state == LoaderState(3, 0)
    assert loader.steps_in(3) == 9


def test_a_loader_continues_from_any_state_as_if_never_stopped():
    straight = PromptLoader(5, batch_size=2, shuffle=True, seed=1)
    expected = []
    states = []
    for _ in range(9):
        states.append(straight.state)
        expected.append(straight.next_batch())
    for stop, state in enumerate(states):
        resumed = PromptLoader(5, batch_size=2, shuffle=True, seed=1)
        resumed.state = state
        assert [resumed.next_batch() for _ in range(9 - stop)] == expected[stop:]


def test_a_dataset_smaller_than_a_batch_gives_all_of_it():
    assert PromptLoader(3, batch_size=8, shuffle=False, seed=1).next_batch() == [0, 1, 2]


@pytest.mark.parametrize(("rows", "size", "expected"), [(5, 2, [[0, 1], [2, 3], [4]]), (0, 2, []), (1, 4, [[0]])])
def test_batches_in_order_hold_each_index_once(rows, size, expected):
    assert list(in_batches(rows, size)) == expected


@pytest.mark.parametrize(
    ("where", "kept"),
    [("left", [3, 4, 5, 6]), ("right", [1, 2, 3, 4]), ("middle", [1, 2, 5, 6]), ("error", [1, 2, 3, 4, 5, 6])],
)
def test_a_prompt_is_cut_where_it_is_asked(where, kept):
    assert truncate([1, 2, 3, 4, 5, 6], 4, where) == kept
    assert truncate([1, 2, 3], 4, where) == [1, 2, 3]


def test_overlong_prompts_are_cut_in_place_of_left_out(tokenizer):
    rows = [PromptRow(text, "1", "mine", origin=f"row {text}") for text in ("1", "12345")]
    dataset = PromptDataset(rows, tokenizer, max_prompt_length=4, truncation="left")
    assert (len(dataset), dataset.num_filtered) == (2, 0)
    kept = dataset.batch([1]).column("prompts")[0]
    assert tokenizer.convert_ids_to_tokens(kept) == ["3", "4", "5", "<answer>"]
    filtered = PromptDataset(rows, tokenizer, max_prompt_length=4, truncation="left", filter_overlong=True)
    assert len(filtered) == 1  # filtering comes first, as in verl


@pytest.fixture(scope="module")
def chatml():
    """A byte-level BPE with the ChatML template of Qwen's and SmolLM's tokenizers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["user assistant system What is 2+3? Be short."] * 8, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=(
            "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']}}"
            "{{'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
            "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
            "{% endif %}"
        ),
    )


def test_chat_messages_go_through_a_real_template_in_their_roles(chatml, tmp_path):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 2+3?"}]
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{**ROW, "prompt": messages}]), parquet)
    (row,) = read_rows([parquet])
    expected = (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = encode_prompt(row, chatml)
    assert chatml.decode(ids) == expected
    assert ids.count(chatml.convert_tokens_to_ids("<|im_start|>")) == 3  # one token each, not their characters
    without = encode_prompt(row, chatml, template_options={"enable_thinking": False})
    assert chatml.decode(without) == expected + "<think>\n\n</think>\n\n"


def test_messages_without_a_template_are_refused_with_the_way_out(chatml):
    plain = PreTrainedTokenizerFast(tokenizer_object=chatml.backend_tokenizer, eos_token="<|im_end|>")
    row = PromptRow([{"role": "user", "content": "hi"}], "1", "mine", origin="file row 1")
    with pytest.raises(DataError, match="file row 1 holds chat messages, but the tokenizer has no chat template"):
        encode_prompt(row, plain)


def test_a_data_set_saved_to_disk_gives_the_same_rows_as_its_jsonl(tmp_path):
    other = {**ROW, "prompt": [{"role": "user", "content": "34"}]}
    datasets.Dataset.from_list([ROW, other]).save_to_disk(tmp_path / "set")
    rows = read_rows([tmp_path / "set"])
    assert [(row.text, row.ground_truth, row.data_source, row.extra_info) for row in rows] == [
        ("12", "21", "mine", {"index": 0}),
        ("34", "21", "mine", {"index": 0}),
    ]
    assert rows[1].origin == f"{tmp_path / 'set'} row 2"


def test_a_data_set_of_several_splits_names_them_and_one_of_them_is_read(tmp_path):
    one = datasets.Dataset.from_list([ROW])
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "sets")
    with pytest.raises(DataError, match=r"holds several splits; give one of them: .*/train, .*/test"):
        read_rows([tmp_path / "sets"])
    assert len(read_rows([tmp_path / "sets" / "test"])) == 1


def test_a_folder_that_is_no_data_set_and_a_missing_package_say_so(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"it has no state\.json"):
        read_rows([tmp_path])
    datasets.Dataset.from_list([ROW]).save_to_disk(tmp_path / "set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install kapell-trainer\[datasets\]"):
        read_rows([tmp_path / "set"])


def test_any_reasoning_gym_task_is_a_source_with_its_own_score():
    rows = read_rows(["reasoning_gym:spell_backward?size=3&seed=1&min_word_len=3&max_word_len=6"])
    assert [row.data_source for row in rows] == ["reasoning_gym/spell_backward"] * 3
    again = read_rows(["reasoning_gym:spell_backward?size=3&seed=1&min_word_len=3&max_word_len=6"])
    assert [row.text for row in rows] == [row.text for row in again]
    word = rows[0].text.split()[-1]
    assert 3 <= len(word) <= 6
    assert rows[0].ground_truth == word[::-1]
    reward = builtin_reward(["reasoning_gym/spell_backward"])
    answer, entry = word[::-1], rows[0].extra_info
    assert reward(rows[0].data_source, f" {answer}\n", answer, entry) == {"score": 1.0, "exact_match": 1.0}
    junk = reward(rows[0].data_source, f"{answer}junk", answer, entry)
    assert junk == {"score": pytest.approx(0.8), "exact_match": 0.0}


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "letter_counting"])
def test_other_tasks_score_their_own_answers(task):
    for row in read_rows([f"reasoning_gym:{task}?size=2&seed=3"]):
        result = builtin_reward([row.data_source])(row.data_source, row.ground_truth, row.ground_truth, row.extra_info)
        assert result["score"] == 1.0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("reasoning_gym:spell_backwards", "no task 'spell_backwards'; did you mean spell_backward"),
        ("reasoning_gym:spell_backward?sise=3", "no option 'sise'; it has: .*size"),
        ("reasoning_gym:spell_backward?min_word_len=9&max_word_len=3", "spell_backward.*max_word_len"),
    ],
)
def test_a_wrong_task_or_option_is_named(source, message):
    with pytest.raises(ValueError, match=message):
        read_rows([source])


def test_a_missing_reasoning_gym_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install kapell-trainer\[reasoning-gym\]"):
        read_rows(["reasoning_gym:chain_sum"])


def test_prompts_that_are_left_out_are_counted_in_a_warning(tmp_path, caplog):
    rows = [{**ROW, "prompt": text, "data_source": "reverse_digits"} for text in ("1", "22", "333333", "4444444")]
    train, val = write_jsonl(tmp_path / "train.jsonl", rows[:3]), write_jsonl(tmp_path / "val.jsonl", rows[1:])
    overrides = [f"data.train_files={train}", f"data.val_files={val}", "data.max_prompt_length=4"]
    prepared = prepare(load_config(overrides=[*overrides, "data.filter_overlong_prompts=true"]).config, tmp_path)
    assert (len(prepared.train), len(prepared.val)) == (2, 1)
    assert "1 of 3 training prompts are left out: more than data.max_prompt_length=4 tokens" in caplog.text
    assert "2 of 3 validation prompts are left out: more than data.max_prompt_length=4 tokens" in caplog.text
    long = write_jsonl(tmp_path / "long.jsonl", rows[2:])
    overrides[1] = f"data.val_files={long}"
    with pytest.raises(DataError, match="validation prompts: all 2 have more than"):
        prepare(load_config(overrides=[*overrides, "data.filter_overlong_prompts=true"]).config, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], 60),
        (["trainer.total_epochs=40"], 120),
        (["trainer.total_epochs=40", "trainer.total_training_steps=100"], 100),
        (["trainer.total_epochs=4", "trainer.total_training_steps=100"], 12),
        (["trainer.total_training_steps=100"], 100),
    ],
)
def test_a_run_is_as_long_as_its_steps_or_epochs_say(tmp_path, overrides, steps):
    file = write_jsonl(tmp_path / "rows.jsonl", [{**ROW, "prompt": "12", "data_source": "reverse_digits"}] * 5)
    small = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", f"data.train_files={file}"]
    assert prepare(load_config(overrides=[*small, *overrides]).config, tmp_path).total_steps == steps


def test_the_sizes_of_batches_are_those_that_are_dealt():
    loader = PromptLoader(7, batch_size=3, shuffle=True, seed=1)
    assert (
        list(islice(loader.batch_sizes(), 7)) == [len(loader.next_batch()) for _ in range(7)] == [3, 3, 1, 3, 3, 1, 3]
    )
