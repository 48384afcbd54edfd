"""Options of Megatron-LM, as its reader asks for them: in a command, or under the names that a tree has for them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dtlayout.programs.megatron.own_names import Said
from dtlayout.programs.options import OptionReader
from dtlayout.programs.understood import Row, Understood

FLAGS = frozenset((
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split", "--add-qkv-bias", "--bf16",
    "--cross-entropy-loss-fusion", "--disable-bias-linear", "--enable-cuda-graph", "--external-cuda-graph", "--fp16",
    "--grad-reduce-in-bf16", "--group-query-attention", "--moe-enable-deepep", "--moe-layer-recompute",
    "--moe-router-enable-expert-bias", "--moe-router-pre-softmax", "--multi-latent-attention",
    "--no-overlap-p2p-communication", "--overlap-grad-reduce", "--overlap-moe-expert-parallel-comm",
    "--overlap-param-gather", "--qk-layernorm", "--quick-geglu",
    "--recompute-activations", "--sequence-parallel", "--swiglu", "--tp-comm-overlap",
    "--untie-embeddings-and-output-weights", "--use-custom-fsdp", "--use-distributed-optimizer", "--use-flash-attn",
    "--use-megatron-fsdp", "--use-precision-aware-optimizer", "--use-rope-scaling",
    "--use-rotary-position-embeddings",
))  # fmt: skip
"""Options without a value."""


class MegatronOptions(OptionReader):
    """Asks for options of Megatron-LM, each with the list of its words, and notes them under the file's own names.

    `said` are the names of a tree; a command has the options themselves.
    """

    def __init__(self, found: Understood, options: Mapping[str, list[str]], said: Said | None = None):
        super().__init__(found, options)
        self.said = said

    def call(self, name: str) -> str:
        """The name of an option as the file has it, or would have it."""
        return self.said.call(name) if self.said else name

    def list_names(self, name: str) -> Sequence[str]:
        """The file's own names that an option comes from, none for one that is assumed."""
        return self.said.sources.get(name, ()) if self.said else (name,)

    def is_there(self, name: str) -> bool:
        """True if the file has the option; it is not used by that."""
        return self.options.get(name) is not None

    def is_denied(self, name: str) -> bool:
        """True if the file says that the option is not there."""
        return self.said is not None and name in self.said.denied and bool(self.list_names(name))

    def has(self, name: str) -> bool:
        """True if the option is there, which is then used; a flag with a value is a problem."""
        if not super().has(name):
            return False
        if name in FLAGS and self.options[name]:
            self.found.problems.append(f"{self.call(name)} takes no value, and has {' '.join(self.options[name])}")
        return True

    def one(self, name: str) -> Any:
        """The word of an option that has one; None otherwise, which is a problem then."""
        words = self.options[name]
        if len(words) != 1:
            self.found.problems.append(f"{self.call(name)} has {len(words)} values, and takes one")
            return None
        return self.known(name, words[0])

    def show(self, name: str) -> str:
        """The option as the file has it; its name alone where it is assumed."""
        if self.said is None:
            return " ".join([name, *self.options[name]])
        return self.said.show(*self.list_names(name)) or self.call(name)

    def show_all(self, *names: str) -> str:
        """Options that the file has, or denies, as it has them, each of its own names once."""
        if self.said is None:
            return " ".join(self.show(name) for name in names if self.is_there(name))
        there = [name for name in names if self.is_there(name) or name in self.said.denied]
        own = dict.fromkeys(each for name in there for each in self.list_names(name))
        return self.said.show(*own) or ", ".join(dict.fromkeys(map(self.call, there)))

    def note(self, section: str, values: Mapping[str, Any], *names: str, otherwise: str = "") -> None:
        """Note values of one of our sections, and the options that say them.

        `otherwise` is a reason for which something else is predicted. They are assumed then, and where the tree's
        default stands for an option.
        """
        note = otherwise or next(iter(self._list_assumed(*names)), "")
        self.found.put(section, values, self.show_all(*names), "assumed" if note else "read", note)

    def note_absent(self, section: str, values: Mapping[str, Any], name: str, note: str = "", shown: str = "") -> None:
        """Note what stands where an option is not there: read where the file denies it, and assumed otherwise."""
        if self.is_denied(name):
            self.found.put(section, values, self.show_all(name))
        else:
            self.assume(section, values, shown, note or f"no {self.call(name)}")

    def put(self, section: str, key: str, name: str, kind: Any) -> Any:
        """Note an option that is one of our keys; None where it is not there."""
        value = self.value(name, kind)
        if value is not None:
            self.note(section, {key: value}, name)
        return value

    def note_row(self, ours: str, *names: str, otherwise: str = "") -> None:
        """Note the options that say something of ours which is in no section by itself."""
        note = otherwise or next(iter(self._list_assumed(*names)), "")
        shown = self.show_all(*names)
        self.found.rows.append(Row(shown, ours, "assumed" if note or not shown else "read", note))

    def refuse(self, neutral: Mapping[str, Sequence[str]], refused: Mapping[str, str]) -> None:
        """Refuse options of subjects that are not predicted, but for words with which nothing is otherwise."""
        for name, words in self.options.items():
            if name in self.used or words is None:
                continue
            subject = next((each for each, names in refused.items() if re.fullmatch(names, name)), None)
            if words and words[0] in neutral.get(name, ()):
                self.has(name)
                self.found.ignore(self.show(name), "its default", "no effect")
            elif subject is not None:
                self.has(name)
                what = f"{self.call(name)} is not understood here: nothing predicts {subject}"
                self.found.problems.append(f"{what}; without it the rest can be predicted")

    def _list_assumed(self, *names: str) -> list[str]:
        assumed = self.said.assumed if self.said else {}
        return [assumed[name] for name in names if name in assumed]
