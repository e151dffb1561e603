"""MonoBeast: IMPALA in one file, fed by actors on this machine over shared memory.

    python monobeast.py --env PongNoFrameskip-v4 --num_actors 2 --name pong   # train; the same line again resumes
    python monobeast.py --mode test --name pong                               # play whole games with the checkpoint
    python plot.py runs/pong                                                  # draw the learning curve

Actor processes step groups of environments straight into rollout slots in shared memory. A feed gives the agent two
loops: `infer` answers each new row with actions, `learn` trains on rollouts and publishes the weights. polybeast.py
trains this same agent on env servers. docs/rollout.md explains every field of a rollout.
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
from beast.run.flags import RUN_LIMITS, RunFlags


@dataclass
class AgentFlags(RunFlags):
    """IMPALA with V-trace. A *step* is one decision of the agent; in Atari it lasts 4 frames."""

    # Rollouts and batches: see "How it works" in README.md.
    group_width: int = 16
    """Environments in a group, which share one forward pass. Wider: less CPU time a step, more policy lag."""
    batch_width: int = 4
    """Environments in one update: a divisor of --group_width (several updates a rollout), or a multiple."""
    unroll_length: int = 20
    """Steps of one rollout (T), after which the value of the last observation stands in for later rewards."""
    epochs: int = 1
    """Passes over a batch, each with V-trace's targets of the net as it is then; together they are one update."""
    minibatches: int = 1
    """Parts of a batch, each some of its columns, dealt anew in every epoch. Each is a step of the optimizer."""
    max_policy_lag: int = 0
    """Updates after which a rollout's oldest action is too old to learn from: it is dropped and counted. 0: never."""

    # The agent.
    net: Literal["shallow", "deep", "mlp"] = "shallow"
    """Image encoder: Nature CNN (shallow; a 3x3 convolution below 36 pixels), IMPALA ResNet (deep) or an MLP (mlp)."""
    width: Literal[1, 2, 4] = 1
    """Channels of the deep net in multiples of IMPALA's 16, 32, 32."""
    value_net: Literal["shared", "separate"] = "shared"
    """Values from the policy's features, or from encoders of their own, which helps where actions are continuous."""
    hidden_size: int = 512
    """Features that an image encoder puts out; MLPs have two layers of a quarter of this."""
    core: Literal["none", "lstm", "gru"] = "none"
    """Recurrent core between encoder and heads, for tasks that need memory."""
    core_size: int = 256
    """Units of the recurrent core."""
    center_images: bool = True
    """Subtract each pixel's running mean and scale by its deviation, so that a static background says nothing and a
    ball much."""
    normalize_observations: bool = True
    """Normalize vectors of floats by running statistics, and clip them to ±10. Checkpoints have the statistics."""

    initial_std: float = 1.0
    """Standard deviation of continuous actions at the start, where the bounds of an action are -1 and 1."""

    # The loss.
    discount: float = 0.99
    """Discount of one agent step (gamma)."""
    vtrace_lambda: float = 1.0
    """Lambda of V-trace: lower trusts the values more and the rewards of far steps less; 1 is IMPALA's."""
    clip_rho: float = 1.0
    """V-trace's clip of importance weights in value targets (rho bar)."""
    clip_pg_rho: float = 1.0
    """V-trace's clip of importance weights in the policy gradient; only with --ppo_clip 0, which has no other."""
    ppo_clip: float = 0.2
    """Clip the policy ratio to [1/(1+x), 1+x] as in APPO; 0 takes the V-trace policy gradient instead."""
    normalize_advantages: bool = True
    """Shift and scale the advantages of an update to mean 0 and deviation 1: the policy's step no longer depends on
    the reward's scale."""
    reward_scale: float = 1.0
    """Multiplies rewards in the learner, before the clip; logged returns stay as they are."""
    reward_clip: float | Literal["auto"] = "auto"
    """Clip rewards to [-x, x] in the learner; 0 means no clip, auto clips to [-1, 1] for Atari ids only. Logged returns
    are never clipped."""
    normalize_returns: Literal["auto", "on", "off"] = "auto"
    """Learn values in units of the returns' running deviation, by a ValueHead (PopArt); auto does unless rewards are
    clipped."""
    baseline_cost: float = 0.5
    """Weight of the value loss."""
    entropy_cost: float = 0.01
    """Weight of the entropy bonus: more keeps the policy random for longer."""
    reduction: Literal["sum", "mean"] = "mean"
    """Whether a loss is the sum or the mean over the steps of an update. With the sum, learning rate and clip depend on
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
    """Global norm above which gradients are scaled down; 0 means no clip. Choose it for the --reduction."""


@dataclass
class Flags(AgentFlags):
    """IMPALA with V-trace on one machine. A *step* is one decision of the agent; in Atari it lasts 4 frames."""

    # Actors.
    mode: Literal["train", "test", "tune"] = "train"  # type: ignore[assignment]  # only this agent tunes
    """train, play whole games with a run's checkpoint (test), or measure this environment, model and machine for about
    40 seconds and print the fastest setting of actors, widths, threads and precision (tune), and with --compile whether
    that is faster."""
    auto: bool = False
    """Measure first, as --mode tune does, and train with --num_actors, --group_width, --num_slots, --learner_threads
    and --amp as found, and without --compile where that was slower. A run that is resumed keeps those it began with."""
    num_actors: int = 1
    """Actor processes, each with two groups of environments: one steps while the other waits for its actions."""
    num_slots: int = 0
    """Rollouts in shared memory: more keep the learner busy, and add policy lag. 0 chooses one more than there are
    groups, or enough for a batch."""
    actor_niceness: int = 5
    """Unix niceness added to actors (0 to 19), so that they yield to the learner where cores are short. Linux with
    autogroups (kernel.sched_autogroup_enabled) ignores it between the actors and the learner."""
    pin_actors: bool = False
    """Bind each actor to a core in turn."""
    deterministic: bool = False
    """Run everything in lock-step in one process: slow, but two runs with one seed are equal to the bit on a CPU."""


# FORK HERE: your environment. Any gymnasium environment will do, for example
#   gymnasium.vector.SyncVectorEnv([lambda: YourEnv(difficulty=3)] * num_envs)
def create_env(flags: Flags, num_envs: int, **overrides) -> gymnasium.vector.VectorEnv:
    """Environments for one group. Called in every actor process, and in the main process to learn the spaces.

    `overrides` are arguments of an environment that go before the flags': render_mode, where a game is filmed.
    """
    return envs.make(flags.env, num_envs, **envs.options(flags) | overrides)


run_if_actor(Flags, create_env)  # an actor process reads this file down to here, and never imports torch
if __name__ == "__main__":
    command_line.print_help_if_asked(Flags, __doc__)  # nor does --help

import copy
import math
import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from beast.device import choose_device, pin_memory
from beast.envs.probe import probe_env
from beast.envs.rows import rollout_fields
from beast.envs.spaces import EnvSpaces, category_sizes, channels_first, policy_width
from beast.errors import InputError, exit_with_message
from beast.feeds.actors import ActorProcesses, LocalActors
from beast.feeds.feed import Feed
from beast.feeds.memory import RolloutMemory
from beast.feeds.shared_memory import SharedMemoryFeed
from beast.learn import vtrace
from beast.learn.distributions import distribution, encode_action
from beast.learn.learner import Learner, step_unless
from beast.learn.nests import map_tensors, minibatches
from beast.learn.published import PublishedWeights
from beast.learn.recurrent import Core
from beast.run import checkpoint, evaluation, tuning
from beast.run.flags import (
    FREE_ON_RESUME,
    check_env_flags,
    check_limits,
    check_slots,
    describe_updates,
    even_policy_lag,
    run_name,
)
from beast.run.hardware import keep_freed_memory
from beast.run.training import Result, Training

F = TypeVar("F", bound=AgentFlags)
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


class Normalize(nn.Module):
    """Images [T, B, C, H, W], or vectors [T, B, size] clipped to ±10, in units of each number's own deviation.

    In training mode the last row of images, or all of vectors, then enter the running statistics (Chan et al. 1979).

    Most of a Pong image never changes, and after a convolution the ball is a few percent of a large constant. Without
    the constant the value loss was a quarter to a half at step 100,000 (benchmarks/results/pong-search.csv).
    """

    def __init__(self, shape: tuple[int, ...], unit: float):
        super().__init__()
        self.unit, self.is_image = unit, len(shape) == 3
        # Added to a deviation: noise of rare pixels stays small. The numbers of a grid are few and mean something.
        self.floor = (0.2 if min(shape[1:]) >= 36 else 0.01) if self.is_image else 1e-4
        for name in ("count", "mean", "variance"):
            self.register_buffer(name, torch.zeros(() if name == "count" else shape))
        self.register_buffer("scale", torch.full(shape, unit))
        self.register_buffer("offset", torch.zeros(shape))

    def forward(self, x):
        output = torch.addcmul(self.offset.to(x.dtype), x, self.scale.to(x.dtype))
        if self.training and torch.is_grad_enabled():
            self.observe(x[-1] if self.is_image else x.flatten(0, 1))
        # An Inf is not clipped, so that its update is bad.
        return output if self.is_image else output.clamp(-10, 10).where(x.isfinite(), output)

    @torch.no_grad()
    def observe(self, x: torch.Tensor) -> None:
        """Take images [B, C, H, W] or vectors [N, size] into the running mean and variance."""
        x = (x.float() * self.unit).where(x.abs() < 1e15, self.mean)  # NaN, Inf and what has no square in float32
        share = len(x) / (self.count + len(x))
        mean = x.mean(0)
        variance = (x - mean).square().mean(0)
        difference = mean - self.mean
        self.mean += difference * share
        self.variance += (variance - self.variance + difference.square() * (1 - share)) * share
        self.count += len(x)
        rounding = 1e-5 * self.mean.abs()  # a constant of 10,000 is one in float32, too
        self.scale.copy_(self.unit / (self.variance.sqrt() + self.floor + rounding))
        self.offset.copy_(-self.mean * self.scale / self.unit)


class Encoder(nn.Module):
    """Features [T, B, size] of one part of the observations [T, B, *shape]: images by convolutions, else by an MLP."""

    def __init__(self, space: gymnasium.Space, flags: AgentFlags, amp: bool):
        super().__init__()
        self.amp, gain, shape = amp, math.sqrt(2), space.shape
        self.categories: spaces.MultiDiscrete | None = None
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            self.categories = spaces.MultiDiscrete(category_sizes(space))
            self.register_buffer("start", torch.as_tensor(space.start), persistent=False)
        self.unit = 1 / 255 if space.dtype == np.uint8 and self.categories is None else 1.0
        self.is_image = len(shape) == 3 and flags.net != "mlp" and self.categories is None
        self.center: Normalize | None = None
        if not self.is_image:
            width = flags.hidden_size // 4
            inputs = spaces.flatdim(space) if self.categories is not None else math.prod(shape)
            layers = [orthogonal(nn.Linear(size, width), gain) for size in (inputs, width)]
            self.head, self.size = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh()), width
            if flags.normalize_observations and np.issubdtype(space.dtype, np.floating):
                self.center = Normalize((inputs,), self.unit)
            return
        self.channels_first = channels_first(shape)
        self.memory_format = torch.channels_last if flags.channels_last else torch.contiguous_format
        shape = shape if self.channels_first else (shape[2], shape[0], shape[1])
        channels = shape[0]
        if flags.center_images and space.dtype == np.uint8:
            self.center = Normalize(shape, self.unit)
        if flags.net == "shallow" and min(shape[1:]) < 3:
            raise InputError(f"an image of {list(space.shape)}: a convolution needs 3 pixels a side; give --net mlp")
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
        flat = self.convolutions(torch.zeros(1, *shape)).numel()
        self.head = nn.Sequential(orthogonal(nn.Linear(flat, flags.hidden_size), gain), nn.ReLU())
        self.size = flags.hidden_size
        self.to(memory_format=self.memory_format)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments):
        """Weights that were trained without statistics stay without; statistics of another shape begin anew."""
        if self.center and f"{prefix}center.mean" not in state_dict:
            if state_dict.pop(f"{prefix}center.count", None) is None and f"{prefix}head.0.weight" in state_dict:
                self.center = None
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def forward(self, x):
        if self.categories is not None:
            return self.head(encode_action(self.categories, (x - self.start).reshape(*x.shape[:2], -1)))
        if not self.is_image:
            x = x.reshape(*x.shape[:2], -1).float()
            return self.head(self.center(x) if self.center else x * self.unit)
        rows = x.shape[:2]
        x = (x if self.channels_first else x.permute(0, 1, 4, 2, 3)).to(torch.bfloat16 if self.amp else torch.float32)
        x = self.center(x) if self.center else x * self.unit  # a uint8 is exact in both
        x = x.flatten(0, 1)
        x = x.contiguous(memory_format=self.memory_format)  # last: converting in the same step took half as long again
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            x = self.convolutions(x).permute(0, 2, 3, 1)  # channels last, as it lies: flattening copies nothing
            x = self.head(x.flatten(1))
        return x.float().unflatten(0, rows)


class ValueHead(nn.Linear):
    """Values [T, B, 1] of features [T, B, size], learned in units of the returns' deviation: PopArt (arXiv 1602.07714).

    `observe` follows mean and deviation of the returns. It changes weight and bias with them, so that no value changes.
    """

    RATE = 1e-3  # share of an update in the running statistics
    LEAST_DEVIATION = 1e-2

    def __init__(self, size: int):
        super().__init__(size, 1)
        for name, start in (("mean", 0.0), ("variance", 1.0), ("deviation", 1.0)):
            self.register_buffer(name, torch.tensor(start))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments):
        for name, buffer in self.named_buffers():  # a checkpoint of before this class has none
            state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def forward(self, x):
        return super().forward(x) * self.deviation + self.mean

    @torch.no_grad()
    def observe(self, mean: torch.Tensor, deviation: torch.Tensor, is_bad: torch.Tensor) -> None:
        """Take mean and deviation of an update's returns into the running ones, unless the update is bad."""
        rate = torch.where(is_bad, 0, self.RATE)
        mean, deviation = (torch.where(is_bad, 0, x) for x in (mean, deviation))  # NaN times a rate of 0 is NaN
        old_mean, old_deviation = self.mean.clone(), self.deviation.clone()
        difference = mean - self.mean
        self.mean += rate * difference
        variance = deviation.square() + difference.square() * (1 - rate)
        self.variance += rate * (variance - self.variance)
        self.deviation.copy_(self.variance.sqrt().clamp(min=self.LEAST_DEVIATION))
        self.weight *= old_deviation / self.deviation
        self.bias.copy_((self.bias * old_deviation + old_mean - self.mean) / self.deviation)


