"""Whether FSDP2 of this torch takes parameters of whole numbers, as codes of a quantized base are."""

import pytest
import torch
from torch.torch_version import TorchVersion

TAKES_CODES = torch.__version__ >= TorchVersion("2.12")
needs_codes = pytest.mark.skipif(not TAKES_CODES, reason="FSDP2 of this torch shards no codes")
