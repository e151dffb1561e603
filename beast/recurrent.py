"""Recurrent cores over rollouts in which episodes begin."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.function import once_differentiable


def run_core(
    core: nn.LSTM | nn.GRU, x: torch.Tensor, begins: torch.Tensor, state: tuple, amp: bool
) -> tuple[torch.Tensor, tuple]:
    """A core of one layer over x [T, B, size], its state zeroed before row t wherever begins [T, B, 1].

    `state` is (hidden, cell) of an LSTM or (hidden,) of a GRU before row 0, each [1, B, units]. Returns the outputs
    [T, B, units] and the state after row T-1, all float32. With `amp` an LSTM multiplies its weights in bfloat16;
    what it remembers is float32 in any case. Raises ValueError for more than one layer.
    """
    if core.num_layers > 1 or core.bidirectional or getattr(core, "proj_size", 0):
        raise ValueError(f"{core}: one layer, one direction and no projection; for more layers call run_core for each")
    if isinstance(core, nn.LSTM):
        hidden, cell = (part[0] for part in state)
        bias = core.bias_ih_l0 + core.bias_hh_l0
        dtype = torch.bfloat16 if amp else torch.float32
        x, cell = _LSTM.apply(x, begins, hidden, cell, core.weight_ih_l0, core.weight_hh_l0, bias, dtype)
        return x, (x[-1:], cell.unsqueeze(0))
    outputs = []
    hidden = state[0]
    for row, begin in zip(x.split(1), begins):
        output, hidden = core(row, hidden.masked_fill(begin, 0))
        outputs.append(output)
    return torch.cat(outputs), (hidden,)


class _LSTM(torch.autograd.Function):
    """torch's LSTM of one layer (gates in its order: input, forget, cell, output), with beginnings of episodes.

    torch's own has to be called anew for every row before which a state is zeroed. Here all products that need not wait
    for the row before, the gradients of the weights above all, are one each (benchmarks/LEDGER.md).
    """

    @staticmethod
    def forward(ctx, x, begins, hidden, cell, weight_ih, weight_hh, bias, dtype):
        x, weight_ih, weight_hh = x.to(dtype), weight_ih.to(dtype), weight_hh.to(dtype)
        from_inputs = x @ weight_ih.t()  # [T, B, 4·units]
        rows = []
        for t in range(len(x)):
            hidden, cell = hidden.masked_fill(begins[t], 0), cell.masked_fill(begins[t], 0)
            hidden_before, cell_before = hidden.to(dtype), cell
            gates = (hidden_before @ weight_hh.t()).float() + from_inputs[t] + bias
            i, f, g, o = gates.chunk(4, dim=1)
            i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
            cell = f * cell_before + i * g
            squashed = cell.tanh()
            hidden = o * squashed
            rows.append((hidden, hidden_before, cell_before, i, f, g, o, squashed))
        outputs, *kept = (torch.stack(parts) for parts in zip(*rows))
        ctx.save_for_backward(x, begins, weight_ih, weight_hh, *kept)
        return outputs, cell

    @staticmethod
    @once_differentiable
    def backward(ctx, d_outputs, d_cell):
        x, begins, weight_ih, weight_hh, hidden_before, cell_before, i, f, g, o, squashed = ctx.saved_tensors
        # What a cell's gradient becomes on its way to the gates i, f and g, and an output's on its way to cell and o.
        to_i, to_f, to_g = g * i * (1 - i), cell_before * f * (1 - f), i * (1 - g * g)
        to_cell, to_o = o * (1 - squashed * squashed), squashed * o * (1 - o)
        d_hidden, rows = torch.zeros_like(d_cell), []
        for t in reversed(range(len(x))):
            d_hidden = d_hidden + d_outputs[t]
            d_cell = d_cell + d_hidden * to_cell[t]
            d_gates = torch.cat([d_cell * to_i[t], d_cell * to_f[t], d_cell * to_g[t], d_hidden * to_o[t]], dim=1)
            rows.append(d_gates)
            d_hidden = (d_gates.to(x.dtype) @ weight_hh).float().masked_fill(begins[t], 0)
            d_cell = (d_cell * f[t]).masked_fill(begins[t], 0)
        d_gates = torch.stack(rows[::-1]).flatten(0, 1)  # [T·B, 4·units]
        d_bias = d_gates.sum(0)
        d_gates = d_gates.to(x.dtype)
        d_x = (d_gates @ weight_ih).float().view(x.shape)
        d_weight_ih = (d_gates.t() @ x.flatten(0, 1)).float()
        d_weight_hh = (d_gates.t() @ hidden_before.flatten(0, 1)).float()
        return d_x, None, d_hidden, d_cell, d_weight_ih, d_weight_hh, d_bias, None
