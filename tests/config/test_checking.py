"""Checking: the trainer asks its engine's file, and everything that is wrong with a config comes at once."""

from dataclasses import replace

import pytest

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.refusals import describe
from dtlayout.config.checking import check_layout
from dtlayout.config.config import Config
from dtlayout.config.loading import parse_config
from dtlayout.costmodel import engine
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.cluster import find_gpu
from dtlayout.spec.device import Device, check_formats, device_of
from dtlayout.spec.precision import Precision

EXPERTS = {"number": 4, "per_token": 2, "ffn_size": 16}


def config_with(model: dict[str, object], **sections: dict[str, object]) -> Config:
    batch, train = {"global_batch": 8, "seq_len": 16}, {"steps": 3}
    return parse_config({"model": {"name": "debug", **model}, "batch": batch, "train": train, **sections})


def problems_of(config: Config) -> list[str]:
    with pytest.raises(InvalidLayout) as caught:
        check_layout(config, 1)
    return caught.value.problems


def test_a_capability_of_the_trainer_is_a_row_of_its_engines_file(monkeypatch):
    rows = {
        "model.window=8 can be predicted, not trained; use window=0": config_with({"window": 8}),
        "model.gated_ffn=false can be predicted, not trained; use gated_ffn=true": config_with({"gated_ffn": False}),
        "precision.matmuls=mxfp8 can be predicted, not trained; use precision.matmuls=compute or fp8-tensorwise or "
        "fp8-rowwise": config_with({}, precision={"matmuls": "mxfp8"}),
        "model.experts.bias=true can be predicted, not trained; use experts.bias=false": config_with(
            {"experts": EXPERTS | {"bias": True}}
        ),
    }
    for problem, config in rows.items():
        assert problems_of(config) == [problem]
    tables = engine._read_engines()[engine.OWN_ENGINE]
    features = tables["features"]
    gained = replace(features, matmuls=("mxfp8",), untrained=())
    monkeypatch.setitem(tables, "features", gained)
    for config in rows.values():
        assert check_layout(config, 1).world_size == 1


def test_an_adapter_and_a_quantized_base_are_refused_where_they_cannot_be():
    lora, wide = {"rank": 4}, {"hidden_size": 192, "num_heads": 6}
    overlapped = {"tp": 2, "sequence_parallel": True, "tp_overlap": True}
    rows = {
        "adapter.targets: no linear layer of a block is called q_prj; use some of q_proj, k_proj, v_proj, o_proj, "
        "gate_proj, up_proj, down_proj": config_with({}, adapter={"targets": ["q_prj"]}),
        "adapter.targets: gate is a router, which stays as it is; leave it out": config_with(
            {"experts": EXPERTS}, adapter={"targets": ["gate", "q_proj"]}
        ),
        "layout.tp_overlap sends the parts of frozen matmuls, and none of [adapter] beside them; use tp_overlap=false":
            config_with({}, adapter=lora, layout=overlapped),
        "precision.base=nf4 stores frozen weights, and without [adapter] all are trained; use base=compute, or "
        "[adapter]": config_with({}, precision={"base": "nf4"}),
        "precision.base=int8 stores blocks of 64, and a row of mlp.down_proj has 48 elements on each of 2 ranks of tp; "
        "use base=compute": config_with({"ffn_size": 96}, adapter=lora, precision={"base": "int8"}, layout={"tp": 2}),
        "precision.base=nf4 stores blocks of 64, and a row of self_attn.o_proj has 96 elements on each of 2 ranks of "
        "tp; use tp=1": config_with(
            wide | {"ffn_size": 128}, adapter=lora, precision={"base": "nf4"}, layout={"tp": 2}
        ),
    }  # fmt: skip
    for problem, config in rows.items():
        with pytest.raises(InvalidLayout) as caught:
            check_layout(config, config.layout.smallest_world_size)
        assert caught.value.problems == [problem]


