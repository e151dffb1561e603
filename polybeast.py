"""PolyBeast: the agent of monobeast.py with central inference over gRPC, its environments on any number of hosts.

    python polybeast.py --env PongNoFrameskip-v4 --name pong-poly       # starts its own env servers; again: resumes
    python polybeast.py --addresses hostA:4431 hostB:4431 --token_file token --tls_ca cert.pem     # polybeast_env.py's
    python polybeast.py --mode test --name pong-poly                    # play whole games with the checkpoint

Env servers (polybeast_env.py) stream rows of observations to the actor pool, threads in C++ that bring them to a
dynamic batcher and whole rollouts to a batching queue. What is left for this file is two loops: `infer` answers the
batcher's batches, `learn` trains on the queue's. Words, shapes and the meaning of every field: see README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import shlex
import sys
from dataclasses import dataclass, fields, replace
from typing import Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from beast import checkpoint, envs, games, vtrace, wire
from beast.distributions import action_shape_dtype, distribution, encode_action, encoded_action_width, policy_width
from beast.env_server import MAKING_SECONDS
from beast.flags import FREE_ON_RESUME, RUN_LIMITS, RunFlags, check_limits, check_widths, exit_with_message, run_name
from beast.learner import Learner
from beast.local_servers import LocalServers
from beast.machine import choose_device, keep_freed_memory, stream
from beast.profile import Laps
from beast.recurrent import run_core
from beast.tensors import PublishedWeights, SeenObservations, map_tensors
from beast.training import Training
from polybeast_env import create_env, parse_flags

try:
    import libbeast
except ModuleNotFoundError:
    sys.exit("PolyBeast needs its C++ part, libbeast: `pip install .` builds it (README.md, PolyBeast)")

STREAM_STAGES = ("environment", "inference", "enqueue")  # what a stream waits for, in turn
STREAMS_PER_SERVER = 2  # double buffering: one group steps while the other's actions are chosen


@dataclass
class Flags(RunFlags):
    """IMPALA with V-trace, its environments anywhere. A *step* is one decision of the agent; in Atari it lasts 4
    frames."""

    # Where the environments are.
    num_servers: int = 2
    """Env servers to start here, where no --addresses are given; each serves two groups of environments."""
    addresses: tuple[str, ...] = ()
    """Env servers that run already, `host:port` or `unix:/path`. Environment and group width are theirs then."""
    token_file: str = ""
    """File with the secret that the env servers ask for."""
    tls_ca: str = ""
    """Certificate (PEM) that the env servers' certificates are signed with, or their own; a token needs it."""
    insecure: bool = False
    """Send a token to other hosts without TLS: in a trusted network."""
    server_niceness: int = 5
    """Unix niceness added to env servers started here (0 to 19), so that they yield to the learner."""

    # Who does how much.
    group_width: int = 16
    """Environments in a group: they are stepped together and travel together. Wider costs less a step, and more
    lag."""
    batch_width: int = 4
    """Columns (environments) of one update. Divides the group width or is a multiple of it."""
    unroll_length: int = 20
    """Steps of one rollout (T): how far a reward is carried back before the value of the last observation stands in
    for the rest."""
    queue_width: int = 0
    """Groups wait while so many columns (or more) wait for the learner; 0 takes one group or batch, whichever is
    wider. Fewer mean less policy lag."""
    inference_width: int = 0
    """Rows that inference answers at once, at most; 0 takes one group on a CPU (rows that fit the cache, and no
    gathering) and all groups on a GPU."""
    server_arguments: str = ""
    """Arguments of your own flags of polybeast_env.py, for the env servers started here and for --mode test, as in
    `--server_arguments="--level 3"`."""

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


def make_optimizer(flags: Flags, net: nn.Module) -> torch.optim.Optimizer:
    if flags.optimizer == "adam":
        return torch.optim.Adam(net.parameters(), flags.learning_rate, eps=flags.optimizer_epsilon, fused=True)
    return torch.optim.RMSprop(
        net.parameters(), flags.learning_rate, alpha=flags.rmsprop_alpha, eps=flags.optimizer_epsilon
    )


