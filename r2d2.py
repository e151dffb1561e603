"""R2D2: recurrent Q-learning from prioritized replay in one file (Kapturowski et al. 2019; SEED RL, section 3.2).

    python r2d2.py --preset vector --env CartPole-v1 --name cartpole-r2d2   # train; the same line again resumes
    python r2d2.py --mode test --name cartpole-r2d2                         # play whole games with the checkpoint
    python plot.py runs/cartpole-r2d2                                       # draw the learning curve

Actors step environments. `act` chooses their actions, at random with each environment's own probability ε. `learn`
stores rollouts as sequences in a replay memory, and trains on sequences that it draws by priority: n-step double
Q-learning with a target network, values rescaled, the core's stored state burnt in. docs/r2d2.md has more.

Shapes: rollouts of U steps by K environments; sequences of B burn-in rows, T transitions and a last row; N columns.
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
from beast.run.flags import ActorFlags, RunFlags, ServerFlags
from r2d2_presets import ABOUT, PRESETS


@dataclass
class Flags(ServerFlags, ActorFlags, RunFlags):
    """R2D2. A *step* is one decision of the agent; in Atari it lasts 4 frames. The defaults learn Pong on two cores."""

    episodic_life: Literal["auto", "on", "off"] = "off"
    """Atari: end an episode at every lost life, for the learner; auto: on for -v4, off for -v5."""

    # Actors.
    group_width: int = 16
    """Environments in a group, which share one forward pass."""
    unroll_length: int = 8
    """Steps of one rollout (U), after which it goes to the replay."""
    num_slots: int = 0
    """Rollouts in shared memory. 0: two more than there are groups."""
    eval_columns: int = 0
    """Environments of each group that act by --epsilon and are not trained on: the log shows their returns. 0: those of
    the greediest quarter."""
    actor_niceness: int = 5
    """Unix niceness (0 to 19) added to actors, and on Linux to the threads of inference and target network on a CPU."""

    # Where the environments are.
    feed: Literal["shared", "remote"] = "shared"
    """Environments in actors of this machine (shared), or in env servers (remote: docs/polybeast.md; needs libbeast).
    --addresses and --listen imply remote; remote without either starts --num_servers here."""
    max_streams: int = 4
    """With --listen: the most streams at a time. Each is a group of environments with an equal part of the replay."""
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
    """Normalize each pixel by its running mean and deviation. While these settle, the Q targets move with them."""
    normalize_observations: bool = False
    """Normalize vectors of numbers by running statistics, and clip them to ±10."""

    # The replay.
    replay_gb: float = 3.0
    """GB of memory for the replay. A short run on this machine takes less. A million steps of Atari take 7.35 GB."""
    replay_sequences: int = 0
    """Upper limit in sequences, rounded up to equally many of each environment. 0: as many as fit in --replay_gb."""
    min_fill: int = 20_000
    """Steps in the replay before the first update."""
    replay_ratio: float = 4.0
    """Trained transitions for each new step. The side that is ahead, actors or learner, waits."""
    burn_in: int = 4
    """Rows (B) that a sequence begins with, which only bring the stored state of the core up to date."""
    trained: int = 16
    """Transitions (T) of a sequence that are trained on."""
    stride: int = 8
    """Steps between the starts of two sequences, a multiple of --unroll_length; with T/2 each step is in two."""
    priority_exponent: float = 0.9
    """Sequences are drawn in proportion to their priority to this power (alpha): 0 draws all alike."""
    importance_exponent: float = 0.6
    """Exponent (beta) of the loss weights that make up for unequal drawing: 0 corrects nothing, 1 all of it."""
    priority_eta: float = 0.9
    """A sequence's priority is eta · max |TD error| + (1 - eta) · mean |TD error|."""
    save_replay: bool = False
    """Save the replay with every checkpoint (replay.npz), while the learner waits. Else a resumed run fills it anew."""

    # The loss.
    batch_width: int = 6
    """Sequences of one update."""
    discount: float = 0.99
    """Discount of one agent step (gamma)."""
    n_steps: int = 5
    """Rewards in a target, before the target network's value; fewer at the end of a sequence or an episode."""
    rescale: bool = True
    """Learn h(Q), which grows as the square root of Q (learn/qlearning.py), so that rewards need no clip."""
    target_period: int = 200
    """Updates between two copies of the net to the target network."""

    # The optimizer.
    learning_rate: float = 2e-4
    """Step size of Adam, constant."""
    optimizer_epsilon: float = 1e-6
    """Added to Adam's denominator."""
    grad_clip: float = 40.0
    """Global norm above which gradients are scaled down; 0: no clip. It is high, as a loss sums T errors."""

    # Evaluation.
    epsilon: float = 1e-3
    """--mode test, evaluations and --eval_columns: probability of a random action; --greedy takes none."""


