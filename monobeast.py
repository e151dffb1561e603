"""MonoBeast: IMPALA in one file, on one machine, over shared memory.

    python monobeast.py --env PongNoFrameskip-v4 --name pong                # train; the same line again resumes
    python monobeast.py --mode test --name pong                             # play whole games with the checkpoint
    python plot.py runs/pong                                                # draw the learning curve

Actor processes step groups of environments straight into rollout slots in shared memory. The inference thread reads
each new row where it lies and writes the actions beside it; the learner thread trains on full slots, which are its
batches, and publishes the weights. Words, shapes and the meaning of every field of a rollout: see README.md.
"""

# ruff: noqa: E402  (an actor stops reading this file before torch is imported)

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import gymnasium
from gymnasium import spaces

from beast import actors, envs
from beast.flags import FREE_ON_RESUME, RUN_LIMITS, RunFlags, check_limits, check_widths, exit_with_message, run_name


@dataclass
class Flags(RunFlags):
    """IMPALA with V-trace on one machine. A *step* is one decision of the agent; in Atari it lasts 4 frames."""

    mode: Literal["train", "test", "tune"] = "train"
    """train, play whole games with a run's checkpoint (test), or measure this environment, model and machine for about
    40 seconds and print the fastest setting of actors, widths, threads and precision (tune), and with --compile whether
    that is faster."""
    auto: bool = False
    """Measure first, as --mode tune does, and train with --num_actors, --group_width, --num_slots, --learner_threads
    and --amp as found, and without --compile where that was slower. A run that is resumed keeps those it began with."""

    # Who does how much: see "How it works" in README.md.
    num_actors: int = 2
    """Actor processes, each with two groups of environments: one steps while the other waits for its actions."""
    group_width: int = 16
    """Environments in a group: they are stepped together and share one forward pass. Wider costs less a step, and
    more lag."""
    batch_width: int = 4
    """Columns (environments) of one update. Divides the group width (its rollout gives several updates) or is a
    multiple of it."""
    unroll_length: int = 20
    """Steps of one rollout (T): how far a reward is carried back before the value of the last observation stands in
    for the rest."""
    num_slots: int = 0
    """Rollouts in shared memory; with the widths they bound the policy lag. 0 chooses one more than there are groups,
    or enough for a batch."""
    actor_niceness: int = 5
    """Unix niceness added to actors (0 to 19), so that they yield to the learner where cores are short."""
    pin_actors: bool = False
    """Bind each actor to a core in turn."""
    deterministic: bool = False
    """Run everything in lock-step in one process: slow, but two runs with one seed are equal to the bit on a CPU."""

    # The agent.
    net: Literal["shallow", "deep", "mlp"] = "shallow"
    """Encoder of images: the Nature CNN (one 3x3 convolution under 36 pixels), the IMPALA ResNet, or an MLP; all else
    goes into an MLP."""
    width: Literal[1, 2, 4] = 1
    """Channels of the deep net in multiples of IMPALA's 16, 32, 32."""
    hidden_size: int = 512
    """Features that an image encoder puts out; MLPs have two layers of a quarter of this."""
    core: Literal["none", "lstm", "gru"] = "none"
    """Recurrent core between encoder and heads, for tasks that need memory."""
    core_size: int = 256
    """Units of the recurrent core."""
    center_images: bool = True
    """Subtract each pixel's running mean and scale by its deviation, so that a static background says nothing and a
    ball much."""

    # The loss.
    discount: float = 0.99
    """Discount of one agent step (gamma)."""
    vtrace_lambda: float = 1.0
    """Lambda of V-trace: lower trusts the values more and the rewards of far steps less; 1 is IMPALA's."""
    clip_rho: float = 1.0
    """V-trace's clip of importance weights in value targets (rho bar)."""
    clip_pg_rho: float = 1.0
    """V-trace's clip of importance weights in the policy gradient."""
    ppo_clip: float = 0.2
    """Clip the policy ratio to [1/(1+x), 1+x] as in APPO; 0 takes the V-trace policy gradient instead."""
    normalize_advantages: bool = True
    """Shift and scale the advantages of an update to mean 0 and deviation 1: the policy's step no longer depends on
    the reward's scale."""
    reward_scale: float = 1.0
    """Multiplies rewards in the learner, before the clip; logged returns stay as they are."""
    reward_clip: float = 1.0
    """Clip rewards to [-x, x] in the learner; 0 means no clip. Logged returns are never clipped."""
    baseline_cost: float = 0.5
    """Weight of the value loss."""
    entropy_cost: float = 0.01
    """Weight of the entropy bonus: more keeps the policy random for longer."""
    reduction: Literal["sum", "mean"] = "mean"
    """Whether a loss is the sum or the mean over the steps of an update. With the sum, learning rate and clip go with
    the batch."""

    # The optimizer.
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Adam, or RMSProp as in TorchBeast (torch's: epsilon outside of the root)."""
    learning_rate: float = 2.5e-4
    """Step size of the optimizer at the start."""
    lr_decay: Literal["linear", "none"] = "linear"
    """Decay the learning rate to 0 at the total steps, or keep it."""
    optimizer_epsilon: float = 1e-5
    """Added to the denominator of Adam and RMSProp."""
    rmsprop_alpha: float = 0.99
    """RMSProp's smoothing constant."""
    grad_clip: float = 0.5
    """Global norm above which gradients are scaled down; 0 means no clip. Goes with the reduction."""


# FORK HERE: your environment. Any gymnasium environment will do, for example
#   gymnasium.vector.SyncVectorEnv([lambda: YourEnv(difficulty=3)] * num_envs)
def create_env(flags: Flags, num_envs: int) -> gymnasium.vector.VectorEnv:
    """Environments for one group. Called in every actor process, and in the main process to learn the spaces."""
    return envs.make(flags.env, num_envs)


actors.run_if_actor(Flags, create_env)  # an actor process reads this file down to here, and never imports torch

import copy
import math
import os
import time
from collections import deque

import numpy as np
import torch
from torch import nn

from beast import checkpoint, games, tuning, vtrace
from beast.distributions import action_shape_dtype, distribution, encode_action, encoded_action_width, policy_width
from beast.learner import Learner
from beast.machine import choose_device, keep_freed_memory, pin_memory, stream
from beast.profile import Laps
from beast.recurrent import run_core
from beast.rollout import RolloutMemory, Slots, max_policy_lag
from beast.tensors import PublishedWeights, SlotTensors, columns, join, rollout_fields
from beast.training import Training

GROUPS_PER_ACTOR = 2  # double buffering: one group steps while the other's actions are chosen


def orthogonal(layer: nn.Module, gain: float) -> nn.Module:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ResidualBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(),
            orthogonal(nn.Conv2d(channels, channels, 3, padding=1), math.sqrt(2)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(channels, channels, 3, padding=1), 1.0),
        )

    def forward(self, x):
        return x + self.layers(x)