def infer(
    batcher: libbeast.DynamicBatcher,
    weights: PublishedWeights,
    seen: SeenObservations,
    action_space: gymnasium.Space,
    generator: torch.Generator,
    laps: Laps,
) -> None:
    """Choose the actions of every batch of rows until the batcher closes.

    The state that a group carries from row to row is the core's and its last action, which the net sees, too.
    """
    device = generator.device
    for batch in batcher:
        laps.lap("wait")
        inputs = map_tensors(lambda x: x.to(device, non_blocking=True), batch.get_inputs())
        (observation, reward, done, *_), (core_state, last_action) = inputs
        inputs = {"obs": observation, "reward": reward, "done": done, "action": last_action}
        laps.lap("gather")
        with torch.no_grad(), weights.newest() as (net, version):
            policy_logits, baseline, core_state = net(inputs, core_state)  # [1, rows, …]
            laps.lap("forward")
            action = distribution(action_space, policy_logits).sample(generator)
        version = torch.full(done.shape, version, dtype=torch.int32)
        numbers = seen.keep(observation)
        outputs = (action, policy_logits, baseline, version, numbers), (core_state, action)
        batch.set_outputs(map_tensors(lambda x: x.cpu(), outputs))  # waits for all of it
        laps.lap("answer")


def learn(
    learner_queue: libbeast.BatchingQueue,
    training: Training,
    weights: PublishedWeights,
    seen: SeenObservations,
    waiting: list[int],
) -> None:
    """Train on every batch of rollouts until the queue closes or the training is done. To `waiting` it adds how many
    columns it finds whenever it comes for the next batch."""
    laps = training.learner.laps
    for (env_outputs, agent_outputs), (core_state, _) in learner_queue:
        laps.lap("wait")
        obs, reward, done, episode_step, episode_return, terminated, truncated = env_outputs
        action, policy_logits, baseline, policy_version, numbers = agent_outputs
        rollout = {  # [T+1, B, …]
            **{"obs": obs, "reward": reward, "done": done, "terminated": terminated, "truncated": truncated},
            **{"action": action, "policy_logits": policy_logits, "baseline": baseline},
            **{"episode_return": episode_return, "episode_step": episode_step, "policy_version": policy_version},
        }
        others = {name: x for name, x in rollout.items() if name != "obs"}
        batch, core_state = map_tensors(lambda x: x.to(training.device, non_blocking=True), (others, core_state))
        batch["obs"] = seen.find(obs, numbers)
        laps.lap("gather")
        training.learn([map_tensors(torch.Tensor.numpy, rollout)], [(batch, core_state)], weights.publish)
        if training.finished():
            return
        waiting.append(learner_queue.size())