# FORK HERE: your environment. Any gymnasium environment with discrete actions will do. (Env servers make their own.)
def create_env(flags: Flags, num_envs: int, **overrides) -> gymnasium.vector.VectorEnv:
    """Environments for one group. Called in every actor process, and in the main process to learn the spaces."""
    return envs.make(flags.env, num_envs, **(envs.options(flags) | overrides))


# Each actor process runs this file up to here, before torch is imported, and steps environments until the run ends.
run_if_actor(Flags, create_env)
if __name__ == "__main__":
    command_line.print_help_if_asked(Flags, __doc__, PRESETS, ABOUT)  # without torch, too

import contextlib
import copy
import math
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from beast.device import choose_device, helper_thread, yield_cores
from beast.envs.groups import finished_episodes
from beast.envs.masks import MASK
from beast.envs.rows import is_final
from beast.envs.spaces import EnvSpaces, is_image
from beast.errors import InputError, exit_with_message
from beast.feeds.actors import GROUPS_PER_ACTOR
from beast.feeds.feed import Feed
from beast.learn import ranks, vtrace
from beast.learn.distributions import Categoricals, action_layout, mask_logits, to_features
from beast.learn.layers import MixedPrecision, ResidualBlock, orthogonal
from beast.learn.learner import Learner, Outcome, step_unless
from beast.learn.nests import columns, map_tensors
from beast.learn.normalization import Observations, without_statistics
from beast.learn.published import PublishedWeights, start_weights
from beast.learn.qlearning import epsilon_ladder, n_step_targets, sequence_priorities, value_scaling
from beast.learn.recurrent import Core
from beast.learn.replay import RatioLimiter, Sample, SequenceReplay, make_replay, resume_replay
from beast.run import evaluation
from beast.run.flags import FREE_ON_RESUME, SERVERS_FREE_ON_RESUME, check_flags, check_server_flags, run_name
from beast.run.training import Result, Training, open_feed, prepare

GAIN = math.sqrt(2)  # of orthogonal weights before a ReLU or tanh


class Encoder(nn.Module):
    """Features [R, N, size] of one part of the observations [R, N, *shape]: images by convolutions, else by an MLP."""

    def __init__(self, space: gymnasium.Space, flags: Flags, amp: bool):
        super().__init__()
        self.is_image = flags.net != "mlp" and is_image(space, flags.channels)
        normalize = flags.center_images if self.is_image else flags.normalize_observations
        # Casts, reorders and normalizes; its `shape` is that of one observation for the first layer, channels first.
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
            widths = (self.center.shape[0], self.size)  # vectors: the shape is (inputs,)
            layers = [orthogonal(nn.Linear(width, self.size), GAIN) for width in widths]
            self.head = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh())
        self.register_load_state_dict_pre_hook(without_statistics)  # older checkpoints have none: then do not normalize

    def _convolutions(self, space: gymnasium.Space, flags: Flags) -> list[nn.Module]:
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
        x = x.flatten(0, 1).contiguous(memory_format=self.memory_format)
        x = self.convolutions(x).permute(0, 2, 3, 1)  # [N, H, W, C]: with --channels_last flatten copies nothing
        return self.head(x.flatten(1)).float().unflatten(0, leading)


