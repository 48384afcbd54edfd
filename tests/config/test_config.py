"""Config: strict types, near names, every problem at once, overrides, presets, and a TOML file that loads again."""

import datetime
import difflib
import json
import math
import re
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ROOT, SHAPE

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.files import find_path_problem
from dtlayout.base.synonyms import MEANT
from dtlayout.config.checking import check_layout
from dtlayout.config.config import Config
from dtlayout.config.loading import load_config, load_plan, parse_config
from dtlayout.config.reference import list_sections
from dtlayout.config.sections import CheckpointConfig, ClusterConfig, DataConfig, MetricsConfig, Source, TrainConfig
from dtlayout.models.files import find_model
from dtlayout.models.presets import PRESETS
from dtlayout.spec import layout
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import known_gpus
from dtlayout.spec.kernel_table import KERNELS
from dtlayout.spec.kernels import OpenKernels
from dtlayout.spec.layout import OpenLayout
from dtlayout.spec.model_shape import ModelShape, RopeScaling
from dtlayout.spec.optimizers import SGD, AdamW
from dtlayout.spec.precision import Format, Precision

TABLES: dict[str, dict[str, Any]] = {
    "model": {"name": "debug"},
    "batch": {"global_batch": 8, "seq_len": 16},
    "train": {"steps": 3},
}
SECTIONS = {section.name: get_type_hints(Config)[section.name] for section in fields(Config)} | {"optimizer": AdamW}
KEYS = [(section, field.name) for section, of in SECTIONS.items() for field in fields(of)]
FIELD_TYPES = {(section, key): get_type_hints(SECTIONS[section])[key] for section, key in KEYS}
SPECIMENS = (3, True, 2.5, "text", [1, 2], ["text"], {"key": 1})
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}


def tables(**changes: Any) -> dict[str, Any]:
    """TABLES with these sections' keys on top."""
    return {name: {**TABLES.get(name, {}), **changes.get(name, {})} for name in {**TABLES, **changes}}


