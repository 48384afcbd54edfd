"""Our stages and our schedule in torch's own pipeline runtime, with the loss and the gradients of one process.

torchrun --nproc-per-node 2 examples/stages_in_torchs_pipeline.py
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as TorchRuntime

import dtlayout as dl

model, kernels = dl.find_preset("debug"), dl.Kernels()
batch, precision = dl.Batch(global_batch=8, seq_len=32), dl.Precision(compute="float32")
layout = dl.Layout(pp=2, schedule="interleaved-1f1b", virtual_stages=2)
layout.check(model, batch)

slices = dl.partition(dl.layer_costs(model, batch), layout)
schedule = dl.make_schedule(layout, batch)
pipeline = dl.build_mesh(layout, "cpu")["pp"]
indices = schedule.placement.stages_of(pipeline.get_local_rank())
modules = [dl.build_stage(model, kernels, precision, batch, slices[i]) for i in indices]
dl.initialize(modules, model, seed=0, device="cpu")


def sum_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return (
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / batch.num_tokens
    )


stages = [
    PipelineStage(module, i, len(slices), torch.device("cpu"), group=pipeline.get_group())
    for module, i in zip(modules, indices, strict=True)
]
runtime = TorchRuntime(stages, schedule.num_microbatches, sum_losses, scale_grads=False)
with tempfile.TemporaryDirectory() as folder:
    order = Path(folder) / "order.csv"
    dl.write_schedule(schedule.ranks, order)
    runtime._load_csv(os.fspath(order))

torch.manual_seed(0)  # every rank brings the same rows
tokens = torch.randint(model.vocab_size, (batch.global_batch, batch.seq_len + 1))
inputs, targets = tokens[:, :-1], tokens[:, 1:]
losses: list[Tensor] = []
is_first, is_last = 0 in indices, len(slices) - 1 in indices
runtime.step(*([inputs] if is_first else []), target=targets if is_last else None, losses=losses)

whole = dl.Llama(model, kernels, batch.seq_len)
dl.initialize([whole], model, seed=0, device="cpu")
alone = whole(inputs, targets=targets, num_targets=batch.num_tokens)
alone.backward()
expected = dict(whole.named_parameters())
for module in modules:
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad)
if is_last:
    torch.testing.assert_close(sum(losses), alone.detach())
    print(f"{schedule}\nloss and gradients as on one process")
dist.destroy_process_group()
