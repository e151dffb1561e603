"""MonoBeast: IMPALA in one file, fed by actors on this machine over shared memory.

    python monobeast.py --env PongNoFrameskip-v4 --num_actors 2 --name pong   # train; the same line again resumes
    python monobeast.py --mode test --name pong                               # play whole games with the checkpoint
    python plot.py runs/pong                                                  # draw the learning curve

Actor processes step groups of environments. A group's step is a row; T+1 rows are a rollout, a slot of shared memory.
Two threads loop over a feed: `infer` answers rows with actions, `learn` trains on rollouts and publishes the weights.
polybeast.py trains this same agent on env servers. docs/rollout.md explains every field of a rollout.
"""

# ruff: noqa: E402  (an actor stops reading this file before torch is imported)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import gymnasium
from gymnasium import spaces

from beast import envs
from beast.feeds.actor import run_if_actor
from beast.run import command_line
from beast.run.flags import ActorFlags, RunFlags
from monobeast_presets import ABOUT, PRESETS


@dataclass
class AgentFlags(RunFlags):
    """IMPALA with V-trace. A *step* is one decision of the agent; in Atari it lasts 4 frames.

    --help shows the text below each field, in sections that begin with a comment.
    """

    # Rollouts and batches: see "How it works" in README.md.
    group_width: int = 16
    """Environments in a group, which share one forward pass. Wider: less CPU time a step, more policy lag."""
    batch_width: int = 4
    """Columns of a batch (B), one for each environment in it. A batch is a part of one group's rollout, or several
    whole rollouts: one of --group_width and this must divide the other."""
    unroll_length: int = 20
    """Steps of one rollout (T), after which the value of the last observation stands in for later rewards."""
    epochs: int = 1
    """Passes over a batch, with V-trace's targets computed anew for every minibatch; together they are one update."""
    minibatches: int = 1
    """Into how many minibatches a batch's columns are dealt, at random in every epoch; one optimizer step each."""
    max_policy_lag: int = 0
    """Drop a rollout whose oldest action is too many updates old: more than this when the last of its batches trains.
    0: drop none. stats/dropped_rollouts counts them."""

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
    """Normalize each pixel of images with bounds by its running mean and deviation: the static background vanishes."""
    normalize_observations: bool = True
    """Normalize vectors of numbers by running statistics, and clip them to ±10. Checkpoints have the statistics."""
    initial_std: float = 1.0
    """Standard deviation of continuous actions at the start, in units of half an action's range (bounds are ±1)."""

    # The loss.
    discount: float = 0.99
    """Discount of one agent step (gamma)."""
    vtrace_lambda: float = 1.0
    """Lambda of V-trace: lower trusts the values more and the rewards of far steps less; 1 is IMPALA's."""
    clip_rho: float = 1.0
    """V-trace's clip of importance weights in value targets (rho bar)."""
    clip_pg_rho: float = 1.0
    """V-trace's clip of importance weights in the policy gradient; used only with --ppo_clip 0."""
    ppo_clip: float = 0.2
    """Clip the policy ratio to [1/(1+x), 1+x], symmetric in the log as in APPO; 0: the V-trace policy gradient."""
    normalize_advantages: bool = True
    """Shift and scale the advantages of a minibatch to mean 0 and deviation 1, whatever the rewards' scale."""
    reward_scale: float = 1.0
    """Multiplies rewards, for loss and net, before the clip; logged returns stay as they are."""
    reward_clip: float | Literal["auto"] = "auto"
    """Clip rewards to [-x, x], for loss and net, not in the log; 0: no clip; auto: [-1, 1] for Atari ids only."""
    normalize_returns: Literal["auto", "on", "off"] = "auto"
    """Learn values in units of the returns' running deviation (PopArt); auto: on, unless rewards are clipped."""
    baseline_cost: float = 0.5
    """Weight of the value loss."""
    entropy_cost: float = 0.01
    """Weight of the entropy bonus: more keeps the policy random for longer."""
    reduction: Literal["sum", "mean"] = "mean"
    """Sum or mean of the loss over a minibatch's steps. With the sum, --learning_rate and --grad_clip must fit."""

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
class Flags(ActorFlags, AgentFlags):
    """IMPALA with V-trace on one machine. polybeast.py combines AgentFlags with the flags of env servers instead."""

    # Actors.
    mode: Literal["train", "test", "tune"] = "train"  # type: ignore[assignment]  # only this agent tunes
    """train, play whole games with a run's checkpoint (test), or measure this environment, model and machine for about
    40 seconds and print the fastest setting of actors, widths, threads and precision (tune). With --compile it measures
    that, too."""
    auto: bool = False
    """Measure first, as --mode tune does, and train with the setting found. A resumed run keeps what it began with."""


