"""R2D2: recurrent Q-learning from prioritized replay in one file (Kapturowski et al. 2019; SEED RL, section 3.2).

    python r2d2.py --preset vector --env CartPole-v1 --name cartpole-r2d2   # train; the same line again resumes
    python r2d2.py --mode test --name cartpole-r2d2                         # play whole games with the checkpoint
    python plot.py runs/cartpole-r2d2                                       # draw the learning curve

Actors step environments and `act` answers, greedily or at random by each environment's own ε. `learn` stores their
rollouts as sequences in a replay memory, and trains on sequences that it draws by priority: n-step double Q-learning
with a target network, values rescaled, the core's stored state burnt in. docs/r2d2.md has more.
"""

# ruff: noqa: E402  (an actor stops reading this file before torch is imported)

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import gymnasium
from gymnasium import spaces

from beast import envs
from beast.feeds.actor import run_if_actor
from beast.run import command_line
from beast.run.flags import FREE_ON_RESUME, RUN_LIMITS, SERVERS_FREE_ON_RESUME, RunFlags, ServerFlags


@dataclass
class Flags(ServerFlags, RunFlags):
    """R2D2. A *step* is one decision of the agent; in Atari it lasts 4 frames. The defaults learn Pong on two cores."""

    episodic_life: Literal["auto", "on", "off"] = "off"
    """Atari: end an episode at every lost life, for the learner; auto: on for -v4, off for -v5."""

    compile: bool = False
    """Not yet: r2d2.py does not compile its net."""

    # Actors.
    num_actors: int = 1
    """Actor processes, each with two groups of environments: one steps while the other waits for its actions."""
    group_width: int = 16
    """Environments in a group, which share one forward pass."""
    unroll_length: int = 8
    """Steps of one rollout (U), after which it goes to the replay."""
    num_slots: int = 0
    """Rollouts in shared memory; 0 chooses two more than there are groups."""
    eval_columns: int = 0
    """Environments of each group that act with --epsilon for the returns of the log, and are not trained on. 0 takes
    the returns of the greediest quarter instead."""
    actor_niceness: int = 5
    """Unix niceness (0 to 19) added to actors, and on Linux to inference and the target network on a CPU."""
    pin_actors: bool = False
    """Bind each actor to a core in turn."""
    deterministic: bool = False
    """Run everything in lock-step in one process: slow, but two runs with one seed are equal to the bit on a CPU."""

    # Where the environments are.
    feed: Literal["shared", "remote"] = "shared"
    """Environments by actors of this machine in shared memory, or by env servers (docs/polybeast.md), which needs
    libbeast. --addresses and --listen imply remote; without them it starts --num_servers here."""
    max_streams: int = 4
    """With --listen: streams at a time, each a group of environments, among which the replay is divided."""
    server_arguments: str = ""
    """Arguments of your own flags of polybeast_env.py, for the env servers started here."""

    # The agent.
    net: Literal["shallow", "deep", "mlp"] = "shallow"
    """Image encoder: Nature CNN (shallow; a 3x3 convolution below 36 pixels), IMPALA ResNet (deep) or an MLP (mlp)."""
    width: Literal[1, 2, 4] = 1
    """Channels of the deep net in multiples of IMPALA's 16, 32, 32."""
    hidden_size: int = 512
    """Features that an image encoder puts out; MLPs have two layers of a quarter of this."""
    core: Literal["none", "lstm", "gru"] = "lstm"
    """Recurrent core between encoder and heads; none is DQN from sequences."""
    core_size: int = 256
    """Units of the recurrent core."""
    head_size: int = 256
    """Hidden units of each of the two heads, state value and advantages."""
    center_images: bool = True
    """Subtract each pixel's running mean and scale by its deviation. The targets move with the statistics, at first."""
    normalize_observations: bool = False
    """Normalize vectors of floats by running statistics, and clip them to ±10."""

    # The replay.
    replay_gb: float = 3.0
    """Memory of the replay in GB, taken at the start; on this machine never more than --total_steps fill. A million
    steps of Atari take 7.35 GB."""
    replay_sequences: int = 0
    """Sequences that the replay has room for, if --replay_gb suffices: as many of each environment, rounded up, and at
    times one more. 0: as many as fit."""
    min_fill: int = 20_000
    """Steps in the replay before the first update."""
    replay_ratio: float = 4.0
    """Trained transitions for each new step. Whichever of actors and learner is ahead of it waits for the other."""
    burn_in: int = 4
    """Rows (B) that a sequence begins with, which only bring the stored state of the core up to date."""
    trained: int = 16
    """Transitions (T) of a sequence that are trained on."""
    stride: int = 8
    """Steps between the beginnings of two sequences, a multiple of the unroll length; T/2 trains each step twice."""
    priority_exponent: float = 0.9
    """Sequences are drawn in proportion to their priority to this power (alpha): 0 draws all alike."""
    importance_exponent: float = 0.6
    """Exponent (beta) of the importance weights, which correct the loss for it: 0 corrects nothing, 1 everything."""
    priority_eta: float = 0.9
    """A priority is this share of the largest TD error in a sequence, and the rest of their mean."""
    save_replay: bool = False
    """Write the replay with every checkpoint (replay.npz), while the learner waits, and resume with it; else it is
    filled anew."""

    # The loss.
    batch_width: int = 6
    """Sequences of one update."""
    discount: float = 0.99
    """Discount of one agent step (gamma)."""
    n_steps: int = 5
    """Rewards in a target, before the target network's value."""
    rescale: bool = True
    """Learn h(Q), which grows as the square root of Q, so that rewards need no clip."""
    target_period: int = 200
    """Updates between two copies of the net to the target network."""

    # The optimizer.
    learning_rate: float = 2e-4
    """Step size of Adam, constant."""
    optimizer_epsilon: float = 1e-6
    """Added to Adam's denominator."""
    grad_clip: float = 40.0
    """Global norm above which gradients are scaled down; 0 means no clip. A loss is a sum over T."""

    # Evaluation.
    epsilon: float = 1e-3
    """--mode test, evaluations and --eval_columns: probability of a random action; --greedy takes none."""