class CenterImages(nn.Module):
    """Float images [N, C, H, W] in units of each pixel's own deviation from its mean.

    Most of a Pong image never changes, and after a convolution the ball is a few percent of a large constant. Without
    the constant the value loss was a quarter to a half at step 100,000 (benchmarks/results/pong-search.csv).
    """

    FLOOR = 0.2  # added to a deviation, in units of a uint8 image's full range: noise of rare pixels stays small

    def __init__(self, shape: tuple[int, ...], unit: float):
        super().__init__()
        self.unit = unit
        for name in ("count", "mean", "variance"):
            self.register_buffer(name, torch.zeros(() if name == "count" else shape))
        self.register_buffer("scale", torch.full(shape, unit))
        self.register_buffer("offset", torch.zeros(shape))

    def forward(self, x):
        return torch.addcmul(self.offset.to(x.dtype), x, self.scale.to(x.dtype))

    @torch.no_grad()
    def observe(self, x: torch.Tensor) -> None:
        """Take images [N, C, H, W] into the running mean and variance (Chan et al. 1979)."""
        x = x.float() * self.unit
        share = len(x) / (self.count + len(x))
        mean = x.mean(0)
        variance = (x - mean).square().mean(0)
        difference = mean - self.mean
        self.mean += difference * share
        self.variance += (variance - self.variance + difference.square() * (1 - share)) * share
        self.count += len(x)
        self.scale.copy_(self.unit / (self.variance.sqrt() + self.FLOOR))
        self.offset.copy_(-self.mean * self.scale / self.unit)