# FORK HERE: your environment. Any gymnasium environment will do, for example
#   gymnasium.vector.SyncVectorEnv([lambda: YourEnv(difficulty=3, **overrides)] * num_envs)
def create_env(flags: Flags, num_envs: int, **overrides) -> gymnasium.vector.VectorEnv:
    """Environments for one group. Called in every actor process, and in the main process to learn the spaces.

    `overrides` are arguments of an environment that override the flags', such as render_mode, to film a game.
    """
    return envs.make(flags.env, num_envs, **(envs.options(flags) | overrides))


# Each actor process runs this same file, with an argument of its own. It never returns from this call: it steps
# environments until the run ends, and does not import torch.
run_if_actor(Flags, create_env)
if __name__ == "__main__":
    command_line.print_help_if_asked(Flags, __doc__, PRESETS, ABOUT)  # without torch, too

import copy
import math
from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor, nn

from beast.device import choose_device
from beast.envs.masks import MASK
from beast.envs.spaces import EnvSpaces, is_image, policy_width
from beast.errors import InputError, exit_with_message
from beast.feeds.actors import GROUPS_PER_ACTOR
from beast.feeds.feed import Feed
from beast.feeds.slots import even_policy_lag
from beast.learn import ranks, vtrace
from beast.learn.distributions import action_layout, distribution, mask_logits, to_features
from beast.learn.layers import MixedPrecision, ResidualBlock, orthogonal
from beast.learn.learner import Learner, Outcome, step_unless
from beast.learn.nests import map_tensors, minibatches
from beast.learn.normalization import (
    Observations,
    ReturnMoments,
    ValueHead,
    own_values,
    value_head,
    without_statistics,
)  # fmt: skip
from beast.learn.published import PublishedWeights, start_weights
from beast.learn.recurrent import Core
from beast.run import evaluation, tuning
from beast.run.flags import FREE_ON_RESUME, check_flags, check_slots, run_name
from beast.run.training import Result, Training, open_feed, prepare

GAIN = math.sqrt(2)  # of orthogonal weights before a ReLU or tanh


class Encoder(nn.Module):
    """Features [R rows, B environments, size] of one field of the observations: images by convolutions, else an MLP."""

    def __init__(self, space: gymnasium.Space, flags: AgentFlags, amp: bool):
        super().__init__()
        self.is_image = flags.net != "mlp" and is_image(space, flags.channels)
        normalize = flags.center_images if self.is_image else flags.normalize_observations
        # Casts and normalizes: images to channels first, all others to vectors (categories one-hot). `center.shape` is
        # the shape of one observation after that.
        self.center = Observations(space, self.is_image, normalize, amp, flags.channels)
        if self.is_image:
            self.size = flags.hidden_size
            self.convolutions = MixedPrecision(*self._convolutions(space, flags), amp=amp)
            inputs = self.convolutions(torch.zeros(1, *self.center.shape)).numel()
            self.head = MixedPrecision(orthogonal(nn.Linear(inputs, self.size), GAIN), nn.ReLU(), amp=amp)
            self.memory_format = torch.channels_last if flags.channels_last else torch.contiguous_format
            self.to(memory_format=self.memory_format)
        else:
            self.size = flags.hidden_size // 4
            widths = (self.center.shape[0], self.size)  # of both layers' inputs
            layers = [orthogonal(nn.Linear(width, self.size), GAIN) for width in widths]
            self.head = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh())
        self.register_load_state_dict_pre_hook(without_statistics)  # older checkpoints have none: then do not normalize

    def _convolutions(self, space: gymnasium.Space, flags: AgentFlags) -> list[nn.Module]:
        """Layers for images [N, C, H, W]."""
        channels, *sides = self.center.shape
        if flags.net == "shallow" and min(sides) < 36:  # MinAtar and other grids: the Nature CNN would leave nothing
            return [orthogonal(nn.Conv2d(channels, 16, 3), GAIN), nn.ReLU()]
        if flags.net == "shallow":  # Mnih et al. 2015
            convolutions = [nn.Conv2d(channels, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3)]
            return [layer for c in convolutions for layer in (orthogonal(c, GAIN), nn.ReLU())]
        layers: list[nn.Module] = []  # Espeholt et al. 2018, figure 3 right
        for out in (16 * flags.width, 32 * flags.width, 32 * flags.width):
            convolution = orthogonal(nn.Conv2d(channels, out, 3, padding=1), GAIN)
            layers += [convolution, nn.MaxPool2d(3, 2, padding=1), ResidualBlock(out), ResidualBlock(out)]
            channels = out
        return [*layers, nn.ReLU()]

    def forward(self, x):
        leading = x.shape[:2]
        x = self.center(x)
        if not self.is_image:
            return self.head(x)
        # Change the memory layout after `center` has cast: both at once took 1.5 times as long (benchmarks/LEDGER.md).
        x = x.flatten(0, 1).contiguous(memory_format=self.memory_format)
        x = self.convolutions(x).permute(0, 2, 3, 1)  # [N, H, W, C]: with --channels_last flatten copies nothing
        return self.head(x.flatten(1)).float().unflatten(0, leading)