def test_fp8_is_refused_where_it_cannot_be():
    fp8, lora = {"matmuls": "fp8-rowwise"}, {"rank": 4}
    narrow = {"hidden_size": 24, "num_heads": 2, "num_kv_heads": 2, "ffn_size": 40}
    rows = {
        "precision.matmuls=fp8-rowwise casts weights in the compute format, and precision.base=nf4 has none; use "
        "precision.base=compute or precision.matmuls=compute":
            config_with({}, adapter=lora, precision=fp8 | {"base": "nf4"}),
        "precision.matmuls=fp8-rowwise casts whole tensors, and layout.tp_overlap multiplies pieces; use "
        "tp_overlap=false": config_with({}, precision=fp8, layout={"tp": 2, "tp_overlap": True}),
        "precision.matmuls=fp8-rowwise needs linear layers with sizes that 16 divides, and no block has one; use "
        "precision.matmuls=compute": config_with(narrow, precision=fp8),
        "precision.matmuls=fp8-rowwise: 16 does not divide the part of mlp.down_proj on 4 ranks of tp, which has 96 "
        "inputs; use tp=1 or 2": config_with(
            {"ffn_size": 96, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 4}, precision=fp8, layout={"tp": 4}
        ),
    }  # fmt: skip
    for problem, config in rows.items():
        with pytest.raises(InvalidLayout) as caught:
            check_layout(config, config.layout.smallest_world_size)
        assert problem in caught.value.problems
    mixture = config_with({"experts": EXPERTS}, precision=fp8)
    check_layout(mixture, mixture.layout.smallest_world_size)
    beside = config_with({}, adapter=lora, precision=fp8, layout={"tp": 2})
    assert check_layout(beside, 2).tp == 2


def test_rounded_weights_are_refused_where_they_cannot_be():
    int4, lora = {"fake_quant": "int4"}, {"rank": 4}
    wide = {"hidden_size": 256, "ffn_size": 512, "num_heads": 4, "num_kv_heads": 4}
    none = "use precision.fake_quant=none"
    rows = {
        "precision.fake_quant=int4 beside experts is nothing that dtlayout has: no export stores their stacks in int4; "
        f"{none}": config_with(wide | {"experts": EXPERTS}, precision=int4),
        "precision.fake_quant=int4 rounds weights that are trained, and with [adapter] an export rounds sums that no "
        f"step has seen; {none}, or precision.base for a base of few bits":
            config_with(wide, adapter=lora, precision=int4 | {"base": "nf4"}),
        "precision.fake_quant=int4 rounds weights before each matmul, and layout.tp_overlap multiplies by them as they "
        "are; use tp_overlap=false": config_with(wide, precision=int4, layout={"tp": 2, "tp_overlap": True}),
        "precision.fake_quant=int4 has groups of 128 columns, which do not divide the 96 of mlp.down_proj; use "
        "precision.fake_quant=int8 or none": config_with(wide | {"ffn_size": 96}, precision=int4),
        "precision.fake_quant=int4: 4 ranks of tp would cut groups of 128 columns in the 256 of self_attn.o_proj; use "
        "tp=1 or 2": config_with(wide, precision=int4, layout={"tp": 4}),
    }  # fmt: skip
    for problem, config in rows.items():
        with pytest.raises(InvalidLayout) as caught:
            check_layout(config, config.layout.smallest_world_size)
        assert problem in caught.value.problems
    assert check_layout(config_with(wide, precision={"fake_quant": "int8"}, layout={"tp": 4}), 4).tp == 4
    with pytest.raises(
        InvalidConfig, match=r"precision.fake_quant=int4 rounds weights for matmuls in the compute format"
    ):
        Precision(fake_quant="int4", matmuls="fp8-rowwise")
    with pytest.raises(InvalidConfig, match=r"precision.fake_quant='int2' is unknown; use one of"):
        Precision(fake_quant="int2")


def test_a_gpu_without_fp8_is_refused_by_its_numbers_or_its_capability():
    config = config_with({}, precision={"matmuls": "fp8-tensorwise"}, train={"device": "cuda", "steps": 3})
    known = {name: device_of(find_gpu(name)) for name in ("a100-80g-sxm", "h100-80g-sxm")}
    unknown = [Device("cuda", "some GPU", capability=each) for each in ((8, 0), (8, 9), ())]
    for device, is_able in zip((*known.values(), *unknown), (False, True, False, True, True), strict=True):
        problems = [] if is_able else [
            f"precision.matmuls=fp8-tensorwise is no format that {device.name} multiplies in; "
            "use precision.matmuls=compute"
        ]  # fmt: skip
        assert describe(check_formats(device, config.precision)) == problems
        if not is_able:
            with pytest.raises(InvalidLayout) as caught:
                check_layout(config, 1, device)
            assert problems[0] in caught.value.problems