PRESETS = {
    # CartPole-v1: 500 in 20 whole games after 80,000 steps with each of three seeds. A quarter of the updates, twice
    # the learning rate and rescaled values gave 500, 275 and 101.
    "vector": {
        "num_actors": 1, "group_width": 8, "unroll_length": 5, "trained": 10, "stride": 5, "core": "none",
        "head_size": 128, "normalize_observations": True, "min_fill": 2000, "replay_ratio": 16.0, "batch_width": 8,
        "discount": 0.99, "n_steps": 1, "rescale": False, "priority_exponent": 0.5, "importance_exponent": 0.5,
        "learning_rate": 5e-4, "optimizer_epsilon": 1e-5, "target_period": 50,
    },
    # Kapturowski et al. 2019, with SEED RL's replay ratio; for a GPU, and 29 GB of memory for the replay. Nobody has
    # run it here.
    "paper": {
        "num_actors": 8, "group_width": 16, "unroll_length": 40, "burn_in": 40, "trained": 80, "stride": 40,
        "batch_width": 64, "replay_gb": 29.0, "min_fill": 200_000, "replay_ratio": 0.75, "target_period": 2500,
        "core_size": 512, "head_size": 512, "center_images": False, "discount": 0.997, "learning_rate": 1e-4,
        "optimizer_epsilon": 1e-3, "grad_clip": 80.0, "full_action_space": "on",
    },
}  # fmt: skip
ABOUT = {  # what --help says of each
    "vector": "vectors, and few actions: CartPole",
    "paper": "Atari on a GPU: 256 environments, batches of 64 x 80 steps",
}


# FORK HERE: your environment. Any gymnasium environment with discrete actions will do.
def create_env(flags: Flags, num_envs: int, **overrides) -> gymnasium.vector.VectorEnv:
    """Environments for one group. Called in every actor process, and in the main process to learn the spaces."""
    return envs.make(flags.env, num_envs, **envs.options(flags) | overrides)


run_if_actor(Flags, create_env)  # an actor process reads this file down to here, and never imports torch
if __name__ == "__main__":
    command_line.print_help_if_asked(Flags, __doc__, PRESETS, ABOUT)  # nor does --help

import contextlib
import copy
import math
import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from beast.device import choose_device, pin_memory
from beast.envs.groups import finished_episodes
from beast.envs.probe import probe_env
from beast.envs.rows import is_final, rollout_fields
from beast.envs.spaces import EnvSpaces
from beast.errors import InputError, exit_with_message
from beast.feeds.actors import ActorProcesses, LocalActors
from beast.feeds.feed import Feed
from beast.feeds.memory import RolloutMemory
from beast.feeds.shared_memory import SharedMemoryFeed
from beast.learn import vtrace
from beast.learn.distributions import Categoricals, encode_action
from beast.learn.learner import Learner, step_unless
from beast.learn.nests import columns, map_tensors
from beast.learn.published import PublishedWeights
from beast.learn.qlearning import n_step_targets, rescale, rescale_inverse, sequence_priorities
from beast.learn.recurrent import Core
from beast.learn.replay import RatioLimiter, Sample, SequenceReplay, resume_replay
from beast.run import checkpoint, evaluation
from beast.run.flags import check_env_flags, check_limits, run_name
from beast.run.hardware import helper_thread, keep_freed_memory, yield_cores
from beast.run.training import Result, Training
from monobeast import GROUPS_PER_ACTOR, Encoder, acting_copy, orthogonal