def problems_of(parsed: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        parse_config(parsed)
    return caught.value.problems


def takes(wanted: Any, value: Any) -> bool:
    """Whether a field of type `wanted` may hold a TOML value."""
    if get_origin(wanted) is Literal:
        return any(value == each and type(value) is type(each) for each in get_args(wanted))
    if get_origin(wanted) is tuple:
        return isinstance(value, list) and all(takes(get_args(wanted)[0], entry) for entry in value)
    if NoneType in get_args(wanted):
        return any(takes(each, value) for each in get_args(wanted) if each is not NoneType)  # no specimen is a table
    return type(value) in ((int, float) if wanted is float else (wanted,))


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("value", SPECIMENS, ids=repr)
def test_a_key_takes_values_of_its_type_and_of_no_other(value):
    keys = [pair for pair in KEYS if pair not in [("model", "name"), ("optimizer", "name")]]
    everywhere = {section: {key: value for of, key in keys if of == section} for section in SECTIONS}
    words = r"must be (a |true)|is unknown; (use one of \[|known: norms)|is a table: write"
    words += "|is missing|is a section of its own"
    found = [line for line in problems_of(tables(**everywhere)) if re.search(words, line)]
    refused = {tuple(re.split(r"[.= \[]", line)[:2]) for line in found}
    assert refused == {(section, key) for section, key in keys if not takes(FIELD_TYPES[section, key], value)}


def test_a_truth_value_is_no_zero_stage():
    assert problems_of(tables(layout={"zero": True}))


def test_an_unknown_key_names_the_nearest():
    misspelt = {(section, key): f"{key}{key[-1]}" for section, key in KEYS if len(key) > 2}
    wrong = {section: {text: 1 for (of, _), text in misspelt.items() if of == section} for section in SECTIONS}
    assert sorted(problems_of(tables(**wrong))) == sorted(
        f"{section}.{text} is unknown; did you mean {section}.{key}?" for (section, key), text in misspelt.items()
    )


def test_an_unknown_section_names_the_nearest():
    wrong = {section[1:]: {} for section in SECTIONS}
    assert problems_of({**TABLES, **wrong}) == [
        f"{section[1:]} is unknown; did you mean {section}?" for section in SECTIONS
    ]


def test_a_name_of_another_program_leads_to_ours():
    ours = {*SECTIONS, "adapter", *(f"adapter.{f.name}" for f in fields(Adapter))}
    ours |= {f"{section}.{key}" for section, key in KEYS}
    assert {*MEANT.values()} <= ours and not {*MEANT} & ours
    assert sorted(problems_of(tables(optimizer={"learning_rate": 1.0}, train={"learning_rate": 1.0}))) == [
        "optimizer.learning_rate is unknown; did you mean optimizer.lr?",
        "train.learning_rate is unknown; did you mean optimizer.lr?",
    ]
    assert problems_of({**TABLES, "lora": {"rank": 2}}) == ["lora is unknown; did you mean adapter?"]
    (line,) = problems_of({**TABLES, "xyzzy": {}})
    assert line.startswith("xyzzy is unknown; known: ") and line.endswith(", adapter")


@settings(deadline=None, max_examples=20)
@given(st.text(st.characters(codec="utf-8"), min_size=1))
def test_an_unknown_key_near_to_nothing_lists_the_known(key):
    known = [field.name for field in fields(CheckpointConfig)]
    if key not in known and not difflib.get_close_matches(key, known, cutoff=0.5):
        assert problems_of(tables(checkpoint={key: 1})) == [
            f"checkpoint.{key} is unknown; known: every, timeout_s, keep, fallback, background, save, export"
        ]


def test_an_unknown_key_of_a_nested_table_is_refused():
    assert problems_of(tables(model={"rope_scaling": {**SCALING, "factr": 2.0}})) == [
        "model.rope_scaling.factr is unknown; did you mean model.rope_scaling.factor?"
    ]


def test_all_problems_of_all_sections_come_at_once():
    found = problems_of(
        {
            "modle": {},
            "model": {"name": "llama2-7", "hidden_size": 64},
            "batch": {"global_batch": 0, "seq_len": -1},
            "train": {"sed": 1},
            "layout": {"tp": "2", "zero": 4},
            "kernels": {"norm": "layer"},
            "precision": {"params": "bfloat16", "compute": "float32"},
            "data": 3,
            "optimizer": {"lr": -1.0, "beta1": 2, "warmup_steps": -1},
            "checkpoint": {"every": -1},
            "metrics": {"log_every": 0},
            "cluster": {"gpu": "abacus"},
        }
    )
    assert found == [
        "model.name='llama2-7' is no preset and no Hugging Face folder, config.json or TOML file; did you mean "
        "llama2-7b? A model of your own needs num_layers, num_heads, num_kv_heads, ffn_size, vocab_size too",
        "modle is unknown; did you mean model?",
        "batch.global_batch=0 must be from 1 to a billion",
        "batch.seq_len=-1 must be from 1 to a billion",
        "train.sed is unknown; did you mean train.seed?",
        "train.steps is missing; say how many, or how many train.epochs",
        "layout.tp='2' must be a whole number",
        "layout.zero=4 is unknown; use one of [1, 2, 3]",
        "kernels.norm='layer' is unknown; use one of ['auto', 'eager', 'fused', 'liger']",
        "precision.params=bfloat16 is coarser than precision.compute=float32: the masters would lose what the step "
        "computed; use params=float32 or finer",
        "data is a table: write [data] and its keys below",
        "optimizer.lr=-1.0 must be above 0 and finite",
        "optimizer.warmup_steps=-1 must not be negative",
        "optimizer.beta1=2.0 must be at least 0 and below 1",
        "checkpoint.every=-1 must not be negative",
        "metrics.log_every=0 must be at least 1",
        f"cluster.gpu='abacus' is unknown; use one of auto, cpu, {', '.join(known_gpus())}",
    ]


@pytest.mark.parametrize(
    ("section", "wrong"),
    [
        ("train", {"steps": -1, "epochs": -1.0, "timeout_s": 0.0}),
        ("checkpoint", {"every": -1, "keep": 0}),
        ("metrics", {"log_every": 0, "memory_every": 0}),
        ("cluster", {"gpu": "abacus", "gpus_per_node": 0}),
    ],
)
def test_a_section_reports_each_of_its_wrong_values(section, wrong):
    found = problems_of(tables(**{section: wrong}))
    assert [key for key in wrong if any(f"{section}.{key}=" in line for line in found)] == list(wrong)


@pytest.mark.parametrize("wrong", [{"tp": 0}, {"micro_batch": 0}, {"recompute": "some"}, {"stage_layers": [1, 0, 1]}])
def test_a_wrong_degree_is_reported_with_the_problems_of_other_sections(wrong):
    found = problems_of(tables(layout=wrong, checkpoint={"keep": 0}))
    assert any(line.startswith("layout.") for line in found)
    assert any(line.startswith("checkpoint.") for line in found)


@pytest.mark.parametrize(
    ("section", "key", "refused", "edge", "rule"),
    [
        ("optimizer", "lr", 0.0, 1e-12, "above 0"),
        ("optimizer", "eps", -1e-9, 1e-12, "above 0"),
        ("optimizer", "max_norm", 0.0, math.inf, "above 0"),
        ("optimizer", "beta1", 1.0, 0.999, "at least 0 and below 1"),
        ("optimizer", "beta2", -0.1, 0.0, "at least 0 and below 1"),
        ("optimizer", "min_lr_ratio", 1.5, 1.0, "between 0 and 1"),
        ("optimizer", "warmup_steps", -1, 0, "not be negative"),
        ("optimizer", "weight_decay", -0.1, 0.0, "not be negative"),
        ("train", "steps", -1, 1, "not be negative"),
        ("train", "timeout_s", 0.0, 0.1, "above 0"),
        ("train", "timeout_s", 1e300, 2_592_000.0, "at most 2592000"),
        ("checkpoint", "timeout_s", 1e300, 2_592_000.0, "at most 2592000"),
        ("batch", "global_batch", 10**13, 10**9, "from 1 to a billion"),
        ("batch", "seq_len", 10**13, 10**9, "from 1 to a billion"),
        ("model", "rope_theta", -5.0, 1e-3, "above 0"),
        ("model", "norm_eps", math.nan, 0.0, "at least 0 and finite"),
        ("checkpoint", "every", -1, 0, "not be negative"),
        ("checkpoint", "keep", 0, 1, "at least 1"),
        ("metrics", "log_every", 0, 1, "at least 1"),
        ("metrics", "memory_every", 0, 1, "at least 1"),
        ("cluster", "gpus_per_node", 0, 1, "at least 1"),
    ],
)
def test_a_number_out_of_range_is_refused_and_its_edge_is_not(section, key, refused, edge, rule):
    (problem,) = problems_of(tables(**{section: {key: refused}}))
    assert problem.startswith(f"{section}.{key}={refused} must") and rule in problem
    parsed = parse_config(tables(**{section: {key: edge}}))
    assert getattr(getattr(parsed, section), key) == edge


def list_path_keys() -> list[tuple[str, str]]:
    """Every key whose text is a path: by what the sentence on it says, so that none is forgotten."""
    path_words = re.compile(r"\bfile\b|\bfolder\b|\bpath\b|\b[Ff]older\b|`data\.source`|^Where ", re.MULTILINE)
    found = [
        (section.name, key.name)
        for section in list_sections()
        for key in section.keys
        if key.type == "a string" and path_words.search(key.meaning)
    ]
    return sorted({(section, key) for section, key in found} - {("model", "name"), ("layout", "schedule")})


PATH_KEYS = [
    ("cluster", "file"), ("data", "chat_template"), ("data", "folder"), ("data", "source"), ("data", "tokenizer"),
    ("data.mixture", "source"), ("layout", "offload_folder"), ("model", "trace"), ("train", "init_from"),
    ("train", "run_folder"), ("validation", "source"), ("validation.sets", "source"),
]  # fmt: skip


def test_every_key_that_is_a_path_is_known():
    assert list_path_keys() == PATH_KEYS


def put(section: str, key: str, value: Any) -> dict[str, Any]:
    """The tables of a config that has this value."""
    if section == "data.mixture":
        return tables(data={"mixture": [{key: value}]})
    if section == "validation.sets":
        return tables(validation={"sets": [{"name": "a", key: value}]})
    return tables(**{section: {key: value}})


@pytest.mark.parametrize(("section", "key"), PATH_KEYS)
def test_a_path_has_a_home_in_the_place_of_its_tilde(section, key, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").write_text('gpu = "cpu"\ngpus = 1\n')
    found: Any = parse_config(put(section, key, "~/mine"))
    for part in section.split("."):
        found = getattr(found, part)
    assert getattr(found[0] if isinstance(found, tuple) else found, key) == str(tmp_path / "mine")
    if section not in ("data.mixture", "validation.sets"):
        assert parse_config(toml.loads(parse_config(put(section, key, "~/mine")).to_toml()))


@pytest.mark.parametrize(("section", "key"), PATH_KEYS)
@pytest.mark.parametrize(
    ("path", "why"),
    [("a" * 5000, "has a name of 5,000 bytes"), ("a/" * 2500, "is 5,000 bytes long"), ("~/" + "é" * 128, "256 bytes")],
)
def test_a_path_that_no_disk_takes_is_refused_in_a_line(section, key, path, why):
    (problem,) = problems_of(put(section, key, path))
    assert problem.startswith(f"{section}.{key}=") and why in problem and len(problem) < 250


FLOAT_KEYS = [pair for pair in KEYS if FIELD_TYPES[pair] is float]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_of_any_section_is_none(value):
    assert len(FLOAT_KEYS) > 10
    everywhere = {section: {key: value for of, key in FLOAT_KEYS if of == section} for section in SECTIONS}
    scaling = {"factor": value, "low_freq_factor": value, "high_freq_factor": value, "original_context": 8}
    everywhere["model"] |= {"name": "debug", "rope_scaling": scaling}
    refused = {line.partition("=")[0] for line in problems_of(tables(**everywhere))}
    wanted = {f"{section}.{key}" for section, key in FLOAT_KEYS if (key, value) != ("max_norm", math.inf)}
    assert refused >= {name for name in wanted if not name.startswith("model.")} | {"model.rope_scaling.factor"}
    for key in ("rope_theta", "norm_eps"):
        (problem,) = problems_of(tables(model={"name": "debug", key: value}))
        assert problem.startswith(f"model.{key}={value} must")


@pytest.mark.parametrize(
    "content", ["a = " + "[" * 5000 + "]" * 5000, "a = " + "[" * 150 + "]" * 150, "a." * 5000 + "b = 1"]
)
def test_a_file_that_is_nested_too_deep_is_refused_in_a_line(tmp_path, content):
    path = write(tmp_path, content)
    with pytest.raises(InvalidConfig, match=rf"^config {path} is not TOML: it is nested .*deep$"):
        load_config(path)
    with pytest.raises(InvalidConfig):
        load_config(write(tmp_path, ""), [f"--batch.seq_len={'[' * 5000}{']' * 5000}"])


@pytest.mark.parametrize(
    ("key", "most"),
    [("num_layers", 10_000), ("num_heads", 10**6), ("num_kv_heads", 10**6), ("hidden_size", 10**9),
     ("ffn_size", 10**9), ("vocab_size", 10**9), ("head_dim", 10**9), ("window", 10**9)],
)  # fmt: skip
@pytest.mark.parametrize("times", [2, 10**9, 10**400])
def test_a_size_that_no_model_has_is_refused(key, most, times):
    assert any(
        line.startswith(f"model.{key}=") and "must be" in line and len(line) < 200
        for line in problems_of(tables(model={"name": "debug", key: times * most}))
    )


def make_sources(folder: Path) -> dict[str, str]:
    """Every kind of place that a model may come from, of the same model."""
    hf = {"model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 264, "head_dim": 32}  # fmt: skip
    (folder / "mine").mkdir()
    (folder / "mine" / "config.json").write_text(json.dumps(hf))
    (folder / "on-top.toml").write_text('[model]\nname = "~/mine"\n')
    return {"a folder": "~/mine", "a config.json": "~/mine/config.json", "a TOML file": "~/on-top.toml"}


def test_a_config_takes_every_model_that_recommend_takes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path, '[model]\nname = "debug"\nffn_size = 7\n[batch]\nglobal_batch = 2\nseq_len = 8\n')
    for what, source in make_sources(tmp_path).items():
        wanted = find_model(source)
        assert (wanted.family, wanted.num_layers, wanted.head_width) == ("qwen3", 3, 32), what
        assert load_plan(path, [f"--model={source}"]).model == wanted
        assert load_plan(path, [f"--model.name={source}"]).model == replace(wanted, ffn_size=7)
    assert load_plan(path, ["--model=llama3.2-1b"]).model == PRESETS["llama3.2-1b"]
    (tmp_path / "circle.toml").write_text('[model]\nname = "~/circle.toml"\n')
    with pytest.raises(InvalidConfig, match="hidden_size is missing"):
        load_plan(path, ["--model=~/circle.toml"])


def test_a_config_that_was_written_whole_takes_nothing_from_what_its_name_names_now():
    for name in ("llama3.2-1b", "qwen3-4b"):  # one has a stretched rotary embedding, one a head_dim
        plain = replace(PRESETS[name], rope_scaling=None, head_dim=None)
        config = parse_config(tables(model={"name": "debug"}))
        assert parse_config(toml.loads(replace(config, model=plain).to_toml())).model == plain


@pytest.mark.parametrize(
    ("section", "key"),
    [("data", "source"), ("data", "split"), ("data", "folder"), ("data", "tokenizer"), ("train", "run_folder")],
)
@pytest.mark.parametrize("path", ["", " ", "a\0b"])
def test_a_path_that_is_none_is_refused(section, key, path):
    assert problems_of(tables(**{section: {key: path}})) == [
        f"{section}.{key}={path!r} must not be empty or hold a NUL"
    ]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"low_freq_factor": 4.0}, "model.rope_scaling.low_freq_factor=4.0 must be below high_freq_factor=4.0"),
        ({"low_freq_factor": 9.0}, "model.rope_scaling.low_freq_factor=9.0 must be below high_freq_factor=4.0"),
        ({"factor": 0.0}, "model.rope_scaling.factor=0.0 must be above 0 and finite"),
        ({"original_context": 0}, "model.rope_scaling.original_context=0 must be from 1 to a billion"),
    ],
)
def test_a_scaling_that_no_wavelength_has_is_refused(changes, problem):
    assert problems_of(tables(model={"rope_scaling": {**SCALING, **changes}})) == [problem]


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [({"warmup_steps": 12}, "train.steps=11"), ({"warmup_steps": 12, "decay_steps": 10}, "optimizer.decay_steps=10")],
)
def test_a_warm_up_that_never_ends_is_refused(optimizer, named):
    config = parse_config(tables(optimizer=optimizer, train={"steps": 11}))
    with pytest.raises(InvalidLayout, match=f"warmup_steps=12 is more than {named}, .* use fewer, or optimizer.decay"):
        check_layout(config, 1)
    for fine in ({"warmup_steps": 11}, {"warmup_steps": 12, "decay_steps": 12}):
        check_layout(parse_config(tables(optimizer=fine, train={"steps": 11})), 1)