class Encoder(nn.Module):
    """Features [N, size] of one observation field [N, *shape]: images by convolutions, all else by an MLP."""

    def __init__(self, space: gymnasium.Space, flags: Flags, amp: bool):
        super().__init__()
        self.amp, gain, shape = amp, math.sqrt(2), space.shape
        self.categories = space if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) else None
        if self.categories is not None:
            self.register_buffer("start", torch.as_tensor(space.start), persistent=False)
        self.unit = 1 / 255 if space.dtype == np.uint8 and self.categories is None else 1.0
        self.is_image = len(shape) == 3 and flags.net != "mlp" and self.categories is None
        if not self.is_image:
            width = flags.hidden_size // 4
            inputs = encoded_action_width(space) if self.categories is not None else math.prod(shape)
            sizes = [inputs, width, width]
            layers = [orthogonal(nn.Linear(i, o), gain) for i, o in zip(sizes, sizes[1:])]
            self.head = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh())
            self.size = width
            return
        self.channels_first = shape[0] < shape[2]
        self.memory_format = torch.channels_last if flags.channels_last else torch.contiguous_format
        shape = shape if self.channels_first else (shape[2], shape[0], shape[1])
        channels = shape[0]
        self.center = CenterImages(shape, self.unit) if flags.center_images and space.dtype == np.uint8 else None
        if flags.net == "shallow" and min(shape[1:]) < 36:  # MinAtar and other grids
            layers = [orthogonal(nn.Conv2d(channels, 16, 3), gain), nn.ReLU()]
        elif flags.net == "shallow":  # Mnih et al. 2015
            convolutions = [nn.Conv2d(channels, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3)]
            layers = [layer for c in convolutions for layer in (orthogonal(c, gain), nn.ReLU())]
        else:  # Espeholt et al. 2018, figure 3 right
            layers = []
            for out in (16 * flags.width, 32 * flags.width, 32 * flags.width):
                convolution = orthogonal(nn.Conv2d(channels, out, 3, padding=1), gain)
                layers += [convolution, nn.MaxPool2d(3, 2, padding=1), ResidualBlock(out), ResidualBlock(out)]
                channels = out
            layers.append(nn.ReLU())
        self.convolutions = nn.Sequential(*layers)
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, *shape)).numel()
        self.head = nn.Sequential(orthogonal(nn.Linear(flat, flags.hidden_size), gain), nn.ReLU())
        self.size = flags.hidden_size
        self.to(memory_format=self.memory_format)

    def forward(self, x):
        if self.categories is not None:
            return self.head(encode_action(self.categories, x - self.start))
        if not self.is_image:
            return self.head(x.flatten(1).float() * self.unit)
        x = self.as_images(x).to(torch.bfloat16 if self.amp else torch.float32)  # a uint8 is exact in both
        x = self.center(x) if self.center else x * self.unit
        x = x.contiguous(memory_format=self.memory_format)  # last: converting in the same step took half as long again
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            x = self.convolutions(x).permute(0, 2, 3, 1)  # channels last, as it lies: flattening copies nothing
            x = self.head(x.flatten(1))
        return x.float()

    def as_images(self, x):
        return x if self.channels_first else x.permute(0, 3, 1, 2)