def train(flags: Flags) -> None:
    """Train until steps or minutes are used up, or SIGINT or SIGTERM asks for an end; a checkpoint is left in any case.

    A failure while it trains is logged with its traceback and raises SystemExit(1).
    """
    keep_freed_memory()
    validate(flags, widths_known=not flags.addresses)
    device, amp = choose_device(flags.device, flags.amp)
    security = read_security(flags)
    with contextlib.ExitStack() as servers_to_close:
        addresses, servers = flags.addresses, None
        if not addresses:
            with contextlib.closing(create_env(env_flags(flags), 1)) as env:  # a wrong id is told here
                envs.observation_spaces(env.single_observation_space)
            servers = LocalServers(
                os.path.join(os.path.dirname(os.path.abspath(__file__)), "polybeast_env.py"),
                [*env_arguments(flags), "--niceness", str(flags.server_niceness)],
                flags.num_servers,
                flags.max_env_restarts,
            )
            servers_to_close.callback(servers.close)
            addresses = servers.addresses
        flags, observation_spaces, action_space = greet(flags, addresses, security)
        torch.manual_seed(flags.seed)
        net = Net(observation_spaces, action_space, flags, amp).to(device)
        learner = Learner(flags, net, make_optimizer(flags, net), compute_loss)
        with Training("poly", flags, learner, FREE_ON_RESUME | FREE_HERE) as training:
            weights = PublishedWeights(net, learner.updates, flags.compile)
            if flags.compile:
                net.forward = torch.compile(net.forward)
            learner_queue = libbeast.BatchingQueue(
                batch_dim=1,
                minimum_batch_size=flags.batch_width,
                maximum_batch_size=flags.batch_width,
                maximum_queue_size=flags.queue_width,
            )
            num_groups = len(addresses) * STREAMS_PER_SERVER
            inference_batcher = libbeast.DynamicBatcher(
                batch_dim=1,
                maximum_batch_size=flags.inference_width
                or (flags.group_width if device.type == "cpu" else flags.group_width * num_groups),
            )
            shape, dtype = action_shape_dtype(action_space)
            no_action = torch.from_numpy(np.zeros((1, 1, *shape), dtype))
            pool = libbeast.ActorPool(
                flags.unroll_length, learner_queue, inference_batcher,
                [address for address in addresses for _ in range(STREAMS_PER_SERVER)],
                (net.initial_state(1), no_action), seed=training.env_seed(0, 0), env=flags.env,
                env_timeout=flags.env_timeout, connect_timeout=max(flags.env_timeout, 10) + MAKING_SECONDS,
                max_env_restarts=flags.max_env_restarts, log=training.run.log,
                **security,
            )  # fmt: skip

            inference_laps = Laps()
            # As many as streams, queue and learner hold, twice, as a stream may be slower than the others.
            in_flight = (num_groups * flags.group_width + flags.queue_width + flags.batch_width) * flags.unroll_length
            seen = SeenObservations(2 * in_flight, device)
            waiting: list[int] = []  # columns in the learner's queue, at each update since the last row of metrics

            def infer_on(stop) -> None:
                torch.set_num_threads(1)
                with stream(device, urgent=True):
                    inference_laps.begin()
                    infer(inference_batcher, weights, seen, action_space, training.generator, inference_laps)

            def learn_on(stop) -> None:
                training.begin_learning()
                with stream(device):
                    learn(learner_queue, training, weights, seen, waiting)

            def wake_all() -> None:
                for queue in (learner_queue, inference_batcher):
                    with contextlib.suppress(RuntimeError):  # another thread was the first to close it
                        queue.close()
                pool.stop()

            def streams() -> dict[str, float]:
                counters = pool.counters()
                return {stage: counters[f"seconds_{stage}"] / num_groups for stage in STREAM_STAGES}

            training.profile.workers |= {"inference": lambda: inference_laps.seconds, "streams": streams}
            training.profile.cores["inference"] = lambda: inference_laps.cpu_seconds
            if servers:
                training.profile.cores["envs"] = servers.cpu_seconds

            def measure(seconds: float, shares: dict[str, float]) -> dict[str, float]:
                counters, mean_waiting = pool.counters(), sum(waiting) / max(len(waiting), 1)
                waiting.clear()
                return {
                    "stats/actor_wait": shares["time/streams_enqueue"],
                    "stats/queue_waiting_columns": mean_waiting,
                    "stats/env_restarts": counters["restarts"],
                }

            works = [infer_on, learn_on, lambda stop: pool.run()] + (
                [lambda stop: servers.watch(stop, training.run.log)] if servers else []
            )
            introduction = (
                f"{num_groups} groups of {flags.group_width} environments, updates of {flags.batch_width} x "
                f"{flags.unroll_length} steps"
            )
            training.conduct(works, wake_all, measure, introduction)


# Flags of this variant, beside those of every run, that may differ when a run is resumed.
FREE_HERE = {
    *("num_servers", "addresses", "token_file", "tls_ca", "insecure", "server_niceness", "group_width"),
    *("inference_width", "queue_width"),
}


def env_arguments(flags: Flags) -> list[str]:
    """The command line of polybeast_env.py for these flags."""
    return ["--env", flags.env, "--group_width", str(flags.group_width), *shlex.split(flags.server_arguments)]


def env_flags(flags: Flags) -> argparse.Namespace:
    """What `create_env` gets, here as in an env server."""
    return parse_flags(env_arguments(flags))


