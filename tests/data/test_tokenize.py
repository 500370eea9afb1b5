import pytest
import torch
from tokenizers.processors import TemplateProcessing

from rlite.data import PromptEncoder, PromptFormat, load_tokenizer
from tests.data.conftest import char_tokenizer

ROW = {"prompt": "3+4=", "answer": "7", "completion": "7"}


def encoder(tokenizer, *, row=ROW, **options):
    return PromptEncoder(tokenizer, PromptFormat(**options), columns=list(row))


def test_plain_prompt_keeps_text_ids_and_columns(tokenizer):
    prompt = encoder(tokenizer).prompt(ROW, uid=5)
    assert prompt.text == "3+4="
    assert prompt.token_ids == tuple(tokenizer.convert_tokens_to_ids(list("3+4=")))
    assert prompt.uid == 5
    assert prompt.columns["answer"] == "7"


def test_template_and_system_prompt_when_plain(tokenizer):
    made = encoder(tokenizer, template="q: {prompt} hint {answer}", system_prompt="add").prompt(ROW, uid=0)
    assert made.text == "add\nq: 3+4= hint 7"


def test_auto_style_uses_the_chat_template_where_there_is_one(tokenizer, chat_tokenizer):
    assert encoder(chat_tokenizer).prompt(ROW, uid=0).text == "{user:3+4=}{assistant:"
    assert encoder(chat_tokenizer, style="plain").prompt(ROW, uid=0).text == "3+4="
    with_system = encoder(chat_tokenizer, system_prompt="add").prompt(ROW, uid=0)
    assert with_system.text == "{system:add}{user:3+4=}{assistant:"
    assert chat_tokenizer.decode(with_system.token_ids) == with_system.text


def test_a_prompt_may_be_a_list_of_messages(tokenizer, chat_tokenizer):
    row = {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert encoder(chat_tokenizer, row=row).prompt(row, uid=0).text == "{user:a}{assistant:b}{assistant:"
    with pytest.raises(
        ValueError, match="row 0 is a list of chat messages, which needs a tokenizer with a chat template"
    ):
        encoder(tokenizer, row=row).prompt(row, uid=0)


def test_chat_style_without_a_template_is_an_error(tokenizer):
    with pytest.raises(ValueError, match=r"data\.prompt\.style = 'chat', but the tokenizer has no chat template"):
        encoder(tokenizer, style="chat")


def test_a_missing_column_is_found_at_once(tokenizer):
    with pytest.raises(ValueError, match=r"data\.prompt\.column for data\.train = 'promt': .*mean 'prompt'"):
        encoder(tokenizer, column="promt")
    with pytest.raises(ValueError, match=r"data\.prompt\.template for data\.train = 'answr': .*mean 'answer'"):
        encoder(tokenizer, template="{prompt} {answr}")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "row 7 has an empty prompt"),
        (None, "row 7 has no value in column 'prompt'"),
        (3, "row 7, column 'prompt': expected text or a list of messages"),
    ],
)
def test_a_bad_prompt_names_the_row(tokenizer, value, message):
    row = {"prompt": value}
    with pytest.raises(ValueError, match=message):
        encoder(tokenizer, row=row).prompt(row, uid=7)


def test_long_prompts_are_dropped_and_counted(tokenizer):
    made = encoder(tokenizer, max_prompt_tokens=3)
    assert made.prompt(ROW, uid=0) is None
    assert made.num_too_long == 1
    assert encoder(tokenizer, max_prompt_tokens=4).prompt(ROW, uid=0) is not None


def test_truncated_prompts_keep_their_end(tokenizer):
    prompt = encoder(tokenizer, max_prompt_tokens=3, too_long="truncate").prompt(ROW, uid=0)
    assert prompt.text == "+4="
    assert tokenizer.decode(prompt.token_ids) == "+4="


def test_long_prompts_can_be_an_error_that_names_row_and_limit(tokenizer):
    with pytest.raises(ValueError, match=r"row 9 has a prompt of 4 tokens, over data\.prompt\.max_prompt_tokens = 3"):
        encoder(tokenizer, max_prompt_tokens=3, too_long="error").prompt(ROW, uid=9)


def test_a_limit_below_one_is_an_error(tokenizer):
    with pytest.raises(ValueError, match=r"data\.prompt\.max_prompt_tokens = 0"):
        encoder(tokenizer, max_prompt_tokens=0)


def test_tokens_that_the_tokenizer_adds_only_in_front(tokenizer):
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos>", special_tokens=[("<pad>", 1), ("<eos>", 0)]
    )
    prompt = encoder(tokenizer).prompt(ROW, uid=0)
    assert prompt.token_ids[0] == 1 and prompt.token_ids[-1] != 0 and len(prompt.token_ids) == 5


def test_supervised_row_masks_the_prompt_and_ends_with_eos(tokenizer):
    row = encoder(tokenizer).token_row(ROW, uid=0)
    assert row.token_ids.dtype == torch.int64
    assert row.token_ids.tolist() == [*tokenizer.convert_tokens_to_ids(list("3+4=7")), tokenizer.eos_token_id]
    assert row.loss_mask.tolist() == [False] * 4 + [True] * 2
    assert row.num_loss_tokens == 2


def test_long_completions_follow_the_same_policy(tokenizer):
    row = {"prompt": "a", "completion": "bcd"}
    assert encoder(tokenizer, row=row, max_completion_tokens=3).token_row(row, uid=0) is None
    cut = encoder(tokenizer, row=row, max_completion_tokens=3, too_long="truncate").token_row(row, uid=0)
    assert tokenizer.decode(cut.token_ids) == "abcd"
    with pytest.raises(ValueError, match=r"row 1 has a completion of 4 tokens"):
        encoder(tokenizer, row=row, max_completion_tokens=3, too_long="error").token_row(row, uid=1)


def test_a_completion_that_is_not_text_names_the_row(tokenizer):
    row = {"prompt": "a", "completion": 7}
    with pytest.raises(ValueError, match="row 2, column 'completion': expected text, got 7"):
        encoder(tokenizer, row=row).token_row(row, uid=2)


def test_a_tokenizer_without_padding_token_pads_with_eos(tmp_path):
    char_tokenizer(eos_token="<eos>").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token == "<eos>"


def test_a_tokenizer_without_eos_is_an_error(tmp_path):
    char_tokenizer(pad_token="<pad>").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no eos_token"):
        load_tokenizer(tmp_path)


def test_a_directory_without_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(ValueError, match="holds no tokenizer that loads"):
        load_tokenizer(tmp_path)