# FORK HERE: your model. Observations arrive as they are stored (uint8 images included), time-major.
class Net(nn.Module):
    """Q values: encoders of the observation fields, an optional recurrent core, dueling heads.

    `forward(inputs, core_state)` takes `inputs["obs"][name]` [T, N, *shape], `inputs["done"]` [T, N], the last action
    `inputs["action"]` [T, N] and its reward `inputs["reward"]` [T, N], and the core's state before row 0, a tuple of
    [1, N, core_size] (empty without a core). It returns Q [T, N, actions] and its maximum [T, N], both float32 and
    rescaled (`--rescale`), and the core's state after row T-1.
    """

    def __init__(self, observation_spaces: dict, action_space: gymnasium.Space, flags: Flags, amp: bool = False):
        super().__init__()
        if not isinstance(action_space, spaces.Discrete):
            raise InputError(
                f"action space {action_space}: R2D2 has one Q value for each action, so it needs a Discrete space; "
                "wrap the environment, or train it with monobeast.py"
            )
        self.action_space, self.flags = action_space, flags
        self.num_actions = int(action_space.n)
        self.names = list(observation_spaces)
        self.encoders = nn.ModuleList([Encoder(space, flags, amp) for space in observation_spaces.values()])  # type: ignore[arg-type]
        size = sum(encoder.size for encoder in self.encoders) + 1 + self.num_actions
        self.core = None
        if flags.core != "none":
            self.core, size = Core(flags.core, size, flags.core_size, amp), flags.core_size
        self.amp = amp and (flags.core == "lstm" or any(encoder.is_image for encoder in self.encoders))

        def head(outputs: int, bias: bool) -> nn.Sequential:
            last = nn.Linear(flags.head_size, outputs, bias=bias)
            nn.init.orthogonal_(last.weight, 0.1)
            return nn.Sequential(orthogonal(nn.Linear(size, flags.head_size), math.sqrt(2)), nn.ReLU(), last)

        self.value, self.advantage = head(1, True), head(self.num_actions, False)  # dueling: Wang et al. 2016

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        return self.core.initial_state(batch_size) if self.core is not None else ()

    def inference_copy(self) -> nn.Module:
        return acting_copy(self)

    def acting_policy(self, q: torch.Tensor) -> Categoricals:
        """The ε-greedy policy of Q [..., actions], for whole games; its mode is greedy."""
        epsilon = self.flags.epsilon
        best = nn.functional.one_hot(q.argmax(-1), self.num_actions)
        return Categoricals(((1 - epsilon) * best + epsilon / self.num_actions).log(), [self.num_actions], ())

    def forward(self, inputs: dict, core_state: tuple) -> tuple[torch.Tensor, torch.Tensor, tuple]:
        # Zero what would cross an episode boundary; masked_fill also removes NaN.
        begins = inputs["done"].unsqueeze(-1)  # [T, N, 1]
        last_reward = inputs["reward"].clamp(-1, 1).unsqueeze(-1).masked_fill(begins, 0)
        last_action = encode_action(self.action_space, inputs["action"]).masked_fill(begins, 0)
        features = [encoder(inputs["obs"][name]) for name, encoder in zip(self.names, self.encoders)]
        x = torch.cat([*features, last_reward, last_action], dim=-1)  # [T, N, size]
        if self.core is not None:
            x, core_state = self.core(x, begins, core_state)
        advantage = self.advantage(x)
        q = self.value(x) + advantage - advantage.mean(-1, keepdim=True)
        return q, q.amax(-1), core_state


