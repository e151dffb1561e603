"""A small agent on real environments whose rollouts a test takes one by one."""

import threading
import types
import weakref

import torch

import monobeast
from beast.envs.rows import rollout_fields
from beast.feeds.actors import LocalActors
from beast.feeds.memory import RolloutMemory
from beast.feeds.shared_memory import SharedMemoryFeed
from beast.learn.learner import Learner
from beast.learn.published import PublishedWeights
from monobeast import Flags


def small_flags(**changes) -> Flags:
    defaults = {"env": "CartPole-v1", "num_actors": 1, "group_width": 4, "batch_width": 4, "unroll_length": 8}
    return monobeast.validate(
        Flags(**{**defaults, "hidden_size": 64, "core_size": 32, "deterministic": True, **changes})
    )


def spaces_of(flags: Flags):
    return monobeast.probe_env(monobeast.create_env, flags)


def new_net(flags: Flags, **options) -> monobeast.Net:
    spaces = spaces_of(flags)
    return monobeast.Net(spaces.observations, spaces.action, flags, **options)


def new_learner(flags: Flags) -> Learner:
    """In float32 on the CPU, whatever the machine has."""
    net = new_net(flags)
    return Learner(net, monobeast.make_optimizer(flags, net), flags.max_bad_updates)


def step(flags: Flags, learner: Learner, batch: dict, core_state: tuple) -> dict[str, float]:
    """One update, counted."""
    return learner.count(learner.measure(batch) | monobeast.update(flags, learner, batch, core_state))


class LockStep:
    """Inference and environments of `--deterministic`; the test is the learner."""

    def __init__(self, flags: Flags):
        torch.manual_seed(flags.seed)
        self.flags, self.learner = flags, new_learner(flags)
        self.net = self.learner.net
        self.memory = RolloutMemory(
            rollout_fields(spaces_of(flags)), flags.num_slots, flags.unroll_length, flags.group_width
        )
        self.weights = PublishedWeights(self.net, 0)
        num_groups = flags.num_actors * monobeast.GROUPS_PER_ACTOR
        actors = LocalActors(monobeast.create_env, flags, self.memory, num_groups, lambda group, life: 100 + group)
        self.feed = SharedMemoryFeed(self.learner, flags, self.memory, actors)
        self._rollouts = self.feed.rollouts()
        weakref.finalize(self, close, self.feed, actors)
        training = types.SimpleNamespace(generator=torch.Generator().manual_seed(1))
        threading.Thread(target=monobeast.infer, args=(training, self.feed, self.weights), daemon=True).start()

    def next_rollout(self) -> tuple[dict, tuple]:
        """Its rows, valid until the next call, and the core's state before row 0."""
        return next(self._rollouts)


def close(feed: SharedMemoryFeed, actors: LocalActors) -> None:
    feed.close()
    actors.close()