def test_the_optimizer_is_the_one_that_is_named_and_loads_again():
    config = parse_config(tables(optimizer={"name": "sgd", "momentum": 0.5, "max_norm": 2.0}))
    assert config.optimizer == SGD(momentum=0.5, max_norm=2.0)
    assert parse_config(toml.loads(config.to_toml())) == config


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (["size", 2], "data.mixture has weight = \"size\" for 'a' and a number for another source"),
        ([None, "size"], "data.mixture has weight = \"size\" for 'b' and a number for another source"),
        (["sizes"], "data.mixture[0].weight='sizes' must be a number or \"size\""),
        ([True], "data.mixture[0].weight=True must be a number"),
        ([0], 'data.mixture.weight=0.0 must be above 0 and finite, or "size"'),
    ],
)
def test_weights_are_numbers_or_all_of_them_size(weights, said):
    named = zip("ab", weights, strict=False)
    mixture = [{"source": name} | ({} if weight is None else {"weight": weight}) for name, weight in named]
    with pytest.raises(InvalidConfig) as error:
        parse_config(tables(data={"mixture": mixture}))
    assert any(said in problem for problem in error.value.problems)


def test_weights_by_size_are_written_and_read_again():
    config = parse_config(tables(data={"mixture": [{"source": each, "weight": "size"} for each in "ab"]}))
    assert config.data.weights is None
    assert parse_config(toml.loads(config.to_toml())) == config


