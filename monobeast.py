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

import sys
from dataclasses import asdict, dataclass, fields
from typing import Literal

import gymnasium
from gymnasium import spaces

from beast import actors, envs


@dataclass
class Flags:
    """IMPALA with V-trace on one machine. A *step* is one decision of the agent; in Atari it lasts 4 frames."""

    mode: Literal["train", "test"] = "train"
    """train, or play whole games with a run's checkpoint (test)."""
    env: str = "PongNoFrameskip-v4"
    """Environment id: `<Game>NoFrameskip-v4` or `ALE/<Game>-v5` (Atari), `MinAtar/<Game>-v0`, any of gymnasium's, or
    `module:id`. --mode test plays the one that the checkpoint was trained on."""
    name: str = ""
    """Name of the run; a run of this name that exists is resumed. Empty: `mono-<env>-<time>`."""
    root: str = "runs"
    """Directory that holds the runs."""
    seed: int = 1
    """Seeds environments, weights and action sampling; a run with other seeds is an independent repetition."""

    # How long to train.
    total_steps: int = 4_000_000
    """Agent steps to train for (times 4 for Atari frames); the learning rate decays towards this count."""
    total_minutes: float = 0.0
    """Minutes of training, earlier starts of the run included, after which it stops; 0 means no limit."""

    # Who does how much: see "How it works" in README.md.
    num_actors: int = 2
    """Actor processes, each with two groups of environments: one steps while the other waits for its actions."""
    group_width: int = 16
    """Environments in a group: they are stepped together and share one forward pass. Wider costs less a step, and
    more lag."""
    batch_width: int = 8
    """Columns (environments) of one update. Divides the group width (its rollout gives several updates) or is a
    multiple of it."""
    unroll_length: int = 20
    """Steps of one rollout (T): how far a reward is carried back before the value of the last observation stands in
    for the rest."""
    num_slots: int = 0
    """Rollouts in shared memory; with the widths they bound the policy lag. 0 chooses one more than there are groups,
    or enough for a batch."""
    max_env_restarts: int = 5
    """Times in a row that an actor is restarted before its death ends the run; 10 minutes of work begin a new row."""
    env_timeout: float = 60.0
    """Seconds after which an actor that does not answer counts as dead."""
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
    learning_rate: float = 3e-4
    """Step size of the optimizer at the start."""
    lr_decay: Literal["linear", "none"] = "linear"
    """Decay the learning rate to 0 at the total steps, or keep it."""
    optimizer_epsilon: float = 1e-5
    """Added to the denominator of Adam and RMSProp."""
    rmsprop_alpha: float = 0.99
    """RMSProp's smoothing constant."""
    grad_clip: float = 0.5
    """Global norm above which gradients are scaled down; 0 means no clip. Goes with the reduction."""
    max_bad_updates: int = 10
    """Updates in a row with a NaN or Inf in loss or gradients that are skipped before the run stops."""

    # The machine.
    device: str = "auto"
    """Where learner and inference compute: cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    amp: Literal["auto", "on", "off"] = "auto"
    """bfloat16 in the convolutions; auto where the hardware has it (a GPU, AVX512-BF16 or AMX), as it is slow
    elsewhere."""
    channels_last: bool = True
    """Keep images with their channels innermost, the order in which convolutions are fastest."""
    compile: bool = False
    """torch.compile the learner's net: a minute at the start, worth it on a GPU."""
    learner_threads: int = 0
    """CPU threads of the learner; 0 takes half of the cores. Inference has one."""
    actor_niceness: int = 5
    """Unix niceness added to actors (0 to 19), so that they yield to the learner where cores are short."""
    pin_actors: bool = False
    """Bind each actor to a core in turn."""

    # What is written down.
    log_steps: int = 20_000
    """Agent steps between two rows of metrics."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints; there is always one at the end."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.csv."""
    track: bool = False
    """Mirror metrics to Weights & Biases (needs `pip install wandb` and an account)."""

    # --mode test.
    episodes: int = 10
    """Whole games to play; mean and standard error are over them."""
    greedy: bool = False
    """Take the most probable action instead of sampling."""
    checkpoint: str = ""
    """Checkpoint file to play; empty takes the run's newest."""
    video: str = ""
    """File to film the first game into (.mp4; needs `pip install imageio-ffmpeg`)."""