def acting_copy(net: nn.Module) -> nn.Module:
    """A copy of a net to act with. Weights that every pass would cast to bf16 are cast once, when they are copied."""
    net = copy.deepcopy(net).eval().requires_grad_(False)
    for module in net.modules():
        if isinstance(module, Encoder) and module.is_image and module.amp:
            module.convolutions.bfloat16()
            module.head.bfloat16()
        elif isinstance(module, Core) and module.kind == "lstm" and module.amp:
            for weight in (module.weight_ih_l0, module.weight_hh_l0):
                weight.data = weight.data.bfloat16()
    return net


def value_head(net: nn.Module) -> ValueHead | None:
    return next((module for module in net.modules() if isinstance(module, ValueHead)), None)


# FORK HERE: your model. Observations arrive as they are stored (uint8 images included), time-major.
class Net(nn.Module):
    """Policy and value: encoders of the observation fields, an optional recurrent core, two heads.

    `forward(inputs, core_state)` takes `inputs["obs"][name]` [T, B, *shape], `inputs["done"]` [T, B], the last action
    `inputs["action"]` [T, B, …] and its reward `inputs["reward"]` [T, B] (unclipped), and the core's state before row
    0, a tuple of [1, B, core_size] (empty without a core). It returns the policy's parameters [T, B, policy_width] and
    the values [T, B], both float32, and the core's state after row T-1.
    """

    def __init__(self, observation_spaces: dict, action_space: gymnasium.Space, flags: AgentFlags, amp: bool = False):
        super().__init__()
        self.action_space, self.flags = action_space, flags
        self.names = list(observation_spaces)
        self.encoders = nn.ModuleList([Encoder(space, flags, amp) for space in observation_spaces.values()])
        self.value_encoders = copy.deepcopy(self.encoders) if flags.value_net == "separate" else nn.ModuleList()
        size = sum(encoder.size for encoder in self.encoders) + 1 + spaces.flatdim(action_space)
        self.join: nn.Module = nn.Identity()
        if len(self.encoders) > 1:  # what one part means may depend on another
            self.join = nn.Sequential(orthogonal(nn.Linear(size, flags.hidden_size), math.sqrt(2)), nn.ReLU())
            size = flags.hidden_size
        self.value_join = copy.deepcopy(self.join) if flags.value_net == "separate" else nn.Identity()
        self.core = None
        if flags.core != "none":
            self.core, size = Core(flags.core, size, flags.core_size, amp), flags.core_size
        self.policy = orthogonal(nn.Linear(size, policy_width(action_space)), 0.01)
        self.baseline = orthogonal(ValueHead(size) if flags.normalize_returns == "on" else nn.Linear(size, 1), 1.0)
        if isinstance(action_space, spaces.Box):
            nn.init.constant_(self.policy.bias.chunk(2)[1], math.log(flags.initial_std))
        self.amp = amp and (flags.core == "lstm" or any(encoder.is_image for encoder in self.encoders))

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        return self.core.initial_state(batch_size) if self.core is not None else ()

    def inference_copy(self) -> nn.Module:
        return acting_copy(self)

    def forward(self, inputs: dict, core_state: tuple) -> tuple[torch.Tensor, torch.Tensor, tuple]:
        # Zero what would cross an episode boundary; masked_fill also removes NaN.
        begins = inputs["done"].unsqueeze(-1)  # [T, B, 1]
        last_reward = scale_rewards(self.flags, inputs["reward"]).clamp(-1, 1).unsqueeze(-1).masked_fill(begins, 0)
        last_action = encode_action(self.action_space, inputs["action"]).masked_fill(begins, 0)

        def encode(encoders, join):
            features = [encoder(inputs["obs"][name]) for name, encoder in zip(self.names, encoders)]
            return join(torch.cat([*features, last_reward, last_action], dim=-1))  # [T, B, size]

        x = encode(self.encoders, self.join)
        if self.core is not None:
            x, core_state = self.core(x, begins, core_state)  # [T, B, core_size]
        of_values = encode(self.value_encoders, self.value_join) if self.value_encoders else x
        return self.policy(x), self.baseline(of_values).squeeze(-1), core_state


