"""The compiler's stand-in on tensors without values."""

from __future__ import annotations

import subprocess
import sys

ALONE = """
import sys
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from tightfit.methods.compiler import stand_in

with FakeTensorMode():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    backend = stand_in()
    assert "torch._inductor.lowering" not in sys.modules, "which takes long to import"
    torch.compile(model, backend=backend)(torch.zeros(2, 3, 8, 8)).sum().backward()
    assert model[0].weight.grad is not None
"""


def test_pooling_is_followed_where_nothing_has_imported_the_code_generator() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