# FORK HERE: your environment. Any gymnasium environment will do, for example
#   gymnasium.vector.SyncVectorEnv([lambda: YourEnv(difficulty=3)] * num_envs)
def create_env(flags: Flags, num_envs: int) -> gymnasium.vector.VectorEnv:
    """Environments for one group. Called in every actor process, and once in the main process to learn the spaces."""
    return envs.make(flags.env, num_envs)


actors.run_if_actor(Flags, create_env)  # an actor process reads this file down to here, and never imports torch

import contextlib
import copy
import json
import math
import os
import threading
import time
import traceback
from collections import deque

import numpy as np
import torch
from torch import nn

from beast import checkpoint, runs, vtrace
from beast.distributions import action_shape_dtype, distribution, encode_action, encoded_action_width, policy_width
from beast.flags import check_limits, exit_with_message
from beast.machine import choose_device, keep_freed_memory
from beast.rollout import RolloutMemory, Slots, max_policy_lag, nest_observations
from beast.tensors import PublishedWeights, columns, join, map_tensors, rollout_fields
from beast.threads import Crew, Interrupts

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
        return torch.addcmul(self.offset, x, self.scale)

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
            self.start = torch.as_tensor(space.start)
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
            return self.head(encode_action(self.categories, x - self.start.to(x.device)))
        if not self.is_image:
            return self.head(x.flatten(1).float() * self.unit)
        x = self.as_images(x).float()
        x = self.center(x) if self.center else x * self.unit
        x = x.contiguous(memory_format=self.memory_format)  # last: 40 us an image, 62 when converted with the dtype
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            x = self.convolutions(x)
        return self.head(x.float().flatten(1))

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
            if (
                flags.core == "lstm"
            ):  # begin by remembering (Gers et al. 2000): the gates are input, forget, cell, output
                nn.init.ones_(self.core.bias_ih_l0[flags.core_size : 2 * flags.core_size])
            size = flags.core_size
        self.policy = orthogonal(nn.Linear(size, policy_width(action_space)), 0.01)
        self.baseline = orthogonal(nn.Linear(size, 1), 1.0)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        num_tensors = {"none": 0, "gru": 1, "lstm": 2}[self.flags.core]
        return tuple(torch.zeros(1, batch_size, self.flags.core_size) for _ in range(num_tensors))

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
            outputs = []
            for t in range(T):
                core_state = tuple(state.masked_fill(begins[t], 0) for state in core_state)
                output, core_state = self.core(x[t : t + 1], core_state if len(core_state) == 2 else core_state[0])
                core_state = core_state if isinstance(core_state, tuple) else (core_state,)
                outputs.append(output)
            x = torch.cat(outputs)  # [T, B, core_size]
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
    vs, advantages = vtrace.from_importance_weights(
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
    if flags.ppo_clip:  # its own ratio takes the place of V-trace's
        next_vs = torch.cat([vs[1:], values[-1:].detach()])
        advantages = rewards + discounts * next_vs - values[:-1].detach()
    weight = mask.float()
    count = weight.sum().clamp(min=1)
    if flags.normalize_advantages:
        centered = advantages - (advantages * weight).sum() / count
        advantages = centered / ((centered.square() * weight).sum() / count).sqrt().clamp(min=1e-5)
    if flags.ppo_clip:
        clipped = ratio.clamp(1 / (1 + flags.ppo_clip), 1 + flags.ppo_clip)
        policy_gains = torch.minimum(ratio * advantages, clipped * advantages)
    else:
        policy_gains = log_probs * advantages
    policy_loss = -(policy_gains * weight).sum()
    value_loss = 0.5 * ((vs - values[:-1]).square() * weight).sum()
    entropy = (policy.entropy() * weight).sum()
    loss = policy_loss + flags.baseline_cost * value_loss - flags.entropy_cost * entropy
    if flags.reduction == "mean":
        loss = loss / count
    with torch.no_grad():
        errors = (vs - values[:-1])[mask]
        stats = {
            "losses/policy_loss": policy_loss / count,
            "losses/value_loss": value_loss / count,
            "losses/entropy": entropy / count,
            "losses/approx_kl": ((ratio - 1 - log_rhos) * weight).nan_to_num().sum() / count,
            "losses/clipfrac": (((ratio - 1).abs() > (flags.ppo_clip or 0.2)).float() * weight).sum() / count,
            "losses/explained_variance": 1 - errors.var() / vs[mask].var().clamp(min=1e-8),
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
        memory: RolloutMemory,
        slots: Slots,
        group_actors,
        weights: PublishedWeights,
        num_groups: int,
        seed: int,
    ):
        self.memory, self.slots, self.actors, self.weights = memory, slots, group_actors, weights
        self.action_space, self.device = net.action_space, next(net.parameters()).device
        self.new_state = lambda: tuple(state.to(self.device) for state in net.initial_state(memory.group_width))
        self.groups = [Group() for _ in range(num_groups)]
        self.starving: list[int] = []  # groups with a full slot that wait for a free one
        self.initial_states: list[tuple] = [()] * memory.num_slots  # of the rollout in each slot: before its row 0
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.batch_sizes: deque[int] = deque(maxlen=1000)
        self.starved_seconds = 0.0  # time of all groups together
        self._starving_since = time.monotonic()
        self._tensors: dict[tuple[int, int], dict] = {}

    def step(self, timeout: float) -> None:
        """Answer every group that is ready, waiting up to `timeout` seconds for the first."""
        ready, lost = self.actors.wait(timeout)
        for group in lost:  # its rollout is given up: what follows belongs to other environments
            if self.groups[group].slot is not None and group not in self.starving:
                self.slots.drop(self.groups[group].slot)
            self.groups[group] = Group()
        now = time.monotonic()
        self.starved_seconds += len(self.starving) * (now - self._starving_since)
        self._starving_since = now
        self.starving = [group for group in self.starving if group not in lost]
        acting = [group for group in self.starving + ready if self._place(group)]
        if self.device.type == "cpu":  # rows that fit the cache, and no gathering
            for group in acting:
                self._act([group])
        elif acting:
            self._act(acting)

    def _place(self, number: int) -> bool:
        """Make sure that the group's newest row has a successor in a slot; False if it has to wait or is resetting."""
        group = self.groups[number]
        if group.slot is not None and group.row < self.memory.unroll_length:
            return True
        if group.slot is not None and number not in self.starving:
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
        if group.slot is None:  # new environments, to be reset
            row = self.memory.row(slot, 0)
            for name in ("action", "policy_logits", "baseline", "policy_version"):
                row[name][...] = 0
            group.slot, group.row, group.core_state = slot, -1, self.new_state()
            self._advance(number)
            return False
        self.memory.repeat_last_row(group.slot, slot)
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
        rows = [self._tensor_row(group.slot, group.row) for group in groups]
        inputs = join([{k: row[k] for k in ("obs", "reward", "done", "action")} for row in rows], self.device)
        core_state = tuple(torch.cat(parts, dim=1) for parts in zip(*(group.core_state for group in groups)))
        with self.weights.newest() as (net, version):
            policy_logits, baseline, core_state = net(inputs, core_state)
        actions = distribution(self.action_space, policy_logits).sample(self.generator)
        width = self.memory.group_width
        for index, (number, group) in enumerate(zip(numbers, groups)):
            mine = slice(index * width, (index + 1) * width)
            row = self._tensor_row(group.slot, group.row + 1)
            row["action"].copy_(actions[:, mine])
            row["policy_logits"].copy_(policy_logits[:, mine])
            row["baseline"].copy_(baseline[:, mine])
            row["policy_version"].fill_(version)
            group.core_state = tuple(state[:, mine] for state in core_state)
            self._advance(number)
        self.batch_sizes.append(len(numbers) * width)

    def _tensor_row(self, slot: int, row: int) -> dict:
        """One row as tensors [1, K, …] over the shared memory."""
        if (slot, row) not in self._tensors:
            arrays = {name: torch.from_numpy(array[slot, row : row + 1]) for name, array in self.memory.arrays.items()}
            self._tensors[slot, row] = nest_observations(arrays)
        return self._tensors[slot, row]


class Learner:
    """The net that learns, its optimizer and the counts that its schedule follows: what a checkpoint holds."""

    def __init__(self, flags: Flags, net: Net):
        self.flags, self.net, self.action_space = flags, net, net.action_space
        if flags.optimizer == "adam":
            self.optimizer = torch.optim.Adam(net.parameters(), flags.learning_rate, eps=flags.optimizer_epsilon)
        else:
            self.optimizer = torch.optim.RMSprop(
                net.parameters(), flags.learning_rate, alpha=flags.rmsprop_alpha, eps=flags.optimizer_epsilon
            )
        self.steps = self.updates = self.bad_updates = self.bad_updates_in_a_row = 0
        self.seconds = 0.0  # of training, all starts of the run together
        self.returns: deque[float] = deque(maxlen=100)
        self.lengths: deque[int] = deque(maxlen=100)
        self.episodes = 0
        self.best = -math.inf

    def learning_rate(self) -> float:
        left = max(1 - self.steps / self.flags.total_steps, 0.0) if self.flags.lr_decay == "linear" else 1.0
        return self.flags.learning_rate * left

    def update(self, batch: dict, core_state: tuple) -> dict[str, float]:
        """One step of the optimizer on rollouts [T+1, B, …]. A NaN or Inf in loss or gradients leaves all weights
        alone."""
        flags = self.flags
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss, stats = compute_loss(flags, self.net, self.action_space, batch, core_state)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), flags.grad_clip or math.inf)
        void = ((batch["terminated"] | batch["truncated"]) & ~batch["done"])[:-1]
        lag = (self.updates - batch["policy_version"][1:]).float()
        self.steps += int((~void).sum())
        stats |= {"losses/total_loss": loss.detach(), "losses/grad_norm": norm, "stats/policy_lag_mean": lag.mean()}
        stats = {name: float(value) for name, value in stats.items()}  # on a GPU this waits for the update
        stats["stats/policy_lag_max"] = float(lag.max())
        if math.isfinite(stats["losses/total_loss"]) and math.isfinite(stats["losses/grad_norm"]):
            self.optimizer.step()
            self.net.observe(map_tensors(lambda x: x[-1], batch["obs"]))
            self.bad_updates_in_a_row = 0
        else:
            self.bad_updates += 1
            self.bad_updates_in_a_row += 1
            if self.bad_updates_in_a_row >= flags.max_bad_updates:
                raise FloatingPointError(
                    f"loss or gradients were NaN or Inf in {self.bad_updates_in_a_row} updates in a row "
                    f"(--max_bad_updates {flags.max_bad_updates}); the last: {stats}. "
                    "Lower --learning_rate or --grad_clip, or try --amp off."
                )
        self.updates += 1
        return stats

    def record_episodes(self, finished: list[tuple[float, int]]) -> None:
        for episode_return, length in finished:
            self.returns.append(episode_return)
            self.lengths.append(length)
            self.episodes += 1

    def state_dict(self) -> dict:
        """All that a later start needs to go on as if there had been no stop."""
        counts = ("steps", "updates", "bad_updates", "bad_updates_in_a_row", "seconds", "episodes", "best")
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counts": {name: getattr(self, name) for name in counts},
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, value in state["counts"].items():
            setattr(self, name, value)
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        torch.set_rng_state(state["rng"])


