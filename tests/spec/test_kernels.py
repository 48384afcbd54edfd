"""A kernel is one record: where it does not run it is refused with what does, and anybody may add one."""

from dataclasses import fields, replace
from importlib import invalidate_caches
from importlib.machinery import ModuleSpec
from itertools import accumulate
from pathlib import Path
from shutil import rmtree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine_constants import BOUNDS
from dtlayout.models.presets import find_preset
from dtlayout.spec.cluster import find_gpu, known_gpus
from dtlayout.spec.device import Device, device_of
from dtlayout.spec.kernel_records import AttentionKernel, ExpertsKernel, Kernel, KernelRequest, NormKernel, Package
from dtlayout.spec.kernel_table import (
    KERNELS,
    find_kernel,
    find_packages,
    is_installed,
    kernels_replaced,
    list_kernels,
    register_kernel,
)
from dtlayout.spec.kernels import COMPILE_OPTIONS, Kernels, OpenKernels, find_alternative
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts

PACKAGES = {kernel.package for kernel in list_kernels(Kernel) if kernel.package}
CPU, CUDA = Device("cpu"), Device("cuda")
HERE = Device("cuda", packages=frozenset())
"""A GPU without any package."""


def test_flash_attention_on_cuda_computes_in_halves_alone():
    Kernels().check(need(CUDA, compute="bfloat16"))
    Kernels().check(need(CUDA, compute="float16"))
    Kernels().check(need(CPU, compute="float32"))
    Kernels(attention="sdpa-math").check(need(CUDA, compute="float32"))
    with pytest.raises(
        InvalidConfig, match=r"use precision.compute=bfloat16 or \S+=float16 or kernels.attention=sdpa-math"
    ):
        Kernels().check(need(CUDA, compute="float32"))


def need(device: Device, **asked) -> KernelRequest:
    return KernelRequest(**{"device": device, "compute": "bfloat16", "head_width": 128, **asked})


@pytest.mark.parametrize(
    ("device_type", "capability", "compute", "modules", "attention"),
    [
        ("cpu", (), "float64", (), "blockwise"),
        ("cpu", (), "bfloat16", ("flash_attn_interface", "flash_attn"), "blockwise"),
        ("cuda", (9, 0), "bfloat16", ("flash_attn_interface",), "fa3"),
        ("cuda", (9, 0), "bfloat16", ("flash_attn", "liger_kernel"), "sdpa-cudnn"),
        ("cuda", (8, 0), "bfloat16", ("flash_attn_interface",), "sdpa-flash"),
        ("cuda", (10, 0), "bfloat16", ("flash_attn_interface", "flash_attn.cute"), "sdpa-cudnn"),
        ("cuda", (12, 0), "bfloat16", ("flash_attn_interface",), "sdpa-flash"),
        ("cuda", (), "bfloat16", ("flash_attn_interface",), "sdpa-flash"),
        ("cuda", (9, 0), "bfloat16", None, "sdpa-cudnn"),
        ("auto", (), "bfloat16", None, "sdpa-flash"),
        ("cuda", (8, 0), "float16", ("flash_attn",), "sdpa-flash"),
        ("cuda", (7, 0), "float16", ("flash_attn",), "sdpa-efficient"),
        ("cpu", (), "float16", (), "blockwise"),
        ("cuda", (9, 0), "float32", ("flash_attn_interface",), "sdpa-efficient"),
        ("cuda", (9, 0), "float64", ("flash_attn_interface",), "sdpa-math"),
    ],
)
def test_auto_is_a_kernel_that_runs_there(device_type, capability, compute, modules, attention):
    packages = None if modules is None else frozenset(modules)
    device = Device(device_type, capability=capability, packages=packages)
    opened = OpenKernels(attention="auto", norm="eager", rope="eager", swiglu="eager", compile="none")
    kernels, reasons = opened.resolve(need(device, compute=compute))
    assert kernels == Kernels(attention=attention, norm="eager") and reasons["attention"] and len(reasons) == 1
    kernels.check(need(device, compute=compute))