# FORK HERE: your model. Observations arrive as they are stored (uint8 images included), time-major.
class Net(nn.Module):
    """Policy and value: encoders of the observation fields, an optional recurrent core, two heads.

    `forward(inputs, core_state)` takes `inputs["obs"][name]` [T, B, *shape], `inputs["done"]` [T, B], the last action
    `inputs["action"]` [T, B, …] and its reward `inputs["reward"]` [T, B] (unclipped), and the core's state before row
    0, a tuple of [1, B, core_size] (empty without a core). It returns the policy's parameters [T, B, policy_width] and
    the values [T, B], both float32, and the core's state after row T-1.
    """

    def __init__(self, observation_spaces: dict, action_space: gymnasium.Space, flags: Flags, amp: bool = False):
        super().__init__()
        self.action_space, self.flags, self.amp = action_space, flags, amp
        self.names = list(observation_spaces)
        self.encoders = nn.ModuleList([Encoder(space, flags, amp) for space in observation_spaces.values()])
        size = sum(encoder.size for encoder in self.encoders) + 1 + encoded_action_width(action_space)
        self.core = None
        if flags.core != "none":
            self.core = (nn.LSTM if flags.core == "lstm" else nn.GRU)(size, flags.core_size)
            for name, parameter in self.core.named_parameters():
                nn.init.orthogonal_(parameter) if "weight" in name else nn.init.zeros_(parameter)
            if flags.core == "lstm":  # begin by remembering (Gers et al. 2000); gates: input, forget, cell, output
                nn.init.ones_(self.core.bias_ih_l0[flags.core_size : 2 * flags.core_size])
            size = flags.core_size
        self.policy = orthogonal(nn.Linear(size, policy_width(action_space)), 0.01)
        self.baseline = orthogonal(nn.Linear(size, 1), 1.0)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        num_tensors = {"none": 0, "gru": 1, "lstm": 2}[self.flags.core]
        return tuple(torch.zeros(1, batch_size, self.flags.core_size) for _ in range(num_tensors))

    def inference_copy(self) -> Net:
        """A copy to act with. Weights that every pass would cast to bf16 are cast once, when they are copied."""
        net = copy.deepcopy(self).eval().requires_grad_(False)
        for encoder in net.encoders:
            if encoder.is_image and self.amp:
                encoder.convolutions.bfloat16()
                encoder.head.bfloat16()
        if isinstance(net.core, nn.LSTM) and self.amp:
            for weight in (net.core.weight_ih_l0, net.core.weight_hh_l0):
                weight.data = weight.data.bfloat16()
        return net

    def observe(self, observations: dict) -> None:
        """Take observations [N, *shape] into the statistics that center the images."""
        for name, encoder in zip(self.names, self.encoders):
            if encoder.is_image and encoder.center:
                encoder.center.observe(encoder.as_images(observations[name]))

    def forward(self, inputs: dict, core_state: tuple) -> tuple[torch.Tensor, torch.Tensor, tuple]:
        done = inputs["done"]
        T, B = done.shape
        begins = done.unsqueeze(-1)  # an episode's first row knows nothing of the one before, and be it NaN
        features = [
            encoder(inputs["obs"][name].flatten(0, 1)).view(T, B, -1)
            for name, encoder in zip(self.names, self.encoders)
        ]
        last_reward = scale_rewards(self.flags, inputs["reward"]).clamp(-1, 1).unsqueeze(-1).masked_fill(begins, 0)
        last_action = encode_action(self.action_space, inputs["action"]).masked_fill(begins, 0)
        x = torch.cat([*features, last_reward, last_action], dim=-1)  # [T, B, size]
        if self.core is not None:
            x, core_state = run_core(self.core, x, begins, core_state, self.amp)  # [T, B, core_size]
        return self.policy(x), self.baseline(x).squeeze(-1), core_state


def scale_rewards(flags: Flags, rewards: torch.Tensor) -> torch.Tensor:
    """Rewards as the loss sees them."""
    rewards = rewards * flags.reward_scale
    return rewards.clamp(-flags.reward_clip, flags.reward_clip) if flags.reward_clip else rewards