# FORK HERE: your model. Observations arrive as they are stored (uint8 images included), time-major.
class Net(nn.Module):
    """Policy and value: encoders of the observation fields, an optional recurrent core, two heads.

    `forward(inputs, core_state)` takes R rows: 1 to act, T+1 to learn. It changes no statistics: `observe` does.
    - inputs: `obs[name]` [R, B, *shape]; `done` [R, B], the row begins an episode; the last `action` [R, B, …] and its
      `reward` [R, B], unclipped; the `task` [R, B]; core_state: before row 0, a tuple of [1, B, core_size], or ()
    - returns the policy's parameters [R, B, policy_width], the values [R, B], both float32, and the core's next state
    `flags` are those that `validate` returns.
    """

    def __init__(self, observation_spaces: dict, action_space: gymnasium.Space, flags: AgentFlags, amp: bool = False):
        super().__init__()
        self.action_space, self.flags = action_space, flags
        self.action_layout = action_layout(action_space)
        self.names = [name for name in observation_spaces if name != MASK]  # which only says what is legal
        self.encoders = nn.ModuleList([Encoder(observation_spaces[name], flags, amp) for name in self.names])
        # The value encoders begin as copies of the policy's.
        self.value_encoders = copy.deepcopy(self.encoders) if flags.value_net == "separate" else nn.ModuleList()
        size = sum(encoder.size for encoder in self.encoders) + 1 + spaces.flatdim(action_space)  # 1: the last reward
        self.join: nn.Module = nn.Identity()  # a single field needs no layer that mixes
        if len(self.encoders) > 1:  # what one field means may depend on another
            self.join = nn.Sequential(orthogonal(nn.Linear(size, flags.hidden_size), GAIN), nn.ReLU())
            size = flags.hidden_size
        self.value_join = copy.deepcopy(self.join) if flags.value_net == "separate" else nn.Identity()
        self.core = None
        if flags.core != "none":
            self.core = Core(flags.core, size, flags.core_size, amp)
            size = flags.core_size
        self.policy = orthogonal(nn.Linear(size, policy_width(action_space)), 0.01)
        has_popart, tasks = flags.normalize_returns == "on", len(envs.tasks_of(flags.env, flags.tasks))
        self.baseline = orthogonal(ValueHead(size, tasks) if has_popart else nn.Linear(size, 1), 1.0)
        if isinstance(action_space, spaces.Box):
            _, log_std = self.policy.bias.chunk(2)  # views of the means and of the log deviations
            nn.init.constant_(log_std, math.log(flags.initial_std))
        has_images = any(encoder.is_image for encoder in self.encoders)
        self.amp = amp and (flags.core == "lstm" or has_images)  # only for the log: MLP and GRU compute in float32

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        """The core's state before an episode, [1, B, core_size] each, on the CPU."""
        return self.core.initial_state(batch_size) if self.core is not None else ()

    @torch.no_grad()
    def observe(self, observations: dict, counts: Tensor | None = None) -> None:
        """Take observations [R, B, *shape] by name into the running statistics that `forward` normalizes by; `counts`
        [R, B]: only these."""
        for encoders in (self.encoders, self.value_encoders):
            for name, encoder in zip(self.names, encoders):
                encoder.center.observe(observations[name], counts)

    def forward(self, inputs: dict, core_state: tuple) -> tuple[Tensor, Tensor, tuple]:
        # Zero what would cross an episode boundary, by masked_fill: a product would keep a NaN.
        begins = inputs["done"].unsqueeze(-1)  # [R, B, 1]
        last_reward = scale_rewards(self.flags, inputs["reward"]).clamp(-1, 1).unsqueeze(-1).masked_fill(begins, 0)
        last_action = to_features(self.action_layout, inputs["action"]).masked_fill(begins, 0)

        def encode(encoders, join):
            features = [encoder(inputs["obs"][name]) for name, encoder in zip(self.names, encoders)]
            return join(torch.cat([*features, last_reward, last_action], dim=-1))  # [R, B, size]

        x = encode(self.encoders, self.join)
        if self.core is not None:
            x, core_state = self.core(x, begins, core_state)  # [R, B, core_size]
        is_separate = self.flags.value_net == "separate"
        value_features = encode(self.value_encoders, self.value_join) if is_separate else x
        policy_logits = mask_logits(self.action_layout, self.policy(x), inputs["obs"].get(MASK), otherwise=0)
        return policy_logits, own_values(self.baseline(value_features), inputs), core_state