def scale_rewards(flags: AgentFlags, rewards: torch.Tensor) -> torch.Tensor:
    """Rewards as the loss sees them."""
    rewards, clip = rewards * flags.reward_scale, float(flags.reward_clip)
    return rewards.clamp(-clip, clip) if clip else rewards


# FORK HERE: your loss.
def compute_loss(flags: AgentFlags, net: Net, batch: dict, core_state: tuple) -> tuple[torch.Tensor, dict]:
    """The loss of one batch of rollouts [T+1, B, …], and its statistics as tensors."""
    policy_logits, values, _ = net(batch, core_state)  # [T+1, B, W], [T+1, B]
    mask, discounts = vtrace.transition_masks(batch["done"], batch["terminated"], batch["truncated"], flags.discount)
    # Row t+1 holds the action chosen at row t, and the policy that chose it.
    actions, rewards = batch["action"][1:], scale_rewards(flags, batch["reward"][1:])
    if "final_obs" in batch:
        rewards = rewards + flags.discount * final_values(net, batch, core_state)
    policy = distribution(net.action_space, policy_logits[:-1])
    log_probs = policy.log_prob(actions)
    log_rhos = log_probs - distribution(net.action_space, batch["policy_logits"][1:]).log_prob(actions)  # [T, B]
    vs, _ = vtrace.from_importance_weights(
        log_rhos=log_rhos.detach().masked_fill(~mask, -torch.inf),  # a void transition has no weight
        discounts=discounts,
        rewards=rewards,
        values=values[:-1].detach(),
        bootstrap_value=values[-1].detach(),
        clip_rho_threshold=flags.clip_rho,
        lambda_=flags.vtrace_lambda,
    )
    ratio = torch.where(mask, log_rhos, 0).exp()
    # V-trace's own advantages have the importance weights in them. These have not: they are normalized first, and then
    # multiplied by the ratio, through which the clipped surrogate gets its gradient.
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
    unit = head.deviation if (head := value_head(net)) else 1.0
    value_loss = 0.5 * (((vs - values[:-1]) / unit).square() * weight).sum()
    entropy = (policy.entropy() * weight).sum()
    loss = policy_loss + flags.baseline_cost * value_loss - flags.entropy_cost * entropy
    if flags.reduction == "mean":
        loss = loss / count
    with torch.no_grad():
        stats = {
            "losses/return_mean": mean(vs),
            "losses/return_deviation": variance(vs).sqrt(),
            "losses/policy_loss": policy_loss / count,
            "losses/value_loss": value_loss / count,
            "losses/entropy": entropy / count,
            "losses/approx_kl": ((ratio - 1 - log_rhos) * weight).nan_to_num().sum() / count,
            "losses/clipfrac": mean(((ratio - 1).abs() > (flags.ppo_clip or 0.2)).float()),
            "losses/explained_variance": 1 - variance(vs - values[:-1]) / variance(vs).clamp(min=1e-8),
        }
    return loss, stats