HOPPER = Device("cuda", capability=(9, 0), packages=frozenset({"flash_attn_interface", "liger_kernel"}))
AMPERE, BLACKWELL, RTX50 = (Device("cuda", capability=each) for each in ((8, 0), (10, 3), (12, 0)))


def test_what_was_asked_for_by_name_stays():
    kernels = Kernels(attention="sdpa-math")
    assert OpenKernels.of(kernels).resolve(need(HOPPER)) == (kernels, {})


def test_each_choice_is_said_with_its_reason():
    bare = replace(HOPPER, packages=None)
    assert OpenKernels().resolve(need(bare)).describe() == [
        "attention sdpa-cudnn: the fastest of PyTorch's on Hopper and Blackwell",
        "norm fused: compile fuses it",
        "rope eager: compile fuses it",
        "swiglu eager: compile fuses it",
        "compile blocks: it fuses what is elementwise, and spares the host",
    ]
    assert OpenKernels(compile="none").resolve(need(HOPPER)).describe() == [
        "attention fa3: made for Hopper, and its package is here",
        *(f"{key} liger: one kernel, and its package is here" for key in ("norm", "rope", "swiglu")),
    ]
    assert OpenKernels(attention="sdpa-math").resolve(need(CPU)).describe() == [
        "norm fused: one kernel of PyTorch's",
        "rope eager: it needs no package",
        "swiglu eager: it needs no package",
        "compile none: a CPU gains little",
    ]


@pytest.mark.parametrize(
    ("asked", "attention"),
    [
        ({"deterministic": True}, "sdpa-flash"),  # cuDNN's gives other bits each time
        ({"document_mask": True}, "sdpa-flash"),  # cuDNN's would hold a mask
        ({"document_mask": True, "compute": "float32"}, "sdpa-efficient"),  # as would all that compute in fp32
        ({"head_width": 192}, "sdpa-flash"),
        ({"head_width": 100}, "sdpa-flash"),
        ({"head_width": 320}, "sdpa-efficient"),
    ],
)
def test_auto_takes_what_does_as_it_is_asked_to(asked, attention):
    hopper = replace(HOPPER, packages=frozenset())
    assert OpenKernels().resolve(need(hopper, **asked)).kernels.attention == attention


@pytest.mark.parametrize(
    ("device", "asked", "choice"),
    [
        (CUDA, {}, "blocks"),
        (CUDA, {"tp": 2, "recompute": "selective"}, "blocks"),
        (CUDA, {"recompute": "keep-matmuls"}, "blocks"),
        (CUDA, {"tp": 2, "recompute": "keep-matmuls"}, "none"),
        (CPU, {}, "none"),
        (Device(), {}, "none"),
    ],
)
def test_blocks_are_compiled_on_cuda_but_where_nobody_has_tried_it(device, asked, choice):
    chosen = OpenKernels().resolve(need(device, **asked))
    assert chosen.kernels.compile == choice and chosen.reasons["compile"]


def test_other_engines_have_their_usual_kernels_where_none_is_asked_for():
    usual = Kernels(attention="sdpa-cudnn", loss="torch")
    assert OpenKernels().or_else(usual) == usual
    assert OpenKernels(attention="flash1", loss="linear").or_else(usual) == Kernels(attention="flash1", loss="linear")


@given(
    device=st.sampled_from([Device(), CPU, CUDA, HERE, HOPPER, *map(device_of, known_gpus().values())]),
    compute=st.sampled_from(["float64", "float32", "bfloat16", "float16"]),
    asked=st.fixed_dictionaries(
        {
            "deterministic": st.booleans(),
            "document_mask": st.booleans(),
            "expert_widths": st.sampled_from([(), (64, 24), (64, 18), (63, 64)]),
        }
    ),
    tp=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "full", "selective", "keep-matmuls"]),
)
def test_what_auto_takes_is_never_refused(device, compute, asked, tp, recompute):
    chosen = OpenKernels().resolve(need(device, compute=compute, tp=tp, recompute=recompute, **asked))
    assert chosen.kernels.problems(need(device, compute=compute, tp=tp, recompute=recompute, **asked)) == []


