"""FSDP2 shards a stage by its names as it shards described models."""

import pytest
import torch
from toys import NUM_TARGETS, S, ask_family, find_difference

from dtlayout.mesh.build import build_mesh
from dtlayout.plans.apply import apply_plan
from dtlayout.plans.init import allocate
from dtlayout.plans.plan import Plan
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision
from dtlayout.tracing.module import TracedModel


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "opt", "gemma2", "falcon", "phi"])
@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # OPT's own blocks do
def test_sharded_units_compute_the_loss_and_gradients_of_the_family(name):
    answer = ask_family(name)
    with torch.device("meta"):
        model = TracedModel(answer.config, Kernels(attention="sdpa-math"), S)
    ends = () if model.parts.is_tied else (("model.embed_tokens",), ("model.norm", "lm_head"))
    plan = Plan(
        tensor={}, blocks="model.layers.*", units=(("model.layers.*",), *ends),
        zero=3, precision=Precision(compute="float32"),
    )  # fmt: skip
    sync = apply_plan(model, plan, build_mesh(Layout(), "cpu"))
    allocate([model], "cpu")
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            parameter.to_local().copy_(answer.state[model.parts.to_family(each)])
    sync.before_backward(is_last=True)
    loss = model(answer.tokens, targets=answer.targets, num_targets=NUM_TARGETS)
    loss.backward()
    assert abs(float(loss.detach()) - answer.loss) < 1e-5 * answer.loss
    assert find_difference(answer, model) < 1e-4
