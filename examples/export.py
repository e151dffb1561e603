"""Export a checkpoint's net with torch.export: a graph for one row of any number of environments, to run without Beast.

    python -m examples.export runs/pong/checkpoint.pt pong.pt2

Observations are as the environment gives them: what normalizes them is part of the graph. It returns the policy's
parameters, the values and the core's state, and this script checks that they are the net's own.
"""

import sys

import torch

import beast
from beast.errors import exit_with_message


def main(path: str, output: str) -> None:
    policy = beast.load(path)
    env = policy.make_env(2)
    observations, info = env.reset(seed=1)
    inputs = policy.inputs(observations, info=info)
    env.close()
    num_envs = torch.export.Dim("num_envs")

    def widths(nest):
        if isinstance(nest, dict):
            return {name: widths(part) for name, part in nest.items()}
        return tuple(widths(part) for part in nest) if isinstance(nest, tuple) else {1: num_envs}

    torch.export.save(torch.export.export(policy.net, inputs, dynamic_shapes=widths(inputs)), output)
    exported = torch.export.load(output).module()
    torch.testing.assert_close(exported(*inputs), policy.net(*inputs))
    print(f"{output}: the net of {path}, trained for {policy.steps:,} steps")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m examples.export CHECKPOINT OUTPUT")
    with exit_with_message():
        main(*sys.argv[1:])