# FORK HERE: your model. Observations arrive as they are stored (uint8 images included), time-major.
class Net(nn.Module):
    """Q values: encoders of the observation fields, an optional recurrent core, dueling heads.

    `forward(inputs, core_state)` takes `inputs["obs"][name]` [R, N, *shape], `inputs["done"]` [R, N] (the row begins an
    episode), the last action `inputs["action"]` [R, N] and its reward `inputs["reward"]` [R, N], and the core's state
    before row 0, a tuple of [1, N, core_size] (empty without a core). It returns Q [R, N, actions], -inf where illegal,
    its maximum [R, N] (the rollout's field `baseline`; no loss needs it), both float32 and rescaled (`--rescale`), and
    the core's state after the last row. `observe` changes its statistics. InputError unless actions are Discrete.
    """

    def __init__(self, observation_spaces: dict, action_space: gymnasium.Space, flags: Flags, amp: bool = False):
        super().__init__()
        if not isinstance(action_space, spaces.Discrete):
            needed = "R2D2 has one Q value for each action, so it needs a Discrete space"
            raise InputError(f"action space {action_space}: {needed}; wrap the environment, or take monobeast.py")
        self.action_space, self.flags = action_space, flags
        self.action_layout, self.num_actions = action_layout(action_space), int(action_space.n)
        self.names = [name for name in observation_spaces if name != MASK]  # which only says what is legal
        self.encoders = nn.ModuleList([Encoder(observation_spaces[name], flags, amp) for name in self.names])
        size = sum(encoder.size for encoder in self.encoders) + 1 + self.num_actions  # 1: the last reward
        self.core = None
        if flags.core != "none":
            self.core, size = Core(flags.core, size, flags.core_size, amp), flags.core_size
        has_images = any(encoder.is_image for encoder in self.encoders)
        self.amp = amp and (flags.core == "lstm" or has_images)  # only for the log: MLP and GRU compute in float32

        def head(outputs: int, bias: bool) -> nn.Sequential:
            last = nn.Linear(flags.head_size, outputs, bias=bias)
            nn.init.orthogonal_(last.weight, 0.1)  # Q begins near 0
            return nn.Sequential(orthogonal(nn.Linear(size, flags.head_size), GAIN), nn.ReLU(), last)

        self.value, self.advantage = head(1, True), head(self.num_actions, False)  # dueling: Wang et al. 2016

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        return self.core.initial_state(batch_size) if self.core is not None else ()

    def acting_policy(self, q: Tensor) -> Categoricals:
        """The ε-greedy policy of Q [..., actions], for --mode test and `beast.load`; training has `act` instead."""
        epsilon = min(self.flags.epsilon, 1 - 1e-6)  # the best action stays the most probable one, for --greedy
        best, legal = nn.functional.one_hot(q.argmax(-1), self.num_actions), q != -math.inf
        probabilities = (1 - epsilon) * best + epsilon * legal / legal.sum(-1, keepdim=True)
        return Categoricals(probabilities.log(), sizes=[self.num_actions], action_shape=())

    @torch.no_grad()
    def observe(self, observations: dict) -> None:
        """Take observations [R, N, *shape] by name into the running statistics that `forward` normalizes by."""
        for name, encoder in zip(self.names, self.encoders):
            encoder.center.observe(observations[name])

    def forward(self, inputs: dict, core_state: tuple) -> tuple[Tensor, Tensor, tuple]:
        # Zero what would cross an episode boundary, by masked_fill: a product would keep a NaN.
        begins = inputs["done"].unsqueeze(-1)  # [R, N, 1]
        last_reward = inputs["reward"].clamp(-1, 1).unsqueeze(-1).masked_fill(begins, 0)  # clips the input only
        last_action = to_features(self.action_layout, inputs["action"]).masked_fill(begins, 0)
        features = [encoder(inputs["obs"][name]) for name, encoder in zip(self.names, self.encoders)]
        x = torch.cat([*features, last_reward, last_action], dim=-1)  # [R, N, size]
        if self.core is not None:
            x, core_state = self.core(x, begins, core_state)
        advantage = self.advantage(x)
        q = self.value(x) + advantage - advantage.mean(-1, keepdim=True)
        q = mask_logits(self.action_layout, q, inputs["obs"].get(MASK))
        return q, q.amax(-1), core_state


class Batch(NamedTuple):
    """Sequences for an update: B rows of burn-in, T transitions to train on, and the row that the last one leads to."""

    sample: Sample  # rows [B+T+1, N, …], the state before them, weights [N]; ids and generations are for replay.update
    target_q: Tensor  # the target network's Q of rows B to B+T, run from row 0, so burnt in: [T+1, N, actions]