@torch.no_grad()
def final_values(net: Net, batch: dict, core_state: tuple) -> torch.Tensor:
    """The value of the last observation of every truncated episode, [T, B], and 0 elsewhere.

    In a SAME_STEP rollout row t+1 already shows the next episode; the last observation of this one lies beside it.
    """
    is_cut = (batch["done"] & batch["truncated"] & ~batch["terminated"])[1:]  # [T, B]
    values, begin = torch.zeros_like(batch["reward"][1:]), 0
    for t in is_cut.any(1).nonzero().flatten().tolist():  # a GPU's host waits here
        if core_state:
            _, _, core_state = net(map_tensors(lambda x: x[begin : t + 1], batch), core_state)
        last = map_tensors(lambda x: x[t + 1 : t + 2], batch)
        last |= {"obs": last["final_obs"], "done": torch.zeros_like(last["done"])}
        values[t] = net(last, core_state)[1][0]
        begin = t + 1
    return values.where(is_cut, 0)


def make_optimizer(flags: AgentFlags, net: nn.Module) -> torch.optim.Optimizer:
    if flags.optimizer == "adam":
        return torch.optim.Adam(net.parameters(), flags.learning_rate, eps=flags.optimizer_epsilon, fused=True)
    return torch.optim.RMSprop(net.parameters(), flags.learning_rate, flags.rmsprop_alpha, flags.optimizer_epsilon)