def test_beside_a_mixture_no_source_is_written_that_nobody_named():
    mixture = [{"source": "a"}, {"source": "b"}]
    config = parse_config(tables(data={"mixture": mixture}))
    written = toml.loads(config.to_toml())
    assert parse_config(written) == config
    assert [each["source"] for each in written["data"]["mixture"]] == ["a", "b"]
    assert written["data"].keys() & {"source", "split"} == set()
    with pytest.raises(
        InvalidConfig, match=r"data\.source='c' and \[\[data\.mixture\]\] both say what is read; use one"
    ):
        parse_config(tables(data={"mixture": mixture, "source": "c"}))


def test_a_source_on_the_command_line_takes_the_place_of_a_mixture_and_the_other_way_round(tmp_path):
    mixture = "--data.mixture=[{source = 'a'}, {source = 'b'}]"
    path = tmp_path / "a.toml"
    path.write_text(load_config(ROOT / "configs" / "debug.toml", ["--data.source=c"]).to_toml())
    mixed = load_config(path, [mixture])
    assert [each.source for each in mixed.data.sources] == ["a", "b"] and mixed.data.source == DataConfig.source
    path.write_text(mixed.to_toml())
    assert [each.source for each in load_config(path, ["--data.source=d"]).data.sources] == ["d"]
    with pytest.raises(InvalidConfig, match="both say what is read"):
        load_config(path, ["--data.source=d", mixture])