# Flags that may differ when a run is resumed. More total steps stretch the decay of the learning rate from there on.
FREE_ON_RESUME = {
    *("mode", "name", "root", "total_steps", "total_minutes", "max_env_restarts", "env_timeout", "max_bad_updates"),
    *("device", "amp", "channels_last", "compile", "learner_threads", "actor_niceness", "pin_actors", "log_steps"),
    *("checkpoint_minutes", "tensorboard", "track", "episodes", "greedy", "checkpoint", "video"),
}


class Training:
    """One start of a run: who shares the slots, what a learning step consists of, what is written down."""

    def __init__(self, flags: Flags, run: runs.Run, net: Net, fields: dict, cleanup: contextlib.ExitStack):
        """`fields` are those of a rollout. Everything that has to be closed is entered into `cleanup`."""
        self.flags, self.run = flags, run
        self.device = next(net.parameters()).device
        self.learner = Learner(flags, net)
        state = checkpoint.load(run.checkpoint_path) if run.resumed else None
        if state:
            self.learner.load_state_dict(state)
            run.log(f"resumed at step {self.learner.steps:,}")
        self.num_groups = flags.num_actors * GROUPS_PER_ACTOR
        self.memory = RolloutMemory(fields, flags.num_slots, flags.unroll_length, flags.group_width)
        self.slots = Slots(flags.num_slots)
        self.weights = PublishedWeights(self.learner.net, self.learner.updates)
        if flags.compile:
            self.learner.net.compile()
        if flags.deterministic:
            self.actors = actors.LocalActors(create_env, flags, self.memory, self.num_groups, self.env_seed)
        else:
            script = os.path.abspath(__file__)
            self.actors = actors.ActorProcesses(
                script, flags, self.memory, flags.num_actors, GROUPS_PER_ACTOR, self.env_seed,
                max_restarts=flags.max_env_restarts, timeout=flags.env_timeout,
                niceness=flags.actor_niceness, pin=flags.pin_actors, log=run.log,
            )  # fmt: skip
        cleanup.callback(self.actors.close)
        action_seed = self.env_seed(self.num_groups, 0)
        self.inference = Inference(
            self.learner.net, self.memory, self.slots, self.actors, self.weights, self.num_groups, action_seed
        )
        if state:  # the stream of action noise goes on, too
            self.inference.generator.set_state(state["action_rng"])
        self.frames_per_step = envs.frames_per_step(flags.env)
        self.metrics = runs.Metrics(
            run.path, self.learner.steps if run.resumed else None, flags.tensorboard, flags.track
        )
        cleanup.callback(self.metrics.close)
        self.lag_bound = max_policy_lag(flags.num_slots, flags.group_width, flags.batch_width)
        self.updating = threading.Lock()  # whoever holds it sees a learner between two updates
        self.latest: dict[str, float] = {}  # the last row of metrics
        self._gathered: list[dict] = []  # statistics of the updates since then
        self._row_began, self._row_steps, self._row_starved = time.monotonic(), self.learner.steps, 0.0
        self._waited = 0.0  # seconds that the learner waited since then
        self._began, self._seconds_before = time.monotonic(), self.learner.seconds
        run.log(
            f"{flags.name}: {flags.env}, {sum(p.numel() for p in self.learner.net.parameters()):,} parameters on "
            f"{self.device}{' in bf16' if net.amp else ''}, {self.num_groups} groups of {flags.group_width} "
            f"environments, {self.memory.num_bytes / 1e6:.0f} MB of slots, updates of {flags.batch_width} x "
            f"{flags.unroll_length} steps, policy lag at most {self.lag_bound} updates"
        )

    def env_seed(self, group: int, life: int) -> int:
        """Other episodes for every group, every restart of its environments, and every start of the run."""
        words = np.random.SeedSequence([self.flags.seed, self.run.num_starts, group, life]).generate_state(1)
        return int(words[0] >> 2)

    def seconds(self) -> float:
        """Of training, all starts of the run together."""
        return self._seconds_before + time.monotonic() - self._began

    def finished(self) -> bool:
        out_of_time = self.flags.total_minutes and self.seconds() >= 60 * self.flags.total_minutes
        return self.learner.steps >= self.flags.total_steps or bool(out_of_time)

    def learn(self, block: bool) -> bool:
        """Train on the next full slots: one batch of them, or several of its columns. False if there are none."""
        K, B, learner = self.flags.group_width, self.flags.batch_width, self.learner
        waiting_since = time.monotonic()
        taken = self.slots.take(max(B // K, 1), block)
        self._waited += time.monotonic() - waiting_since
        if taken is None:
            return False
        with self.updating:
            rollouts = [self.memory.rollout(slot) for slot in taken]
            for rollout in rollouts:
                learner.record_episodes(envs.finished_episodes(rollout))
            rollout = join(
                [map_tensors(torch.from_numpy, rollout) for rollout in rollouts], self.device
            )  # [T+1, m·K, …]
            core_states = zip(*(self.inference.initial_states[slot] for slot in taken))
            core_state = tuple(torch.cat(parts, dim=1) for parts in core_states)
            for first in range(0, len(taken) * K, B):
                batch_state = tuple(state[:, first : first + B] for state in core_state)
                self._gathered.append(learner.update(columns(rollout, first, B), batch_state))
                self.weights.publish(learner.net, learner.updates)
            if learner.steps // self.flags.log_steps != self._row_steps // self.flags.log_steps:
                self.write_metrics()
        self.slots.release(taken)
        self.actors.wake()
        return True

    def write_metrics(self) -> None:
        """A row of metrics over all updates since the last one, but for losses those that were not skipped."""
        learner, now = self.learner, time.monotonic()
        seconds = now - self._row_began
        good = [stats for stats in self._gathered if math.isfinite(stats["losses/grad_norm"])] or self._gathered
        row = {name: float(np.mean([stats[name] for stats in good])) for name in good[0]}
        row["stats/policy_lag_max"] = max(stats["stats/policy_lag_max"] for stats in self._gathered)
        row |= {
            "frames": learner.steps * self.frames_per_step,
            "hours": self.seconds() / 3600,
            "charts/SPS": (learner.steps - self._row_steps) / seconds,
            "charts/learning_rate": learner.learning_rate(),
            "stats/policy_lag_bound": self.lag_bound,
            "stats/inference_batch": float(np.mean(self.inference.batch_sizes)),
            "stats/learner_wait": self._waited / seconds,
            "stats/actor_wait": (self.inference.starved_seconds - self._row_starved) / seconds / self.num_groups,
            "stats/queue_full_slots": self.slots.num_full(),
            "stats/queue_free_slots": self.slots.num_free(),
            "stats/env_restarts": self.actors.total_restarts,
            "stats/bad_updates": learner.bad_updates,
            "stats/updates": learner.updates,
            "stats/episodes": learner.episodes,
        }
        if learner.returns:
            row["charts/episodic_return"] = float(np.mean(learner.returns))
            row["charts/episodic_length"] = float(np.mean(learner.lengths))
        self.metrics.write(learner.steps, row)
        self.latest = row
        self._gathered.clear()
        self._row_began, self._row_steps, self._waited = now, learner.steps, 0.0
        self._row_starved = self.inference.starved_seconds

    def write_last_metrics(self) -> None:
        """The row of the updates since the last full one, at the end of a start."""
        if self._gathered:
            self.write_metrics()

    def save(self) -> None:
        with self.updating:
            self.learner.seconds = self.seconds()
            mean = float(np.mean(self.learner.returns)) if self.learner.returns else -math.inf
            is_best = len(self.learner.returns) == self.learner.returns.maxlen and mean > self.learner.best
            self.learner.best = mean if is_best else self.learner.best
            state = copy.deepcopy({"config": asdict(self.flags), **self.learner.state_dict()})
            state["action_rng"] = self.inference.generator.get_state()
        checkpoint.save(self.run.checkpoint_path, state)
        if is_best:
            checkpoint.save(self.run.best_path, state)


def train(flags: Flags) -> None:
    """Train until steps or minutes are used up, or SIGINT or SIGTERM asks for an end; a checkpoint is left in any case.

    A failure while it trains is logged with its traceback and raises SystemExit(1).
    """
    flags = validate(flags)
    device, amp = choose_device(flags.device, flags.amp)
    observation_spaces, action_space = probe_env(flags)
    keep_freed_memory()
    torch.manual_seed(flags.seed)
    net = Net(observation_spaces, action_space, flags, amp).to(device)
    run = runs.Run(flags.root, flags.name, asdict(flags), resume_free=FREE_ON_RESUME)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(run.close)
        interrupts = cleanup.enter_context(Interrupts())
        training = Training(flags, run, net, rollout_fields(observation_spaces, action_space), cleanup)
        learner = training.learner
        console = runs.Console(
            flags.total_steps, flags.total_minutes, training.frames_per_step, learner.steps, learner.seconds / 60
        )
        cleanup.callback(console.close)

        def wake_all() -> None:
            training.slots.close()
            training.actors.wake()

        crew = Crew(wake_all)

        def infer() -> None:
            torch.set_num_threads(1)
            while not crew.stop.is_set():
                training.inference.step(timeout=0.2)

        def learn() -> None:
            torch.set_num_threads(flags.learner_threads or max(1, (os.cpu_count() or 1) // 2))
            while not crew.stop.is_set() and not training.finished() and training.learn(block=True):
                pass

        def lock_step() -> None:
            torch.set_num_threads(1)
            while not crew.stop.is_set() and not training.finished():
                training.inference.step(timeout=0)
                while not training.finished() and training.learn(block=False):
                    pass

        try:
            for work in (lock_step,) if flags.deterministic else (infer, learn):
                crew.start(work)
            next_save = time.monotonic() + 60 * flags.checkpoint_minutes
            while not (crew.stop.wait(0.25) or interrupts.received or training.finished()):
                console.update(learner.steps, training.latest)
                if time.monotonic() >= next_save:
                    training.save()
                    next_save = time.monotonic() + 60 * flags.checkpoint_minutes
        finally:
            crew.end()
            if crew.failure:  # told before anything else can fail
                is_told = isinstance(crew.failure, actors.ActorError)  # with the actor's own traceback
                run.log(str(crew.failure) if is_told else "".join(traceback.format_exception(crew.failure)))
            training.write_last_metrics()
            training.save()
        console.update(learner.steps, training.latest, final=True)
        mean = "no episode has ended yet"
        if learner.returns:
            mean = f"mean return of the last {len(learner.returns)} episodes {np.mean(learner.returns):.2f}"
        run.log(f"stopped at step {learner.steps:,}: {mean}, {learner.seconds / 60:.1f} minutes, {run.checkpoint_path}")
        if crew.failure:
            sys.exit(1)
        if learner.steps >= flags.total_steps:
            run.log("all of --total_steps are done: raise them to train on, or give another --name")


def test(flags: Flags) -> dict:
    """Play whole games with a checkpoint, print mean ± standard error and write them to test.json in the run's
    directory."""
    flags = validate(flags)
    path = flags.checkpoint or os.path.join(flags.root, flags.name, "checkpoint.pt")
    state = checkpoint.load(path)
    trained = Flags(**{key: value for key, value in state["config"].items() if key in {f.name for f in fields(Flags)}})
    trained.seed, trained.video = flags.seed, flags.video  # create_env may look at them
    observation_spaces, action_space = probe_env(trained)
    net = Net(observation_spaces, action_space, trained).eval()
    net.load_state_dict(state["net"])
    generator = torch.Generator().manual_seed(flags.seed)
    # Each environment plays its fixed share of the games: taking whichever end first would favour short ones.
    width = min(flags.episodes, 1 if flags.video else 10)
    quota = [flags.episodes // width + (index < flags.episodes % width) for index in range(width)]
    memory = RolloutMemory(rollout_fields(observation_spaces, action_space), 1, 1, width)
    group = envs.EnvGroup(create_env(trained, width))
    film = envs.Film(trained.env, group.env, flags.video, flags.seed) if flags.video else None
    games: list[list[tuple[float, int]]] = [[] for _ in range(width)]
    before, after = memory.row(0, 0), memory.row(0, 1)
    before["action"][...] = 0
    group.reset(flags.seed, before)
    core_state = net.initial_state(width)
    while any(len(played) < share for played, share in zip(games, quota)):
        inputs = map_tensors(lambda x: torch.from_numpy(x[:1]), memory.rollout(0))
        with torch.no_grad():
            policy_logits, _, core_state = net(inputs, core_state)
        policy = distribution(action_space, policy_logits)
        after["action"][...] = (policy.mode() if flags.greedy else policy.sample(generator))[0].numpy()
        group.step(after["action"], after)
        if film:
            film.add(after)
        for index in range(width):
            games[index] += envs.finished_episodes(columns(memory.rollout(0), index, 1))
        memory.repeat_last_row(0, 0)
    group.close()
    if film:
        film.close()
    played = [game for share, column_games in zip(quota, games) for game in column_games[:share]]
    returns = np.array([episode_return for episode_return, _ in played])
    standard_error = float(returns.std(ddof=1) / math.sqrt(len(returns))) if len(returns) > 1 else math.nan
    result = {
        "env": trained.env,
        "checkpoint": path,
        "steps": state["counts"]["steps"],
        "greedy": flags.greedy,
        "seed": flags.seed,
        "mean": float(returns.mean()),
        "standard_error": standard_error if math.isfinite(standard_error) else None,
        "returns": returns.tolist(),
        "lengths_in_steps": [length for _, length in played],
    }
    print(
        f"{trained.env}: mean return {returns.mean():.2f} ± {standard_error:.2f} (standard error) over {len(returns)} "
        f"whole games, {'greedy' if flags.greedy else 'sampled'}, seed {flags.seed}, after {result['steps']:,} steps"
    )
    output = os.path.join(os.path.dirname(path), "test.json")
    with open(output, "w") as file:
        json.dump(result, file, indent=2)
    print(f"written to {output}" + (f" and {flags.video}" if flags.video else ""))
    return result


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
        **{name: (1, 10**12) for name in ("total_steps", "group_width", "batch_width", "unroll_length", "log_steps")},
        **{name: (1, 10**6) for name in ("hidden_size", "core_size", "max_bad_updates", "episodes")},
        **{
            name: (0, math.inf)
            for name in ("total_minutes", "num_slots", "learner_threads", "max_env_restarts", "seed")
        },
        **{name: (0, math.inf) for name in ("reward_clip", "baseline_cost", "entropy_cost", "grad_clip", "ppo_clip")},
        **{
            name: (1e-6, math.inf)
            for name in ("env_timeout", "checkpoint_minutes", "clip_rho", "clip_pg_rho", "reward_scale")
        },
        **{name: (1e-12, 10) for name in ("learning_rate", "optimizer_epsilon")},
        **{name: (0, 1) for name in ("discount", "vtrace_lambda", "rmsprop_alpha")},
        "num_actors": (1, 1024),
        "actor_niceness": (0, 19),
    }
    check_limits(flags, limits)
    K, B = flags.group_width, flags.batch_width
    if K % B and B % K:
        raise ValueError(
            f"--group_width {K} and --batch_width {B}: one must divide the other, so that a batch is a part of one "
            f"rollout or several whole ones; try --batch_width {math.gcd(K, B)} or {K * max(1, round(B / K))}"
        )
    groups, slots_per_batch = flags.num_actors * GROUPS_PER_ACTOR, max(B // K, 1)
    needed = max(groups, slots_per_batch)
    num_slots = flags.num_slots or max(groups, slots_per_batch) + slots_per_batch
    if num_slots < needed:
        raise ValueError(
            f"--num_slots {num_slots}: {groups} groups and {slots_per_batch} slots a batch need at least {needed}; "
            "use fewer --num_actors, a smaller --batch_width, or 0 to have it chosen"
        )
    name = flags.name or f"mono-{flags.env.replace('/', '-').replace(':', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Flags(**{**asdict(flags), "num_slots": num_slots, "name": name})


def main() -> None:
    import tyro

    flags = tyro.cli(Flags, description=__doc__, use_underscores=True)
    with exit_with_message("validate"):
        (train if flags.mode == "train" else test)(flags)


if __name__ == "__main__":
    main()
