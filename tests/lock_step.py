"""A small agent, of monobeast.py or r2d2.py, on real environments whose rollouts a test takes one by one."""

import csv
import threading
import types
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import torch

import monobeast
from beast.envs.probe import probe_env
from beast.envs.rows import rollout_fields
from beast.feeds.actors import GROUPS_PER_ACTOR, LocalActors
from beast.feeds.memory import RolloutMemory
from beast.feeds.shared_memory import SharedMemoryFeed
from beast.learn.learner import Counted, Learner
from beast.learn.published import PublishedWeights
from beast.run.training import Training, consumer_of

SMALL = {
    "monobeast": {
        "env": "CartPole-v1", "num_actors": 1, "group_width": 4, "batch_width": 4, "unroll_length": 8,
        "hidden_size": 64, "core_size": 32, "deterministic": True,
    },
    "r2d2": {
        "env": "toy_envs:Counting-v0", "num_actors": 1, "group_width": 4, "unroll_length": 4, "burn_in": 4,
        "trained": 8, "stride": 4, "batch_width": 4, "min_fill": 200, "hidden_size": 64, "core_size": 16,
        "head_size": 16, "deterministic": True, "amp": "off", "replay_ratio": 1.0, "total_steps": 2000,
    },
}  # fmt: skip


def small_flags(agent=monobeast, **changes):
    return agent.validate(agent.Flags(**{**SMALL[agent.__name__], **changes}))


def metrics_of(run: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv in a run's directory."""
    with open(run / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def spaces_of(flags: monobeast.Flags):
    return probe_env(monobeast.create_env, flags)


def new_net(flags: monobeast.Flags, **options) -> monobeast.Net:
    spaces = spaces_of(flags)
    return monobeast.Net(spaces.observations, spaces.action, flags, **options)


def new_learner(flags: monobeast.Flags) -> Learner:
    """In float32 on the CPU, whatever the machine has."""
    net = new_net(flags)
    return Learner(net, monobeast.make_optimizer(flags, net), flags.max_bad_updates)


def step(flags: monobeast.Flags, learner: Learner, batch: dict, core_state: tuple) -> Counted:
    """One update, counted."""
    return learner.count(learner.measure(batch), monobeast.update(flags, learner, batch, core_state))


def games(*ended: tuple[float, int]) -> dict:
    """Rows [2, N] in which games of these returns and lengths in steps end."""
    returns, lengths = (np.array(column) for column in zip(*ended))
    ends, begins = np.ones(len(ended), bool), np.zeros(len(ended), bool)
    return {
        "done": np.stack([begins, ends]),
        "terminated": np.stack([ends, begins]),
        "truncated": np.stack([begins, begins]),
        "reward": np.zeros((2, len(ended))),
        "episode_return": np.stack([returns, 0 * ends]),
        "episode_step": np.stack([lengths, 0 * ends]),
    }


def infer(training, feed: SharedMemoryFeed, weights: PublishedWeights) -> None:
    monobeast.infer(feed, weights, training.generator)


def stand_in(**attributes) -> types.SimpleNamespace:
    """What `learn` needs of a Training, beside these attributes."""
    training = types.SimpleNamespace(**attributes)
    training.rollouts, training.ends = partial(Training.rollouts, training), partial(Training.ends, training)
    return training


class LockStep:
    """Inference and environments of `--deterministic`; the test is the learner.

    The function `make_learner(flags)` makes its learner and `act(training, feed, weights)` answers the rows.
    """

    def __init__(self, flags, create_env=None, make_learner=new_learner, act=infer, batch_width=0, joins_groups=None):
        torch.manual_seed(flags.seed)
        self.flags, self.learner = flags, make_learner(flags)
        self.net = self.learner.net
        create_env = create_env or monobeast.create_env
        self.spaces = probe_env(create_env, flags)
        memory = RolloutMemory(rollout_fields(self.spaces), flags.num_slots, flags.unroll_length, flags.group_width)
        self.num_groups = flags.num_actors * GROUPS_PER_ACTOR
        actors = LocalActors(create_env, flags, memory, self.num_groups, lambda group, life: 100 * group)
        self.feed = SharedMemoryFeed(
            consumer_of(self.learner, getattr(flags, "max_policy_lag", 0)), memory, actors,
            batch_width or flags.batch_width, lock_step=True, stagger=flags.stagger, joins_groups=joins_groups,
        )  # fmt: skip
        self._rollouts = self.feed.rollouts()
        weakref.finalize(self, close, self.feed, actors)
        self.weights = PublishedWeights(self.net, 0)
        generator = torch.Generator().manual_seed(1)
        training = types.SimpleNamespace(generator=generator, flags=flags, device=torch.device("cpu"))
        self.thread = threading.Thread(target=act, args=(training, self.feed, self.weights), daemon=True)
        self.thread.start()

    def next_rollout(self) -> tuple[dict, tuple]:
        """Its rows, valid until the next call, and the core's state before row 0."""
        return next(self._rollouts)


def close(feed: SharedMemoryFeed, actors: LocalActors) -> None:
    feed.close()
    actors.close()