# FORK HERE: your loss.
def compute_loss(
    flags: Flags, net: nn.Module, action_space, batch: dict, core_state: tuple
) -> tuple[torch.Tensor, dict]:
    """The loss of one batch of rollouts [T+1, B, …], and its statistics as tensors."""
    policy_logits, values, _ = net(batch, core_state)  # [T+1, B, W], [T+1, B]
    mask, discounts = vtrace.transition_masks(batch["done"], batch["terminated"], batch["truncated"], flags.discount)
    # Row t+1 holds the action chosen at row t, and the policy that chose it.
    actions, rewards = batch["action"][1:], scale_rewards(flags, batch["reward"][1:])
    policy = distribution(action_space, policy_logits[:-1])
    log_probs = policy.log_prob(actions)
    log_rhos = log_probs - distribution(action_space, batch["policy_logits"][1:]).log_prob(actions)  # [T, B]
    vs, _ = vtrace.from_importance_weights(
        log_rhos=log_rhos.detach().masked_fill(~mask, -torch.inf),  # a void transition has no weight
        discounts=discounts,
        rewards=rewards,
        values=values[:-1].detach(),
        bootstrap_value=values[-1].detach(),
        clip_rho_threshold=flags.clip_rho,
        clip_pg_rho_threshold=flags.clip_pg_rho,
        lambda_=flags.vtrace_lambda,
    )
    ratio = torch.where(mask, log_rhos, 0).exp()
    advantages = rewards + discounts * torch.cat([vs[1:], values[-1:].detach()]) - values[:-1].detach()
    weight = mask.float()
    count = weight.sum().clamp(min=1)

    def mean(x):
        return (x * weight).sum() / count

    def variance(x):
        return mean((x - mean(x)).square())

    if flags.normalize_advantages:
        advantages = (advantages - mean(advantages)) / variance(advantages).sqrt().clamp(min=1e-5)
    if flags.ppo_clip:
        clipped = ratio.clamp(1 / (1 + flags.ppo_clip), 1 + flags.ppo_clip)
        policy_gains = torch.minimum(ratio * advantages, clipped * advantages)
    else:
        policy_gains = ratio.detach().clamp(max=flags.clip_pg_rho) * advantages * log_probs
    policy_loss = -(policy_gains * weight).sum()
    value_loss = 0.5 * ((vs - values[:-1]).square() * weight).sum()
    entropy = (policy.entropy() * weight).sum()
    loss = policy_loss + flags.baseline_cost * value_loss - flags.entropy_cost * entropy
    if flags.reduction == "mean":
        loss = loss / count
    with torch.no_grad():
        stats = {
            "losses/policy_loss": policy_loss / count,
            "losses/value_loss": value_loss / count,
            "losses/entropy": entropy / count,
            "losses/approx_kl": ((ratio - 1 - log_rhos) * weight).nan_to_num().sum() / count,
            "losses/clipfrac": mean(((ratio - 1).abs() > (flags.ppo_clip or 0.2)).float()),
            "losses/explained_variance": 1 - variance(vs - values[:-1]) / variance(vs).clamp(min=1e-8),
        }
    return loss, stats


@dataclass
class Group:
    """Where one group of environments is: row `row` of `slot` is the newest one written (or being written)."""

    slot: int | None = None
    row: int = 0
    core_state: tuple = ()  # before that row