def scale_rewards(flags: AgentFlags, rewards: Tensor) -> Tensor:
    """Scaled and clipped rewards, for the loss. `Net.forward` takes them, too, and clips them to ±1 on top."""
    rewards, clip = rewards * flags.reward_scale, float(flags.reward_clip)
    return rewards.clamp(-clip, clip) if clip else rewards


# FORK HERE: your loss.
def compute_loss(flags: AgentFlags, net: Net, batch: dict, core_state: tuple) -> tuple[Tensor, ReturnMoments, dict]:
    """The loss of one minibatch of rollouts [T+1, B, …], the moments of its value targets for PopArt, and metrics, all
    scalar tensors. Metrics are means over steps, but total_loss with --reduction sum. `core_state` is the one before
    row 0."""
    policy_logits, values, _ = net(batch, core_state)  # [T+1, B, policy_width], [T+1, B]
    # Transition t leads from row t to row t+1. mask [T, B]: does it count? Under NEXT_STEP autoreset, gymnasium's own,
    # the action at an episode's last observation only resets, so that transition does not. discounts [T, B] are 0 where
    # row t+1 is terminal or begins an episode; so a truncated episode is valued by its last row (docs/rollout.md).
    # Several policies may have acted (multibeast.py): then batch["counts"] are the rows whose action this one chose.
    ends = batch["done"], batch["terminated"], batch["truncated"]
    mask, discounts = vtrace.transition_masks(*ends, flags.discount, batch.get("counts"))
    # Row t+1 holds the action chosen at row t, and the policy that chose it.
    actions, rewards = batch["action"][1:], scale_rewards(flags, batch["reward"][1:])
    if "final_obs" in batch:  # SAME_STEP autoreset: no row has a truncated episode's last obs, so add its value here
        rewards = rewards + flags.discount * final_values(net, batch, core_state)
    policy = distribution(net.action_space, policy_logits[:-1])
    log_probs = policy.log_prob(actions)
    log_rhos = log_probs - distribution(net.action_space, batch["policy_logits"][1:]).log_prob(actions)  # [T, B]
    vs = vtrace.from_importance_weights(
        log_rhos=log_rhos.detach().masked_fill(~mask, -torch.inf),  # weight 0
        discounts=discounts,
        rewards=rewards,
        values=values[:-1].detach(),
        bootstrap_value=values[-1].detach(),
        clip_rho_threshold=flags.clip_rho,
        lambda_=flags.vtrace_lambda,
    ).vs
    log_ratio = torch.where(mask, log_rhos, 0)  # 0, not -inf: means below multiply by weight 0, and 0 * inf is NaN
    ratio = log_ratio.exp()
    popart = value_head(net)  # a ValueHead, or None
    unit = popart.unit(batch) if popart else 1.0  # values have the rewards' unit; errors count in that of returns
    # V-trace's own pg_advantages contain the importance weights. These do not: both losses below multiply by `ratio`.
    # With --ppo_clip the gradient flows through `ratio`, else through log_probs.
    advantages = (rewards + discounts * torch.cat([vs[1:], values[-1:].detach()]) - values[:-1].detach()) / unit
    weight = mask.float()
    # Of all ranks together: then their gradients add up to that of one rank with all columns.
    errors = (vs - values[:-1]).detach()
    count, means, variances = ranks.moments(weight, advantages, vs, errors)
    if flags.normalize_advantages:
        advantages = (advantages - means[0]) / variances[0].sqrt().clamp(min=1e-5)
    if flags.ppo_clip:
        clipped = ratio.clamp(1 / (1 + flags.ppo_clip), 1 + flags.ppo_clip)
        policy_gains = torch.minimum(ratio * advantages, clipped * advantages)
    else:
        policy_gains = ratio.detach().clamp(max=flags.clip_pg_rho) * advantages * log_probs
    policy_loss = -(policy_gains * weight).sum()
    value_loss = 0.5 * (((vs - values[:-1]) / unit).square() * weight).sum()
    entropy = (policy.entropy() * weight).sum()
    loss = policy_loss + flags.baseline_cost * value_loss - flags.entropy_cost * entropy
    if flags.reduction == "mean":
        loss = loss / count
    with torch.no_grad():
        share = count / ranks.size()  # metrics are averaged over the ranks (see `ranks.sum_gradients`)

        def mean(x):
            return (x * weight).sum() / share

        found = ReturnMoments(means[1], variances[1].sqrt())
        metrics = {
            "losses/return_mean": found.mean,
            "losses/return_deviation": found.deviation,
            "losses/policy_loss": policy_loss / share,
            "losses/value_loss": value_loss / share,
            "losses/entropy": entropy / share,
            "losses/approx_kl": mean(ratio - 1 - log_ratio),
            "losses/clipfrac": mean(((ratio - 1).abs() > (flags.ppo_clip or 0.2)).float()),  # counted as in PPO
            "losses/explained_variance": 1 - variances[2] / variances[1].clamp(min=1e-8),
            "losses/total_loss": loss.detach() * ranks.size(),
        }
        returns = popart.moments(vs, mask, batch) if popart else found
    return loss, returns, metrics