def test_a_key_that_another_optimizer_has_is_refused_by_name_with_all_other_problems():
    assert problems_of(tables(optimizer={"name": "sgd", "beta1": 0.9, "momentun": 1.0, "lr": -1.0})) == [
        "optimizer.beta1 is a key of optimizer.name=adamw; name that, or leave beta1 out",
        "optimizer.momentun is unknown; did you mean optimizer.momentum?",
        "optimizer.lr=-1.0 must be above 0 and finite",
    ]


@pytest.mark.parametrize("name", ["adam", 3, ["adamw"]])
def test_an_optimizer_that_nobody_registered_is_refused_with_the_problems_of_other_sections(name):
    assert problems_of(tables(optimizer={"name": name, "beta3": 0.9}, checkpoint={"keep": 0})) == [
        f"optimizer.name={name!r} is unknown; use one of adamw, sgd, muon",
        "checkpoint.keep=0 must be at least 1",
    ]


@pytest.mark.parametrize("key", ["lr", "eps", "max_norm", "weight_decay"])
def test_not_a_number_is_refused(key):
    assert problems_of(tables(optimizer={key: math.nan}))


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("--layout.tp=2", "layout", "tp", 2),
        ("--optimizer.lr=1e-3", "optimizer", "lr", 1e-3),
        ("--optimizer.lr=1", "optimizer", "lr", 1.0),
        ("--layout.sequence_parallel=false", "layout", "sequence_parallel", False),
        ("--layout.stage_layers=[1, 3]", "layout", "stage_layers", (1, 3)),
        ("--layout.schedule=gpipe", "layout", "schedule", "gpipe"),
        ('--layout.schedule="gpipe"', "layout", "schedule", "gpipe"),
        ("--data.source=some folder/*.txt", "data", "source", "some folder/*.txt"),
        ("--train.run_folder=a=b", "train", "run_folder", "a=b"),
        ("--data.mixture=[{source='a', weight=2.5}]", "data", "mixture", (Source(source="a", weight=2.5),)),
        ("--data.mixture=[{source='a', weight='size'}]", "data", "mixture", (Source(source="a", weight="size"),)),
        ("--data.end_of_document=", "data", "end_of_document", ""),
        ("--train.steps=5", "train", "steps", 5),
        ("--model.num_layers=6", "model", "num_layers", 6),
    ],
)
def test_an_override_puts_its_value_in_and_leaves_the_rest(tmp_path, override, section, key, value):
    path = write(tmp_path, '[model]\nname = "debug"\n[batch]\nglobal_batch = 8\nseq_len = 16\n[train]\nsteps = 3\n')
    before, after = load_config(path), load_config(path, [override])
    assert getattr(getattr(after, section), key) == value
    assert replace(after, **{section: getattr(before, section)}) == before
    assert replace(getattr(after, section), **{key: getattr(getattr(before, section), key)}) == getattr(before, section)