def test_a_kernel_of_ones_own_is_taken_where_it_says_that_it_is_preferred():
    with kernels_replaced(AttentionKernel(name="mine", efficiency="flash2_efficiency", preference=1, reason="mine")):
        kernels, reasons = OpenKernels().resolve(need(CUDA))
        assert (kernels.attention, reasons["attention"]) == ("mine", "mine")


def test_flash_attention_3_is_for_hopper():
    kernels = Kernels(attention="fa3")
    kernels.check(need(Device("cuda", capability=(9, 0))))
    kernels.check(need(CUDA))  # where the GPU is not known yet
    with pytest.raises(
        InvalidConfig, match=r"compute capability 9, and this GPU has 8\.6; use kernels.attention=sdpa-"
    ):
        kernels.check(need(Device("cuda", capability=(8, 6))))


def test_kernels_that_a_v100_or_fp16_does_not_run_are_refused():
    v100 = device_of(find_gpu("v100-32g-sxm"))
    refused = r"sdpa-flash runs on compute capability 8 and above, and this GPU has 7\.0; use kernels.attention=sdpa-"
    with pytest.raises(InvalidConfig, match=refused):
        Kernels(attention="sdpa-flash").check(need(v100, compute="float16"))
    (problem,) = Kernels(attention="sdpa-math", experts="grouped").problems(
        need(AMPERE, compute="float16", expert_widths=(64, 24))
    )
    assert problem.startswith("kernels.experts=grouped does not compute in precision.compute=float16 on CUDA")


def test_a_kernel_for_one_generation_of_gpus_is_refused_on_a_named_gpu_of_another():
    kernels = Kernels(attention="fa3")
    for gpu in known_gpus().values():
        problems = kernels.problems(need(device_of(gpu)))
        assert bool(problems) == (gpu.capability != () and gpu.capability[0] != 9), gpu.name


@given(
    kernel=st.sampled_from(list_kernels(Kernel)),
    compute=st.sampled_from(["float64", "float32", "bfloat16"]),
    device=st.sampled_from([Device(), CPU, CUDA, HERE, *map(device_of, known_gpus().values())]),
)
def test_what_is_advised_instead_of_a_kernel_runs_there(kernel, compute, device):
    def problems_with(name: str) -> list[str]:
        defaults = {"attention": "sdpa-math", "norm": "eager"}
        asked = need(device, compute=compute, expert_widths=(64, 24))
        return Kernels(**{**defaults, kernel.operation: name}).problems(asked)

    problems = problems_with(kernel.name)
    assert len(problems) <= 1
    for problem in problems:
        other = find_alternative(kernel, compute, device)
        assert other != kernel.name and not problems_with(other)
        if "no package" not in problem:
            assert f"kernels.{kernel.operation}={other}" in problem


def test_a_kernel_that_cannot_repeat_its_bits_is_told_where_it_would_run_on_cuda():
    def unrepeatable(kernels: Kernels, device: Device) -> list[str]:
        return kernels.problems(need(device, deterministic=True))

    (problem,) = unrepeatable(Kernels(attention="sdpa-cudnn"), CUDA)
    assert problem == (
        "kernels.attention=sdpa-cudnn gives other bits each time on CUDA, and train.deterministic=true asks for the "
        "same; use kernels.attention=sdpa-flash or train.deterministic=false"
    )
    assert unrepeatable(Kernels(attention="sdpa-cudnn"), Device()) == [problem]  # it runs nowhere else
    assert unrepeatable(Kernels(attention="sdpa-cudnn"), CPU) == [
        "kernels.attention=sdpa-cudnn runs on CUDA alone; use kernels.attention=sdpa-flash on the CPU"
    ]
    assert unrepeatable(Kernels(), CUDA) == []
    with kernels_replaced(NormKernel(name="mine", is_repeatable=False)):
        mine = Kernels(norm="mine")
        assert [len(unrepeatable(mine, device)) for device in (CUDA, CPU, Device())] == [1, 0, 0]
        assert "use kernels.norm=fused" in unrepeatable(mine, CUDA)[0]