@torch.no_grad()
def final_values(net: Net, batch: dict, core_state: tuple) -> Tensor:
    """The value of the last observation of every truncated episode, [T, B], and 0 elsewhere.

    In a SAME_STEP rollout row t+1 already shows the next episode; the last observation of this one lies beside it.
    """
    is_cut = (batch["done"] & batch["truncated"] & ~batch["terminated"])[1:]  # [T, B]: transition t is truncated
    values = torch.zeros_like(batch["reward"][1:])
    first = 0  # `core_state` is the one before row `first`
    for t in is_cut.any(1).nonzero().flatten().tolist():  # .tolist() makes the CPU wait for a GPU
        if core_state:
            _, _, core_state = net(map_tensors(lambda x: x[first : t + 1], batch), core_state)
            first = t + 1
        # Row t+1 has the old episode's action and reward, but the new one's obs and done: replace obs and done.
        last = map_tensors(lambda x: x[t + 1 : t + 2], batch)
        last |= {"obs": last["final_obs"], "done": torch.zeros_like(last["done"])}
        _, value, _ = net(last, core_state)
        values[t] = value[0]
    return values.where(is_cut, 0)


def make_optimizer(flags: AgentFlags, net: nn.Module) -> torch.optim.Optimizer:
    """Adam or RMSProp. `step_unless` skips bad updates: a fused Adam on the GPU itself, with RMSProp the CPU waits."""
    if flags.optimizer == "adam":
        return torch.optim.Adam(net.parameters(), flags.learning_rate, eps=flags.optimizer_epsilon, fused=True)
    return torch.optim.RMSprop(net.parameters(), flags.learning_rate, flags.rmsprop_alpha, flags.optimizer_epsilon)


def learning_rate(flags: AgentFlags, steps: int, initial: float | None = None) -> float:
    """The optimizer's step size after `steps` agent steps; `initial`: that of a group of parameters of its own."""
    left = max(1 - steps / flags.total_steps, 0.0) if flags.lr_decay == "linear" else 1.0
    return (flags.learning_rate if initial is None else initial) * left