class Inference:
    """Chooses the actions of all groups: reads observations where they lie in the slots, writes actions beside them."""

    def __init__(
        self,
        net: Net,
        tensors: SlotTensors,
        slots: Slots,
        group_actors,
        weights: PublishedWeights,
        num_groups: int,
        generator: torch.Generator,
    ):
        self.tensors, self.slots, self.actors, self.weights = tensors, slots, group_actors, weights
        self.memory, self.device, self.action_space = tensors.memory, tensors.device, net.action_space
        self.new_state = lambda: tuple(state.to(self.device) for state in net.initial_state(self.memory.group_width))
        self.groups = [Group() for _ in range(num_groups)]
        self.starving: list[int] = []  # groups with a full slot that wait for a free one
        self.initial_states: list[tuple] = [()] * self.memory.num_slots  # of the rollout in each slot: before its row 0
        self.generator = generator  # of action noise
        self.batch_sizes: deque[int] = deque(maxlen=1000)
        self._starved_seconds = 0.0  # time of all groups together
        self._starving_since = time.monotonic()
        self.laps = Laps()

    def step(self, timeout: float) -> None:
        """Answer every group that is ready, waiting up to `timeout` seconds for the first."""
        ready, lost = self.actors.wait(timeout)
        self.laps.lap("wait")
        for group in lost:  # its rollout is given up: what follows belongs to other environments
            if self.groups[group].slot is not None and group not in self.starving:
                self.slots.drop(self.groups[group].slot)
            self.groups[group] = Group()
        for group in ready:
            if self.groups[group].slot is not None:
                self.tensors.upload(self.groups[group].slot, self.groups[group].row)
        now = time.monotonic()
        self._starved_seconds += len(self.starving) * (now - self._starving_since)
        self._starving_since = now
        self.starving = [group for group in self.starving if group not in lost]
        acting = [group for group in self.starving + ready if self._place(group)]
        if self.device.type == "cpu":  # rows that fit the cache, and no gathering
            for group in acting:
                self._act([group])
        elif acting:
            self._act(acting)

    def starved_share(self, seconds: float) -> float:
        """The share of the last `seconds` that a group waited for a free slot, counted from the last call."""
        starved, self._starved_seconds = self._starved_seconds, 0.0
        return starved / seconds / len(self.groups)

    def _place(self, number: int) -> bool:
        """Make sure that the group's newest row has a successor in a slot; False if it has to wait or is resetting."""
        group = self.groups[number]
        if group.slot is not None and group.row < self.memory.unroll_length:
            return True
        if group.slot is not None and number not in self.starving:
            self.tensors.full[group.slot].set()
            self.slots.fill(group.slot)
        # A full slot still holds the last row of the group that waits, so nobody else may have it.
        kept = {self.groups[other].slot for other in self.starving if other != number}
        slot = self.slots.acquire(prefer=group.slot, avoid=kept)
        if slot is None:
            if number not in self.starving:
                self.starving.append(number)
            return False
        if number in self.starving:
            self.starving.remove(number)
        self.tensors.free[slot].wait()
        if group.slot is None:  # new environments, to be reset
            self.tensors.begin(slot)
            group.slot, group.row, group.core_state = slot, -1, self.new_state()
            self._advance(number)
            return False
        self.tensors.repeat_last_row(group.slot, slot)
        group.slot, group.row = slot, 0
        return True

    def _advance(self, number: int) -> None:
        group = self.groups[number]
        group.row += 1
        self.actors.go(number, group.slot, group.row)

    @torch.no_grad()
    def _act(self, numbers: list[int]) -> None:
        groups = [self.groups[number] for number in numbers]
        for group in groups:
            if group.row == 0:
                self.initial_states[group.slot] = group.core_state
        rows = [self.tensors.row(group.slot, group.row) for group in groups]
        inputs = join([{k: row[k] for k in ("obs", "reward", "done", "action")} for row in rows], self.device)
        core_state = tuple(torch.cat(parts, dim=1) for parts in zip(*(group.core_state for group in groups)))
        self.laps.lap("gather")
        with self.weights.newest() as (net, version):
            policy_logits, baseline, core_state = net(inputs, core_state)
        self.laps.lap("forward")
        actions = distribution(self.action_space, policy_logits).sample(self.generator)
        width = self.memory.group_width
        for index, group in enumerate(groups):
            mine = slice(index * width, (index + 1) * width)
            row = self.tensors.row(group.slot, group.row + 1)
            row["action"].copy_(actions[:, mine])
            row["policy_logits"].copy_(policy_logits[:, mine])
            row["baseline"].copy_(baseline[:, mine])
            row["policy_version"].fill_(version)
            group.core_state = tuple(state[:, mine] for state in core_state)
        self.tensors.download_actions([(group.slot, group.row + 1) for group in groups])
        for number in numbers:
            self._advance(number)
        self.batch_sizes.append(len(numbers) * width)
        self.laps.lap("answer")


def make_optimizer(flags: Flags, net: nn.Module) -> torch.optim.Optimizer:
    if flags.optimizer == "adam":
        return torch.optim.Adam(net.parameters(), flags.learning_rate, eps=flags.optimizer_epsilon, fused=True)
    return torch.optim.RMSprop(
        net.parameters(), flags.learning_rate, alpha=flags.rmsprop_alpha, eps=flags.optimizer_epsilon
    )