def test_a_kernel_that_no_device_has_in_this_format_is_refused_before_the_device_is_known():
    exact = need(Device(), compute="float64")
    (problem,) = Kernels(attention="flash-attn").problems(exact)
    assert problem == (
        "kernels.attention=flash-attn does not compute in precision.compute=float64; "
        "use precision.compute=bfloat16 or precision.compute=float16 or kernels.attention=sdpa-flash"
    )
    (problem,) = Kernels(norm="liger").problems(exact)
    assert problem.endswith("precision.compute=bfloat16 or precision.compute=float16 or kernels.norm=fused")
    (problem,) = Kernels(attention="torch").problems(need(Device()))
    assert "can only be predicted; use kernels.attention=sdpa-flash" in problem


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        (
            Kernels(attention="flash-attn"),
            "kernels.attention=flash-attn: no package flash_attn here; install it: pip install 'dtlayout[flash-attn]'",
        ),
        (
            Kernels(attention="fa3"),
            "kernels.attention=fa3: no package flash_attn_interface here; install it: python setup.py install, in the "
            "folder hopper of https://github.com/Dao-AILab/flash-attention",
        ),
        (
            Kernels(norm="liger", rope="liger", swiglu="liger"),
            "kernels.norm=liger, kernels.rope=liger, kernels.swiglu=liger: no package liger_kernel here; install it: "
            "pip install 'dtlayout[liger]'",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_a_missing_package_is_one_line_with_its_command(kernels, expected):
    with pytest.raises(InvalidConfig) as caught:
        kernels.check(need(HERE))
    assert str(caught.value) == expected and caught.value.exit_code == 2
    kernels.check(need(CUDA))  # where nobody has looked


def test_each_missing_package_has_its_line():
    problems = Kernels(attention="fa3", swiglu="liger").problems(need(HERE))
    assert [problem.partition(":")[0] for problem in problems] == ["kernels.attention=fa3", "kernels.swiglu=liger"]


def test_what_is_there_and_what_nobody_asked_for_is_no_problem(monkeypatch):
    Kernels().check(need(HERE))
    monkeypatch.setattr(
        "dtlayout.spec.kernel_table.find_spec",
        lambda module: ModuleSpec("flash_attn", None, origin="here") if module == "flash_attn" else None,
    )
    assert find_packages() == {"flash_attn"}
    Kernels(attention="flash-attn").check(need(Device("cuda", packages=find_packages())))


def test_a_folder_that_is_called_like_a_package_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "some_tracker" / "offline-run").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("some_tracker")
    (tmp_path / "some_tracker" / "__init__.py").touch()
    invalidate_caches()
    assert is_installed("some_tracker")


def test_looking_for_a_package_does_not_import_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for package in PACKAGES:
        for name in accumulate(package.module.split("."), "{}/{}".format):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_packages() == {package.module for package in PACKAGES}
    rmtree(tmp_path / "flash_attn" / "cute")
    assert find_packages() == {package.module for package in PACKAGES} - {"flash_attn.cute"}


def test_every_extra_of_the_commands_exists():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for package in PACKAGES:
        extra = package.install.partition("[")[2].partition("]")[0]
        assert not extra or f"\n{extra} = [" in text


@pytest.mark.parametrize("kernel", list_kernels(Kernel), ids=lambda kernel: f"{kernel.operation}-{kernel.name}")
def test_each_record_runs_somewhere_or_is_priced_and_names_constants_that_exist(kernel):
    assert kernel.formats() == () or kernel.function or kernel.backend
    if isinstance(kernel, AttentionKernel):
        assert bool(kernel.efficiency) != bool(kernel.traffic)
        assert {kernel.efficiency, kernel.traffic, kernel.saved} - {""} <= BOUNDS.keys()


