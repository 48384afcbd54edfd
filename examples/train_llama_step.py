"""From values to one training step of a Llama on pp2 · tp2, with the loss of one process.

torchrun --nproc-per-node 4 examples/train_llama_step.py
"""

import torch
import torch.distributed as dist

import dtlayout as dl

model, kernels = dl.find_preset("debug"), dl.Kernels()
batch = dl.Batch(global_batch=4, seq_len=32)
precision = dl.Precision(compute="float32")
layout = dl.Layout(pp=2, tp=2)
layout.check(model, batch)  # InvalidLayout says what would work

plan = dl.make_plan(model, layout, kernels, precision)
slices = dl.partition(dl.layer_costs(model, batch), layout)
schedule = dl.make_schedule(layout, batch)
mesh = dl.build_mesh(layout, "cpu")
stages = schedule.placement.stages_of(mesh["pp"].get_local_rank())
modules = [dl.build_stage(model, kernels, precision, batch, slices[stage]) for stage in stages]
sync = [dl.apply_plan(module, plan, mesh) for module in modules]
dl.initialize(modules, model, seed=0, device="cpu")
runtime = dl.build_runtime(modules, schedule, sync, mesh, dl.stage_boundary(model, layout, batch, precision))
optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-3)
step = dl.TrainStep(runtime, optimizer, max_norm=1.0, mesh=mesh, model=model)

torch.manual_seed(0)  # every rank of a pipeline brings the same rows
tokens = torch.randint(model.vocab_size, (batch.global_batch, batch.seq_len + 1))
inputs, targets = tokens[:, :-1], tokens[:, 1:]
result = step(inputs, targets)

whole = dl.Llama(model, kernels, batch.seq_len)
dl.initialize([whole], model, seed=0, device="cpu")
with torch.no_grad():
    alone = float(whole(inputs, targets=targets, num_targets=targets.numel()))
assert abs(result.loss - alone) < 1e-5, f"4 ranks give {result.loss}, one gives {alone}"
if dist.get_rank() == 0:
    print(f"{layout}\n{plan}\n{schedule}\nloss {result.loss:.6f}, on one process {alone:.6f}")
dist.destroy_process_group()
