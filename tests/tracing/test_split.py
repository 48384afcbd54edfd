"""tp splits a block where each call of its code can be computed in parts; where not, the call is named."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtlayout.models.traced import Divided, Trace, read_trace
from dtlayout.tracing.trace import describe_module

HEADS, WIDTH = 4, 8


class Block(nn.Module):
    """A block as somebody writes it, whose parts tests replace."""

    def __init__(self) -> None:
        super().__init__()
        size = HEADS * WIDTH
        self.num_heads = HEADS
        self.before, self.between = nn.LayerNorm(size), nn.LayerNorm(size)
        self.q, self.k, self.v, self.o = (nn.Linear(size, size) for _ in range(4))
        self.up, self.down = nn.Linear(size, 64), nn.Linear(64, size)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, WIDTH)).transpose(1, 2)

    def activate(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def scale(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (self.split_heads(layer(h)) for layer in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q * self.scale(), k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        return x + self.down(self.activate(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(50, HEADS * WIDTH), nn.Linear(HEADS * WIDTH, 50, bias=False)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        x = self.tokens(words)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class States(Block):
    """Its code states how many heads there are."""

    def split_heads(self, x):
        return x.view(*x.shape[:2], self.num_heads, WIDTH).transpose(1, 2)


class Silent(Block):
    """With half of its heads a view runs, and takes two heads for one."""

    def split_heads(self, x):
        return x.view(x.shape[0], -1, self.num_heads, WIDTH).transpose(1, 2)


class Literal(Block):
    """The number stands in the code itself."""

    def split_heads(self, x):
        return x.view(*x.shape[:2], 4, WIDTH).transpose(1, 2)


class Inner(Block):
    """The heads of an element lie side by side."""

    def split_heads(self, x):
        return x.unflatten(-1, (-1, HEADS)).permute(0, 3, 1, 2)


class Softmax(Block):
    """An activation over all elements of a token."""

    def activate(self, x):
        return x.softmax(-1)


class Halves(Block):
    """The first half of the elements is multiplied by the second."""

    def activate(self, x):
        first, second = x.chunk(2, -1)
        return torch.cat((first * second, second), -1)


class Sorts(Block):
    """A function that has no rule."""

    def activate(self, x):
        return x.cumsum(-1)


class Scales(States):
    """Queries are scaled by a number that depends on how many heads there are."""

    def scale(self):
        return self.num_heads**-0.5


class Counts(Block):
    """The result is divided by the number of elements that a rank has."""

    def activate(self, x):
        return F.relu(x) / x.shape[-1]


class Fills(Block):
    """A part of the elements is set by its place."""

    def activate(self, x):
        y = F.relu(x).clone()
        y[..., :8] = 0
        return y


class OverHeads(Block):
    """A softmax over heads, which are no last dimension."""

    def split_heads(self, x):
        return super().split_heads(x).softmax(1)


class Flag(States):
    """A flag of a call depends on how many heads there are."""

    def forward(self, x):
        h = self.before(x)
        q, k, v = (self.split_heads(layer(h)) for layer in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.num_heads == HEADS)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        return x + self.down(self.activate(self.up(self.between(x))))


class Swaps(States):
    """With fewer heads keys take the place of values."""

    def forward(self, x):
        h = self.before(x)
        q, k, v = (self.split_heads(layer(h)) for layer in (self.q, self.k, self.v))
        k, v = (k, v) if self.num_heads == HEADS else (v, k)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        return x + self.down(self.activate(self.up(self.between(x))))


class Quarters(Block):
    """One matrix holds gate and up, and its code takes halves of the gate apart."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HEADS * WIDTH, 128)

    def activate(self, x):
        (gate, up), quarter = x.chunk(2, -1), x.shape[-1] // 4
        return F.silu(torch.cat((x[..., :quarter], gate[..., quarter:]), -1)) * up


class Squeezes(Block):
    """Code that takes another way where one head is left."""

    def split_heads(self, x):
        heads = super().split_heads(x)
        return heads * 2 if heads.shape[1] == 1 else heads


def trace(block: type[Block], folder) -> Trace:
    describe_module(Model(block), {"words": torch.zeros(1, 12, dtype=torch.long)}, folder / "own.json")
    return read_trace(str(folder / "own.json"))


@pytest.mark.parametrize(
    ("block", "numbers"), [(Block, ()), (States, ("num_heads",)), (Silent, ("num_heads",))], ids=lambda x: str(x)[-20:]
)
def test_numbers_that_stand_in_the_way_are_divided(block, numbers, tmp_path):
    found = trace(block, tmp_path)
    assert "tp" not in found.whole and found.divided == (Divided(numbers),)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Literal, "its code does not run with a part of its heads"),
        (Inner, "needs by scaled_dot_product_attention what other ranks have"),
        (Softmax, "needs by softmax what other ranks have"),
        (Halves, "needs by chunk what other ranks have"),
        (Sorts, "reads a part of a tensor by cumsum, for which there is no rule"),
        (Scales, "computes mul with a number that depends on how many heads there are"),
        (Counts, "computes div with a number that depends on how many heads there are"),
        (Fills, "needs by setitem what other ranks have"),
        (OverHeads, "needs by softmax what other ranks have"),
        (Flag, "computes scaled_dot_product_attention with a number that depends on"),
        (Swaps, "its code computes something else with a part of its heads"),
        (Quarters, "cuts a matrix at other places than between its parts"),
        (Squeezes, "its code computes something else with a part of its heads"),
    ],
)
def test_a_call_that_needs_more_than_a_rank_has_is_the_reason(block, reason, tmp_path):
    assert reason in trace(block, tmp_path).whole["tp"]
