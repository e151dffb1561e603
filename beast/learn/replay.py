"""Prioritized replay of sequences: what environments did, kept in rings of rows, and sampled by priority.

A *sequence* is the rows s … s+B+T of one environment: B of burn-in, T trained transitions, and the row that the last
one leads to. Rows are stored once, however many sequences they are part of. All rows of a group come together, so a
ring belongs to a group. It consists of *blocks* of U rows, one for each rollout; the rollout's row U is row 0 of the
next block. A sequence begins with a block, where the core's state is known.
"""

from __future__ import annotations

import hashlib
import math
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from beast.envs import family_of
from beast.envs.rows import ROW_FIELDS, nest_observations, rollout_fields
from beast.envs.spaces import EnvSpaces
from beast.errors import InputError, OutOfMemory, first_line
from beast.files import replace_file
from beast.learn.learner import Learner
from beast.machine import available_memory

LEAST_PRIORITY = 1e-6  # of a sequence that can be trained on: none is forgotten


class SumTree:
    """Numbers >= 0, the leaves of a binary tree whose inner nodes hold sums, to draw one in proportion to its size."""

    def __init__(self, size: int):
        self.capacity = 1 << max(size - 1, 1).bit_length()
        self.nodes = np.zeros(2 * self.capacity)  # node i has the children 2i and 2i+1; leaves come last

    @property
    def total(self) -> float:
        return float(self.nodes[1])

    @property
    def leaves(self) -> np.ndarray:
        return self.nodes[self.capacity :]

    def set(self, indices: np.ndarray, values: np.ndarray | float) -> None:
        """Write leaves. Each node above them is summed anew, so that rounding errors do not add up."""
        self.leaves[indices] = values
        nodes = np.asarray(indices) + self.capacity
        while len(nodes) and nodes[0] > 1:
            nodes = np.unique(nodes // 2)
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def find(self, targets: np.ndarray) -> np.ndarray:
        """The leaf where the sum over leaves passes each target in [0, total); never an empty one, unless all are."""
        nodes, targets = np.ones(len(targets), np.int64), np.array(targets)
        while nodes[0] < self.capacity:
            left = self.nodes[2 * nodes]
            right = (targets >= left) & (self.nodes[2 * nodes + 1] > 0)  # not empty, whatever rounding did to a target
            targets -= np.where(right, left, 0)
            nodes = 2 * nodes + right
        return nodes - self.capacity


class Sample(NamedTuple):
    """N sequences. `ids` and `generations` are for `SequenceReplay.update`."""

    ids: np.ndarray
    generations: np.ndarray
    weights: torch.Tensor  # [N] on the device: importance weights, the largest is 1
    rows: dict  # [B+T+1, N, …] on the device
    core_state: tuple  # tensors [1, N, size] on the device, before row 0


class SequenceReplay:
    """The latest rows of all groups, and the priorities of the sequences in them. One thread changes it.

    A sequence has a *generation*, a number that no other has: priorities that come for a sequence that has been
    overwritten meanwhile are dropped. No sequence has rows of two lives of its environments.
    """

    def __init__(
        self, fields: dict[str, tuple[tuple[int, ...], str]], state_sizes: list[int], num_groups: int, width: int, *,
        unroll_length: int, burn_in: int, trained: int, stride: int, capacity_gb: float, max_sequences: int = 0,
        is_stack: bool = False, priority_exponent: float = 0.9, importance_exponent: float = 0.6,
        random: np.random.Generator | None = None,
    ):  # fmt: skip
        """`fields` are those of `rollout_fields`; `width` columns of each group are stored; `state_sizes` are the sizes
        of the parts of the core's state. `is_stack`: of `obs/obs` [stack, height, width], the last images of a game,
        store only the newest. `random` draws the samples. Capacity is that of `capacity_gb`, or of `max_sequences`
        where that is less and not 0.

        Raises InputError if the capacity is too small, OutOfMemory if there is not so much memory."""
        self.num_groups, self.width, self.unroll_length = num_groups, width, unroll_length
        self.length, self.stride = burn_in + trained, stride // unroll_length
        self.blocks_of_sequence = -(-self.length // unroll_length)
        self.priority_exponent, self.importance_exponent = priority_exponent, importance_exponent
        self.random = random or np.random.default_rng()
        kept = {name: field for name, field in fields.items() if "/" in name or ROW_FIELDS[name].is_replayed}
        self.stack = 0
        if is_stack:
            (self.stack, *image), dtype = fields["obs/obs"]
            kept["obs/obs"] = tuple(image), dtype
        kept["action"] = (), "uint8" if fields["policy_logits"][0][0] <= 256 else "int64"
        kept["episode_step"] = (), "uint8"  # the first steps matter to stacks; more than 255 counts as 255
        bytes_of_row = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in kept.values())
        bytes_of_block = (unroll_length * bytes_of_row + 4 * sum(state_sizes) + 16) * width * num_groups
        self.bytes_of_step = bytes_of_block // (unroll_length * width * num_groups)  # with its share of a core's state
        # Where no life begins, a sequence is whole at any time. One block is written while the next one, whose row 0 is
        # written with it, is lost as well.
        needed = self.blocks_of_sequence + self.stride + 1
        self.num_blocks = int(capacity_gb * 1e9 / bytes_of_block)
        if max_sequences:
            wanted = -(-max_sequences // (num_groups * width)) * self.stride + self.blocks_of_sequence + 1
            self.num_blocks = min(self.num_blocks, max(wanted, needed))
        if self.num_blocks < needed:
            least = math.ceil(needed * bytes_of_block / 1e6) / 1e3
            raise InputError(
                f"--replay_gb {capacity_gb:g}: one sequence of each environment needs {least:g} GB; give that, or use "
                "fewer environments (--num_actors, --group_width)"
            )
        self.num_bytes = self.num_blocks * bytes_of_block
        if self.num_bytes > (free := available_memory()):
            needs = f"the replay needs {self.num_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
            raise OutOfMemory(f"{needs}: lower --replay_gb")
        ring = num_groups, self.num_blocks * unroll_length, width
        self.arrays = {name: np.empty((*ring, *shape), dtype) for name, (shape, dtype) in kept.items()}
        self.states = [np.empty((num_groups, self.num_blocks, width, size), np.float32) for size in state_sizes]
        for array in (*self.arrays.values(), *self.states):
            array.fill(0)  # missing memory is missed now, not in the middle of a run
        self.tree = SumTree(num_groups * self.num_blocks * width)  # id: (group, block, column)
        self.generations = np.zeros((num_groups, self.num_blocks), np.int64)
        self.is_complete = np.zeros((num_groups, self.num_blocks), bool)
        self.written_at = np.zeros((num_groups, self.num_blocks), np.int64)  # `rows` before each block
        self._last_generation = 0
        # Of each group. Blocks are counted from the start of the run; a block's place in the ring is the remainder.
        self._next_block, self._life_began, self._life = ([start] * num_groups for start in (0, 0, -1))
        self.rows = 0  # written so far
        self.late_priorities = self.bad_priorities = 0  # that were dropped: overwritten sequences; NaN, Inf, negative

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return self.num_groups * self.num_blocks * self.unroll_length * self.width

    @property
    def description(self) -> str:
        """For the log's first line."""
        size = f"{self.num_bytes / 1e9:.2f} GB for {self.capacity:,} steps of {self.bytes_of_step:,} bytes"
        return f"replay of {size}"

    def num_sequences(self) -> int:
        """Sequences that can be drawn now."""
        return int(self.is_complete.sum()) * self.width

    def add(self, rollout: dict, core_state: tuple) -> np.ndarray:
        """Append a group's rollout [U+1, width, …] of tensors and the core's state before its row 0, [1, width, size].

        Returns the ids of the sequences that it completes, which have no priority yet: `update` them.
        """
        U, group, life = self.unroll_length, int(rollout["group"][0, 0]), int(rollout["life"][0, 0])
        if life != self._life[group]:
            # The next block holds the last row of the old life, which its last sequences need.
            self._next_block[group] += self._next_block[group] > 0
            self._life_began[group], self._life[group] = self._next_block[group], life
        block = self._next_block[group]
        self._next_block[group] += 1
        for written in (block, block + 1):
            self._forget(group, written % self.num_blocks)
        places = (block * U + np.arange(U + 1)) % (self.num_blocks * U)
        for name, array in self.arrays.items():
            kind, slash, part = name.partition("/")
            x = rollout[kind][part] if slash else rollout[name]
            if name == "obs/obs" and self.stack:
                if block == 0:
                    check_stacks(x, rollout["episode_step"])
                x = x[:, :, -1]
            x = x.cpu().numpy()
            array[group, places] = np.minimum(x, 255) if name == "episode_step" else x
        for kept, state in zip(self.states, core_state):
            kept[group, block % self.num_blocks] = state[0].cpu().numpy()
        self.written_at[group, block % self.num_blocks] = self.rows
        self.rows += U * self.width
        # Nobody overwrites what a group has left that comes no more.
        if self.rows > 2 * self.capacity:
            for place in zip(*np.nonzero(self.is_complete & (self.written_at < self.rows - 2 * self.capacity))):
                self._forget(*place)
        first = block + 1 - self.blocks_of_sequence
        age = first - self._life_began[group]
        if age < 0 or age % self.stride:
            return np.empty(0, np.int64)
        self.is_complete[group, first % self.num_blocks] = True
        return self._ids(group, first % self.num_blocks)

    def update(self, ids: np.ndarray, generations: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of sequences whose generation is still there. 0: there is nothing to train on."""
        is_late = self.generation_of(ids) != generations
        is_bad = ~(np.isfinite(priorities) & (priorities >= 0))
        self.late_priorities += int(is_late.sum())
        self.bad_priorities += int((is_bad & ~is_late).sum())
        good = ~(is_late | is_bad)
        priorities = priorities[good].astype(np.float64)
        powers = np.maximum(priorities, LEAST_PRIORITY) ** self.priority_exponent
        self.tree.set(ids[good], np.where(priorities > 0, powers, 0))

    def sample(self, count: int, device: torch.device) -> Sample:
        """Draw `count` sequences, and gather their rows."""
        return self.draw(count, device)()

    def draw(self, count: int, device: torch.device) -> Callable[[], Sample]:
        """Draw `count` sequences, each by its priority; where none has one, all are equally likely.

        The function that it returns gathers their rows. Any thread may call it, before the next `add`. Sequence i's
        probability is P(i) = p_i^α / Σ p^α, its weight (M P(i))^-β over the largest of the batch; M is the number of
        sequences that can be drawn.
        """
        draws, total = self.random.random(count), self.tree.total
        if total > 0:
            ids = self.tree.find(draws * total)
            # M and the total are the same for all, so the largest weight takes them away.
            weights = self.tree.leaves[ids] ** -self.importance_exponent
        else:
            groups, blocks = np.nonzero(self.is_complete)
            among = self._ids(groups[:, None], blocks[:, None]).flatten()
            ids, weights = among[(draws * len(among)).astype(np.int64)], np.ones(count)
        weights = torch.from_numpy((weights / weights.max()).astype(np.float32)).to(device)
        generations = self.generation_of(ids)
        return lambda: Sample(ids, generations, weights, *self.gather(ids, device))

    def generation_of(self, ids: np.ndarray) -> np.ndarray:
        return self.generations.reshape(-1)[ids // self.width]

    def gather(self, ids: np.ndarray, device: torch.device, observations: bool = True) -> tuple[dict, tuple]:
        """Rows [B+T+1, N, …] of these sequences and the core's state before row 0, on the device."""
        blocks, columns = np.divmod(ids, self.width)
        groups, blocks = np.divmod(blocks, self.num_blocks)
        ring = self.num_blocks * self.unroll_length

        def take(array: np.ndarray, before: int = 0) -> torch.Tensor:
            rows = (blocks * self.unroll_length + np.arange(-before, self.length + 1)[:, None]) % ring
            places = (groups * ring + rows) * self.width + columns
            return torch.from_numpy(array.reshape(-1, *array.shape[3:])[places]).to(device, non_blocking=True)

        names = [name for name in self.arrays if observations or "/" not in name]
        before = {"obs/obs": max(self.stack - 1, 0)}  # rows whose images a stack needs
        found: dict[str, Any] = {name: take(self.arrays[name], before.get(name, 0)) for name in names}
        found["action"] = found["action"].long()
        for name, number in (("group", groups), ("env_number", columns)):  # for messages
            found[name] = torch.from_numpy(number).to(device).expand(self.length + 1, -1)
        if self.stack and observations:
            found["obs/obs"] = stack_images(found["obs/obs"], found["episode_step"], self.stack)
        states = (torch.from_numpy(kept[groups, blocks, columns]).to(device).unsqueeze(0) for kept in self.states)
        return nest_observations(found), tuple(states)

    def stats(self) -> dict[str, float]:
        """Metrics: rows that are stored, their share of the capacity, and priorities that were dropped so far."""
        rows = sum(min(blocks, self.num_blocks) for blocks in self._next_block) * self.unroll_length * self.width
        return {
            "stats/replay_rows": rows, "stats/replay_fill": rows / self.capacity,
            "stats/late_priorities": self.late_priorities, "stats/bad_priorities": self.bad_priorities,
        }  # fmt: skip

    def save(self, path: Path, version: int | str) -> None:
        """Write all to an .npz file, whose checksums `load` checks; `version` tells a state of a run from others."""
        arrays: dict[str, Any] = {**self._stored(), **self._counts(), "version": version}
        replace_file(path, lambda file: np.savez(file, **arrays))

    def load(self, path: Path, version: int | str) -> bool:
        """Take over what `save` wrote; False, and nothing is changed, if it is of another version or capacity.

        All environments begin a new life. Raises InputError for a damaged file.
        """
        own, counts = self._stored(), self._counts()
        kinds = {name: (array.shape, array.dtype) for name, array in {**own, **counts}.items()}
        try:
            if not zipfile.is_zipfile(path):  # numpy would advise to load it unsafely
                raise zipfile.BadZipFile("no whole .npz file")
            with np.load(path, allow_pickle=False) as file:
                found = {name: read_array(file.zip, name) for name in kinds.keys() & file.files}
                if file["version"].tolist() != version or kinds != found:
                    return False
                for name, array in own.items():
                    read_array(file.zip, name, array)  # a second copy of all might not fit
                read = [file[name].tolist() for name in counts]
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise InputError(
                f"{path}: no replay can be read from it ({first_line(error)}); delete it to fill a new one"
            ) from error
        self._next_block, self._life_began, self._last_generation, self.rows = read
        self._life = [-1] * self.num_groups
        return True

    def _counts(self) -> dict[str, np.ndarray]:
        """How far it has been written."""
        counts: dict[str, Any] = {"next_block": self._next_block, "life_began": self._life_began}
        counts |= {"last_generation": self._last_generation, "rows": self.rows}
        return {name: np.array(count, np.int64) for name, count in counts.items()}

    def _stored(self) -> dict[str, np.ndarray]:
        """All arrays that a file holds, by their names there."""
        arrays = {**self.arrays, **{f"state/{index}": x for index, x in enumerate(self.states)}}
        arrays |= {name: getattr(self, name) for name in ("generations", "is_complete", "written_at")}
        return {**arrays, "tree": self.tree.nodes}

    def _forget(self, group: int, place: int) -> None:
        """The sequences that begin with this block can be drawn no more."""
        self._last_generation += 1
        self.generations[group, place] = self._last_generation
        self.is_complete[group, place] = False
        self.tree.set(self._ids(group, place), 0.0)

    def _ids(self, group, place) -> np.ndarray:
        return (group * self.num_blocks + place) * self.width + np.arange(self.width)


def read_array(file: zipfile.ZipFile, name: str, array: np.ndarray | None = None) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of an array in an .npz file. An `array` of both is filled with it, a piece at a time."""
    with file.open(f"{name}.npy") as member:
        np.lib.format.read_magic(member)
        shape, is_transposed, dtype = np.lib.format.read_array_header_1_0(member)
        if array is not None and is_transposed:  # in Fortran's order
            array.T[...] = np.frombuffer(member.read(array.nbytes), dtype).reshape(shape[::-1])
        elif array is not None:
            place = array.reshape(-1).view(np.uint8)
            for begin in range(0, len(place), 1 << 24):
                piece = place[begin : begin + (1 << 24)]
                piece[:] = np.frombuffer(member.read(len(piece)), np.uint8, len(piece))  # a ValueError if there is less
        if array is not None and member.read(1):  # the end, where the checksum is compared
            raise ValueError(f"{name} is longer than its shape")
    return shape, dtype


def make_replay(
    flags, env_spaces: EnvSpaces, state_sizes: list[int], num_groups: int, random: np.random.Generator
) -> SequenceReplay:
    """An empty replay for so many groups. Of Atari's stacks of gray images it stores the newest image only."""
    fields = rollout_fields(env_spaces)
    shape, _ = fields.get("obs/obs", ((), ""))
    is_stack = family_of(flags.env).stacks_images and len(shape) == 3 and 1 < shape[0] < min(shape[1:])
    # No more than the steps of the run, unless a later start may have more of them, or some groups most of them.
    of_run = flags.total_steps // flags.stride + 4 * num_groups * flags.group_width
    of_run = 0 if flags.save_replay or flags.feed == "remote" else of_run
    return SequenceReplay(
        fields, state_sizes, num_groups, flags.group_width - flags.eval_columns,
        unroll_length=flags.unroll_length, burn_in=flags.burn_in, trained=flags.trained, stride=flags.stride,
        capacity_gb=flags.replay_gb, max_sequences=min(filter(None, (flags.replay_sequences, of_run)), default=0),
        is_stack=is_stack and flags.unroll_length >= shape[0], priority_exponent=flags.priority_exponent,
        importance_exponent=flags.importance_exponent, random=random,
    )  # fmt: skip


def resume_replay(
    replay: SequenceReplay, limiter: RatioLimiter, path: Path, learner: Learner, log: Callable[[str], None]
) -> Callable[[], None]:
    """Take over the replay that an earlier start saved, if there is one, and log it; returns what saves it again.

    The learner's weights are the version of the replay. A file that does not fit stays until the new replay is filled:
    the next start may be right for it.
    """
    is_loaded = path.exists() and replay.load(path, weights_digest(learner.net))
    if is_loaded:
        limiter.filled = min(replay.rows, limiter.min_fill)
        log(f"replay: {replay.num_sequences():,} sequences are those of {path}")
    elif path.exists():
        log(f"replay: filled anew, not from {path}, which is of another run, update or capacity")
    before = learner.updates, replay.rows

    def save() -> None:
        if (learner.updates, replay.rows) == before:  # a start that has failed, say
            return
        if is_loaded or replay.rows >= limiter.min_fill or not path.exists():
            replay.save(path, weights_digest(learner.net))

    return save


def weights_digest(net: torch.nn.Module) -> str:
    """A name of these weights and statistics, which those of no other run or update have."""
    digest = hashlib.sha256()
    for x in net.state_dict().values():
        digest.update(x.cpu().numpy().tobytes())
    return digest.hexdigest()


def stack_images(images: torch.Tensor, episode_step: torch.Tensor, stack: int) -> torch.Tensor:
    """Stacks [T, N, stack, …], the newest image last, of single images [stack-1 + T, N, …].

    What was before a game's first image is 0, as in ale-py: image j of row t is there if the game is stack-1-j steps
    old (`episode_step` [T, N]).
    """
    rows = len(episode_step)
    stacks = torch.stack([images[j : j + rows] for j in range(stack)], dim=2)
    for j in range(stack - 1):
        row, column = (episode_step < stack - 1 - j).nonzero(as_tuple=True)
        stacks[row, column, j] = 0  # few images: a mask would visit all
    return stacks


def check_stacks(stacks: torch.Tensor, episode_step: torch.Tensor) -> None:
    """Raises InputError unless [T, N, stack, …] is what `stack_images` makes of the newest images."""
    stack = stacks.shape[2]
    images = torch.cat([torch.zeros_like(stacks[: stack - 1, :, -1]), stacks[:, :, -1]])
    is_known = episode_step <= torch.arange(len(stacks), device=stacks.device).unsqueeze(1)  # all images are in here
    is_known[stack - 1 :] = True
    if not torch.equal(stacks[is_known], stack_images(images, episode_step, stack)[is_known]):
        raise InputError(
            f"the observations are not the last {stack} images of a game, the newest last and zeros before the first, "
            "of which the replay stores the newest only: set is_stack=False in make_replay"
        )


class RatioLimiter:
    """Keeps the number of trained transitions at `ratio` times the number of new steps.

    The learner makes updates while `may_update()`, and asks for the next rollout when it may not. Until then slots stay
    full and environments wait, so either side holds the other back. Steps count from when the replay held `min_fill`.
    """

    def __init__(self, ratio: float, transitions_of_update: int, min_fill: int):
        self.ratio, self.transitions_of_update, self.min_fill = ratio, transitions_of_update, min_fill
        self.filled = self.steps = self.updates = 0  # filled: steps before the first update was allowed
        self.seconds = 0.0  # from then to the last update
        self._began = time.monotonic()

    def add(self, steps: int) -> None:
        """Count new steps."""
        if self.filled < self.min_fill:
            self.filled += steps
            self._began = time.monotonic()
        else:
            self.steps += steps

    def add_update(self) -> None:
        self.updates += 1
        self.seconds = time.monotonic() - self._began

    def may_update(self) -> bool:
        return (self.updates + 1) * self.transitions_of_update <= self.ratio * self.steps

    def measured(self) -> float:
        """Trained transitions per step so far."""
        return self.updates * self.transitions_of_update / max(self.steps, 1)

    def describe(self) -> str:
        """What it came to, in two lines; in one if there was no update."""
        transitions = self.transitions_of_update
        ratio = (
            f"replay ratio {self.measured():.3f} (--replay_ratio {self.ratio:g}): {self.updates:,} updates x "
            f"{transitions:,} transitions for {self.steps:,} steps, after {self.filled:,} that filled the replay"
        )
        if not self.updates:
            return ratio
        updates, steps = (count / max(self.seconds, 1e-9) for count in (self.updates, self.steps))
        return (
            f"{ratio}\n{updates:,.2f} updates/s x {transitions:,} transitions / {self.ratio:g} = "
            f"{updates * transitions / self.ratio:,.0f} steps/s; there were {steps:,.0f}"
        )
