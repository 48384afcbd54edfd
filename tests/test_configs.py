"""The config files that come with the project."""

import re
from pathlib import Path

import pytest

from dtlayout.config.checking import check_layout
from dtlayout.config.loading import load_config

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_legal_on_the_gpus_of_its_name(path: Path) -> None:
    named = re.search(r"-(\d+)x", path.name)
    config = load_config(path)
    layout = check_layout(config, int(named[1]) if named else 8)
    assert not named or config.cluster.gpu.startswith(path.stem.rpartition("x")[2])
    assert layout.num_microbatches(config.batch) >= layout.pp