# FORK HERE: your loss.
def compute_loss(
    flags: Flags, net: Net, target: Net, batch: dict, core_state: tuple, weights: torch.Tensor, target_q: torch.Tensor
) -> tuple[torch.Tensor, dict, torch.Tensor]:  # fmt: skip
    """The loss of sequences [B+T+1, N, …] with their importance weights [N], statistics as tensors, and the sequences'
    priorities [N]. `target_q` [T+1, N, actions] is what the target network says after the burn-in."""
    rows = map_tensors(lambda x: x[flags.burn_in :], batch)  # [T+1, N, …]
    with torch.no_grad():
        state = burn_in(flags, net, batch, core_state)
    q, _, _ = net(rows, state)  # [T+1, N, actions]
    h, h_inverse = rescaling(flags)
    with torch.no_grad():
        mask, discounts = vtrace.transition_masks(rows["done"], rows["terminated"], rows["truncated"], flags.discount)
        rewards = rows["reward"][1:]
        if "final_obs" in rows:
            target_state = burn_in(flags, target, batch, core_state)
            rewards = rewards + flags.discount * final_values(net, target, rows, state, target_state, h_inverse)
        # Double Q-learning: the net chooses, the target network values.
        values = h_inverse(target_q.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1))  # [T+1, N]
        targets = h(n_step_targets(rewards, discounts, mask, values, flags.n_steps))
    chosen = q[:-1].gather(-1, rows["action"][1:].unsqueeze(-1)).squeeze(-1)  # row t+1 holds the action chosen at row t
    errors = (targets - chosen).where(mask, 0)  # [T, N]
    loss = (weights * 0.5 * errors.square().sum(0)).mean()  # the sum over time, as in R2D2: clip and step size suit it
    with torch.no_grad():
        count = mask.sum().clamp(min=1)
        stats = {
            "losses/td_error": errors.abs().sum() / count,
            "losses/q_mean": (chosen * mask).sum() / count,
            "losses/target_mean": (targets * mask).sum() / count,
            "stats/importance_weight": weights.mean(),
        }
    return loss, stats, sequence_priorities(errors.detach(), mask, flags.priority_eta)


def rescaling(flags: Flags) -> tuple[Callable, Callable]:
    """The function h by which the networks' values are rescaled returns, and its inverse; copies with --no_rescale."""
    return (rescale, rescale_inverse) if flags.rescale else (torch.clone, torch.clone)


def burn_in(flags: Flags, net: Net, batch: dict, core_state: tuple) -> tuple:
    """The core's state before row B, by this net's own weights: the stored state is of older ones."""
    if not flags.burn_in:
        return core_state
    return net(map_tensors(lambda x: x[: flags.burn_in], batch), core_state)[2]


def final_values(net: Net, target: Net, rows: dict, state: tuple, target_state: tuple, h_inverse) -> torch.Tensor:
    """The value of the last observation of every truncated episode, [T, N], and 0 elsewhere.

    In a SAME_STEP rollout row t+1 already shows the next episode; the last observation of this one lies beside it.
    """
    is_cut = (rows["done"] & rows["truncated"] & ~rows["terminated"])[1:]  # [T, N]
    values, begin = torch.zeros_like(rows["reward"][1:]), 0
    for t in is_cut.any(1).nonzero().flatten().tolist():
        part = map_tensors(lambda x: x[begin : t + 1], rows)
        last = map_tensors(lambda x: x[t + 1 : t + 2], rows)
        last |= {"obs": last["final_obs"], "done": torch.zeros_like(last["done"])}
        if state:
            state, target_state = net(part, state)[2], target(part, target_state)[2]
        best = net(last, state)[0].argmax(-1, keepdim=True)
        values[t] = h_inverse(target(last, target_state)[0].gather(-1, best))[0, :, 0]
        begin = t + 1
    return values.where(is_cut, 0)


def initial_priorities(flags: Flags, rows: dict) -> torch.Tensor:
    """Priorities [N] of new sequences [B+T+1, N]. The Q values that chose the actions stand in for both networks'.
    Those of the last row are not known yet, so the transition to it is left out."""
    q = rows["policy_logits"][flags.burn_in + 1 :]  # row t+1 holds Q(x_t): [T, N, actions]
    rows = map_tensors(lambda x: x[flags.burn_in : -1], {name: x for name, x in rows.items() if name != "obs"})
    h, h_inverse = rescaling(flags)
    mask, discounts = vtrace.transition_masks(rows["done"], rows["terminated"], rows["truncated"], flags.discount)
    # SAME_STEP: nobody has valued a truncated episode's last observation yet.
    mask &= ~(rows["done"] & rows["truncated"] & ~rows["terminated"])[1:]
    targets = h(n_step_targets(rows["reward"][1:], discounts, mask, h_inverse(q.amax(-1)), flags.n_steps))
    chosen = q[:-1].gather(-1, rows["action"][1:].unsqueeze(-1)).squeeze(-1)
    return sequence_priorities(targets - chosen, mask, flags.priority_eta)


