"""Conversations with a model: the prompt of each answer is all messages so far, as the chat template writes them.

Under tp the first rank reads the questions and writes the prompts, and the other ranks get the ids of each prompt.
"""

from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch.distributed as dist

from dtlayout.base.errors import InvalidConfig
from dtlayout.data.chat import ChatTemplate
from dtlayout.data.template import ChatMessage
from dtlayout.data.tokenizer import Tokenizer

_PATIENCE = timedelta(days=1)
"""Longest time that ranks wait for a person's next question."""


class Conversation:
    """Messages so far, and the room that a model's context has for more of them."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, system: str = "", context: int | None = None):
        """`system` is the message that comes first, if there is one; `context` the model's longest text, in tokens."""
        self.messages: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
        self.context = context
        self._template, self._tokenizer = template, tokenizer

    def check(self) -> None:
        """DataError if the template refuses any question after the messages so far, such as a system message."""
        self._write([*self.messages, {"role": "user", "content": "a"}])

    def ask(self, question: str) -> list[int]:
        """Ids of the prompt that an answer to the question goes on from.

        DataError if the template refuses, InvalidConfig if the context has no room for an answer.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        prompt = self._write(messages)
        if self.context is not None and len(prompt) >= self.context:
            raise InvalidConfig(
                f"the conversation with this question has {len(prompt):,} tokens, and the model's context is "
                f"{self.context:,}: begin another one"
            )
        self.messages = messages
        return prompt

    def limit(self, prompt: list[int], max_tokens: int) -> int:
        """Tokens that an answer may have: `max_tokens`, or as many as the context has room for behind the prompt."""
        return max_tokens if self.context is None else min(max_tokens, self.context - len(prompt))

    def add_answer(self, text: str) -> None:
        """Keep an answer, for the prompts that follow."""
        self.messages.append({"role": "assistant", "content": text})

    def _write(self, messages: list[ChatMessage]) -> list[int]:
        text = self._template.render(messages, asks=True)
        prompt: list[int] = self._tokenizer.encode_chats([text])[0][0].tolist()
        return prompt


def share_prompts(prompts: Iterable[list[int]]) -> Iterator[list[int]]:
    """Give every rank the prompts of the first one; those that others pass are never read.

    An error in the first rank's `prompts` is raised there, and ends the iteration on the others.
    """
    if not dist.is_initialized():
        yield from prompts
        return
    is_first, own = dist.get_rank() == 0, iter(prompts)
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)  # the default group gives up while a person thinks
    while True:
        found: list[list[int] | None] = [None]
        try:
            if is_first:
                found = [next(own, None)]
        finally:
            dist.broadcast_object_list(found, src=0, group=group)
        if found[0] is None:
            return
        yield found[0]
