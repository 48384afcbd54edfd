"""The part of a causal model of `transformers` that a pipeline stage holds, with the calling convention of `Llama`.

`TracedModel` → `TracedDecoder` (embedding, blocks, other ends) and `Head`. Blocks and ends are the family's own
modules. What blocks need beside hidden states is made by the family's own base model, of which a `Shell` is left.
Blocks keep their index in the whole model, and parameters the names of `ModelParts.names`.

Legend: B batch, S sequence, D model width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.description import Operation
from dtlayout.models.traced import Divided
from dtlayout.ops.attention import prepare_mask
from dtlayout.ops.documents import Documents, see_documents
from dtlayout.ops.loss import Head
from dtlayout.ops.positions import OwnPositions
from dtlayout.spec.kernels import Kernels
from dtlayout.tracing.attention import NAME, bind_kernel
from dtlayout.tracing.building import build_model
from dtlayout.tracing.parts import ModelParts, find_parts
from dtlayout.tracing.refit import divide, refit
from dtlayout.tracing.shell import Shell, compute_tables, cut_heads, own_tables


class TracedModel(nn.Module):
    """The whole model, or the part of it that a pipeline stage holds.

    Takes tokens [B, S] where it has the embedding, else the hidden states [B, S, D] of the part before. Gives hidden
    states without the head; with it logits [B, S, V], or the loss where targets come in.
    """

    tp_shards: int = 1
    """Number of equal parts of a sequence, one of which hidden states have between modules (sequence parallelism)."""
    tp_shard: int = 0
    """The part that is here."""

    def __init__(
        self,
        config: Any,
        kernels: Kernels,
        max_seq_len: int,
        *,
        layers: Sequence[int] | None = None,
        embedding: bool = True,
        head: bool = True,
        dtype: torch.dtype = torch.float32,
        operations: Sequence[Sequence[Operation]] = (),
        divided: Sequence[Divided] = (),
    ):
        """`config` is a `PretrainedConfig`; `layers` are the blocks to hold, all by default.

        `operations` are those of each block of the model, by which it is refitted, and `divided` what tp splits of its
        code; without them blocks stay as they are.

        InvalidConfig for models that are no plain decoder, and for those with a table of positions that is shorter
        than `max_seq_len`.
        """
        super().__init__()
        model = build_model(config, dtype)
        self.parts = find_parts(model)
        if self.parts.before and max_seq_len > getattr(config, "max_position_embeddings", max_seq_len):
            raise InvalidConfig(
                f"data.seq_len={max_seq_len} is longer than the table of {config.max_position_embeddings} positions "
                f"that {type(model).__name__} has"
            )
        matrix = model.get_output_embeddings()
        blocks = range(self.parts.num_blocks) if layers is None else layers
        for number in blocks if operations else ():
            refit(model.get_submodule(f"{self.parts.blocks}.{number}"), operations[number])
        self.divided, self.num_heads = divided, config.num_attention_heads
        self.model = TracedDecoder(
            model, self.parts, kernels, max_seq_len, blocks, embedding=embedding, norm=head, dtype=dtype
        )
        self.lm_head = None
        if head:
            self.lm_head = Head(
                matrix.in_features, matrix.out_features, kernels.loss, dtype, bias=self.parts.head_bias,
                factor=self.parts.logits.scale, softcap=self.parts.logits.softcap,
            )  # fmt: skip
            if self.parts.is_tied and self.model.embed_tokens is not None:
                self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        x: Tensor,
        documents: Documents | None = None,
        *,
        targets: Tensor | None = None,
        num_targets: Tensor | float = 1.0,
    ) -> Tensor:
        """The loss is the sum of -log p over the valid `targets` [B, S], divided by `num_targets`, which is their
        number in the whole step.

        With `documents` a token sees no other document than its own. Positions don't start anew.
        """
        if documents is not None and not self.model.shell.takes_mask:
            raise InvalidConfig("data.document_mask needs attention that transformers looks up by name; use false")
        h_BSD = self.model(x, documents, self.tp_shards, self.tp_shard)
        return h_BSD if self.lm_head is None else self.lm_head(h_BSD, targets, num_targets)

    def split(self, parts: int, part: int, *, sequence: bool) -> None:
        """Make this the model of one of `parts` ranks of tp, whose hidden states are with `sequence` a part of it."""
        if sequence:
            self.tp_shards, self.tp_shard = parts, part
        of_blocks = dict(enumerate(self.divided))
        for number, block in self.model.layers.items():
            if int(number) in of_blocks:
                divide(block, of_blocks[int(number)].numbers, parts)

        def cut(number: int, name: str, value: Any) -> Any:
            if number not in of_blocks or name not in of_blocks[number].arguments:
                return value
            return cut_heads(value, self.num_heads, parts, part, self.model.shell.hidden.shape[0])

        self.model.shell.cut = cut

    def reset_buffers(self, device: torch.device | str | None = None) -> None:
        """Put tables, such as rotary frequencies, on a device, by default that of the parameters; not on meta."""
        device = next(self.parameters()).device if device is None else torch.device(device)
        if device.type != "meta":
            for module, name, values in self.model.tables:
                module._buffers[name] = values.to(device)


class TracedDecoder(nn.Module):
    """Embedding, blocks and other ends; named `model` inside a `TracedModel`."""

    def __init__(
        self,
        model: Any,
        parts: ModelParts,
        kernels: Kernels,
        max_seq_len: int,
        layers: Sequence[int],
        *,
        embedding: bool,
        norm: bool,
        dtype: torch.dtype,
    ):
        """`model` is the whole causal model on the meta device; it is taken apart."""
        super().__init__()
        table, blocks = model.get_input_embeddings(), model.get_submodule(parts.blocks)
        size = table.num_embeddings, table.embedding_dim
        self.scale = parts.embedding_scale
        self.prepare_mask = partial(prepare_mask, kernel=kernels.attention)
        self.positions = OwnPositions(max_seq_len)
        self.embed_tokens = nn.Embedding(*size, dtype=dtype) if embedding else None  # the token of padding is trained
        for path in parts.before:
            self._register(parts, path, model.get_submodule(path) if embedding else None)
        self.layers = nn.ModuleDict({str(i): blocks[i] for i in layers})
        for path in parts.after:
            self._register(parts, path, model.get_submodule(path) if norm else None)
        self.ends = [parts.name_ours(path).rpartition(".")[2] for path in parts.after] if norm else []
        """Attributes of the ends behind the blocks, in the order of their calls."""
        for block in self.layers.values():
            bind_kernel(block, kernels.attention)
        cut = len(parts.base) + 1
        self.shell = Shell(
            model.get_submodule(parts.base),
            parts.blocks[cut:],
            before={p[cut:]: (model.get_submodule(p) if embedding else None, w) for p, w in parts.before.items()},
            after=[path[cut:] for path in parts.after],
            returns_tuple=parts.returns_tuple,
            takes_mask=model.config._attn_implementation == NAME,
        )
        self.tables = [
            (module, name, values)
            for module in {id(m): m for root in (self.shell.base, self) for m, _ in own_tables(root)}.values()
            for name, values in compute_tables(model, module).items()
        ]
        """Each buffer's module, its name there, and its values on the CPU."""

    def _register(self, parts: ModelParts, path: str, end: nn.Module | None) -> None:
        self.register_module(parts.name_ours(path).rpartition(".")[2], end)

    def forward(self, x: Tensor, documents: Documents | None = None, tp_shards: int = 1, tp_shard: int = 0) -> Tensor:
        """Hidden states [B, s, D] of the tokens [B, S] of a rank of cp, or of hidden states; s is S / `tp_shards`."""
        positions, h_BSD = self.positions.find(documents, x.device), x
        if self.embed_tokens is not None:
            h_BSD = self.embed_tokens(x)
            if self.scale != 1:
                h_BSD = h_BSD * torch.tensor(self.scale, dtype=h_BSD.dtype)  # rounded as the family does
        self.shell.keep_apart = None if documents is None else self._keep_apart(documents, h_BSD)
        if self.embed_tokens is not None and positions is None and tp_shards == 1:
            h_BSD = self.shell.embed(h_BSD, blocks=self.layers)
        else:
            num_own = h_BSD.shape[1] * tp_shards
            if self.embed_tokens is not None:
                own = torch.arange(num_own, device=x.device) if positions is None else positions
                h_BSD = self.shell.embed(h_BSD, own.chunk(tp_shards)[tp_shard])
            seq_len = num_own if positions is None else self.positions.max_seq_len
            h_BSD = self.shell.run(self.layers, h_BSD, seq_len, positions)
        for name in self.ends:
            h_BSD = getattr(self, name)(h_BSD)
        return h_BSD

    def _keep_apart(self, documents: Documents, like: Tensor) -> Callable[[Tensor | None], Tensor]:
        """A function from a block's own mask, true where a token sees another, to one that keeps documents apart too.

        A block without a mask of its own gets what its kernel needs. Each is made once for all blocks.
        """
        of_kernel = self.prepare_mask(documents, like=like)
        if of_kernel.dim() == 4:  # [B, 1, S, S]: with three it is known from a block's own mask
            of_kernel = of_kernel.squeeze(1)
        combine = cache(lambda own: own & see_documents(documents.starts.to(like.device, non_blocking=True)))
        return lambda own: of_kernel if own is None else combine(own)
