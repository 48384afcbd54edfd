"""What a mesh refuses; meshes that work are used by every test on ranks."""

import pytest

from dtlayout.errors import InvalidLayout
from dtlayout.layout import Layout
from dtlayout.mesh.build import build_mesh


def test_a_layout_of_another_world_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidLayout, match="needs 8 ranks, this job has 4; start it with torchrun --nproc-per-node 8"):
        build_mesh(Layout(pp=2, dp_shard=2, tp=2), "cpu")
