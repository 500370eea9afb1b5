"""From rows to token ids: chat template or plain text, the length limit, and the rows of a supervised warm start."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlite.data.sources import Row, check_columns
from rlite.types import Prompt, TokenRow


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How a row becomes a prompt."""

    column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages (`{role, content}`)."""
    template: str | None = None
    """Text with column names in braces, such as `Q: {question} A:`; replaces `column`."""
    system_prompt: str | None = None
    """Put in front: as system message of the chat template, or as text and a newline when plain."""
    style: Literal["auto", "chat", "plain"] = "auto"
    """`chat` applies the tokenizer's chat template, `plain` none, `auto` one if the tokenizer has it."""
    max_prompt_tokens: int = 1024
    """Longest prompt."""
    too_long: Literal["drop", "truncate", "error"] = "drop"
    """Rows over a limit: `drop` (counted, reported), `truncate` (prompts keep their end, completions their start)."""
    completion_column: str = "completion"
    """Column with the wanted answer; only a supervised warm start reads it."""
    max_completion_tokens: int = 1024
    """Longest wanted answer, end-of-sequence token included; only a supervised warm start reads it."""

    def needed_columns(self) -> list[str]:
        """Columns without which no prompt can be made."""
        if self.template is None:
            return [self.column]
        return list(
            dict.fromkeys(name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None)
        )


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """Tokenizer of a Hugging Face directory; a missing padding token is set to the end-of-sequence token.

    rlite masks by position, never by value, so an end-of-sequence token that doubles as padding is still trained on.

    Raises:
        ValueError: no such directory, no tokenizer in it, or no end-of-sequence token.
    """
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise ValueError(f"data.tokenizer_dir = {str(directory)!r}: no such directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.tokenizer_dir = {str(directory)!r}: holds no tokenizer that loads ({error})") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"data.tokenizer_dir = {str(directory)!r}: the tokenizer has no eos_token, completions could not end. "
            "Set eos_token in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class PromptEncoder:
    """Turns rows into `Prompt`s, and into `TokenRow`s for a supervised warm start.

    Args:
        tokenizer: of the policy.
        prompt_format: what to do.
        columns: of the data set; checked at once.
        key: config key of the source, for error messages.

    Raises:
        ValueError: missing column, chat template wanted but absent, limit below 1.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_format: PromptFormat,
        *,
        columns: Sequence[str],
        key: str = "data.train",
    ) -> None:
        self.tokenizer, self.format, self.key = tokenizer, prompt_format, key
        self.num_too_long = 0
        field = "column" if prompt_format.template is None else "template"
        check_columns(prompt_format.needed_columns(), columns, key=f"data.prompt.{field} for {key}")
        has_template = bool(tokenizer.chat_template)
        if prompt_format.style == "chat" and not has_template:
            raise ValueError(
                "data.prompt.style = 'chat', but the tokenizer has no chat template: set it to 'plain' or 'auto', "
                "or add a chat_template to the tokenizer"
            )
        self.chat = prompt_format.style == "chat" or (prompt_format.style == "auto" and has_template)
        for name in ("max_prompt_tokens", "max_completion_tokens"):
            if getattr(prompt_format, name) < 1:
                raise ValueError(f"data.prompt.{name} = {getattr(prompt_format, name)}: must be at least 1")

    def prompt(self, row: Row, *, uid: int) -> Prompt | None:
        """The prompt of row number `uid`; None when it is too long and dropped (counted in `num_too_long`)."""
        text = self._text(row, uid)
        token_ids = self._encode(text)
        if not token_ids:
            raise ValueError(f"{self.key}: row {uid} has an empty prompt")
        limit = self.format.max_prompt_tokens
        if len(token_ids) > limit:
            if not self._keep_too_long(uid, what="prompt", length=len(token_ids), limit=limit):
                return None
            token_ids = token_ids[-limit:]
            text = self.tokenizer.decode(token_ids)
        return Prompt(uid=uid, token_ids=tuple(token_ids), text=text, columns=row)

    def token_row(self, row: Row, *, uid: int) -> TokenRow | None:
        """Prompt (masked), wanted completion and end-of-sequence token; None when too long and dropped."""
        prompt = self.prompt(row, uid=uid)
        if prompt is None:
            return None
        wanted = row[self.format.completion_column]
        if not isinstance(wanted, str):
            raise ValueError(
                f"{self.key}: row {uid}, column {self.format.completion_column!r}: expected text, got {wanted!r}"
            )
        completion = [*self.tokenizer.encode(wanted, add_special_tokens=False), self.tokenizer.eos_token_id]
        limit = self.format.max_completion_tokens
        if len(completion) > limit:
            if not self._keep_too_long(uid, what="completion", length=len(completion), limit=limit):
                return None
            completion = completion[:limit]
        token_ids = torch.tensor([*prompt.token_ids, *completion], dtype=torch.int64)
        loss_mask = torch.arange(len(token_ids)) >= len(prompt.token_ids)
        return TokenRow(token_ids=token_ids, loss_mask=loss_mask)

    def _keep_too_long(self, uid: int, *, what: str, length: int, limit: int) -> bool:
        if self.format.too_long == "error":
            raise ValueError(
                f"{self.key}: row {uid} has a {what} of {length} tokens, over data.prompt.max_{what}_tokens = {limit}. "
                "Raise the limit, or set data.prompt.too_long to 'drop' or 'truncate'."
            )
        self.num_too_long += 1
        return self.format.too_long == "truncate"

    def _text(self, row: Row, uid: int) -> str:
        for name in self.format.needed_columns():
            if row[name] is None:
                raise ValueError(f"{self.key}: row {uid} has no value in column {name!r}")
        content = row[self.format.column] if self.format.template is None else self.format.template.format(**row)
        messages = _messages(content, where=f"{self.key}: row {uid}, column {self.format.column!r}")
        system = self.format.system_prompt
        if self.chat:
            if system is not None:
                messages = [{"role": "system", "content": system}, *messages]
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if not isinstance(content, str):
            raise ValueError(
                f"{self.key}: row {uid} is a list of chat messages, which needs a tokenizer with a chat template "
                "and data.prompt.style 'auto' or 'chat'"
            )
        return content if system is None else f"{system}\n{content}"

    def _encode(self, text: str) -> list[int]:
        # A chat template writes its special tokens itself; plain text gets what the tokenizer adds (a bos token, say).
        token_ids = self.tokenizer.encode(text, add_special_tokens=not self.chat)
        eos = self.tokenizer.eos_token
        if token_ids and token_ids[-1] == self.tokenizer.eos_token_id and not text.rstrip().endswith(eos):
            # Some tokenizers end every text with eos; the model has to continue the prompt, not to start anew.
            token_ids = token_ids[:-1]
        return token_ids


def _messages(content: Any, *, where: str) -> list[Mapping[str, str]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if isinstance(content, list) and content and all(_is_message(message) for message in content):
        return list(content)
    raise ValueError(f"{where}: expected text or a list of messages with role and content, got {content!r:.200}")


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and {"role", "content"} <= message.keys()
