"""Recurrent cores: what they compute is what torch's own modules do, called row by row."""

import pytest
import torch
from torch import nn

from beast.learn.nests import map_tensors
from beast.learn.recurrent import Core

T, B, SIZE, UNITS = 7, 3, 5, 4


def row_by_row(core, x, begins, state):
    """The definition: zero the state where an episode begins, then one row."""
    outputs = []
    for row, begin in zip(x, begins):
        state = tuple(torch.where(begin, torch.zeros_like(part), part) for part in state)
        output, state = core(row.unsqueeze(0), state if len(state) == 2 else state[0])
        state = state if isinstance(state, tuple) else (state,)
        outputs.append(output)
    return torch.cat(outputs), state


def outputs_and_gradients(run, core, x, begins, state, weights):
    core.zero_grad()
    x = x.clone().requires_grad_()
    state = tuple(part.clone().requires_grad_() for part in state)
    outputs, after = run(core, x, begins, state)
    # All that comes out has a part in the loss, so that a gradient flows back through everything.
    sum((part * weight).sum() for part, weight in zip((outputs, *after), weights)).backward()
    gradients = [x.grad, *(part.grad for part in state), *(parameter.grad.clone() for parameter in core.parameters())]
    return [part.detach() for part in (outputs, *after)] + gradients


@pytest.mark.parametrize("kind, amp", [(nn.LSTM, False), (nn.LSTM, True), (nn.GRU, False)])
@pytest.mark.parametrize("rows", [[], [0], [3], [6], [0, 1, 3, 4, 6]])
def test_outputs_states_and_gradients_are_those_of_torch_row_by_row(kind, rows, amp):
    torch.manual_seed(1)
    torchs, ours = kind(SIZE, UNITS), Core(kind.__name__.lower(), SIZE, UNITS, amp)
    ours.load_state_dict(torchs.state_dict())
    begins = torch.zeros(T, B, 1, dtype=torch.bool)
    for row in rows:
        begins[row, row % B] = True
    x = torch.randn(T, B, SIZE)
    state = tuple(torch.randn(1, B, UNITS) for _ in range(2 if kind is nn.LSTM else 1))
    weights = [torch.randn(T, B, UNITS), *(torch.randn(1, B, UNITS) for _ in state)]
    expected = outputs_and_gradients(row_by_row, torchs, x, begins, state, weights)
    found = outputs_and_gradients(lambda core, *inputs: core(*inputs), ours, x, begins, state, weights)
    assert all(tensor.dtype == torch.float32 for tensor in found)
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected)]
    assert max(errors) < (0.02 if amp else 1e-5)  # bfloat16 has 8 bits
    assert max(errors) > 1e-4 or not amp, "products are in bfloat16"


def test_what_an_lstm_remembers_is_not_rounded_to_bfloat16():
    core = Core("lstm", 1, 2, amp=True).requires_grad_(False)
    map_tensors(lambda parameter: parameter.zero_(), tuple(core.parameters()))
    core.bias_ih_l0.copy_(torch.tensor([9.0, 9, 20, 20, 0.001, 0.001, 9, 9]))  # adds 0.001 and forgets nothing
    state = (torch.zeros(1, 1, 2), torch.full((1, 1, 2), 2.0))
    begins = torch.zeros(500, 1, 1, dtype=torch.bool)
    _, (_, cell) = core(torch.zeros(500, 1, 1), begins, state)
    torch.testing.assert_close(cell, torch.full((1, 1, 2), 2.5), rtol=0, atol=1e-3)  # 2.001 is 2.0 in bfloat16