def read_security(flags: Flags) -> dict:
    """Token and certificate for libbeast. Raises FileNotFoundError naming the flag."""
    contents = {}
    for name in ("token_file", "tls_ca"):
        path = getattr(flags, name)
        if path and not os.path.isfile(path):
            raise FileNotFoundError(f"--{name} {path}: there is no such file")
        with open(path or os.devnull, "rb") as file:
            contents[name] = file.read()
    token = contents["token_file"].decode().strip()
    return {"token": token, "root_certificates": contents["tls_ca"], "insecure": flags.insecure}


def greet(flags: Flags, addresses: list[str], security: dict) -> tuple[Flags, dict, gymnasium.Space]:
    """What all servers say they have: flags with their environment and group width, observation spaces, action space.

    Raises ValueError if they do not have the same, ConnectionError if one cannot be reached.
    """
    first = None
    for address in addresses:
        hello = libbeast.handshake(address, timeout=max(flags.env_timeout, 10), **security)
        first = first or hello
        for name in ("env", "num_envs", "observation_space", "action_space"):
            if hello[name] != first[name]:
                raise ValueError(
                    f"{address} has {name} {hello[name]}, {addresses[0]} has {first[name]}: "
                    "start all env servers with the same flags"
                )
    observation_space = wire.space_from_json(first["observation_space"])
    flags = validate(replace(flags, env=first["env"], group_width=first["num_envs"]))
    return flags, envs.observation_spaces(observation_space), wire.space_from_json(first["action_space"])


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
    with contextlib.closing(create_env(env_flags(trained), 1)) as env:
        observation_spaces = envs.observation_spaces(env.single_observation_space)
        net = Net(observation_spaces, env.single_action_space, trained).eval()
    net.load_state_dict(state["net"])
    played = games.play(
        lambda num_envs: create_env(env_flags(trained), num_envs),
        net, trained.env, flags.episodes, flags.seed, flags.greedy, flags.video,
    )  # fmt: skip
    return games.report(played, trained, path, state["counts"]["steps"])


def validate(flags: Flags, widths_known: bool = True) -> Flags:
    """The flags with automatic values filled in. Raises ValueError with the value, the limit and the remedy.

    What depends on the group width is left alone while only the servers know that."""
    limits = {  # name: lowest, highest
        **RUN_LIMITS,
        **{name: (1, 10**6) for name in ("group_width", "batch_width", "unroll_length", "hidden_size", "core_size")},
        **{name: (0, math.inf) for name in ("reward_clip", "baseline_cost", "entropy_cost", "grad_clip", "ppo_clip")},
        **{name: (0, 10**9) for name in ("queue_width", "inference_width")},
        **{name: (1e-6, math.inf) for name in ("clip_rho", "clip_pg_rho", "reward_scale")},
        **{name: (1e-12, 10) for name in ("learning_rate", "optimizer_epsilon")},
        **{name: (0, 1) for name in ("discount", "vtrace_lambda", "rmsprop_alpha")},
        "num_servers": (1, 1024),
        "server_niceness": (0, 19),
    }
    check_limits(flags, limits)
    if not widths_known:
        return flags
    check_widths(flags.group_width, flags.batch_width)
    queue_width = flags.queue_width or max(flags.group_width, flags.batch_width)
    if queue_width < flags.batch_width:
        raise ValueError(f"--queue_width {queue_width} must be at least --batch_width {flags.batch_width}, or 0")
    if 0 < flags.inference_width < flags.group_width:
        raise ValueError(
            f"--inference_width {flags.inference_width} must be at least --group_width {flags.group_width}, or 0: a "
            "group's rows are answered together"
        )
    return replace(flags, queue_width=queue_width, name=run_name("poly", flags))


def main() -> None:
    import tyro

    flags = tyro.cli(Flags, description=__doc__, use_underscores=True)
    with exit_with_message("validate", "read_security", "greet"):
        (train if flags.mode == "train" else test)(flags)


if __name__ == "__main__":
    main()