def learning_rate(flags: AgentFlags, steps: int) -> float:
    """The optimizer's step size after `steps` agent steps."""
    left = max(1 - steps / flags.total_steps, 0.0) if flags.lr_decay == "linear" else 1.0
    return flags.learning_rate * left


# FORK HERE: your update, such as a target network or a second optimizer.
def update(flags: AgentFlags, learner: Learner, batch: dict, core_state: tuple) -> dict[str, torch.Tensor]:
    """Steps of the optimizer on minibatches of rollouts [T+1, B, …]; none after a NaN or Inf in loss or gradients.

    Returns scalar statistics of the last minibatch, or of the first bad one, on the device. Only RMSProp and SAME_STEP
    environments make the host wait for a GPU.
    """
    net, optimizer, laps = learner.net, learner.optimizer, learner.laps
    is_bad = torch.zeros_like(batch["done"][0, 0])
    numbers: dict[str, torch.Tensor] = {}
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(flags, learner.steps)
    for _ in range(flags.epochs):
        for part, state in minibatches(batch, core_state, flags.minibatches):
            with net.register_forward_hook(lambda *_: laps.lap("forward")):
                loss, stats = compute_loss(flags, net, part, state)
            laps.lap("loss")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            laps.lap("backward")
            norm = nn.utils.clip_grad_norm_(net.parameters(), flags.grad_clip or math.inf)
            latest = {**stats, "losses/total_loss": loss.detach(), "losses/grad_norm": norm}
            numbers = {name: torch.where(is_bad, numbers[name], x) for name, x in latest.items()} if numbers else latest
            is_bad = is_bad | ~(loss.detach().isfinite() & norm.isfinite())
            step_unless(optimizer, is_bad)
            if head := value_head(net):
                head.observe(stats["losses/return_mean"], stats["losses/return_deviation"], is_bad)
            laps.lap("optimizer")
    return {**numbers, "is_bad": is_bad}