class QLearner(Learner):
    """A Learner with a target network, and the random numbers that draw its batches."""

    def __init__(self, net: Net, optimizer: torch.optim.Optimizer, flags: Flags):
        super().__init__(net, optimizer, flags.max_bad_updates)
        self.target = copy.deepcopy(net).eval().requires_grad_(False)
        self.random = np.random.Generator(np.random.PCG64(flags.seed))
        self.all_returns: list[float] = []  # of the last 100 games of all environments, however much they explore
        # A GPU has its own queue. A checkpoint does not hold a prepared batch, so a deterministic run has none.
        has_helper = next(net.parameters()).device.type == "cpu" and not flags.deterministic
        self.helper = helper_thread(flags) if has_helper else None
        self.prepared: Future | None = None

    def next_batch(self, flags: Flags, replay: SequenceReplay, device: torch.device) -> tuple[Sample, torch.Tensor]:
        """A batch of sequences, and the target network's Q values after the burn-in [T+1, N, actions]. The helper
        prepares the next batch during this update, with the priorities from before it."""

        def evaluate(sample: Sample) -> tuple[Sample, torch.Tensor]:
            return sample, self.target(sample.batch, sample.core_state)[0][flags.burn_in :]

        if self.prepared:
            sample, target_q = self.prepared.result()
        else:
            sample, target_q = replay.sample(flags.batch_width, device), None
        if self.updates % flags.target_period == 0:
            self.target.load_state_dict(self.net.state_dict())  # buffers, too
            target_q = None
        if target_q is None:
            target_q = evaluate(sample)[1]
        if self.helper:
            gather = replay.draw(flags.batch_width, device)
            self.prepared = self.helper.submit(lambda: evaluate(gather()))
        return sample, target_q

    def state_dict(self) -> dict:
        return super().state_dict() | {
            "target": self.target.state_dict(),
            "random": self.random.bit_generator.state,
            "all_returns": self.all_returns,
        }

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.target.load_state_dict(state["target"])
        self.random.bit_generator.state = state["random"]
        self.all_returns = state["all_returns"]


def make_learner(flags: Flags, env_spaces: EnvSpaces) -> QLearner:
    """A new net, its target network and its optimizer on the flags' device."""
    device, amp = choose_device(flags.device, flags.amp)
    net = Net(env_spaces.observations, env_spaces.action, flags, amp).to(device)
    optimizer = torch.optim.Adam(net.parameters(), flags.learning_rate, eps=flags.optimizer_epsilon, fused=True)
    return QLearner(net, optimizer, flags)


