"""What a stage sends to the next one has the form that the next one expects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tightfit.cost.pipeline_schedule import Action
from tightfit.errors import InputError
from tightfit.parallel.pipeline.messages import StageMessages, shape_key


@pytest.mark.parametrize("change", ["frozen", "shape", "type"])
def test_outputs_of_another_form_are_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next stage knows their form from the first step. It would wait for ever for another one."""
    sent: list[Any] = []
    monkeypatch.setattr(StageMessages, "send", lambda self, tensor, *rest: sent.append(tensor))
    mesh: Any = SimpleNamespace(size=lambda axis: 2)
    messages, action, key = StageMessages(mesh, 1), Action("F", 0, 0), shape_key({"x": torch.ones(2, 3)})
    usual = torch.ones(2, 4, requires_grad=True)
    messages.send_outputs(action, key, [usual])
    messages.send_outputs(action, key, [usual])
    assert len(sent) == 3  # a header comes first
    others = {"frozen": usual.detach(), "shape": usual[:1], "type": usual.double()}
    with pytest.raises(InputError, match="stage 0 returns tensors with other types, shapes or gradients"):
        messages.send_outputs(action, key, [others[change]])
    with torch.no_grad():  # an evaluation has messages of its own
        messages.send_outputs(action, shape_key({"x": torch.ones(2, 3)}), [usual.detach()])
