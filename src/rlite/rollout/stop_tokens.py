"""Which tokens end a completion of a Hugging Face model directory."""

import json
from pathlib import Path


def end_of_sequence_ids(model_dir: Path | str) -> tuple[int, ...]:
    """Ids in `generation_config.json` (else `config.json`) and the tokenizer's own end-of-sequence id, sorted.

    The first are what `generate` of transformers stops at: chat models list the end-of-turn token there. Empty when the
    directory names none; completions then end at `max_tokens` only.
    """
    model_dir = Path(model_dir)
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = model_dir / name
        value = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
            break
    if (model_dir / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        eos_token_id = AutoTokenizer.from_pretrained(model_dir).eos_token_id
        ids.update([] if eos_token_id is None else [eos_token_id])
    return tuple(sorted(ids))
