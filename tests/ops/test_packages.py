"""A package that is not here is one line that says how to get it."""

from pathlib import Path

import pytest

from dtlayout.errors import InvalidConfig
from dtlayout.kernels import Kernels
from dtlayout.ops.packages import PACKAGES, check_packages, find_installed


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtlayout.ops.packages.find_spec", lambda module: None)


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
def test_a_missing_package_is_one_line_with_its_command(none_installed, kernels, expected):
    with pytest.raises(InvalidConfig) as caught:
        check_packages(kernels)
    assert str(caught.value) == expected and caught.value.exit_code == 2


def test_each_missing_package_has_its_line(none_installed):
    with pytest.raises(InvalidConfig) as caught:
        check_packages(Kernels(attention="fa3", swiglu="liger"))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "kernels.attention=fa3",
        "kernels.swiglu=liger",
    ]


def test_what_is_there_and_what_nobody_asked_for_is_no_problem(monkeypatch, none_installed):
    check_packages(Kernels())
    assert find_installed() == set()
    monkeypatch.setattr("dtlayout.ops.packages.find_spec", lambda module: object() if module == "flash_attn" else None)
    assert find_installed() == {"flash-attn"}
    check_packages(Kernels(attention="flash-attn"))


def test_looking_for_a_package_does_not_import_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for package in PACKAGES.values():
        (tmp_path / f"{package.module}.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_installed() == set(PACKAGES)


def test_every_extra_of_the_commands_exists():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for package in PACKAGES.values():
        extra = package.install.partition("[")[2].partition("]")[0]
        assert not extra or f"\n{extra} = [" in text