def test_every_kernel_that_docs_kernels_names_is_there_and_runs_where_the_table_says():
    lines = (Path(__file__).parents[2] / "docs" / "reference" / "kernels.md").read_text().splitlines()
    rows = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    rows = rows[2 : rows.index(next(row for row in rows if row[0] == "compile"))]
    short = {"float64": "float64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    operations: list[str] = []
    documented = set()
    for key, value, _, cpu, cuda in rows:
        operations = [name.strip("` ") for name in key.split(",")] if key else operations
        for operation, name in ((o, n.strip("` ")) for o in operations for n in value.split(",") if n != "auto"):
            documented.add((operation, name))
            kernel = KERNELS[operation][name]
            for cell, formats in ((cpu, kernel.cpu), (cuda, kernel.cuda)):
                if cell == "every format":
                    assert len(formats) == 4, name
                else:
                    assert {f for f, word in short.items() if word in cell.split(";")[0]} == set(formats), name
    assert documented == {(kernel.operation, kernel.name) for kernel in list_kernels(Kernel)}


MINE = NormKernel(name="mine", function="dtlayout.ops.norm:eager_rms_norm", cuda=())


def test_a_kernel_that_is_registered_is_a_choice_and_its_name_is_taken():
    with kernels_replaced():  # so that it is gone afterwards
        register_kernel(MINE)
        assert Kernels(norm="mine").problems(need(CPU)) == []
        (problem,) = Kernels(norm="mine").problems(need(CUDA))
        assert problem == "kernels.norm=mine runs on the CPU alone; use kernels.norm=fused on CUDA"
        for name in ("mine", "eager", "auto"):
            with pytest.raises(InvalidConfig, match=f"kernels.norm={name} is there already; give yours another name"):
                register_kernel(NormKernel(name=name))
    with pytest.raises(InvalidConfig, match=r"kernels\.norm='mine' is unknown; use one of"):
        Kernels(norm="mine")


@pytest.mark.parametrize("constants", [{}, {"efficiency": "flash2_efficiency", "traffic": "softmax_traffic_bytes"}])
def test_attention_without_a_price_or_with_two_is_refused(constants):
    with pytest.raises(
        InvalidConfig, match=r"kernels\.attention=mine needs one constant that prices it; name efficiency"
    ):
        AttentionKernel(name="mine", **constants)


def test_a_function_is_given_or_named():
    assert find_kernel(NormKernel, "eager").load().__name__ == "eager_rms_norm"
    assert NormKernel(name="mine", function=len).load() is len


def test_every_field_of_kernels_but_those_of_compile_is_an_operation():
    assert {f.name for f in fields(Kernels)} - {"compile", *COMPILE_OPTIONS} == {
        kernel.operation for kernel in list_kernels(Kernel)
    }


def test_a_package_inside_one_that_is_not_here_is_not_here_either(monkeypatch):
    part = Package("no_such_package.part", "pip install no-such-package")
    monkeypatch.setattr("dtlayout.spec.kernel_table.list_kernels", lambda _: [NormKernel(name="mine", package=part)])
    assert find_packages() == frozenset()


@pytest.mark.parametrize(
    ("attention", "device", "problem", "best"),
    [
        ("sdpa-cudnn", "cuda", "gives no log-sum-exp of its scores on cuda, which this layout.cp_method", "sdpa-flash"),
        ("sdpa-efficient", "auto", "gives no log-sum-exp of its scores on auto", "blockwise"),
    ],
)
def test_attention_whose_parts_cannot_be_joined_is_refused_with_what_can(attention, device, problem, best):
    (found,) = Kernels(attention=attention).problems(need(Device(device), in_parts=True))
    assert problem in found and found.endswith(" or layout.cp_method=all-to-all")
    other = found.partition("use kernels.attention=")[2].partition(" ")[0]
    assert other == best
    assert not Kernels(attention=other).problems(need(Device(device), in_parts=True))
    assert not Kernels(attention=attention).problems(need(Device(device)))


def test_one_program_of_all_blocks_leaves_nothing_to_copy_between_them():
    asked = {"offloads_activations": True}
    (found,) = Kernels(compile="model").problems(need(Device("cpu"), **asked))
    assert found.endswith("use kernels.compile=blocks or layout.offload=none")
    assert not Kernels(compile="blocks").problems(need(Device("cpu"), **asked))


def test_auto_takes_attention_whose_parts_can_be_joined():
    hopper = Device("cuda", capability=(9, 0), packages=frozenset())
    asked = {"device": hopper, "compute": "bfloat16", "head_width": 128}
    found = [
        OpenKernels().resolve(KernelRequest(**asked, in_parts=in_parts, document_mask=document_mask)).kernels.attention
        for in_parts, document_mask in ((False, False), (True, False), (True, True))
    ]
    assert found == ["sdpa-cudnn", "sdpa-flash", "sdpa-flash"]


@pytest.mark.parametrize(
    ("device", "compute", "widths", "experts"),
    [
        (CUDA, "bfloat16", (64, 24), "grouped"),
        (CUDA, "bfloat16", (64, 20), "loop"),  # 40 bytes
        (CUDA, "bfloat16", (36, 64), "loop"),
        (CUDA, "float32", (64, 24), "loop"),
        (CPU, "float32", (64, 20), "grouped"),
        (CPU, "float32", (64, 18), "loop"),
        (CPU, "bfloat16", (64, 24), "grouped"),
        (CPU, "float64", (64, 24), "loop"),
        (HOPPER, "bfloat16", (64, 24), "grouped"),
        (BLACKWELL, "bfloat16", (64, 24), "grouped"),
        (AMPERE, "bfloat16", (64, 24), "loop"),
        (RTX50, "bfloat16", (64, 24), "loop"),
        (Device(), "bfloat16", (64, 24), "grouped"),
        (Device(), "float32", (64, 24), "loop"),
    ],
)
def test_auto_takes_one_kernel_for_all_experts_where_it_computes_rows_so_wide(device, compute, widths, experts):
    chosen = OpenKernels().resolve(need(device, compute=compute, expert_widths=widths))
    assert chosen.kernels.experts == experts
    reason = {"grouped": "one kernel for all experts", "loop": "it computes everything"}[experts]
    assert f"experts {experts}: {reason}" in chosen.describe()


def test_asked_by_name_pytorchs_grouped_matmul_runs_where_it_is_a_loop():
    assert Kernels(attention="sdpa-math", experts="grouped").problems(need(AMPERE, expert_widths=(64, 24))) == []
    grouped, loop = (find_kernel(ExpertsKernel, name) for name in ("grouped", "loop"))
    capabilities = [device.capability for device in (AMPERE, HOPPER, BLACKWELL, RTX50, CPU)]
    assert [grouped.is_one_by_one_on(each) for each in capabilities] == [True, False, False, True, False]
    assert all(map(loop.is_one_by_one_on, capabilities))


def test_a_model_without_experts_is_told_nothing_of_their_kernels():
    request = need(CUDA, compute="float32")
    assert OpenKernels().resolve(request) == OpenKernels(experts="loop").resolve(request)
    assert Kernels(attention="sdpa-math", experts="grouped").problems(request) == []


def test_experts_whose_rows_are_not_aligned_are_refused_with_their_bytes():
    (problem,) = Kernels(experts="grouped").problems(need(CUDA, expert_widths=(64, 20)))
    assert problem == (
        "kernels.experts=grouped computes rows of a multiple of 16 bytes, and those of experts have 40 in "
        "precision.compute=bfloat16; use kernels.experts=loop"
    )
    assert not Kernels(experts="loop").problems(need(CUDA, expert_widths=(64, 20)))
    (problem,) = Kernels(attention="sdpa-math", experts="grouped").problems(
        need(CUDA, compute="float32", expert_widths=(64, 18))
    )
    assert "does not compute in precision.compute=float32 on CUDA" in problem


def test_the_widths_of_experts_are_those_of_the_model():
    dense = find_preset("llama3.1-8b")
    mixture = replace(dense, experts=Experts(number=8, per_token=2, ffn_size=1024))
    widths = [
        KernelRequest.of(CUDA, m, "bfloat16", Layout(), document_mask=False).expert_widths for m in (dense, mixture)
    ]
    assert widths == [(), (4096, 1024)]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"compile_mode": "max-autotune"},
            "kernels.compile_mode=max-autotune has no effect where ",
        ),
        ({"compile_fullgraph": True}, "kernels.compile_fullgraph=true has no effect where kernels.compile=none"),
    ],
)
def test_options_of_a_compiler_that_compiles_nothing_are_refused(asked, said):
    request = KernelRequest(device=Device("cuda"), compute="bfloat16")
    problems = Kernels(**asked).problems(request)
    assert len(problems) == 1 and problems[0].startswith(said)
    assert Kernels(compile="blocks", **asked).problems(request) == []