def test_a_later_override_wins_and_a_nested_one_changes_one_key(tmp_path):
    path = write(
        tmp_path,
        '[model]\nname = "debug"\n[model.rope_scaling]\nfactor = 8.0\nlow_freq_factor = 1.0\nhigh_freq_factor = 4.0\n'
        "original_context = 8192\n[batch]\nglobal_batch = 8\nseq_len = 16\n[train]\nsteps = 3\n",
    )
    config = load_config(path, ["--model.rope_scaling.factor=2", "--layout.tp=2", "--layout.tp=4"])
    assert config.model.rope_scaling == RopeScaling(**{**SCALING, "factor": 2.0})
    assert config.layout.tp == 4


def test_a_layout_is_overridden_by_its_printed_name():
    path = ROOT / "configs" / "debug.toml"
    whole = load_config(path, ["--layout=dp2·tp2+sp mb2 zero3 recompute=full"]).layout
    assert str(whole) == "dp2·tp2+sp mb2 zero3 recompute=full"
    before, part = load_config(path).layout, load_config(path, ["--layout=pp=2"]).layout
    assert part == replace(before, pp=2)
    with pytest.raises(InvalidConfig, match="'2' is no choice; write a layout as it is printed"):
        load_config(path, ["--layout=2"])


@pytest.mark.parametrize("text", ["layout.tp=2", "--layout.tp", "--layout", "--.tp=2", "--layout.=2", "-layout.tp=2"])
def test_what_is_no_override_is_refused_with_an_example(tmp_path, text):
    with pytest.raises(InvalidConfig, match=r"is not an override; write --section\.key=value, such as --layout\.tp=2"):
        load_config(write(tmp_path, ""), [text])


@pytest.mark.parametrize("override", ["--layout.tp=2", "--train.steps.first=2", "--model.name.first=x"])
def test_an_override_below_what_is_no_table_is_refused(tmp_path, override):
    path = write(tmp_path, 'layout = 3\n[model]\nname = "debug"\n[train]\nsteps = 1\n')
    with pytest.raises(InvalidConfig):
        load_config(path, [override])


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_name_and_any_of_its_sizes_may_change(name):
    assert parse_config(tables(model={"name": name})).model == PRESETS[name]
    assert parse_config(tables(model={"name": name, "num_layers": 2})).model == replace(PRESETS[name], num_layers=2)


def test_a_model_of_ones_own_needs_every_size():
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48, "vocab_size": 300}
    assert parse_config(tables(model={"name": "mine", **sizes})).model == ModelShape(name="mine", **sizes)
    for size in sizes:
        incomplete = {key: value for key, value in sizes.items() if key != size}
        (problem,) = problems_of(tables(model={"name": "mine", **incomplete}))
        assert problem.startswith(
            "model.name='mine' is no preset and no Hugging Face folder, config.json or TOML file; use one of debug, "
        )
        assert problem.endswith(f"needs {size} too")


@pytest.mark.parametrize("value", [3, "text", [1], [{"tp": 2}]])
def test_a_section_that_is_no_table_is_refused(value):
    found = problems_of(dict.fromkeys(SECTIONS, value))
    assert [line.partition(" with ")[0].partition(" and ")[0] for line in found] == [
        f"{section} is a table: write [{section}]" for section in SECTIONS
    ]


@pytest.mark.parametrize("value", [datetime.date(2024, 2, 29), datetime.time(12), datetime.datetime(2024, 2, 29)])
def test_a_date_is_refused_with_its_key(value):
    assert problems_of(tables(train={"seed": value}, optimizer={"lr": value})) == [
        f"train.seed={value!r} must be a whole number",
        f"optimizer.lr={value!r} must be a number",
    ]


def test_a_model_name_that_is_a_list_is_refused():
    assert problems_of(tables(model={"name": ["debug"]}))


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path):
    for path, reason in ((tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InvalidConfig, match=reason) as caught:
            load_config(path)
        assert str(caught.value).startswith(f"config {path} cannot be read: ")


@pytest.mark.parametrize("content", [b"[model", b"model = ", b"a = 1\na = 2\n", b"name = '\xff'\n"])
def test_a_file_that_is_not_toml_is_refused(tmp_path, content):
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidConfig) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"config {path} is not TOML: ")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_a_config_of_the_project_trains_on_the_fewest_ranks_that_it_needs(path):
    config = load_config(path)
    assert check_layout(config, config.layout.smallest_world_size).dp_shard >= 1