def test_an_adapter_is_a_section_of_its_own_and_comes_back_from_a_runs_config():
    config = config_with({}, adapter={"method": "ia3", "targets": ["k_proj"]})
    assert config.model.adapter == Adapter(method="ia3", targets=("k_proj",))
    assert parse_config(toml.loads(config.to_toml())) == config
    for table, problem in (
        ({"rnk": 4}, "adapter.rnk is unknown; did you mean adapter.rank?"),
        ({"rank": 0}, "adapter.rank=0 must be from 1 to a million"),
        ({"targets": ["q_proj", "q_proj"]}, "adapter.targets has 'q_proj' twice; remove it"),
    ):
        with pytest.raises(InvalidConfig) as caught:
            config_with({}, adapter=table)
        assert caught.value.problems == [problem]
    with pytest.raises(InvalidConfig, match=r"model.adapter is a section of its own: write \[adapter\]"):
        config_with({"adapter": {"rank": 4}})
    rate = {"experts": EXPERTS | {"correction_bias": True, "bias_rate": 0.1}}
    with pytest.raises(InvalidConfig, match=r"bias_rate=0.1 moves the router, which is frozen with \[adapter\]; use"):
        config_with(rate, adapter={"rank": 4})


@pytest.mark.parametrize(
    ("key", "value", "works"), [("ep_overlap", True, "false"), ("ep_dispatcher", "deepep", "alltoall")]
)
def test_ways_to_exchange_tokens_that_other_programs_have_are_refused_alike(key, value, works):
    config = config_with({"experts": EXPERTS}, layout={"dp_shard": 2, "ep": 2, key: value})
    with pytest.raises(InvalidLayout) as caught:
        check_layout(config, 2)
    asked = f"layout.{key}={str(value).lower()}"
    assert caught.value.problems == [f"{asked} can be predicted, not trained; use layout.{key}={works}"]


def test_what_has_no_effect_is_not_refused():
    assert check_layout(config_with({}, layout={"ep_overlap": True, "ep_dispatcher": "deepep"}), 1).ep_overlap


def test_problems_of_every_owner_come_at_once():
    config = config_with(
        {"window": 8}, layout={"tp": 3}, kernels={"attention": "flash1"}, optimizer={"warmup_steps": 4},
        checkpoint={"save": False, "export": True}, precision={"matmuls": "mxfp8"}, spikes={"action": "save"},
    )  # fmt: skip
    starts = (
        "world size 1", "tp=3 does not divide num_heads", "checkpoint.export=true", 'spikes.action="save"',
        "optimizer.warmup_steps=4", "precision.matmuls=mxfp8", "model.window=8", "kernels.attention=flash1",
    )  # fmt: skip
    found = problems_of(config)
    places = [next(i for i, problem in enumerate(found) if problem.startswith(start)) for start in starts]
    assert places == sorted(places)


def test_sections_that_would_change_nothing_or_round_are_refused_together():
    muon, lora, fp16 = {"name": "muon"}, {"rank": 4}, {"compute": "float16"}
    rows = {
        "optimizer.name=muon would update nothing: no weight of role expert or matrix in a block is trained; "
        "use optimizer.name=adamw": {"optimizer": muon, "adapter": lora},
        "train.loss_scale=8 scales no loss in precision.compute=bfloat16; use loss_scale=0": {
            "train": {"loss_scale": 8},
        },
        "train.loss_scale=12 is no power of two from 1 on, so that it would round gradients; use loss_scale=16": {
            "train": {"loss_scale": 12}, "precision": fp16,
        },
        "train.loss_scale=0.5 is no power of two from 1 on, so that it would round gradients; use loss_scale=1": {
            "train": {"loss_scale": 0.5}, "precision": fp16,
        },
    }  # fmt: skip
    for problem, sections in rows.items():
        assert problem in problems_of(
            config_with({}, **{**sections, "train": {"steps": 3, **sections.get("train", {})}})
        )
    fine = config_with({}, optimizer=muon, precision=fp16, train={"steps": 3, "loss_scale": 1024})
    assert check_layout(fine, 1).tp == 1
    with pytest.raises(InvalidLayout, match="muon iterates in bfloat16, which v100-32g-sxm does not multiply"):
        check_layout(fine, 1, device_of(find_gpu("v100-32g-sxm")))


def test_a_state_on_disk_needs_a_folder_whose_path_can_be_one():
    on_disk = {"offload": "disk"}
    assert problems_of(config_with({}, layout=on_disk)) == [
        "layout.offload=disk needs layout.offload_folder; name a folder on a fast local disk"
    ]
    with pytest.raises(InvalidConfig, match=r"layout\.offload_folder=.* must not hold a NUL"):
        config_with({}, layout=on_disk | {"offload_folder": "a\0b"})
    for layout in (on_disk | {"offload_folder": "~/state"}, {"offload": "optimizer"}):
        assert check_layout(config_with({}, layout=layout), 1).world_size == 1
