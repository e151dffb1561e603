"""Play whole games with a checkpoint, and write what was observed and done as demonstrations (docs/demonstrations.md).

    python -m examples.demonstrate runs/cartpole/checkpoint.pt cartpole.npz 20    # games

Actions are drawn from the policy, as in training. Give a fork's own file as a fourth word.
"""

import sys

import numpy as np

import beast
from beast.envs.spaces import parts_by_name
from beast.errors import InputError, exit_with_message
from beast.files import replace_file
from beast.learn.demonstrations import array_name


def main(path: str, output: str, episodes: int, agent: str = "") -> None:
    policy = beast.load(path, agent)
    space, env = policy.action_space, policy.make_env(1)
    rows: list[dict] = []
    observations, info = env.reset(seed=policy.flags.seed)
    state, reward, done, ended = None, 0.0, True, 0
    while ended < episodes:
        inputs, _ = policy.inputs(observations, state, reward, done, info)
        actions, state = policy.act(observations, state, reward, done, info=info)
        row = {array_name("observations", name): x[0, 0].numpy() for name, x in inputs["obs"].items()}
        row |= {array_name("actions", name): np.asarray(x)[0] for name, x in parts_by_name(space, actions).items()}
        was_over = bool(rows and rows[-1]["episode_ends"]) and not done  # NEXT_STEP autoreset: this action only resets
        observations, reward, terminated, truncated, info = env.step(actions)
        over = bool(terminated[0] | truncated[0])
        done = over if policy.spaces.final_observations else was_over and not over
        if not was_over:
            rows.append({**row, "rewards": reward[0], "episode_ends": over})
            ended += over
    env.close()
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    replace_file(output, lambda file: np.savez_compressed(file, **arrays))
    print(f"{output}: {len(rows):,} decisions of {ended} episodes, mean return {arrays['rewards'].sum() / ended:.2f}")


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit("usage: python -m examples.demonstrate CHECKPOINT OUTPUT GAMES [AGENT]")
    with exit_with_message():
        if not sys.argv[3].isdecimal() or not int(sys.argv[3]):
            raise InputError(f"GAMES {sys.argv[3]}: give a number from 1 on")
        main(*sys.argv[1:3], int(sys.argv[3]), *sys.argv[4:])