positive = st.integers(1, 1 << 40)
sizes = st.integers(1, 10**9)
counts = st.integers(1, 10**9)
floats = st.floats(1e-12, 1e12)
shares = st.floats(0, 1)
decays = st.floats(0, 1, exclude_max=True)
texts = st.text(st.characters(codec="utf-8"))
paths = texts.filter(lambda text: text.strip() and not find_path_problem(text))


@st.composite
def shapes(draw) -> ModelShape:
    heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    scaling = st.builds(
        RopeScaling,
        factor=floats,
        low_freq_factor=st.floats(1e-12, 1.0, exclude_max=True),
        high_freq_factor=st.floats(1.0, 1e12),
        original_context=sizes,
    )
    return ModelShape(
        name=draw(texts.filter(lambda name: name not in PRESETS)),
        hidden_size=2 * heads * group * draw(st.integers(1, 64)),
        head_dim=draw(st.none() | st.integers(1, 64).map(lambda half: 2 * half)),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        num_layers=draw(st.integers(1, 10_000)),
        num_heads=heads * group,
        num_kv_heads=heads,
        ffn_size=draw(sizes),
        vocab_size=draw(sizes),
        tied_embeddings=draw(st.booleans()),
        rope_theta=draw(floats),
        rope_scaling=draw(st.none() | scaling),
        norm_eps=draw(floats),
    )


def choices(of: Any) -> Any:
    return st.sampled_from(get_args(of))


def names(operation: str) -> Any:
    return st.sampled_from(list(KERNELS[operation]))


degrees = st.integers(1, 64)
configs = st.builds(
    Config,
    model=shapes() | st.sampled_from(list(PRESETS.values())),
    batch=st.builds(Batch, global_batch=counts, seq_len=counts),
    train=st.builds(
        TrainConfig,
        steps=positive,
        run_folder=paths,
        seed=st.integers(-(1 << 63), 1 << 63),
        device=st.sampled_from(["auto", "cpu", "cuda"]),
        timeout_s=st.floats(1e-12, 1e6),
    ),
    layout=st.builds(
        OpenLayout,
        pp=degrees,
        dp_replicate=degrees,
        dp_shard=st.just(-1) | degrees,
        tp=degrees,
        sequence_parallel=st.booleans(),
        micro_batch=degrees,
        schedule=st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"]),
        virtual_stages=degrees,
        stage_layers=st.lists(degrees, max_size=5).map(tuple),
        zero=st.sampled_from([1, 2, 3]),
        recompute=st.sampled_from(["none", "full", "selective", "keep-attention", "every-3"]),
    ),
    kernels=st.builds(
        OpenKernels,
        attention=st.just("auto") | names("attention"),
        norm=st.just("auto") | names("norm"),
        loss=names("loss"),
        compile=st.sampled_from(["auto", "none", "blocks", "loss", "model"]),
    ),
    precision=st.builds(
        Precision,
        params=st.just("float64"),
        compute=choices(Format),
        reduce=st.sampled_from(["float64", "float32", "bfloat16"]),
    ),
    data=st.builds(
        lambda source, mixture, **others: DataConfig(
            source=DataConfig.source if mixture else source, mixture=mixture, **others
        ),
        source=paths,
        split=paths,
        text_field=texts,
        messages_field=texts,
        mixture=st.lists(st.builds(Source, source=paths, weight=st.floats(1e-6, 1e6), split=paths), max_size=2).map(
            tuple
        ),
        samples=st.sampled_from(["packed", "padded", "best-fit"]),
        loss_on=st.sampled_from(["answers", "last", "all"]),
        tokenizer=paths,
        end_of_document=texts,
        max_tokens=positive,
        folder=paths,
    ),
    optimizer=st.builds(
        AdamW,
        lr=floats,
        min_lr_ratio=shares,
        warmup_steps=positive,
        decay_steps=positive,
        beta1=decays,
        beta2=decays,
        eps=floats,
    ),
    checkpoint=st.builds(CheckpointConfig, every=positive, keep=positive),
    metrics=st.builds(MetricsConfig, log_every=positive, memory_every=positive),
    cluster=st.builds(
        ClusterConfig, gpu=st.sampled_from(["auto", "cpu", *known_gpus()]), gpus_per_node=st.integers(1, 64)
    ),
)


@settings(deadline=None, max_examples=50)
@given(configs)
def test_a_config_as_toml_loads_to_the_same_config(config):
    assert parse_config(toml.loads(config.to_toml())) == config