def infer(training: Training, feed: Feed, weights: PublishedWeights) -> None:
    """Choose the actions of all rows that wait for them, until the feed closes."""
    for rows in feed.acting():  # [1, N, …]
        with torch.no_grad(), weights.newest() as (net, version):
            policy_logits, baseline, core_state = net(rows.inputs, rows.core_state)
            action = distribution(net.action_space, policy_logits).sample(training.generator)
        rows.answer(action, policy_logits, baseline, version, core_state)


def learn(training: Training, feed: Feed, weights: PublishedWeights) -> None:
    """Train on rollouts as they come, until the feed closes or all steps are done."""
    learner = training.learner
    for rollout, core_state in feed.rollouts():  # [T+1, B, …]
        with learner.updating:  # a checkpoint never holds half an update
            stats = learner.measure(rollout) | update(training.flags, learner, rollout, core_state)
            numbers = learner.count(stats)
            weights.publish(learner.net, learner.updates)
            learner.laps.lap("publish")
            training.record(numbers)
        if training.finished():
            return


def make_learner(flags: AgentFlags, spaces: EnvSpaces) -> Learner:
    """A new net and its optimizer on the flags' device."""
    device, amp = choose_device(flags.device, flags.amp)
    net = Net(spaces.observations, spaces.action, flags, amp).to(device)
    return Learner(net, make_optimizer(flags, net), flags.max_bad_updates)


