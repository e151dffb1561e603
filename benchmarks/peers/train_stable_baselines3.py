"""Stable-Baselines3's PPO on Breakout with its own Atari wrappers: 640 steps an update, one epoch, one minibatch.

    python train_stable_baselines3.py dummy 2     # environments in this process; torch with two threads
    python train_stable_baselines3.py subproc 1   # a process for each environment

Prints the time and the agent steps so far after each rollout.
"""

import sys
import time

import ale_py  # noqa: F401  registers the ids
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

NUM_ENVS, ROLLOUT = 32, 20


class Tell(BaseCallback):
    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        print(time.time(), self.num_timesteps, flush=True)


if __name__ == "__main__":
    kind, num_threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(num_threads)
    envs = make_atari_env(
        "BreakoutNoFrameskip-v4", NUM_ENVS, vec_env_cls={"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[kind]
    )
    model = PPO(
        "CnnPolicy",
        VecFrameStack(envs, 4),
        n_steps=ROLLOUT,
        batch_size=NUM_ENVS * ROLLOUT,
        n_epochs=1,
        device="cpu",
    )
    model.learn(10**9, callback=Tell())