def test_a_section_that_is_left_out_has_its_defaults():
    config = parse_config(TABLES)
    for name, of in SECTIONS.items():
        if name not in TABLES:
            assert getattr(config, name) == of()
    assert config.train == TrainConfig(**TABLES["train"])
    assert [f.name for of in SECTIONS.values() for f in fields(of) if f.default is MISSING] == [
        *(f.name for f in fields(ModelShape) if f.default is MISSING), "global_batch", "seq_len",
    ]  # fmt: skip


@pytest.mark.parametrize("world_size", range(1, 9))
def test_a_layout_fits_exactly_the_multiples_of_its_fixed_degrees(world_size):
    config = parse_config(tables(layout={"pp": 2}))
    if world_size % 2:
        with pytest.raises(InvalidLayout, match=f"world size {world_size} does not fit the layout: pp=2 needs"):
            check_layout(config, world_size)
    elif 8 % (world_size // 2) == 0 and 8 // (world_size // 2) >= 2:
        layout = check_layout(config, world_size)
        assert (layout.world_size, layout.dp_shard) == (world_size, world_size // 2)
    else:
        with pytest.raises(InvalidLayout, match="global_batch=8"):
            check_layout(config, world_size)


def test_kernels_that_cannot_repeat_their_bits_are_refused_where_they_have_to():
    def config_with(attention, *, deterministic):
        train = {"steps": 1, "device": "cuda", "deterministic": deterministic}
        return parse_config(tables(kernels={"attention": attention}, train=train, precision={"compute": "bfloat16"}))

    assert not parse_config(tables()).train.deterministic
    assert check_layout(config_with("sdpa-cudnn", deterministic=False), 1).world_size == 1
    assert check_layout(config_with("sdpa-flash", deterministic=True), 1).world_size == 1
    with pytest.raises(InvalidLayout, match="sdpa-cudnn gives other bits each time on CUDA"):
        check_layout(config_with("sdpa-cudnn", deterministic=True), 1)


def test_the_world_size_and_the_layout_are_complained_of_together():
    config = parse_config(tables(layout={"pp": 5, "tp": 3}))
    with pytest.raises(InvalidLayout) as caught:
        check_layout(config, 8)
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == ["world", "tp=3", "tp=3", "tp=3", "pp=5"]
    assert check_layout(replace(config, model=SHAPE, layout=OpenLayout(tp=2)), 4).dp_shard == 2


def test_advice_for_a_large_cluster_tries_few_layouts(monkeypatch):
    tried = []
    find_broken = layout.find_broken
    monkeypatch.setattr(layout, "find_broken", lambda *args: tried.append(1) or find_broken(*args))
    config = load_config(ROOT / "configs" / "llama3.1-405b-16384xh100.toml")
    with pytest.raises(InvalidLayout, match=r"world size 16500 .* start 8192 or 16384, or change the degrees"):
        check_layout(config, 16_500)
    assert len(tried) < 1000


def test_a_run_is_so_many_steps_or_so_many_epochs_long(tmp_path):
    (found,) = problems_of(tables(train={"steps": 3, "epochs": 2}))
    both = "train.steps=3 and train.epochs=2 both say the length of the run"
    assert found == f"{both}; use one of them, and 0 for the other"
    path = tmp_path / "c.toml"
    path.write_text(parse_config(tables(train={"steps": 3})).to_toml())
    longer = load_config(path, ["--train.epochs=2"])  # what is asked for takes the place of what the file says
    assert (longer.train.steps, longer.train.epochs) == (0, 2)
    path.write_text(longer.to_toml())
    assert load_config(path, ["--train.steps=4"]).train.epochs == 0
    assert load_config(path, ["--train.steps=0"]).train.epochs == 2
    with pytest.raises(InvalidConfig, match="both say the length"):
        load_config(path, ["--train.steps=4", "--train.epochs=1"])


def test_sets_of_validation_have_names_of_their_own():
    sets = [{"name": name, "source": f"{name}.txt"} for name in ("web", "code")]
    config = parse_config(tables(validation={"sets": sets, "batches": 3}))
    assert list(config.held_out_data) == ["web", "code"] and config.validation_data == config.held_out_data["web"]
    with_source = parse_config(tables(validation={"sets": [sets[0] | {"batches": 5}], "source": "a.txt", "batches": 3}))
    assert [each.source for each in with_source.held_out_data.values()] == ["a.txt", "web.txt"]
    assert [with_source.count_held_out_batches(name) for name in ("", "web")] == [3, 5]
    assert parse_config(tables()).held_out_data == {} and parse_config(tables()).validation_data is None
    (twice,) = problems_of(tables(validation={"sets": [sets[0], sets[0]]}))
    assert twice == "validation.sets has 'web' twice; give each a name of its own"
    (wrong,) = problems_of(tables(validation={"sets": [sets[0] | {"name": "a/b"}]}))
    assert wrong == "validation.sets.name='a/b' must be of letters, digits, -, _ and ."
