"""Options of the newest Megatron-LM: each is read, ignored with its subject, predicted otherwise, or refused."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from program_files import check_rows, check_understood, compare_job
from program_jobs import job_of

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.presets import PRESETS
from dtlayout.programs.megatron import read as read_megatron
from dtlayout.programs.registry import PROGRAMS
from dtlayout.programs.understood import OtherFile
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, LatentAttention

SCRIPT = Path(__file__).parent / "megatron_newest" / "latent.sh"
LATENT = {"query_rank": 1536, "kv_rank": 512, "rope_width": 64, "value_width": 128}
UNDERSTOOD: dict[str, Any] = {
    "engine": "megatron", "gpus": (128, 8),
    "told": {"overlap_dp": "true", "recompute_modules": "layernorm+mla_up_proj+mlp+moe"},
    "model": {
        "family": "deepseek_v3", "num_layers": 61, "hidden_size": 7168, "ffn_size": 18432, "num_heads": 128,
        "num_kv_heads": 128, "head_dim": 192, "vocab_size": 129280, "gated_ffn": True, "tied_embeddings": False,
        "norm_eps": 1e-6, "rope_theta": 1e4, "latent_attention": LATENT,
        "experts": {
            "number": 256, "per_token": 8, "ffn_size": 2048, "shared_ffn_size": 2048, "score": "sigmoid", "groups": 8,
            "groups_per_token": 4, "scale": 2.5, "bias_rate": 1e-3, "balance_loss": 1e-4, "dense_layers": 3,
            "correction_bias": True,
        },
    },
    "batch": {"seq_len": 4096, "global_batch": 2048},
    "layout": {
        "tp": 1, "ep": 8, "micro_batch": 1, "sequence_parallel": False, "zero": 3, "dp_shard": 128, "dp_replicate": 1,
        "recompute": "selective", "ep_dispatcher": "deepep",
    },
    "precision": {"compute": "bfloat16", "matmuls": "mxfp8", "reduce": "bfloat16"},
    "optimizer": {
        "name": "adamw", "lr": 3.9e-6, "weight_decay": 0.1, "max_norm": 1.0, "beta1": 0.9, "beta2": 0.95,
        "state_format": "bfloat16",
    },
}  # fmt: skip
BASE = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 "
    "--global-batch-size 8 --vocab-size 1024 --bf16 --untie-embeddings-and-output-weights --num-experts 8 "
    "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall "
)
PARTS = {
    "ignored": """
        --no-barrier-with-level-1-timing --no-data-sharding --no-align-grad-reduce --no-align-param-gather
        --no-gradient-reduce-div-fusion --no-weight-decay-cond-type x --no-ckpt-fully-parallel-save
        --no-use-legacy-models --no-use-tokenizer-model-from-checkpoint-args --use-nccl-ub --fsdp-manual-registration
        --create-all-gather-group
        --suggested-communication-unit-size 9 --ddp-pad-buckets-for-high-nccl-busbw --disable-gloo-process-groups
        --ddp-reduce-scatter-with-fp32-accumulation --use-sharp --sharp-enabled-group dp --init-model-with-meta-device
        --per-split-data-args-path x --dataloader-fast-cache-load --mid-level-dataset-surplus 0.1 --vocab-extra-ids 0
        --object-storage-cache-path x --app-tag-run-name x --record-memory-history --memory-snapshot-path x
        --use-persistent-ckpt-worker --save-retain-interval 9 --async-strategy mcore --inprocess-restart
        --ft-num-warmup-iters 3 --error-injection-rate 0 --check-weight-hash-across-dp-replicas-interval 9
        --phase-transition-iterations 9 --apply-wd-to-qk-layernorm --muon-momentum 0.9 --moe-deepep-num-sms 20
        --moe-router-force-load-balancing --moe-router-padding-for-quantization --moe-token-drop-policy probs
        --rotary-scaling-factor 40 --mscale 1.0 --beta-fast 32 --rope-type rope --symmetric-ar-type x
        --inference-max-requests 8 --batch-invariant-mode --disable-tp-comm-bulk-dgrad --moe-use-upcycling
    """,
    "assumed": """
        --keep-fp8-transpose-cache --reuse-grad-buf-for-mxfp8-param-ag --no-pin-cpu-grads --fsdp-double-buffer
        --no-scatter-gather-tensors-in-pipeline --microbatch-group-size-per-virtual-pipeline-stage 4 --squared-relu
        --megatron-fsdp-main-grads-dtype bf16 --megatron-fsdp-version 2 --use-megatron-fsdp-v2 --first-last-layers-bf16
        --num-layers-at-start-in-bf16 1 --moe-shared-expert-overlap --overlap-p2p-communication-warmup-flush --qk-clip
        --defer-embedding-wgrad-compute --use-transformer-engine-op-fuser --no-fp8-weight-transpose-cache --sft
    """,
    "no effect": """
        --softmax-type vanilla --outer-dp-sharding-strategy no_shard --mtp-num-layers 0 --q-lora-rank 8
        --moe-flex-dispatcher-backend deepep --cpu-offloading-num-layers 0
    """,
    "read": """
        --use-precision-aware-optimizer --main-grads-dtype fp32 --quick-geglu --enable-cuda-graph --external-cuda-graph
        --multi-latent-attention --megatron-fsdp-grad-comm-dtype bf16
    """,
}  # fmt: skip
REFUSED = """
    --mtp-num-layers 1 --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity --moe-latent-size 64
    --moe-shared-expert-gate --moe-extended-tp --moe-router-topk-limited-devices 2
    --window-size 128,0 --window-attn-skip-freq 2 --softmax-type learnable --no-rope-freq 4 --attention-output-gate
    --linear-attention-freq 4 --experimental-attention-variant dsa --spec a --hybrid-override-pattern M-
    --is-hybrid-model --mamba-state-dim 8 --heterogeneous-layers-config-path x --enable-gpt-oss --optimizer-cpu-offload
    --optimizer-offload-fraction 0.5 --cpu-offloading-num-layers 4 --fine-grained-activation-offloading
    --offload-modules moe_act --use-torch-fsdp2 --outer-dp-sharding-strategy optim --fp32-residual-connection
    --distribute-saved-activations --hierarchical-context-parallel-sizes 2 --hybrid-context-parallel --perform-rl-step
    --te-precision-config-file x --use-kitchen --standalone-embedding-stage --step-batch-size-schedule x --yaml-cfg x
