"""Text from a model: the whole prompt first, then one token after the other, with kept keys and values.

Legend: B batch, H query heads, G key-value heads, S tokens, K head width, D model width, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from dtlayout.base.errors import InvalidConfig
from dtlayout.checkpoint.first_weights import load_weights
from dtlayout.checkpoint.frozen_base import open_saved_base
from dtlayout.checkpoint.manifest import find_checkpoint
from dtlayout.checkpoint.sharded import load_parameters, read_model
from dtlayout.models.beside import CONFIG
from dtlayout.models.families import find_weight
from dtlayout.models.files import find_model
from dtlayout.models.llama import Block, Llama
from dtlayout.models.peft import find_base_folder, is_hf_folder, is_peft
from dtlayout.models.stored import find_weights
from dtlayout.models.traced import FAMILY
from dtlayout.models.weights import find_adapted_model, find_weight_problems
from dtlayout.ops.attention import Attend
from dtlayout.plans.apply import split_tensors
from dtlayout.plans.init import allocate, initialize
from dtlayout.plans.plan import tensor_styles
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape

KERNELS = Kernels(attention="sdpa-math", norm="fused")
"""Kernels of a model that generates; `generate` replaces its attention by one that keeps keys and values."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from its probabilities."""

    temperature: float = 0.8
    """Divisor of the logits; 0 always takes the likeliest token."""
    top_p: float = 0.95
    """Only the likeliest tokens that together have this probability are drawn."""
    top_k: int = 0
    """Only so many of the likeliest tokens are drawn; 0 leaves their number open."""
    seed: int = 0
    """Seed of the random draws; with it, all tokens of a text are decided."""

    def __post_init__(self) -> None:
        problems = []
        if self.temperature != 0 and not 0.01 <= self.temperature <= 100:
            problems.append(f"temperature={self.temperature:g} must be 0, or from 0.01 to 100")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p:g} must be above 0 and at most 1")
        if self.top_k < 0:
            problems.append(f"top_k={self.top_k} must be at least 1, or 0 for all tokens")
        if not 0 <= self.seed < 2**63:
            problems.append(f"seed={self.seed} must be from 0 to 2^63 - 1")
        if problems:
            raise InvalidConfig(problems)

    def make(self) -> Callable[[Tensor], int]:
        """A function that draws a token from logits [V]."""
        generator = torch.Generator().manual_seed(self.seed)

        def take(logits_V: Tensor) -> int:
            if self.temperature == 0:
                return int(logits_V.argmax())
            likely_V, order_V = (logits_V.double().cpu() / self.temperature).softmax(0).sort(descending=True)
            if self.top_k:
                likely_V[self.top_k :] = 0
                likely_V /= likely_V.sum()
            before_V = likely_V.cumsum(0) - likely_V
            chosen = torch.multinomial(likely_V.masked_fill(before_V >= self.top_p, 0), 1, generator=generator)
            return int(order_V[chosen])

        return take


def find_shape(source: Path) -> ModelShape:
    """The shape of the model in a run, a checkpoint, a Hugging Face folder or a PEFT folder."""
    if is_peft(source):
        return find_adapted_model(source)
    return find_model(str(source / CONFIG)) if is_hf_folder(source) else read_model(find_checkpoint(source))


def open_model(source: Path, max_len: int, number_format: str, device_type: str, base: Path | None = None) -> Llama:
    """A model of at most `max_len` tokens with the weights of a run, a checkpoint, a Hugging Face or a PEFT folder.

    Several ranks split it by tp over all of them. `base` is where the frozen model of a run's adapter is now, by
    default where it was. InvalidConfig or CheckpointError if it cannot be opened, InvalidLayout if the number of ranks
    does not divide it.
    """
    shape, is_hf = find_shape(source), is_hf_folder(source)
    if shape.family == FAMILY:
        raise InvalidConfig(
            f"generate writes with blocks that are described; export {shape.name}, for transformers' own"
        )
    if base is not None and (is_hf or shape.adapter is None):
        raise InvalidConfig(f"--base is for a run with an adapter, and {source} is none")
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    layout = Layout(tp=num_ranks, sequence_parallel=False)
    layout.check(shape, Batch(global_batch=1, seq_len=max_len))
    weights = find_base_folder(source) if is_hf else source
    if is_hf and (problems := find_weight_problems(find_weights(weights), shape.base)):
        raise InvalidConfig([f"{source}: {problem}" for problem in problems])
    with torch.device("meta"):
        model = Llama(shape, KERNELS, max_len, dtype=getattr(torch, number_format))
    if num_ranks > 1:
        mesh = init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("tp",))
        split_tensors(model, tensor_styles(shape, layout), mesh)
    if is_hf:
        load_weights(weights, [model], shape, 0, device_type, adapter=source if is_peft(source) else None)
    else:
        checkpoint = find_checkpoint(source)
        _give_base(checkpoint, model, shape, device_type, base)
        _load_checkpoint(checkpoint, model, shape)
    return model.eval()