# FORK HERE: your loss.
def compute_loss(flags: Flags, net: Net, target: Net, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss of a batch, its sequences' priorities [N], and metrics, scalar tensors."""
    sample = batch.sample
    rows = map_tensors(lambda x: x[flags.burn_in :], sample.rows)  # [T+1, N, …]
    with torch.no_grad():
        state = burn_in(flags, net, sample.rows, sample.core_state)
    q, _, _ = net(rows, state)  # [T+1, N, actions]
    scale, unscale = value_scaling(flags.rescale)
    with torch.no_grad():
        # Transition t leads from row t to row t+1. mask [T, N] is False where row t is an episode's last and the action
        # only resets: no error, and an n-step sum that comes to row t ends with its value. discounts [T, N] are 0 where
        # row t+1 is terminal or begins an episode, so a truncated one is valued by its last row (docs/rollout.md).
        mask, discounts = vtrace.transition_masks(rows["done"], rows["terminated"], rows["truncated"], flags.discount)
        rewards = rows["reward"][1:]
        if "final_obs" in rows:  # environments that reset within the step that ends an episode (docs/rollout.md)
            target_state = burn_in(flags, target, sample.rows, sample.core_state)
            rewards = rewards + flags.discount * final_values(net, target, rows, state, target_state, unscale)
        # Double Q-learning: the net chooses, the target network values.
        values = unscale(batch.target_q.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1))  # [T+1, N]
        targets = scale(n_step_targets(rewards, discounts, mask, values, flags.n_steps))
    chosen = q[:-1].gather(-1, rows["action"][1:].unsqueeze(-1)).squeeze(-1)  # row t+1 holds the action chosen at row t
    errors = (targets - chosen).where(mask, 0)  # [T, N]
    # The sum over time, as in R2D2: --grad_clip and --learning_rate suit it.
    loss = (sample.weights * 0.5 * errors.square().sum(0)).mean() / ranks.size()  # the ranks' gradients are added
    with torch.no_grad():
        count = mask.sum().clamp(min=1)
        metrics = {
            "losses/td_error": errors.abs().sum() / count,
            "losses/q_mean": (chosen * mask).sum() / count,
            "losses/target_mean": (targets * mask).sum() / count,
            "stats/importance_weight": sample.weights.mean(),
            "losses/total_loss": loss.detach() * ranks.size(),  # metrics are means over the ranks
        }
    return loss, sequence_priorities(errors.detach(), mask, flags.priority_eta), metrics


def burn_in(flags: Flags, net: Net, all_rows: dict, core_state: tuple) -> tuple:
    """The core's state [1, N, core_size] before row B, by this net's own weights: the stored state is of older ones."""
    if not flags.burn_in:
        return core_state
    return net(map_tensors(lambda x: x[: flags.burn_in], all_rows), core_state)[2]


def final_values(net: Net, target: Net, rows: dict, state: tuple, target_state: tuple, unscale: Callable) -> Tensor:
    """The value of the last observation of every truncated episode, [T, N], and 0 elsewhere.

    In a SAME_STEP rollout row t+1 already shows the next episode; the last observation of this one lies beside it. Both
    states are those before row 0 of `rows`.
    """
    is_cut = (rows["done"] & rows["truncated"] & ~rows["terminated"])[1:]  # [T, N]
    values = torch.zeros_like(rows["reward"][1:])
    first = 0  # both states are those before row `first`
    for t in is_cut.any(1).nonzero().flatten().tolist():
        if state:  # there is a core: run both nets over rows first … t
            part = map_tensors(lambda x: x[first : t + 1], rows)
            state, target_state, first = net(part, state)[2], target(part, target_state)[2], t + 1
        # The action and reward of row t+1 led to final_obs, too; only obs and done are the next episode's.
        last = map_tensors(lambda x: x[t + 1 : t + 2], rows)
        last |= {"obs": last["final_obs"], "done": torch.zeros_like(last["done"])}
        best = net(last, state)[0].argmax(-1, keepdim=True)  # [1, N, 1]
        target_q = target(last, target_state)[0]  # [1, N, actions]
        values[t] = unscale(target_q.gather(-1, best)).flatten()
    return values.where(is_cut, 0)