def learn(
    flags: Flags,
    training: Training,
    tensors: SlotTensors,
    slots: Slots,
    inference: Inference,
    weights: PublishedWeights,
    block: bool,
) -> bool:
    """Train on the next full slots: one batch of them, or several of its columns. False if there are none."""
    K, B = flags.group_width, flags.batch_width
    taken = slots.take(max(B // K, 1), block)
    training.learner.laps.lap("wait")
    if taken is None:
        return False
    for slot in taken:
        tensors.full[slot].wait()
    rollout = join([tensors.rollout(slot) for slot in taken], training.device)  # [T+1, m·K, …]
    core_states = zip(*(inference.initial_states[slot] for slot in taken))
    core_state = tuple(torch.cat(parts, dim=1) for parts in core_states)
    batches = (
        (columns(rollout, first, B), tuple(state[:, first : first + B] for state in core_state))
        for first in range(0, len(taken) * K, B)
    )
    training.learner.laps.lap("gather")
    training.learn([tensors.memory.rollout(slot) for slot in taken], batches, weights.publish)
    for slot in taken:
        tensors.free[slot].set()
    slots.release(taken)
    inference.actors.wake()
    return True


def make_learner(flags: Flags, observation_spaces: dict, action_space: gymnasium.Space) -> Learner:
    """A new net and its optimizer on the flags' device."""
    device, amp = choose_device(flags.device, flags.amp)
    net = Net(observation_spaces, action_space, flags, amp).to(device)
    return Learner(flags, net, make_optimizer(flags, net), compute_loss)


def train(flags: Flags) -> None:
    """Train until steps or minutes are used up, or SIGINT or SIGTERM asks for an end; a checkpoint is left in any case.

    A failure while it trains is logged with its traceback and raises SystemExit(1).
    """
    keep_freed_memory()
    flags = validate(flags)
    observation_spaces, action_space = probe_env(flags)
    if flags.auto:
        flags = tuning.of_the_run(flags) or tune(flags)
    torch.manual_seed(flags.seed)
    learner = make_learner(flags, observation_spaces, action_space)
    net = learner.net
    with Training("mono", flags, learner, FREE_ON_RESUME | {"actor_niceness", "pin_actors", "auto"}) as training:
        num_groups = flags.num_actors * GROUPS_PER_ACTOR
        fields = rollout_fields(observation_spaces, action_space)
        memory = RolloutMemory(fields, flags.num_slots, flags.unroll_length, flags.group_width)
        if training.device.type == "cuda":
            training.cleanup.callback(pin_memory(memory.buffer, training.device, training.run.log))
        slots = Slots(flags.num_slots)
        tensors = SlotTensors(memory, training.device)
        weights = PublishedWeights(net, learner.updates, flags.compile)
        if flags.compile:
            net.forward = torch.compile(net.forward)
        if flags.deterministic:
            group_actors = actors.LocalActors(create_env, flags, memory, num_groups, training.env_seed)
        else:
            script = os.path.abspath(__file__)
            group_actors = actors.ActorProcesses(
                script, flags, memory, flags.num_actors, GROUPS_PER_ACTOR, training.env_seed,
                max_restarts=flags.max_env_restarts, timeout=flags.env_timeout,
                niceness=flags.actor_niceness, pin=flags.pin_actors, log=training.run.log,
            )  # fmt: skip
        training.cleanup.callback(group_actors.close)
        inference = Inference(net, tensors, slots, group_actors, weights, num_groups, training.generator)
        training.profile.workers |= {"inference": lambda: inference.laps.seconds, **group_actors.workers()}
        training.profile.cores |= {"inference": lambda: inference.laps.cpu_seconds, "envs": group_actors.cpu_seconds}
        lag_bound = max_policy_lag(flags.num_slots, flags.group_width, flags.batch_width)

        def infer(stop) -> None:
            torch.set_num_threads(1)
            with stream(training.device, urgent=True):
                inference.laps.begin()
                while not stop():
                    inference.step(timeout=0.2)

        def learn_on(stop) -> None:
            training.begin_learning()
            with stream(training.device):
                while not stop() and learn(flags, training, tensors, slots, inference, weights, block=True):
                    pass

        def lock_step(stop) -> None:
            torch.set_num_threads(1)
            while not stop():
                inference.laps.begin()  # the two take turns
                inference.step(timeout=0)
                training.learner.laps.begin()
                while not stop() and learn(flags, training, tensors, slots, inference, weights, block=False):
                    pass

        def wake_all() -> None:
            slots.close()
            group_actors.wake()

        def measure(seconds: float, shares: dict[str, float]) -> dict[str, float]:
            return {
                "stats/policy_lag_bound": lag_bound,
                "stats/inference_batch": float(np.mean(inference.batch_sizes)),
                "stats/actor_wait": inference.starved_share(seconds),
                "stats/queue_full_slots": slots.mean_full(),
                "stats/queue_free_slots": slots.num_free(),
                "stats/env_restarts": group_actors.total_restarts,
            }

        introduction = (
            f"{num_groups} groups of {flags.group_width} environments, {memory.num_bytes / 1e6:.0f} MB of slots, "
            f"updates of {flags.batch_width} x {flags.unroll_length} steps, policy lag at most {lag_bound} updates"
        )
        works = [lock_step] if flags.deterministic else [infer, learn_on]
        training.conduct(works, wake_all, measure, introduction)


def tune(flags: Flags) -> Flags:
    """Print what each stage costs here and the fastest setting that follows from it; returns the flags with it."""
    keep_freed_memory()
    space_of_each = probe_env(flags)
    tuned, report = tuning.choose(
        validate(flags), create_env, space_of_each, lambda flags: make_learner(flags, *space_of_each), validate
    )
    print(report)
    return tuned


def test(flags: Flags) -> dict:
    """Play whole games with a checkpoint, print mean ± standard error and write them to test.json in the run's
    directory."""
    flags = validate(flags)
    path = flags.checkpoint or os.path.join(flags.root, flags.name, "checkpoint.pt")
    state = checkpoint.load(path)
    # create_env may look at these.
    own = {"seed": flags.seed, "video": flags.video, "greedy": flags.greedy, "mode": "test"}
    known = {field.name for field in fields(Flags)}
    trained = Flags(**{key: value for key, value in {**state["config"], **own}.items() if key in known})
    net = Net(*probe_env(trained), trained).eval()
    net.load_state_dict(state["net"])
    played = games.play(
        lambda num_envs: create_env(trained, num_envs),
        net, trained.env, flags.episodes, flags.seed, flags.greedy, flags.video,
    )  # fmt: skip
    return games.report(played, trained, path, state["counts"]["steps"])


def probe_env(flags: Flags) -> tuple[dict, gymnasium.Space]:
    """The observation spaces by name and the action space of `create_env`'s environments."""
    env = create_env(flags, 1)
    try:
        action_shape_dtype(env.single_action_space)
        return envs.observation_spaces(env.single_observation_space), env.single_action_space
    finally:
        env.close()


def validate(flags: Flags) -> Flags:
    """The flags with automatic values filled in. Raises ValueError with the value, the limit and the remedy."""
    limits = {  # name: lowest, highest
        **RUN_LIMITS,
        **{name: (1, 10**6) for name in ("group_width", "batch_width", "unroll_length", "hidden_size", "core_size")},
        **{name: (0, math.inf) for name in ("num_slots", "reward_clip", "baseline_cost", "entropy_cost", "grad_clip")},
        **{name: (1e-6, math.inf) for name in ("clip_rho", "clip_pg_rho", "reward_scale")},
        **{name: (1e-12, 10) for name in ("learning_rate", "optimizer_epsilon")},
        **{name: (0, 1) for name in ("discount", "vtrace_lambda", "rmsprop_alpha")},
        "ppo_clip": (0, math.inf),
        "num_actors": (1, 1024),
        "actor_niceness": (0, 19),
    }
    check_limits(flags, limits)
    check_widths(flags.group_width, flags.batch_width)
    if flags.auto and flags.deterministic:
        raise ValueError("--auto with --deterministic: what is measured differs from run to run; leave one of them out")
    groups, slots_per_batch = flags.num_actors * GROUPS_PER_ACTOR, max(flags.batch_width // flags.group_width, 1)
    needed = max(groups, slots_per_batch)
    num_slots = flags.num_slots or needed + slots_per_batch
    if num_slots < needed:
        raise ValueError(
            f"--num_slots {num_slots}: {groups} groups and {slots_per_batch} slots a batch need at least {needed}; "
            "use fewer --num_actors, a smaller --batch_width, or 0 to have it chosen"
        )
    return replace(flags, num_slots=num_slots, name=run_name("mono", flags))


def main() -> None:
    import tyro

    flags = tyro.cli(Flags, description=__doc__, use_underscores=True)
    with exit_with_message("validate"):
        {"train": train, "test": test, "tune": tune}[flags.mode](flags)


if __name__ == "__main__":
    main()
