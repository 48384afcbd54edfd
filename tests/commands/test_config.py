"""dtlayout config: the page of all keys is what the code says, and one section of it can be asked for."""

import json
import os
import subprocess
import sys
from dataclasses import fields, make_dataclass

import pytest
from tiny import ROOT

from dtlayout.base.toml import loads
from dtlayout.cli import main
from dtlayout.config.reference import list_sections
from dtlayout.config.sections import DataConfig
from dtlayout.spec.optimizers import OPTIMIZERS, Optimizer


def test_the_page_is_what_the_command_prints():
    environment = {key: value for key, value in os.environ.items() if key != "DTLAYOUT_PLUGINS"}
    printed = subprocess.run(  # a process of its own: what other tests register is not shipped
        [sys.executable, "-m", "dtlayout.cli", "config"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    page = ROOT / "docs" / "reference" / "config.md"
    assert printed == page.read_text(encoding="utf-8"), "make docs-config writes the page"


def test_every_key_has_a_meaning_and_a_default_that_is_toml():
    for section in list_sections():
        assert section.keys and section.meaning
        for key in section.keys:
            assert key.type and key.meaning.endswith("."), f"{section.title} {key.name}"
            assert not key.default or loads(f"key = {key.default}")


def test_a_class_without_a_source_has_keys_without_a_sentence(capsys, monkeypatch):
    mine = make_dataclass("Mine", [("k", int, 3)], bases=(Optimizer,), frozen=True, kw_only=True)
    monkeypatch.setitem(OPTIMIZERS, "mine", mine)
    assert main(["config", "optimizer"]) == 0
    mine = capsys.readouterr().out.partition('name = "mine"')[2]
    assert "\n- `k`: a whole number, `3` by default.\n" in mine and "Steps over which the learning rate grows" in mine


def test_one_section_is_printed_and_is_a_document(capsys):
    assert main(["config", "data"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "## [data]\n\nDocuments to train on, and how they become tokens and samples.\n\n- `source`: a string, "
    )
    assert printed.count("##") == 1
    assert (
        '- `samples`: a string, `"packed"` by default, one of packed, padded, best-fit. How documents become' in printed
    )
    assert "- `max_tokens`: a whole number, `0` by default, must not be negative. Most tokens to prepare " in printed
    assert main(["config", "data", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)
    assert [key["name"] for key in document["keys"]] == [field.name for field in fields(DataConfig)]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            "data.mixture",
            "## [[data.mixture]]\n\nOne of several sources of samples.\n\n- `source`: a string, needed, must not be ",
        ),
        ("optimizer", '## [optimizer] with name = "adamw"\n'),
        ("optimizer", '## [optimizer] with name = "sgd"\n'),
        ("kernels", '- `norm`: a string, `"auto"` by default, one of auto, eager, fused, liger. '),
        ("metrics", "- `to`: a list, `[]` by default, some of tensorboard, wandb"),
        ("model", "- `head_dim`: a whole number. Width of a head"),
    ],
)
def test_a_key_says_its_type_its_default_and_its_range(capsys, section, said):
    assert main(["config", section]) == 0
    assert said in capsys.readouterr().out


def test_an_unknown_section_is_refused_with_those_that_there_are(capsys):
    assert main(["config", "dat"]) == 2
    assert capsys.readouterr().err.startswith(
        "there is no section 'dat'; use one of model, model.experts, model.latent_attention, model.block, "
        "model.rope_scaling, "
    )
