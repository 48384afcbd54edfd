"""Presets are the published models: their sizes add up to the published numbers of parameters."""

import pytest
import torch

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.counting import count_parameters
from dtlayout.models.llama import Llama
from dtlayout.models.presets import PRESETS, find_preset
from dtlayout.spec.kernels import Kernels

PUBLISHED = {  # sum of the safetensors of each model on the HF hub
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,  # its files hold the tied head a second time
    "qwen3-1.7b": 1_720_574_976,  # likewise
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "dots.llm1": 142_774_381_696,  # with the biases of routers; what transformers builds of its config.json
}


@pytest.mark.parametrize("name", PRESETS)
def test_the_model_on_the_meta_device_has_as_many_parameters_as_are_counted(name):
    with torch.device("meta"):
        model = Llama(find_preset(name), Kernels(), max_seq_len=8)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(find_preset(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_as_many_parameters_as_were_published(name):
    assert count_parameters(find_preset(name)) == PUBLISHED[name]


def test_every_preset_but_the_smallest_is_a_published_model():
    assert PRESETS.keys() - PUBLISHED.keys() == {"debug"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_called_by_its_name(name):
    assert find_preset(name).name == name


def test_an_unknown_preset_is_refused_with_all_that_exist():
    with pytest.raises(InvalidConfig, match=r"^model 'llama-8b' is not a preset; use one of ") as caught:
        find_preset("llama-8b")
    assert str(caught.value).partition("use one of ")[2].split(", ") == list(PRESETS)