"""


def read(words: str) -> Any:
    return read_megatron.read(OtherFile(Path("train.sh"), words, None))


def list_options(text: str) -> list[str]:
    return [each.strip() for each in re.split(r"\s(?=--)", text) if each.strip()]


def test_a_script_with_them_is_understood_field_by_field():
    found = check_understood(SCRIPT, UNDERSTOOD)
    script = SCRIPT.read_text()
    check_rows(found, set(re.findall(r"(?<=\s)--[\w-]+", script)) - {"--nproc_per_node", "--nnodes"})
    notes = {row.option: (row.how, row.note) for row in found.rows}
    assert notes["--moe-flex-dispatcher-backend hybridep"] == ("assumed", "predicted as deepep")
    assert notes["--moe-router-pre-softmax"] == ("no effect", "with sigmoid scores")
    assert notes["--kv-channels 128"] == ("no effect", "with --multi-latent-attention")
    assert notes["--main-params-dtype fp16"] == ("assumed", "predicted as fp32")


@pytest.mark.parametrize(
    ("how", "option"), [(how, option) for how, text in PARTS.items() for option in list_options(text)]
)
def test_an_option_plays_its_part(how, option):
    found = read(BASE + option)
    assert not found.problems
    rows = [row for row in found.rows if option.split()[0] in row.option.replace(",", " ").split()]
    assert [row.how for row in rows] == [how], rows


@pytest.mark.parametrize("option", list_options(REFUSED))
def test_what_is_not_predicted_is_refused_with_its_subject(option):
    (problem,) = read(BASE + option).problems
    assert problem.startswith(f"{option.split()[0]} is not understood here: nothing predicts ")
    assert problem.endswith("; without it the rest can be predicted")


def test_what_some_options_say():
    assert read(f"{BASE}--quick-geglu").get("model", "gated_ffn") is True
    assert read(f"{BASE}--enable-cuda-graph").told["cuda_graphs"] == "full"
    assert read(f"{BASE}--external-cuda-graph").told["cuda_graphs"] == "attention"
    assert read(f"{BASE}--megatron-fsdp-grad-comm-dtype bf16").get("precision", "reduce") == "bfloat16"
    assert read(f"{BASE}--megatron-fsdp-grad-comm-dtype auto").get("precision", "reduce") is None
    impl = "--cross-entropy-fusion-impl te"
    assert read(f"{BASE}--cross-entropy-loss-fusion {impl}").told["fused_loss"] == "always"
    for alone in (
        impl,
        "--cross-entropy-loss-fusion",
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native",
    ):
        assert "fused_loss" not in read(BASE + alone).told
    latent = read(f"{BASE}--multi-latent-attention").get("model", "latent_attention")
    assert latent == {"query_rank": 0, "kv_rank": 32, "rope_width": 64, "value_width": 128}
    problems = read(f"{BASE}--exp-avg-dtype bf16").problems
    assert problems == ["--exp-avg-dtype bf16 needs --use-precision-aware-optimizer"]
    aware = read(f"{BASE}--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8").problems
    assert aware == ["--exp-avg-dtype bf16, --exp-avg-sq-dtype fp8 is not predicted; fp32 or bf16 for both is"]
    assert read(f"{BASE}--quick-geglu 3").problems == ["--quick-geglu takes no value, and has 3"]


def test_selective_recomputation_names_its_modules():
    selective = f"{BASE}--recompute-granularity selective"
    for words, told in {
        "": None, " --recompute-modules core_attn": None, " --recompute-modules moe_act layernorm": "layernorm+moe_act",
        " --recompute-modules moe": "moe", " --moe-layer-recompute": "core_attn+moe",
        " --recompute-modules moe_act --moe-layer-recompute": "moe+moe_act",
    }.items():  # fmt: skip
        found = read(selective + words)
        assert not found.problems and found.get("layout", "recompute") == "selective"
        assert found.told.get("recompute_modules") == told
    assert read(f"{BASE}--moe-layer-recompute").get("layout", "recompute") == "selective"
    nothing = read(f"{selective} --recompute-modules")
    assert nothing.get("layout", "recompute") == "none" and "recompute_modules" not in nothing.told


def test_modules_that_the_model_or_the_recomputation_has_not_have_no_effect():
    selective = f"{BASE}--recompute-granularity selective --recompute-modules"
    rows = {row.option: (row.how, row.note) for row in read(f"{selective} mlp shared_experts moe").rows}
    assert rows["--recompute-modules mlp"] == ("no effect", "the model has no dense feed-forward")
    assert rows["--recompute-modules shared_experts"] == ("no effect", "the model has no shared expert")
    dense = selective.replace("--num-experts 8", "")
    rows = {row.option: (row.how, row.note) for row in read(f"{dense} layernorm").rows}
    assert rows["--recompute-modules layernorm"] == ("no effect", "the model has no experts or latent attention")
    for words, note in {"": "without --recompute-granularity", "full": "with --recompute-granularity full"}.items():
        found = read(f"{BASE}--recompute-modules moe" + f" --recompute-granularity {words}" * bool(words))
        assert [(row.how, row.note) for row in found.rows if "modules" in row.option] == [("no effect", note)]
        assert not found.problems and "recompute_modules" not in found.told


def test_modules_that_are_not_known_are_refused():
    selective = f"{BASE}--recompute-granularity selective --recompute-modules"
    assert read(f"{selective} moe gdn_norm_out").problems == [
        "--recompute-modules gdn_norm_out is nothing that is known here; use core_attn or layernorm or mla_up_proj or "
        "mlp or moe or moe_act or shared_experts"
    ]
    (problem,) = read(f"A=$1\npython pretrain_gpt.py {selective} $A").problems
    assert problem.startswith("--recompute-modules is $1, argument 1 of the script")
    assert read(f"{BASE}--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
                "--moe-layer-recompute").problems == [
        "--moe-layer-recompute goes with selective recomputation, not with full"
    ]  # fmt: skip


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_latent_attention_that_is_written_is_read_back(score):
    model = replace(
        PRESETS["llama-7b"], name="latent", num_layers=8, head_dim=192, latent_attention=LatentAttention(**LATENT),
        experts=Experts(number=64, per_token=6, ffn_size=1408, shared_ffn_size=2816, dense_layers=1, score=score),
        family="deepseek_v3" if score == "sigmoid" else "deepseek_v2",
    )  # fmt: skip
    job = job_of("megatron", Layout(dp_shard=16, ep=8), model=model)
    found = read("\n".join(PROGRAMS["megatron"].write(job).lines))
    assert not found.problems
    compare_job(job, found, {"params", "reduce"})


def test_stages_that_count_the_table_and_the_loss_as_blocks():
    both = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
    dense = BASE.replace("--num-experts 8", "--pipeline-model-parallel-size 4")
    found = read(
        dense.replace("--num-layers 24", "--num-layers 30") + both + "--num-layers-per-virtual-pipeline-stage 4"
    )
    assert not found.problems and found.get("layout", "stage_layers") == [3, 4, 4, 4, 4, 4, 4, 3]
    assert found.get("layout", "virtual_stages") == 2
    problems = read(f"{dense}{both}").problems
    assert problems == [
        "24 blocks, with those of --account-for-embedding-in-pipeline-split and "
        "--account-for-loss-in-pipeline-split, are no multiple of 4 stages"
    ]


def test_a_value_that_is_asked_for_is_named():
    with pytest.raises(InvalidConfig, match="no command of the script has --num-layers"):
        read("python train.py")
    assert read(f"{BASE}--kv-lora-rank $RANK --multi-latent-attention").problems == [
        "--kv-lora-rank is $RANK, set by no line of the script: --given RANK=VALUE says it"
    ]