def initial_priorities(flags: Flags, rows: dict) -> Tensor:
    """Priorities [N] of new sequences [B+T+1, N], whose rows hold no observations. The Q values that chose the actions
    stand in for both networks'. The last row's Q values are not known yet, so the transition to it is left out."""
    q = rows["policy_logits"][flags.burn_in + 1 :]  # `act` stored Q(x_t) in row t+1: [T, N, actions], from x_B on
    trained = map_tensors(lambda x: x[flags.burn_in : -1], rows)  # rows x_B …, T of them: T-1 transitions
    scale, unscale = value_scaling(flags.rescale)
    done, terminated, truncated = (trained[name] for name in ("done", "terminated", "truncated"))
    mask, discounts = vtrace.transition_masks(done, terminated, truncated, flags.discount)
    # SAME_STEP: nobody has valued a truncated episode's last observation yet.
    mask &= ~(done & truncated & ~terminated)[1:]
    targets = scale(n_step_targets(trained["reward"][1:], discounts, mask, unscale(q.amax(-1)), flags.n_steps))
    chosen = q[:-1].gather(-1, trained["action"][1:].unsqueeze(-1)).squeeze(-1)
    return sequence_priorities(targets - chosen, mask, flags.priority_eta)


class QLearner(Learner):
    """A Learner with a target network, and the random numbers that draw its batches. Inherited from Learner: `steps`
    and `updates`, counts; `updating`, the lock around an update; `laps`, the profile (`lap(stage)` books the time since
    the last)."""

    def __init__(self, net: Net, optimizer: torch.optim.Optimizer, flags: Flags):
        super().__init__(net, optimizer, flags.max_bad_updates)
        self.target = copy.deepcopy(net).eval().requires_grad_(False)
        self.random = np.random.Generator(np.random.PCG64(flags.seed))
        # The returns of the log are those of the last columns, which explore the least or evaluate.
        self.first_shown = flags.group_width - (flags.eval_columns or max(flags.group_width // 4, 1))
        self.all_returns: deque[float] = deque(maxlen=100)  # of all environments, however much they explore
        # A helper prepares the next batch: on a CPU, and not if deterministic, as no checkpoint holds that batch.
        has_helper = next(net.parameters()).device.type == "cpu" and not flags.deterministic
        self.helper = helper_thread(flags) if has_helper else None
        self._prepared: Future[Batch] | None = None

    def next_batch(self, flags: Flags, replay: SequenceReplay, device: torch.device) -> Batch:
        """A batch of sequences, drawn by priority.

        With a helper, batch n+1 is gathered while update n runs, so it is drawn by the priorities from before update n.
        Its target Q values are computed again when the net has just been copied to the target network.
        """
        prepared = self._prepared.result() if self._prepared else None
        sample = prepared.sample if prepared else replay.sample(flags.batch_width, device)
        if self.updates % flags.target_period == 0:
            self.target.load_state_dict(self.net.state_dict())  # buffers, too
            prepared = None  # its target Q values are outdated
        batch = prepared or self._with_target_q(flags, sample)
        if self.helper:
            fetch = replay.draw(flags.batch_width, device)  # draws here: not thread-safe; fetch() copies the rows
            self._prepared = self.helper.submit(lambda: self._with_target_q(flags, fetch()))
        return batch

    def _with_target_q(self, flags: Flags, sample: Sample) -> Batch:
        return Batch(sample, self.call(self.target, sample.rows, sample.core_state)[0][flags.burn_in :])

    def wait_for_batch(self) -> None:
        """Wait until the helper has gathered its batch. Only then may the replay change."""
        if self._prepared:
            self._prepared.result()

    def record_games(self, rows: dict) -> None:
        """The feed calls it with each rollout, numpy arrays [U+1, K]."""
        with self.updating:
            self.all_returns.extend(episode_return for episode_return, _ in finished_episodes(rows))
        is_shown = rows["env_number"][0] >= self.first_shown
        super().record_games({name: x[:, is_shown] for name, x in rows.items()})

    def state_dict(self) -> dict:
        own = {"target": self.target.state_dict(), "random": self.random.bit_generator.state}
        return super().state_dict() | own | {"all_returns": list(self.all_returns)}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.target.load_state_dict(state["target"])
        self.random.bit_generator.state = state["random"]
        self.all_returns.extend(state["all_returns"])


def make_learner(flags: Flags, env_spaces: EnvSpaces) -> QLearner:
    """A new net, its target network and its optimizer on the flags' device."""
    device, amp = choose_device(flags.device, flags.amp)
    net = Net(env_spaces.observations, env_spaces.action, flags, amp).to(device)
    optimizer = torch.optim.Adam(net.parameters(), flags.learning_rate, eps=flags.optimizer_epsilon, fused=True)
    return QLearner(net, optimizer, flags)


def gradients(flags: Flags, learner: QLearner, batch: Batch) -> tuple:
    """Leave the gradients of a batch's loss, clipped, in the parameters' `.grad`. Returns the loss, the gradients' norm
    before the clip, and what `compute_loss` returns beside the loss."""
    net, laps = learner.net, learner.laps
    with net.register_forward_hook(lambda *_: laps.lap("forward")):  # timing only
        loss, priorities, metrics = compute_loss(flags, net, learner.target, batch)
    laps.lap("loss")
    learner.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    metrics = ranks.sum_gradients(net.parameters(), metrics)
    grad_norm = nn.utils.clip_grad_norm_(net.parameters(), flags.grad_clip or math.inf)
    return metrics["losses/total_loss"], grad_norm, priorities, metrics


# FORK HERE: your update.
def update(flags: Flags, learner: QLearner, batch: Batch) -> tuple[Outcome, Tensor]:
    """A step of the optimizer on a batch of sequences; none after a NaN or Inf in loss or gradients. Returns what came
    of it and the sequences' new priorities [N]."""
    loss, grad_norm, priorities, metrics = learner.call(partial(gradients, flags, learner), batch)
    learner.laps.lap("backward")
    is_bad = ~(loss.isfinite() & grad_norm.isfinite())
    step_unless(learner.optimizer, is_bad)
    learner.net.observe(map_tensors(lambda x: x[flags.burn_in :], batch.sample.rows["obs"]))
    # A bad update changes no priority, as the replay ignores NaN. But a sequence whose own error is not finite gets 0:
    # it is drawn no more.
    priorities = torch.where(priorities.isfinite(), priorities.where(~is_bad, math.nan), 0)
    learner.laps.lap("optimizer")
    return Outcome(is_bad, grad_norm, metrics), priorities


def act(training: Training, feed: Feed, weights: PublishedWeights, num_groups: int) -> None:
    """Choose the actions of all rows that wait for them, until the feed closes."""
    flags = training.flags
    yield_cores(training.device, flags.actor_niceness)
    ladder = epsilon_ladder(num_groups, flags.group_width, flags.eval_columns, flags.epsilon).to(training.device)
    for rows in feed.acting():  # [1, N, …], whole groups
        with torch.no_grad(), weights.newest() as (net, version):
            q, value, core_state = net(rows.inputs, rows.core_state)
            epsilon = ladder[rows.inputs["group"].long(), rows.inputs["env_number"].long()]
            coin = torch.rand(epsilon.shape, generator=training.generator, device=q.device)
            scores = torch.rand(q.shape, generator=training.generator, device=q.device).masked_fill(q == -math.inf, -1)
            action = torch.where((coin < epsilon).unsqueeze(-1), scores, q).argmax(-1)
        rows.answer(action, q, value, version, core_state)  # Q goes to the field policy_logits


def learn(training: Training, learner: QLearner, feed: Feed, weights: PublishedWeights, replay: SequenceReplay,
          limiter: RatioLimiter) -> None:  # fmt: skip
    """Store rollouts and train on sequences in the replay ratio, until the feed closes or the run is finished. While it
    trains it takes no rollout, so slots fill up and actors wait."""
    flags, laps = training.flags, learner.laps
    for rollout, core_state in training.rollouts(feed):  # [U+1, K, …], one group's
        with learner.updating:  # a checkpoint never holds half an update
            store(flags, learner, replay, limiter, rollout, core_state)
        # Of several ranks all wait until each has a sequence: none can take part with an empty one before.
        while ranks.all_of(limiter.may_update() and replay.num_sequences() > 0 and not training.ends(feed)):
            with learner.updating:
                batch = learner.next_batch(flags, replay, training.device)
                laps.lap("sample")
                measured = learner.measure(batch.sample.rows)  # steps and policy lag; a fork's update may edit the rows
                outcome, priorities = update(flags, learner, batch)
                # `count` raises learner.updates by 1 and learner.steps by 0 here: `store` has counted the steps.
                counted = learner.count(measured._replace(steps=torch.zeros_like(measured.steps)), outcome)
                weights.publish(learner.net, learner.updates)
                laps.lap("publish")
                replay.update(batch.sample.ids, batch.sample.generations, priorities.cpu().numpy())
                limiter.add_update()
                laps.lap("priorities")
                of_all = float(np.mean(learner.all_returns)) if learner.all_returns else math.nan
                own = {"stats/replay_ratio": limiter.measured(), "charts/return_all": of_all}
                training.record(counted, {**replay.stats(), **own})


def store(flags: Flags, learner: QLearner, replay: SequenceReplay, limiter: RatioLimiter, rollout: dict,
          core_state: tuple) -> None:  # fmt: skip
    """Put a group's rollout [U+1, K, …] into the replay, with first priorities for the sequences that it completes.
    `replay.width` columns train, K - eval_columns."""
    is_step = ~is_final(rollout["done"], rollout["terminated"], rollout["truncated"])[:-1]  # [U, K]: an action counts
    # Of all ranks: so they agree on how many updates follow.
    limiter.add(learner.count_steps(rollout, is_step, is_step[:, : replay.width].sum()))
    if "counts" in rollout:  # this rank has none, and takes part with nothing
        return
    learner.wait_for_batch()
    ids = replay.add(columns(rollout, 0, replay.width), tuple(x[:, : replay.width] for x in core_state))
    if len(ids):
        rows, _ = replay.gather(ids, torch.device("cpu"), observations=False)
        replay.update(ids, replay.generation_of(ids), initial_priorities(flags, rows).numpy())
    learner.laps.lap("insert")


# Flags that may differ when a run is resumed.
RESUME_FREE = {
    *FREE_ON_RESUME, *SERVERS_FREE_ON_RESUME, "feed", "learning_rate", "grad_clip",
    "replay_gb", "replay_sequences", "min_fill", "save_replay", "epsilon",
}  # fmt: skip


def train(flags: Flags) -> Result:
    """Train until steps or minutes are used up, or a signal asks for an end (see `Training.run_threads`)."""
    with contextlib.ExitStack() as to_close:
        if validate(flags, width_known=False).feed == "remote":  # both branches validate again, with what is known then
            import polybeast_env
            from beast.run import servers  # needs libbeast

            connection = servers.connect(flags, validate, polybeast_env, to_close)
            flags, env_spaces, num_groups = connection.flags, connection.spaces, connection.num_streams
        else:
            flags, env_spaces = prepare(flags, create_env, validate)
            num_groups = flags.num_actors * GROUPS_PER_ACTOR
        torch.manual_seed(flags.seed)
        learner = make_learner(flags, env_spaces)
        to_close.enter_context(learner.helper or contextlib.nullcontext())
        training = to_close.enter_context(Training("r2d2", flags, learner, RESUME_FREE, env_spaces.frames_per_step))
        state_sizes = [x.shape[-1] for x in learner.net.initial_state(1)]
        replay = make_replay(flags, env_spaces, state_sizes, num_groups, learner.random)
        limiter = RatioLimiter(flags.replay_ratio, flags.batch_width * flags.trained * ranks.size(), flags.min_fill)
        path, log = training.run.path / "replay.npz", training.run.log
        write_replay = resume_replay(replay, limiter, path, learner, log) if flags.save_replay else None
        training.cleanup.callback(lambda: log(limiter.describe()))
        width = flags.group_width  # of the feed's batches: whole groups, as the replay is divided among them
        feed, others = (  # others: loops to run beside it, for env servers
            servers.make_feed(training, connection, width) if flags.feed == "remote"
            else (open_feed(training, create_env, env_spaces, num_groups, __file__, batch_width=width), [])
        )  # fmt: skip
        weights = start_weights(learner, flags)
        updates = f"updates of {flags.batch_width} sequences of {flags.burn_in} + {flags.trained} steps"
        return training.run_threads(
            feed,
            infer=partial(act, training, feed, weights, num_groups),
            learn=partial(learn, training, learner, feed, weights, replay, limiter),
            introduction=f"{replay.description}, {updates}, {flags.replay_ratio:g} trained transitions a step",
            others=others, save_beside=write_replay,
        )  # fmt: skip


def test(flags: Flags, given: Collection[str] = ()) -> dict:
    """Play whole games with a checkpoint, and print and write their returns (see `evaluation.report`)."""
    # own: flags that are not the checkpoint's
    return evaluation.play_checkpoint(flags, create_env, Net, variants=("r2d2",), given=given, own=("epsilon",))


def validate(flags: Flags, width_known: bool = True) -> Flags:
    """The flags with automatic values filled in. Raises InputError with the value, the limit and the remedy. Without
    `width_known` env servers have not told the group width yet."""
    limits = {  # beside those of all runs (beast/run/flags.py): lowest, highest, remedy
        **{name: (1, 10**6) for name in ("head_size", "target_period", "n_steps")},
        **{name: (0, 1) for name in ("priority_eta", "priority_exponent", "importance_exponent", "epsilon")},
        **{name: (0, 10**12) for name in ("min_fill", "replay_sequences")},
        "trained": (3, 10**5),  # `initial_priorities` has one fewer, of which one may be void
        "burn_in": (0, 10**5),
        "max_streams": (1, 4096),
        "replay_gb": (1e-6, 1e6),
        "replay_ratio": (1e-3, 1e3),
        "eval_columns": (0, flags.group_width - 1 if width_known else 10**6, "at least one of a group has to train"),
    }
    flags = check_flags(flags, limits)
    if flags.stride < 1 or flags.stride % flags.unroll_length:
        raise InputError(
            f"--stride {flags.stride}: it must be a multiple of --unroll_length {flags.unroll_length}, as the core's "
            "state is known at the start of a rollout only"
        )
    is_remote = flags.feed == "remote" or bool(flags.addresses or flags.listen)
    if flags.deterministic and is_remote:
        raise InputError("--deterministic: env servers answer in any order; leave that out, or the servers")
    for name in ("token_file", "tls_ca", "tls_cert", "tls_key"):
        if getattr(flags, name) and not is_remote:
            raise InputError(f"--{name} is for env servers: give --addresses or --listen, too, or leave it out")
    if is_remote:
        flags = check_server_flags(flags, flags.group_width, width_known)  # batches of the feed are groups
    num_groups = flags.num_actors * GROUPS_PER_ACTOR
    burn_in = flags.burn_in if flags.core != "none" else 0  # there is no state to burn in
    one_each = 0 if is_remote else num_groups * flags.group_width * (burn_in + flags.trained)
    stored = (flags.group_width - flags.eval_columns) / flags.group_width if width_known else 1  # of all steps
    min_fill = math.ceil(flags.min_fill / stored)
    all_steps = f" ({min_fill} with those of --eval_columns)" if min_fill > flags.min_fill else ""
    if flags.mode == "train" and max(min_fill, one_each) >= flags.total_steps:
        raise InputError(
            f"--total_steps {flags.total_steps}: updates begin after --min_fill {flags.min_fill} steps{all_steps} "
            f"and a sequence of each environment, {one_each} steps: raise it, or lower --min_fill, --burn_in, --trained"
        )
    num_slots = flags.num_slots or num_groups + 2
    if not num_groups <= num_slots <= 2**16:
        raise InputError(f"--num_slots {num_slots}: {num_groups} groups need {num_groups} to 65536; 0 has it chosen")
    return replace(
        flags, num_slots=num_slots, burn_in=burn_in, feed="remote" if is_remote else "shared",
        learner_threads=1 if flags.deterministic else flags.learner_threads, name=run_name("r2d2", flags),
    )  # fmt: skip


def main() -> None:
    flags = command_line.parse(Flags, __doc__, PRESETS, ABOUT)
    with exit_with_message():
        train(flags) if flags.mode == "train" else test(validate(flags), command_line.given())


if __name__ == "__main__":
    main()