# Remedies for bad updates, and for old rollouts: they may change when a run is resumed.
AGENT_FREE_ON_RESUME = {"learning_rate", "grad_clip", "max_policy_lag"}


def train(flags: Flags) -> Result:
    """Train until steps or minutes are used up, or a signal asks for an end; a checkpoint is left in any case.

    SIGTERM and SIGHUP end it as steps do; Ctrl-C raises KeyboardInterrupt when all is saved. A failure while it trains
    is logged and raises SystemExit(1).
    """
    keep_freed_memory()
    validate(flags)  # before any environment is made
    spaces = probe_env(create_env, flags)
    flags = validate(replace(flags, env=spaces.env_id, atari_backend=spaces.atari_backend))
    if flags.auto:
        flags = tuning.settings_of_existing_run(flags) or tune(flags)
    torch.manual_seed(flags.seed)
    learner = make_learner(flags, spaces)
    resume_free = FREE_ON_RESUME | AGENT_FREE_ON_RESUME | {"actor_niceness", "pin_actors", "auto"}
    with Training("mono", flags, learner, resume_free, spaces.frames_per_step) as training:
        num_groups = flags.num_actors * GROUPS_PER_ACTOR
        memory = RolloutMemory(rollout_fields(spaces), flags.num_slots, flags.unroll_length, flags.group_width)
        if training.device.type == "cuda":
            training.cleanup.callback(pin_memory(memory.buffer, training.device, training.run.log))
        weights = PublishedWeights(learner.net, learner.updates, flags.compile)
        if flags.compile:
            learner.net.forward = torch.compile(learner.net.forward)
        actors: LocalActors | ActorProcesses
        if flags.deterministic:
            actors = LocalActors(create_env, flags, memory, num_groups, training.env_seed)
        else:
            script = os.path.abspath(__file__)
            actors = ActorProcesses(script, flags, memory, num_groups, training.env_seed, training.run.log)
        training.cleanup.callback(actors.close)
        feed = SharedMemoryFeed(learner, flags, memory, actors)
        introduction = (
            f"{num_groups} groups of {flags.group_width} environments, {memory.num_bytes / 1e6:.0f} MB of slots, "
            f"{describe_updates(flags, value_head(learner.net))}, "
            f"policy lag up to {even_policy_lag(flags)} updates where all groups are equally fast"
        )
        return training.train(
            feed, lambda: infer(training, feed, weights), lambda: learn(training, feed, weights), introduction
        )


def tune(flags: Flags) -> Flags:
    """Print what each stage costs here and the fastest setting that follows from it; returns the flags with it."""
    keep_freed_memory()
    spaces = probe_env(create_env, validate(flags))
    flags = validate(replace(flags, env=spaces.env_id, atari_backend=spaces.atari_backend))
    tuned, report = tuning.choose(flags, create_env, spaces, make_learner, update, validate)
    print(report)
    return tuned


