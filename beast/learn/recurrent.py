"""Recurrent cores over rollouts in which episodes begin."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Core(nn.Module):
    """An LSTM or GRU of one layer, with the parameters of torch's, whose state is zeroed where an episode begins.

    torch's own modules have to be called anew for every row before which a state is zeroed, and cannot be compiled.
    """

    def __init__(self, kind: str, size: int, units: int, amp: bool = False):
        """`kind` is "lstm" or "gru". With `amp` an LSTM multiplies its weights in bfloat16; its state is float32."""
        super().__init__()
        self.kind, self.units, self.amp = kind, units, amp
        num_gates = 4 if kind == "lstm" else 3
        self.weight_ih_l0 = nn.Parameter(nn.init.orthogonal_(torch.empty(num_gates * units, size)))
        self.weight_hh_l0 = nn.Parameter(nn.init.orthogonal_(torch.empty(num_gates * units, units)))
        self.bias_ih_l0 = nn.Parameter(torch.zeros(num_gates * units))
        self.bias_hh_l0 = nn.Parameter(torch.zeros(num_gates * units))
        if kind == "lstm":  # begin by remembering (Gers et al. 2000); gates: input, forget, cell, output
            nn.init.ones_(self.bias_ih_l0[units : 2 * units])

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        """(hidden, cell) of an LSTM or (hidden,) of a GRU, each [1, B, units]."""
        return tuple(torch.zeros(1, batch_size, self.units) for _ in range(2 if self.kind == "lstm" else 1))

    def cast_weights(self) -> None:
        """For a copy that only acts."""
        if self.kind == "lstm" and self.amp:
            for weight in (self.weight_ih_l0, self.weight_hh_l0):
                weight.data = weight.data.bfloat16()

    def forward(self, x: Tensor, begins: Tensor, state: tuple) -> tuple[Tensor, tuple]:
        """Outputs [T, B, units] over x [T, B, size] and the state after row T-1, all float32.

        `state` is the one before row 0; it is zeroed before row t wherever begins [T, B, 1].
        """
        if self.kind == "lstm":
            bias = self.bias_ih_l0 + self.bias_hh_l0
            dtype = torch.bfloat16 if self.amp else torch.float32
            hidden, cell = (part[0] for part in state)
            x, cell = _LSTM.apply(x, begins, hidden, cell, self.weight_ih_l0, self.weight_hh_l0, bias, dtype)
            return x, (x[-1:], cell.unsqueeze(0))
        hidden, outputs = state[0][0], []
        for from_input, begin in zip(nn.functional.linear(x, self.weight_ih_l0, self.bias_ih_l0), begins):
            hidden = hidden.masked_fill(begin, 0)
            r, z, n = from_input.chunk(3, dim=1)
            from_hidden = nn.functional.linear(hidden, self.weight_hh_l0, self.bias_hh_l0)
            r_hidden, z_hidden, n_hidden = from_hidden.chunk(3, dim=1)
            z = (z + z_hidden).sigmoid()
            hidden = (1 - z) * (n + (r + r_hidden).sigmoid() * n_hidden).tanh() + z * hidden
            outputs.append(hidden)
        return torch.stack(outputs), (hidden.unsqueeze(0),)


class _LSTM(torch.autograd.Function):
    """torch's LSTM of one layer (gates in its order: input, forget, cell, output), with beginnings of episodes.

    All products that need not wait for the row before, the gradients of the weights above all, are one each
    (benchmarks/LEDGER.md).
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