# FORK HERE: your update.
def update(flags: Flags, learner: QLearner, sample: Sample, target_q: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """A step of the optimizer on a batch of sequences; none after a NaN or Inf in loss or gradients.

    Returns scalar statistics and the sequences' new priorities [N], on the device.
    """
    net, optimizer, laps = learner.net, learner.optimizer, learner.laps
    for group in optimizer.param_groups:
        group["lr"] = flags.learning_rate
    with net.register_forward_hook(lambda *_: laps.lap("forward")):
        loss, stats, priorities = compute_loss(
            flags, net, learner.target, sample.batch, sample.core_state, sample.weights, target_q
        )
    laps.lap("loss")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    laps.lap("backward")
    norm = nn.utils.clip_grad_norm_(net.parameters(), flags.grad_clip or math.inf)
    is_bad = ~(loss.detach().isfinite() & norm.isfinite())
    step_unless(optimizer, is_bad)
    # The replay ignores NaN, so a bad update changes no priority. 0: a sequence with a NaN error is never drawn again.
    priorities = priorities.where(~is_bad, math.nan).where(priorities.isfinite(), 0)
    laps.lap("optimizer")
    return {**stats, "losses/total_loss": loss.detach(), "losses/grad_norm": norm, "is_bad": is_bad}, priorities


def epsilons(flags: Flags, num_groups: int) -> torch.Tensor:
    """ε of each environment [groups, K]: 0.4^(1 + 7 i / (N - 1)), from 0.4 to 0.00066, with N environments that train.

    They are numbered so that every group spans the whole ladder: a lost or slow one takes no part of it away. The last
    columns explore the least.
    """
    width = flags.group_width - flags.eval_columns
    number = torch.arange(num_groups * width).view(width, num_groups).t()
    share = number / (number.numel() - 1) if number.numel() > 1 else torch.full((1, 1), 0.5)
    evaluating = torch.full((num_groups, flags.eval_columns), flags.epsilon)
    return torch.cat([0.4 ** (1 + 7 * share), evaluating], dim=1)


def act(training: Training, feed: Feed, weights: PublishedWeights, num_groups: int) -> None:
    """Choose the actions of all rows that wait for them, until the feed closes."""
    width, generator = training.flags.group_width, training.generator
    yield_cores(training.device, training.flags.actor_niceness)
    ladder = epsilons(training.flags, num_groups).to(training.device)
    for rows in feed.acting():  # [1, N, …], whole groups
        with torch.no_grad(), weights.newest() as (net, version):
            q, best, core_state = net(rows.inputs, rows.core_state)
            column = torch.arange(q.shape[1], device=q.device) % width
            epsilon = ladder[rows.inputs["group"].long(), column]
            coin = torch.rand(epsilon.shape, generator=generator, device=q.device)
            drawn = torch.randint(q.shape[2], epsilon.shape, generator=generator, device=q.device)
            action = torch.where(coin < epsilon, drawn, q.argmax(-1))
        rows.answer(action, q, best, version, core_state)


def learn(
    training: Training, learner: QLearner, feed: Feed, weights: PublishedWeights, replay: SequenceReplay,
    limiter: RatioLimiter,
) -> None:  # fmt: skip
    """Store rollouts and train on sequences in the replay ratio, until the feed closes or all steps are done."""
    flags, laps = training.flags, learner.laps
    for rollout, core_state in feed.rollouts():  # [U+1, K, …], one group's
        with learner.updating:  # a checkpoint never holds half an update
            store(flags, learner, replay, limiter, rollout, core_state)
        while limiter.may_update() and replay.num_sequences() and not (feed.closed.is_set() or training.finished()):
            with learner.updating:
                sample, target_q = learner.next_batch(flags, replay, training.device)
                laps.lap("sample")
                stats = learner.measure(sample.batch)
                found, priorities = update(flags, learner, sample, target_q)
                stats |= found | {"steps": torch.zeros((), device=training.device)}  # they count when they are stored
                numbers = learner.count(stats)
                weights.publish(learner.net, learner.updates)
                laps.lap("publish")
                replay.update(sample.ids, sample.generations, priorities.cpu().numpy())
                limiter.add_update()
                laps.lap("priorities")
                of_all = float(np.mean(learner.all_returns)) if learner.all_returns else math.nan
                own = {"stats/replay_ratio": limiter.measured(), "charts/return_all": of_all}
                training.record(numbers and {**numbers, **replay.stats(), **own})
        if training.finished():
            return


def store(
    flags: Flags, learner: QLearner, replay: SequenceReplay, limiter: RatioLimiter, rollout: dict, core_state: tuple
) -> None:
    """Put a group's rollout [U+1, K, …] into the replay, with first priorities for the sequences that it completes."""
    names = ("done", "terminated", "truncated", "reward", "episode_return", "episode_step")
    numpy_rows = {name: rollout[name].cpu().numpy() for name in names}
    learner.all_returns = (learner.all_returns + [x for x, _ in finished_episodes(numpy_rows)])[-100:]
    counts = ~is_final(*(numpy_rows[name] for name in ("done", "terminated", "truncated")))[:-1]
    learner.steps += int(counts.sum())
    limiter.add(int(counts[:, : replay.width].sum()))
    if learner.prepared:
        learner.prepared.result()  # it reads rows that `add` may overwrite
    ids = replay.add(columns(rollout, 0, replay.width), tuple(x[:, : replay.width] for x in core_state))
    if len(ids):
        rows, _ = replay.gather(ids, torch.device("cpu"), observations=False)
        replay.update(ids, replay.generation_of(ids), initial_priorities(flags, rows).numpy())
    learner.laps.lap("insert")


def make_replay(flags: Flags, env_spaces: EnvSpaces, learner: QLearner, num_groups: int) -> SequenceReplay:
    """An empty replay for so many groups. Of Atari's stacks of gray images it stores the newest image only."""
    shape = rollout_fields(env_spaces).get("obs/obs", ((), ""))[0]
    is_stack = envs.is_atari(flags.env) and len(shape) == 3 and 1 < shape[0] < min(shape[1:])
    # No more than the steps of the run, unless a later start may have more of them, or some groups most of them.
    enough = flags.total_steps // flags.stride + 4 * num_groups * flags.group_width
    enough = 0 if flags.save_replay or flags.feed == "remote" else enough
    return SequenceReplay(
        rollout_fields(env_spaces), [x.shape[-1] for x in learner.net.initial_state(1)], num_groups,
        flags.group_width - flags.eval_columns, unroll_length=flags.unroll_length, burn_in=flags.burn_in,
        trained=flags.trained, stride=flags.stride, capacity_gb=flags.replay_gb,
        max_sequences=min(filter(None, (flags.replay_sequences, enough)), default=0),
        is_stack=is_stack and flags.unroll_length >= shape[0], priority_exponent=flags.priority_exponent,
        importance_exponent=flags.importance_exponent, random=learner.random,
    )  # fmt: skip


# Flags of R2D2, beside those of every run, that may differ when a run is resumed.
RESUME_FREE = (
    FREE_ON_RESUME
    | SERVERS_FREE_ON_RESUME
    | {
        *("actor_niceness", "pin_actors", "feed", "learning_rate", "grad_clip"),
        *("replay_gb", "replay_sequences", "min_fill", "save_replay", "epsilon"),
    }
)


def train(flags: Flags) -> Result:
    """Train until steps or minutes are used up, or a signal asks for an end; a checkpoint is left in any case.

    SIGTERM and SIGHUP end it as steps do; Ctrl-C raises KeyboardInterrupt when all is saved. A failure while it trains
    is logged and raises SystemExit(1).
    """
    keep_freed_memory()
    # Before any environment is made; without a name, as --env may be another than that of create_env or the servers.
    flags = replace(validate(flags), name=flags.name)
    with contextlib.ExitStack() as to_close:
        if flags.feed == "remote":
            import polybeast  # which needs libbeast

            connection = polybeast.connect(server_flags(flags, polybeast.Flags), to_close)
            width, num_groups = connection.flags.group_width, connection.num_streams
            connection = connection._replace(flags=replace(connection.flags, batch_width=width))  # whole groups
            env_spaces, frames_per_step = connection.spaces, connection.frames_per_step
            flags = validate(replace(flags, env=connection.flags.env, group_width=width))
        else:
            env_spaces, num_groups = probe_env(create_env, flags), flags.num_actors * GROUPS_PER_ACTOR
            frames_per_step = env_spaces.frames_per_step
            flags = validate(replace(flags, env=env_spaces.env_id, atari_backend=env_spaces.atari_backend))
        torch.manual_seed(flags.seed)
        learner = make_learner(flags, env_spaces)
        to_close.enter_context(learner.helper or contextlib.nullcontext())
        training = to_close.enter_context(Training("r2d2", flags, learner, RESUME_FREE, frames_per_step))
        run, cleanup = training.run, training.cleanup
        replay = make_replay(flags, env_spaces, learner, num_groups)
        limiter = RatioLimiter(flags.replay_ratio, flags.batch_width * flags.trained, flags.min_fill)
        if flags.save_replay:
            save = resume_replay(replay, limiter, run.path / "replay.npz", learner.updates, run.log)
            training.save_beside = lambda: save(learner.updates)
        cleanup.callback(lambda: run.log(limiter.describe()))
        feed: Feed
        others: list = []
        if flags.feed == "remote":
            feed, others = polybeast.make_feed(training, connection)
        else:
            feed = shared_memory_feed(training, flags, env_spaces, num_groups)
        feed.return_columns = slice(flags.group_width - (flags.eval_columns or max(flags.group_width // 4, 1)), None)
        weights = PublishedWeights(learner.net, learner.updates)
        introduction = (
            f"{num_groups} groups of {flags.group_width} environments, replay of {replay.num_bytes / 1e9:.2f} GB for "
            f"{replay.capacity:,} steps of {replay.bytes_of_step:,} bytes, updates of {flags.batch_width} sequences of "
            f"{flags.burn_in} + {flags.trained} steps, {flags.replay_ratio:g} trained transitions a step"
        )
        return training.train(
            feed,
            lambda: act(training, feed, weights, num_groups),
            lambda: learn(training, learner, feed, weights, replay, limiter),
            introduction,
            others,
        )


def shared_memory_feed(training: Training, flags: Flags, env_spaces: EnvSpaces, num_groups: int) -> Feed:
    """Actors on this machine, and the feed of what they write; the training closes them."""
    memory = RolloutMemory(rollout_fields(env_spaces), flags.num_slots, flags.unroll_length, flags.group_width)
    if training.device.type == "cuda":
        training.cleanup.callback(pin_memory(memory.buffer, training.device, training.run.log))
    actors: LocalActors | ActorProcesses
    if flags.deterministic:
        actors = LocalActors(create_env, flags, memory, num_groups, training.env_seed)
    else:
        script = os.path.abspath(__file__)
        actors = ActorProcesses(script, flags, memory, num_groups, training.env_seed, training.run.log)
    training.cleanup.callback(actors.close)
    return SharedMemoryFeed(training.learner, rollout_flags(flags), memory, actors)


def rollout_flags(flags: Flags) -> SimpleNamespace:
    """What a feed is told of the flags: its batches are the rollouts of one group, whatever an update's are, and none
    is too old for the replay."""
    return SimpleNamespace(**vars(flags) | {"batch_width": flags.group_width, "max_policy_lag": 0})


def server_flags(flags: Flags, flags_class: type):
    """PolyBeast's flags of the same names and values, for its connection to env servers. Any group's width suits a
    batch of 1."""
    names = {field.name for field in fields(flags_class)} & {field.name for field in fields(flags)}
    own = {"batch_width": 1} | ({} if flags.listen else {"max_streams": 0})  # which is for --listen only
    return flags_class(**{name: getattr(flags, name) for name in names} | own)


def test(flags: Flags) -> dict:
    """Play whole games with a checkpoint, print mean ± standard error and write them to test.json in the run's
    directory."""
    path = flags.checkpoint or os.path.join(flags.root, flags.name, "checkpoint.pt")
    state = checkpoint.load(path, "--checkpoint" if flags.checkpoint else "", variants=("r2d2",))
    own = {name: getattr(flags, name) for name in ("seed", "video", "greedy", "atari_backend", "epsilon")}
    config = {**state["config"], **own, "mode": "test"}
    trained = Flags(**{field.name: config[field.name] for field in fields(flags) if field.name in config})
    overrides: dict = {"render_mode": "rgb_array"} if flags.video else {}
    env_spaces = probe_env(create_env, trained, **overrides)
    trained = replace(trained, env=env_spaces.env_id)
    net = Net(env_spaces.observations, env_spaces.action, trained).eval()
    checkpoint.load_weights(net, state["net"], path)
    make_envs = partial(create_env, trained, **overrides)
    played = evaluation.play(make_envs, net, flags.episodes, flags.seed, flags.greedy, flags.video)
    return evaluation.report(played, trained, path, state["counts"]["steps"])


def validate(flags: Flags) -> Flags:
    """The flags with automatic values filled in. Raises InputError with the value, the limit and the remedy."""
    flags = replace(flags, env_kwargs=check_env_flags(flags))
    sizes = ("group_width", "batch_width", "core_size", "head_size", "target_period", "n_steps")
    limits = {  # name: lowest, highest
        **RUN_LIMITS,
        **{name: (1, 10**6) for name in sizes},
        "hidden_size": (4, 10**6),  # MLPs have a quarter of it
        "num_actors": (1, 1024),
        "max_streams": (1, 4096),
        "actor_niceness": (0, 19),
        "unroll_length": (1, 2**16 - 1),
        "trained": (3, 10**5),  # a first priority leaves the last one out, and another may be void
        "burn_in": (0, 10**5),
        "eval_columns": (0, flags.group_width - 1, "at least one environment of a group has to train"),
        "replay_gb": (1e-6, 1e6),
        "replay_ratio": (1e-3, 1e3),
        "min_fill": (0, 10**12),
        "replay_sequences": (0, 10**12),
        "learning_rate": (1e-12, 10),
        "optimizer_epsilon": (1e-12, 10),
        "grad_clip": (0, math.inf),
        **{name: (0, 1) for name in ("discount", "priority_eta", "epsilon")},
        **{name: (0, 1) for name in ("priority_exponent", "importance_exponent")},
    }
    check_limits(flags, limits)
    if flags.stride < 1 or flags.stride % flags.unroll_length:
        raise InputError(
            f"--stride {flags.stride}: it must be a multiple of --unroll_length {flags.unroll_length}, as the core's "
            "state is known at the start of a rollout only"
        )
    if flags.compile:
        raise InputError("--compile: r2d2.py does not compile its net yet; leave it out")
    is_remote = flags.feed == "remote" or bool(flags.addresses or flags.listen)
    if flags.deterministic and is_remote:
        raise InputError("--deterministic: env servers answer in any order; leave it out, or --feed remote")
    for name in ("token_file", "tls_ca", "tls_cert", "tls_key"):
        if getattr(flags, name) and not is_remote:
            raise InputError(f"--{name} is for env servers: give --addresses or --listen, too, or leave it out")
    num_groups = flags.num_actors * GROUPS_PER_ACTOR
    burn_in = flags.burn_in if flags.core != "none" else 0  # there is no state to burn in
    one_each = 0 if is_remote else num_groups * flags.group_width * (burn_in + flags.trained)
    if flags.mode == "train" and max(flags.min_fill, one_each) >= flags.total_steps:
        raise InputError(
            f"--total_steps {flags.total_steps}: the first update comes after --min_fill {flags.min_fill} steps and a "
            f"sequence of each environment, {one_each} steps: raise it, or lower --min_fill, --burn_in or --trained"
        )
    num_slots = flags.num_slots or num_groups + 2
    if not num_groups <= num_slots <= 2**16:
        raise InputError(f"--num_slots {num_slots}: {num_groups} groups need {num_groups} to 65536; 0 has it chosen")
    return replace(
        flags,
        num_slots=num_slots,
        feed="remote" if is_remote else "shared",
        burn_in=burn_in,
        learner_threads=1 if flags.deterministic else flags.learner_threads,
        name=run_name("r2d2", flags),
    )


def main() -> None:
    flags = command_line.parse(Flags, __doc__, PRESETS, ABOUT)
    with exit_with_message():
        train(flags) if flags.mode == "train" else test(validate(flags))


if __name__ == "__main__":
    main()
