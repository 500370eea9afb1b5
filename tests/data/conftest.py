import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz \n+-=:?{}"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '{' + m['role'] + ':' + m['content'] + '}' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '{assistant:' }}{% endif %}"
)


def char_tokenizer(**special):
    """One token per character; `<eos>` is 0."""
    vocabulary = {token: index for index, token in enumerate(["<eos>", "<pad>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


@pytest.fixture
def tokenizer():
    return char_tokenizer(eos_token="<eos>", pad_token="<pad>")


@pytest.fixture
def chat_tokenizer():
    tokenizer = char_tokenizer(eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def tokenizer_dir(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")