def gradients(flags: AgentFlags, learner: Learner, batch: dict, core_state: tuple) -> tuple:
    """Leave the gradients of a minibatch's loss, clipped, in the parameters' `.grad`. Returns the loss, the gradients'
    norm before the clip, and what `compute_loss` returns beside the loss. `laps.lap(stage)` is for the profile: it
    books the time since the last lap."""
    net, laps = learner.net, learner.laps
    with net.register_forward_hook(lambda *_: laps.lap("forward")):  # compute_loss calls the net
        loss, returns, metrics = compute_loss(flags, net, batch, core_state)
    laps.lap("loss")
    learner.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    metrics = ranks.sum_gradients(net.parameters(), metrics)
    grad_norm = nn.utils.clip_grad_norm_(net.parameters(), flags.grad_clip or math.inf)
    return metrics["losses/total_loss"], grad_norm, returns, metrics


# FORK HERE: your update, such as a target network or a second optimizer.
def update(flags: AgentFlags, learner: Learner, batch: dict, core_state: tuple) -> Outcome:
    """Steps of the optimizer on minibatches of rollouts [T+1, B, …]; none after a NaN or Inf in loss or gradients.

    Only RMSProp and SAME_STEP environments make the CPU wait for a GPU.
    """
    net, optimizer = learner.net, learner.optimizer
    popart = value_head(net)
    outcome: Outcome | None = None
    for param_group, initial in zip(optimizer.param_groups, learner.rates):
        param_group["lr"] = learning_rate(flags, learner.schedule_steps, initial)
    for epoch in range(flags.epochs):
        for part, state in minibatches(batch, core_state, flags.minibatches):
            loss, grad_norm, returns, metrics = learner.call(partial(gradients, flags, learner), part, state)
            learner.laps.lap("backward")
            step = Outcome(is_bad=~(loss.isfinite() & grad_norm.isfinite()), grad_norm=grad_norm, metrics=metrics)
            outcome = outcome.then(step) if outcome else step  # the first bad one, else the latest
            step_unless(optimizer, outcome.is_bad)
            if popart:
                popart.observe(returns, outcome.is_bad)
            learner.laps.lap("optimizer")
        if epoch == 0:
            # Once a batch: after the last of ten epochs Hopper learned more slowly.
            net.observe(batch["obs"], batch.get("counts"))
    assert outcome  # there is an epoch
    return outcome


def infer(feed: Feed, weights: PublishedWeights, generator: torch.Generator) -> None:
    """Choose the actions of all rows that wait for them, until the feed closes. `generator` draws them."""
    for rows in feed.acting():  # [1, N, …]: N environments wait
        with torch.no_grad(), weights.newest() as (net, version):
            policy_logits, baseline, core_state = net(rows.inputs, rows.core_state)
            action = distribution(net.action_space, policy_logits).sample(generator)
        rows.answer(action, policy_logits, baseline, version, core_state)


def learn(training: Training, feed: Feed, weights: PublishedWeights) -> None:
    """Train on rollouts as they come, until the feed closes, or all steps or minutes are used up.

    Raises FloatingPointError after --max_bad_updates bad updates in a row.
    """
    learner = training.learner
    for batch, core_state in training.rollouts(feed):  # [T+1, B, …]
        with learner.updating:  # a lock: no checkpoint holds half an update
            measured = learner.measure(batch)  # steps and policy lag, before the update may edit the batch
            outcome = update(training.flags, learner, batch, core_state)
            # Counts the update and returns its numbers. A GPU's come one update late, so that the CPU need not wait:
            # None after the first update, which `record` takes, too.
            counted = learner.count(measured, outcome)
            weights.publish(learner.net, learner.updates)  # with the number that `count` has just raised
            learner.laps.lap("publish")
            training.record(counted)


def make_learner(flags: AgentFlags, env_spaces: EnvSpaces) -> Learner:
    """A new net and its optimizer on the flags' device. Raises InputError if there is no such device."""
    device, amp = choose_device(flags.device, flags.amp)
    net = Net(env_spaces.observations, env_spaces.action, flags, amp).to(device)
    return Learner(net, make_optimizer(flags, net), flags.max_bad_updates)


# Flags that may change when a run is resumed. The three added here are for users with bad updates or old rollouts.
AGENT_FREE_ON_RESUME = FREE_ON_RESUME | {"learning_rate", "grad_clip", "max_policy_lag"}