def test_a_whole_graph_of_a_block_with_experts_is_refused():
    request = KernelRequest(device=Device("cuda"), compute="bfloat16", expert_widths=(64, 64))
    kernels = Kernels(compile="blocks", compile_fullgraph=True, experts="grouped")
    assert any("counts of tokens break the graph" in each for each in kernels.problems(request))


def test_an_unknown_mode_is_refused_with_those_that_there_are():
    with pytest.raises(InvalidConfig, match=r"kernels\.compile_mode='fast' is unknown; use one of \['default', "):
        OpenKernels(compile_mode="fast")


@pytest.mark.parametrize(
    ("asked", "kernels", "said"),
    [
        ({"expert_widths": (64, 64)}, {}, "experts get other numbers of rows each time"),
        ({"document_mask": True}, {}, "sdpa-flash reads offsets of documents"),
        ({"is_pipelined": True}, {}, "a stage holds what several microbatches keep"),
        ({"recompute": "full"}, {}, "layout.recompute=full runs forwards inside the backward"),
        ({"offloads_activations": True}, {}, "lies at another address than the graph reads"),
        ({"zero": 3}, {}, "layout.zero=3 gathers weights into other memory each time"),
    ],
)
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_graphs_are_refused_where_sizes_or_addresses_change(mode, asked, kernels, said):
    request = need(CUDA, **asked)
    recorded = Kernels(compile="blocks", compile_mode=mode, **kernels)
    [line] = recorded.problems(request)
    assert line.startswith(f"kernels.compile_mode={mode} records CUDA graphs: ") and said in line
    assert "use kernels.compile_mode=max-autotune-no-cudagraphs" in line
    assert recorded.problems(need(CUDA)) == []
    for other in ("default", "max-autotune-no-cudagraphs"):
        assert replace(recorded, compile_mode=other).problems(request) == []


def test_graphs_stay_where_nothing_changes():
    graphs = Kernels(compile="blocks", compile_mode="reduce-overhead", attention="sdpa-cudnn")
    assert graphs.problems(need(CUDA, document_mask=True)) == [], "a mask has one size"
    assert replace(graphs, compile="model").problems(need(CUDA, recompute="full")) == [], "it is inside of the program"
    of_loss = replace(graphs, compile="loss")
    assert of_loss.problems(need(CUDA, zero=3, recompute="full", expert_widths=(64, 64), document_mask=True)) == []


def test_a_cpu_has_no_graphs():
    graphs = Kernels(compile="blocks", compile_mode="reduce-overhead")
    [line] = graphs.problems(need(CPU, compute="float32"))
    assert line.startswith("kernels.compile_mode=reduce-overhead records CUDA graphs, and a CPU has none")
    assert replace(graphs, compile_mode="max-autotune").problems(need(CPU, compute="float32")) == []


def test_a_layout_says_what_graphs_depend_on():
    request = KernelRequest.of(
        CUDA, find_preset("llama3.1-8b"), "bfloat16", Layout(pp=2, dp_shard=2, zero=3), document_mask=False
    )
    assert (request.is_pipelined, request.zero) == (True, 3)
