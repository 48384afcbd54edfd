"""torch.compile sees a traced block whole: it trains to the same numbers, and keeps what predictions say."""

import pytest
import torch
from parity import compiling_with
from thorough import thorough
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from toys import NUM_TARGETS, TOYS, S, ask_family, build, find_difference, make_config

from dtlayout.models.description import BLOCKS
from dtlayout.models.scores import find_score_bytes
from dtlayout.plans.apply import prepare_blocks
from dtlayout.plans.init import allocate
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.recompute import Recompute
from dtlayout.tracing.module import TracedModel
from dtlayout.tracing.trace import trace_config

LENGTH, HEADS = 61, 4


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "recompute", "graphs", "tolerance"),
    [
        ("gpt_neox", "selective", 1, 1e-10),
        (
            "gemma2",
            "none",
            2,
            1e-5,
        ),  # a norm's mean is of fp32 in any format, and a compiler adds it up in another order
        *map(thorough, [("llama", "none", 1, 1e-5), ("gemma2", "full", 2, 1e-5), ("bloom", "full", 1, 1e-5)]),
    ],
)
def test_compiled_blocks_train_to_the_familys_numbers_without_a_graph_break(name, recompute, graphs, tolerance):
    answer = ask_family(name)
    model = build(answer.config)
    model.reset_buffers("cpu")
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            parameter.copy_(answer.state[model.parts.to_family(each)])
    prepare_blocks(model, BLOCKS, Recompute.parse(recompute), compiles=True)
    with compiling_with("aot_eager"):
        loss = model(answer.tokens, targets=answer.targets, num_targets=NUM_TARGETS)
        loss.backward()
    assert abs(float(loss.detach()) - answer.loss) < tolerance * answer.loss
    assert find_difference(answer, model) < tolerance
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]  # one for each kind of block


@pytest.mark.parametrize("name", ["gemma2", thorough("bloom"), thorough("gptj")])
def test_a_compiled_block_keeps_the_scores_that_predictions_say(name):
    kind, keys = TOYS[name]
    config = make_config(kind, **keys)
    trace = trace_config({**config.to_dict(), "model_type": kind}, name)
    found = find_score_bytes(trace.kinds[0].attention.scores, LENGTH, 2).compile(2)
    with torch.device("meta"):
        model = TracedModel(config, Kernels(loss="linear"), LENGTH, dtype=torch.bfloat16)
    allocate([model], "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    prepare_blocks(model, BLOCKS, Recompute.parse("none"), compiles=True)
    saved: list[torch.Tensor] = []
    with compiling_with("aot_eager_decomp_partition"), saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(torch.zeros(1, LENGTH, dtype=torch.int64))
    storages = {each.untyped_storage().data_ptr(): each for each in saved}
    scores = [
        each for each in storages.values() if each.untyped_storage().nbytes() // each.itemsize == HEADS * LENGTH**2
    ]
    assert len(scores) == 2 * len(trace.shape.block_kinds)
    assert sum(each.itemsize for each in scores) == found.kept * len(trace.shape.block_kinds)


def test_sizes_of_toys_are_those_that_are_looked_for():
    assert S < LENGTH <= make_config("gemma2").max_position_embeddings