def train(flags: Flags) -> Result:
    """Train until steps or minutes are used up, or a signal asks for an end (see `Training.run_threads`)."""
    # Validates, makes an environment to learn its spaces and its id (a fork may ignore --env), and validates again, as
    # flags that are "auto" depend on the id.
    flags, env_spaces = prepare(flags, create_env, validate)
    if flags.auto:
        flags = tuning.settings_of_existing_run(flags) or tune(flags)
    torch.manual_seed(flags.seed)
    learner = make_learner(flags, env_spaces)
    with Training("mono", flags, learner, AGENT_FREE_ON_RESUME | {"auto"}, env_spaces.frames_per_step) as training:
        weights = start_weights(learner, flags)  # after Training has loaded the checkpoint
        num_groups = flags.num_actors * GROUPS_PER_ACTOR
        feed = open_feed(
            training, create_env, env_spaces, num_groups, __file__,
            batch_width=flags.batch_width, max_policy_lag=flags.max_policy_lag,
        )  # fmt: skip
        lag = even_policy_lag(flags.num_slots, flags.group_width, flags.batch_width)
        return training.run_threads(
            feed,
            infer=partial(infer, feed, weights, training.generator),
            learn=partial(learn, training, feed, weights),
            introduction=f"{describe_updates(flags, learner.net)}, policy lag up to {lag} if groups are equally fast",
        )


def describe_updates(flags: AgentFlags, net: nn.Module) -> str:
    """What an update learns from, for the log's first line."""
    clip = f"clipped to ±{flags.reward_clip:g}" if flags.reward_clip else "not clipped"
    normalized = ", returns normalized" if value_head(net) else ""
    epochs = f" in {flags.epochs} epochs" if flags.epochs > 1 else ""
    parts = f" of {flags.minibatches} minibatches" if flags.minibatches > 1 else ""
    return f"updates of {flags.batch_width} x {flags.unroll_length} steps{epochs}{parts}, rewards {clip}{normalized}"


def tune(flags: Flags) -> Flags:
    """Print what each stage costs here and the fastest setting that follows from it; returns the flags with it."""
    flags, env_spaces = prepare(flags, create_env, validate)
    return tuning.choose(flags, create_env, env_spaces, make_learner, update, validate)


def test(flags: AgentFlags, create_env: Callable = create_env, given: Collection[str] = ()) -> dict:
    """Play whole games with a checkpoint, and print and write their returns (see `evaluation.report`)."""
    return evaluation.play_checkpoint(flags, create_env, Net, variants=("mono", "poly"), given=given)


def validate_agent(flags):
    """The flags, with both "auto" of AgentFlags replaced. Raises InputError with value, limit and remedy."""
    if flags.reward_clip == "auto":
        flags = replace(flags, reward_clip=envs.family_of(flags.env).reward_clip)
    if flags.normalize_returns == "auto":
        flags = replace(flags, normalize_returns="off" if flags.reward_clip else "on")
    limits = {  # beside those of all runs (beast/run/flags.py): lowest, highest, remedy
        "epochs": (1, 10**6),
        **{name: (0, math.inf) for name in ("reward_clip", "baseline_cost", "entropy_cost", "ppo_clip")},
        **{name: (1e-6, math.inf) for name in ("clip_rho", "clip_pg_rho", "reward_scale")},
        **{name: (0, 1) for name in ("vtrace_lambda", "rmsprop_alpha")},
        "max_policy_lag": (0, 10**9),
        "minibatches": (1, flags.batch_width, "each has a column of the batch or more: raise --batch_width"),
        "initial_std": (0.0068, 7.38),  # from exp(LOG_STD_MIN) to exp(LOG_STD_MAX) of learn/distributions.py
    }
    flags = check_flags(flags, limits)
    if flags.value_net == "separate" and flags.core != "none":
        raise InputError(
            f"--value_net separate --core {flags.core}: values would have no memory; leave one of them out"
        )
    return flags


def validate(flags: Flags) -> Flags:
    """The flags with automatic values filled in. Raises InputError with the value, the limit and the remedy."""
    flags = validate_agent(flags)
    num_slots = check_slots(flags, flags.num_actors * GROUPS_PER_ACTOR)
    if flags.auto and flags.deterministic:
        raise InputError("--auto with --deterministic: what is measured differs from run to run; leave one of them out")
    threads = 1 if flags.deterministic else flags.learner_threads
    return replace(flags, num_slots=num_slots, learner_threads=threads, name=run_name("mono", flags))


def main() -> None:
    flags = command_line.parse(Flags, __doc__, PRESETS, ABOUT)
    with exit_with_message():
        given = command_line.given()
        {"train": train, "test": lambda x: test(validate(x), create_env, given), "tune": tune}[flags.mode](flags)


if __name__ == "__main__":
    main()