def _give_base(checkpoint: Path, model: Llama, shape: ModelShape, device_type: str, asked: Path | None) -> None:
    """Give a model its memory, and the frozen weights beside an adapter, which no checkpoint holds."""
    if shape.adapter is None:
        allocate([model], device_type)
        return
    base = open_saved_base(checkpoint, shape, asked)
    if base.folder:
        load_weights(Path(base.folder), [model], shape, 0, device_type)
    else:
        initialize([model], shape, base.seed, device_type)


def _load_checkpoint(checkpoint: Path, model: Llama, shape: ModelShape) -> None:
    """Fill a model's parameters; a tied weight is saved under its first name, and may be two tensors here."""
    own = {
        name: parameter.detach() for name, parameter in model.named_parameters()
        if shape.adapter is None or find_weight(shape, name).trains
    }  # fmt: skip
    load_parameters(checkpoint, {name: tensor for name, tensor in own.items() if name not in shape.aliases})
    if seconds := {first: own[second] for second, first in shape.aliases.items() if second in own}:
        load_parameters(checkpoint, seconds)


class Memory:
    """Attention in place of a block's kernel that keeps the keys and values of all tokens so far."""

    def __init__(self, max_len: int):
        self.max_len = max_len
        self.length = 0
        self._kept: tuple[Tensor, Tensor] | None = None

    def __call__(self, q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of new tokens to all tokens so far: first a whole prompt, then one token at a time."""
        batch, groups, num_new, width = k_BGSK.shape
        if self._kept is None:
            size = (batch, groups, self.max_len, width)
            self._kept = k_BGSK.new_empty(size), v_BGSK.new_empty(size)
        for kept, new in zip(self._kept, (k_BGSK, v_BGSK), strict=True):
            kept[:, :, self.length : self.length + num_new] = new
        is_first = self.length == 0
        assert is_first or num_new == 1, "a prompt comes whole"
        self.length += num_new
        keys, values = (kept[:, :, : self.length] for kept in self._kept)
        return F.scaled_dot_product_attention(q_BHSK, keys, values, is_causal=is_first, enable_gqa=True)


@torch.inference_mode()
def generate(
    model: Llama, prompt: Sequence[int], max_tokens: int, take: Callable[[Tensor], int], *, ends: Collection[int] = ()
) -> Iterator[int]:
    """Draw the ids that follow a prompt of at least one id: `max_tokens` of them, or until one of `ends` comes.

    The model's tables of positions grow where the text is longer than the `max_len` that it was opened with.
    """
    decoder, max_len = model.model, len(prompt) + max_tokens
    assert decoder.embed_tokens is not None, "the model is whole"
    if max_len > len(decoder.rotary.cos):
        decoder.rotary.hold((range(max_len),))
    cos, sin = decoder.rotary.cos, decoder.rotary.sin
    blocks = [block for block in decoder.layers.values() if isinstance(block, Block)]
    kernels: list[Attend] = [block.self_attn.attend for block in blocks]
    for block in blocks:
        block.self_attn.attend = Memory(max_len)
    try:
        new, start = list(prompt), 0
        for _ in range(max_tokens):
            decoder.rotary.cos, decoder.rotary.sin = (table[start : start + len(new)] for table in (cos, sin))
            h_BSD = decoder(torch.tensor([new], device=decoder.embed_tokens.weight.device))
            start += len(new)
            new = [take(_find_logits(model, h_BSD[:, -1:])[0, 0])]
            if new[0] in ends:
                return
            yield new[0]
    finally:
        decoder.rotary.cos, decoder.rotary.sin = cos, sin
        for block, kernel in zip(blocks, kernels, strict=True):
            block.self_attn.attend = kernel


def _find_logits(model: Llama, h_BSD: Tensor) -> Tensor:
    """Logits [B, S, V] of hidden states, whole on every rank."""
    assert model.lm_head is not None, "the model is whole"
    logits = model.lm_head(h_BSD)
    if not dist.is_initialized():
        return logits
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.contiguous())
    return torch.cat(parts, -1)


def stream_text(
    ids: Iterable[int], decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()
) -> Iterator[str]:
    """The text of ids that follow the ids `before`, piece by piece.

    All ids are decoded together each time, since some tokenizers drop the first space of a text. A character that is
    not whole yet comes with the id that ends it.
    """
    so_far = list(before)
    shown = decode(so_far).rstrip("\N{REPLACEMENT CHARACTER}")
    for number in ids:
        so_far.append(number)
        text = decode(so_far)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield decode(so_far)[len(shown) :]