def test(flags: AgentFlags, create_env: Callable = create_env) -> dict:
    """Play whole games with a checkpoint, print mean ± standard error and write them to test.json in the run's
    directory."""
    path = flags.checkpoint or os.path.join(flags.root, flags.name, "checkpoint.pt")
    state = checkpoint.load(path, "--checkpoint" if flags.checkpoint else "", variants=("mono", "poly"))
    # create_env may look at these.
    own = {name: getattr(flags, name) for name in ("seed", "video", "greedy", "atari_backend")} | {"mode": "test"}
    known = {field.name for field in fields(flags)}
    trained = type(flags)(**{key: value for key, value in {**state["config"], **own}.items() if key in known})
    overrides = {"render_mode": "rgb_array"} if flags.video else {}
    spaces = probe_env(create_env, trained, **overrides)
    trained = replace(trained, env=spaces.env_id)
    net = Net(spaces.observations, spaces.action, trained).eval()
    checkpoint.load_weights(net, state["net"], path)
    make_envs = partial(create_env, trained, **overrides)
    played = evaluation.play(make_envs, net, flags.episodes, flags.seed, flags.greedy, flags.video)
    return evaluation.report(played, trained, path, state["counts"]["steps"])


def validate_agent(flags: F) -> F:
    """The flags with `auto` filled in. Raises InputError with the value, the limit and the remedy."""
    flags = replace(flags, env_kwargs=check_env_flags(flags))
    if flags.reward_clip == "auto":
        flags = replace(flags, reward_clip=envs.family_of(flags.env).reward_clip)
    if flags.normalize_returns == "auto":
        flags = replace(flags, normalize_returns="off" if flags.reward_clip else "on")
    limits = {  # name: lowest, highest
        **RUN_LIMITS,
        **{name: (1, 10**6) for name in ("group_width", "batch_width", "core_size", "epochs")},
        "hidden_size": (4, 10**6),  # MLPs have a quarter of it
        "unroll_length": (1, 2**16 - 1),
        **{name: (0, math.inf) for name in ("reward_clip", "baseline_cost", "entropy_cost", "grad_clip", "ppo_clip")},
        **{name: (1e-6, math.inf) for name in ("clip_rho", "clip_pg_rho", "reward_scale")},
        **{name: (1e-12, 10) for name in ("learning_rate", "optimizer_epsilon")},
        **{name: (0, 1) for name in ("discount", "vtrace_lambda", "rmsprop_alpha")},
        "max_policy_lag": (0, 10**9),
        "minibatches": (1, flags.batch_width, "each has a column of the batch or more: raise --batch_width"),
        "initial_std": (0.0068, 7.38),  # Gaussian's
    }
    check_limits(flags, limits)
    if flags.value_net == "separate" and flags.core != "none":
        raise InputError(
            f"--value_net separate --core {flags.core}: values would have no memory; leave one of them out"
        )
    return flags


def validate(flags: Flags) -> Flags:
    """The flags with automatic values filled in. Raises InputError with the value, the limit and the remedy."""
    flags = validate_agent(flags)
    check_limits(flags, {"num_actors": (1, 1024), "actor_niceness": (0, 19)})
    num_slots = check_slots(flags.num_slots, flags.num_actors * GROUPS_PER_ACTOR, flags.group_width, flags.batch_width)
    least = max(flags.group_width // flags.batch_width, 1) - 1
    if 0 < flags.max_policy_lag < least:
        raise InputError(
            f"--max_policy_lag {flags.max_policy_lag}: a rollout of {flags.group_width} columns gives {least + 1} "
            f"updates, the last of which lags by {least} or more: give at least {least}, or 0 for no limit"
        )
    if flags.auto and flags.deterministic:
        raise InputError("--auto with --deterministic: what is measured differs from run to run; leave one of them out")
    threads = 1 if flags.deterministic else flags.learner_threads
    return replace(flags, num_slots=num_slots, learner_threads=threads, name=run_name("mono", flags))


def main() -> None:
    flags = command_line.parse(Flags, __doc__)
    with exit_with_message():
        {"train": train, "test": lambda flags: test(validate(flags)), "tune": tune}[flags.mode](flags)


if __name__ == "__main__":
    main()
