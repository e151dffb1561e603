"""MultiBeast: several policies of one agent file in one run, each with its own learner, weights and counts.

    python multibeast.py --env PongNoFrameskip-v4 --num_policies 4 --name four   # train; the same line again resumes
    python multibeast.py --agent my_fork.py --num_policies 2                     # a fork of monobeast.py
    python multibeast.py --mode test --name four --policy 3                      # play whole games with one of them
    python multibeast.py --mode match --rivals runs/four:0 runs/four:3           # who wins, where agents meet

The agent's file has the environments, the net, the loss and the update. This file says who plays: `choose_policy`
draws a policy for each seat when a game begins. `infer` acts with every policy on the environments that it plays, and
`learn` trains each on the transitions whose actions it chose, and on no others.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from beast.envs.masks import MASK
from beast.envs.rows import OBJECTIVE, REWARD_TERMS, nest_observations, rollout_fields
from beast.envs.spaces import ActionsByKind, EnvSpaces, random_actions
from beast.envs.tasks import tasks_of
from beast.errors import InputError, exit_with_message
from beast.feeds.actors import GROUPS_PER_ACTOR
from beast.feeds.feed import Feed
from beast.feeds.memory import Fields
from beast.files import write_json
from beast.learn.distributions import distribution
from beast.learn.learner import Learner
from beast.learn.learners import Learners
from beast.learn.published import PublishedWeights, start_weights
from beast.population.kinds import Kind, Team, all_kinds, check_core_states, seat_kinds
from beast.population.match import play_match, scores_of
from beast.population.pool import Population
from beast.population.ratings import outcome
from beast.population.routing import POLICY, Dealer, Game, Games, Seats, by_policy, put_together, take
from beast.population.tuned import Tuned
from beast.run import command_line, evaluation
from beast.run.flags import RUN_LIMITS, check_limits, run_name
from beast.run.policy import Policy, import_agent, load
from beast.run.training import Result, Training, open_feed, prepare

NEEDED = ("Flags", "create_env", "Net", "compute_loss", "update", "make_learner", "validate", "AGENT_FREE_ON_RESUME")


@dataclass
class PopulationFlags:
    """Flags beside those of the agent's file."""

    # Several policies.
    agent: str = "monobeast.py"
    """The agent's file, or a fork of it: every policy has its net, its loss and its flags."""
    num_policies: int = 1
    """Policies that learn, for each kind of agents, which have equal spaces. --total_steps are those of one of them."""
    past_every: int = 0
    """Steps of a policy after which its weights are frozen as a past policy, which plays on; 0: never."""
    past_share: float = 0.5
    """Share of the games of several seats in which one seat is a past policy's."""
    past_size: int = 16
    """Past policies that are kept of each kind of agents, or two of each policy if these are more. When there are too
    many, every second one of each is dropped and --past_every doubles."""
    past_at_once: int = 2
    """Past policies that are drawn from at a time: each costs a forward pass of its own."""
    objective: Literal["score", "win"] = "score"
    """What PBT ranks policies by: the mean score of their games, which is info["true_objective"] of the last step, or
    the return where an environment tells none; or the share of games in which a policy has the highest score."""

    # Population-based training.
    pbt: bool = False
    """Let bad policies copy better ones, and vary what they are trained with. Give --lr_decay none, too."""
    pbt_tune: tuple[str, ...] = ("learning_rate", "entropy_cost", "adam_beta1", "reward_terms")
    """Numbers that vary: flags of the agent, adam_beta1 of its optimizer, and reward_terms, the coefficients of an
    environment that names parts of its reward."""
    pbt_start: int = 5_000_000
    """Steps of a policy before the first event."""
    pbt_period: int = 1_250_000
    """Steps of a policy between two events."""
    pbt_fraction: float = 0.3
    """Share of the policies that count as the best, which are left alone, and as the worst, which may be replaced."""
    pbt_gap_absolute: float = 1e-6
    """A policy is replaced only if the objective of the other one is higher by more than this …"""
    pbt_gap_relative: float = 0.1
    """… and by more than this share of the larger one."""
    pbt_mutation_rate: float = 0.15
    """Probability with which each number changes in an event."""
    pbt_factor: tuple[float, float] = (1.2, 1.2)
    """Range of the factor by which a number is multiplied or divided."""
    pbt_window: int = 100
    """Latest games that make the objective."""
    pbt_min_games: int = 20
    """Games that a policy must have played since it was replaced, to be ranked."""
    pbt_keep_first: bool = True
    """Leave the numbers of policy 0 as they were given, or as they are copied."""

    # Playing.
    mode: Literal["train", "test", "match"] = "train"
    """train, play whole games with one policy of a run's checkpoint (test), or let two policies play each other
    (match)."""
    policy: int = 0
    """Which policy --mode test plays."""
    rivals: tuple[str, ...] = ()
    """The two of --mode match: runs or checkpoints, each with the number of its policy behind a colon, as `runs/a:3`;
    without one it is policy 0. The environment is that of the first."""


# FORK HERE: who plays whom.
def choose_policy(flags, game: Game, population: Population, random: np.random.Generator) -> list[int]:
    """The policy of each seat of a game that begins. With one seat, neighbouring environments keep one policy, and
    numbers of environments differ by one at most. With several, each seat is drawn from the policies of its kind of
    agents that learn, and in --past_share of the games one seat is drawn from the past ones."""
    if game.seats == 1:
        return [game.env * flags.num_policies // game.num_envs]
    chosen = [int(random.choice(population.live(kind))) for kind in game.kinds]
    if random.random() < flags.past_share:
        seat = random.integers(game.seats)
        if past := population.past(game.kinds[seat]):
            chosen[seat] = int(random.choice(past))
    return chosen


def infer(
    feed: Feed, weights: list[PublishedWeights], population: Population, kinds: list[Kind], seats: Seats,
    generator: torch.Generator,
) -> None:  # fmt: skip
    """Choose the actions of all rows that wait for them, until the feed closes. `generator` draws them."""
    for rows in feed.acting():  # [1, N, …]: N environments wait
        players = seats.players(rows.inputs)  # [N]
        answers = []
        for policy, columns in by_policy(players):
            kind = kinds[population.kind_of(policy)]
            inputs, core_state = take((rows.inputs, rows.core_state), columns)
            newest = weights[policy].newest() if policy < len(weights) else nullcontext((population.net(policy), 0))
            with torch.no_grad(), newest as (net, version):
                policy_logits, baseline, core_state = net(kind.own(inputs), core_state)
                action = distribution(net.action_space, policy_logits).sample(generator)
            versions = torch.full(baseline.shape, version, dtype=torch.int32)
            action, policy_logits = kind.placed_action(action), kind.placed_logits(policy_logits)
            answers.append((columns, (action, policy_logits, baseline, versions, core_state)))
        rows.answer(*put_together(answers, len(players)), policy=torch.from_numpy(players)[None])


def learn(
    training: Training, feed: Feed, weights: list[PublishedWeights], population: Population, kinds: list[Kind],
    seats: Seats, tuned: Tuned, update: Callable,
) -> None:  # fmt: skip
    """Train each policy on its own transitions as rollouts come, until all steps or minutes are used up.

    Raises FloatingPointError after --max_bad_updates bad updates of one policy in a row.
    """
    flags, learners = training.flags, training.learner
    assert isinstance(learners, Learners)
    dealer, games = Dealer(len(learners.each), flags.batch_width), Games(len(learners.each), seats.count)
    for rollout, state in feed.rollouts():  # [T+1, K, …]
        finished = games.finished(rollout)
        with learners.updating:  # a lock: no checkpoint holds half an update
            population.record(finished)
            tuned.record(finished)
        for policy, batch, core_state in dealer.deal(rollout, state):  # [T+1, B, …]
            learner, batch = learners.each[policy], kinds[population.kind_of(policy)].own(batch)
            with learners.updating:
                measured = learner.measure(batch)
                if 0 < flags.max_policy_lag < measured.lag_max:
                    feed.dropped_rollouts += 1
                    continue
                outcome = update(tuned.flags[policy], learner, batch, core_state)
                counted = learners.count_update(policy, measured, outcome)
                weights[policy].publish(learner.net, learner.updates)
                population.grow(policy, learner.steps, seats.playing())
                learners.laps.lap("publish")
                training.record(counted)
            if training.finished():
                return
        with learners.updating:
            for policy, donor in tuned.event(learners.steps):
                # It counts as an update: what older weights have chosen is known by its number, and not trained on.
                copy_learner(learners.each[policy], learners.each[donor])
                dealer.forget(policy, learners.each[policy].updates)
                games.forget(policy, learners.each[policy].updates)
                weights[policy].publish(learners.nets[policy], learners.each[policy].updates)
                population.inherit(donor, policy)
            tuned.apply()


def copy_learner(learner: Learner, donor: Learner) -> None:
    """Give a learner all that another one has learned: weights, optimizer, and what a fork's has besides. It keeps its
    counts and games."""
    own = {name: x for name, x in learner.state_dict().items() if name in ("counts", "rng")}
    learner.load_state_dict({**copy.deepcopy(donor.state_dict()), **own, "returns": [], "lengths": [], "tasks": {}})
    learner.updates += 1


def train(flags, choose_policy: Callable = choose_policy) -> Result:
    """Train until steps or minutes are used up, or a signal asks for an end (see `Training.run_threads`)."""
    agent = agent_module(flags.agent)
    flags, env_spaces = prepare(flags, agent.create_env, partial(validate, agent), several_kinds=True)
    kinds, seats_by_kind = all_kinds(env_spaces), seat_kinds(env_spaces)
    num_groups = flags.num_actors * GROUPS_PER_ACTOR
    num_columns = num_groups * flags.group_width
    if num_columns < flags.num_policies * env_spaces.agents:
        raise InputError(
            f"--num_policies {flags.num_policies}: the run has {num_columns // env_spaces.agents} environments, and "
            "each policy needs one: raise --group_width or --num_actors"
        )
    if env_spaces.agents == 1 and (flags.past_every or flags.objective == "win"):
        given = f"--past_every {flags.past_every}" if flags.past_every else "--objective win"
        raise InputError(f"{given}: {env_spaces.env_id} has one agent, whom nobody plays against; leave it out")
    num_tasks = len(tasks_of(flags.env, flags.tasks))
    if num_tasks > 1 < flags.num_policies and (
        flags.balance == "compute" or num_columns % (flags.num_policies * num_tasks)
    ):
        raise InputError(
            f"--num_policies {flags.num_policies}: each policy plays the same number of neighbouring environments, and "
            f"all {num_tasks} tasks with --balance samples and a multiple of {flags.num_policies * num_tasks} "
            f"environments; there are {num_columns}, so change --group_width or --num_actors"
        )
    torch.manual_seed(flags.seed)
    random = np.random.default_rng([flags.seed, 1])
    each: list[Learner] = []
    of_each = []
    for number, kind in enumerate(kinds):
        share = seats_by_kind.count(number) / len(seats_by_kind)  # a kind of more agents makes more steps
        own = replace(flags, total_steps=round(flags.total_steps * len(kinds) * share))
        each += [agent.make_learner(own, kind.spaces) for _ in range(flags.num_policies)]
        of_each += [own] * flags.num_policies
        check_counts(agent, own, each[-1].net, kind.spaces)
    check_core_states(kinds, [learner.net for learner in each[:: flags.num_policies]])
    population = Population(
        [learner.net for learner in each], flags.past_every, flags.past_size, flags.past_at_once,
        np.random.default_rng([flags.seed, 2]), len(kinds),
    )  # fmt: skip
    learners = Learners(each, random, {"population": population})
    # Agents that differ have returns that do not compare, and what one of two rivals gains the other loses.
    learners.compares_returns = len(kinds) == 1 and not flags.past_every
    terms = env_spaces.reward_terms
    random_of_pbt = np.random.default_rng([flags.seed, 3])
    tuned = Tuned(of_each, learners, terms, partial(validate, agent), random_of_pbt, len(kinds))
    free = agent.AGENT_FREE_ON_RESUME | {"policy", "rivals"}
    with Training("multi", flags, learners, free, env_spaces.frames_per_step) as training:
        weights = [start_weights(learner, flags) for learner in learners.each]
        tuned.apply()
        more: Fields = {**POLICY, OBJECTIVE: ((), "float32")}
        more |= {REWARD_TERMS: ((len(terms),), "float32")} if terms else {}
        of_agent = {field.name: getattr(flags, field.name) for field in fields(agent.Flags)}
        feed = open_feed(
            training, agent.create_env, env_spaces, num_groups, str(agent.__file__), batch_width=flags.group_width,
            more_fields=more, actor_flags=agent.Flags(**of_agent), arrived=tuned.shape if terms and flags.pbt else None,
        )  # fmt: skip
        choose = partial(choose_policy, flags, population=population, random=random)
        seats = Seats(choose, population.kind_of, num_columns, flags.group_width, seats_by_kind)
        batch = f"{flags.batch_width} x {flags.unroll_length} steps"
        return training.run_threads(
            feed,
            infer=partial(infer, feed, weights, population, kinds, seats, training.generator),
            learn=partial(learn, training, feed, weights, population, kinds, seats, tuned, agent.update),
            save_beside=partial(save_beside, training, population, tuned),
            introduction=f"{policies_of(flags, kinds)}, updates of {batch} for each",
        )


def policies_of(flags, kinds: list[Kind]) -> str:
    """Which policies there are, for people to read."""
    count = f"{flags.num_policies} {'policy' if flags.num_policies == 1 else 'policies'} of {flags.agent}"
    if flags.pbt and flags.pbt_start >= flags.total_steps:
        count += f" (none will be replaced: --pbt_start {flags.pbt_start:,} is past the end)"
    if len(kinds) == 1:
        return count
    first = [f"{number * flags.num_policies} {kind.name}" for number, kind in enumerate(kinds)]
    return f"{count} for each kind of agents, from number {', '.join(first)}"


def save_beside(training: Training, population: Population, tuned: Tuned) -> None:
    """Write payoff.json, who has won how much against whom, and pbt.csv, who has copied whom."""
    if population.results:
        write_json(training.run.path / "payoff.json", population.payoff())
    if tuned.pbt:
        tuned.write(training.run.path / "pbt.csv")


def check_counts(agent: ModuleType, flags, net: torch.nn.Module, env_spaces: EnvSpaces) -> None:
    """Raise InputError unless the agent's loss leaves out transitions that do not count, and those alone."""
    T, B = 4, 2
    rows = {name: np.zeros((T + 1, B, *shape), dtype) for name, (shape, dtype) in rollout_fields(env_spaces).items()}
    for name, space in env_spaces.observations.items():
        rows[f"obs/{name}"][...] = 1 if name == MASK else space.sample()
    device = next(net.parameters()).device
    largest = min(float(flags.reward_clip) or 1.0, 1.0)
    of_one = np.stack([random_actions(env_spaces.action, B, np.random.default_rng(t)) for t in range(T + 1)])

    def loss_of(reward: float, other: int) -> float:
        """Of one column that counts, and another one that does not and is different for each number."""
        random = np.random.default_rng(other)
        actions = of_one.copy()
        actions[:, 1] = np.stack([random_actions(env_spaces.action, B, random)[1] for _ in range(T + 1)])
        rewards = np.linspace(0, largest, T + 1)[:, None] * [reward, random.uniform()]
        logits = rows["policy_logits"].copy()
        logits[:, 1] = random.uniform(size=logits.shape[-1])
        given = {**rows, "action": actions, "reward": rewards.astype("float32"), "policy_logits": logits}
        batch = {name: torch.from_numpy(x).to(device) for name, x in given.items()}
        batch["counts"] = torch.tensor([True, False], device=device).expand(T + 1, B)
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            return float(agent.compute_loss(flags, net, nest_observations(batch), net.initial_state(B))[0])

    is_one = partial(math.isclose, loss_of(1.0, other=0), rel_tol=1e-5, abs_tol=1e-7)
    if not all(is_one(loss_of(1.0, other)) for other in range(1, 6)) or is_one(loss_of(0.5, other=0)):
        raise InputError(
            f"--agent {flags.agent}: its compute_loss trains on what other policies did: take mask and discounts of "
            'vtrace.transition_masks(…, batch.get("counts")), as monobeast.py does'
        )


@functools.cache
def agent_module(name: str) -> ModuleType:
    """The agent's file, here or beside this one. Raises InputError if it is none, or lacks what a population needs."""
    path = Path(name) if Path(name).is_file() else Path(__file__).with_name(name)
    spec = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    is_module = spec and spec.origin and path.is_file() and path.samefile(spec.origin)  # which others may import, too
    agent = importlib.import_module(path.stem) if is_module else import_agent(str(path), f"--agent {name}")
    if missing := [each for each in NEEDED if not hasattr(agent, each)]:
        raise InputError(f"--agent {name}: it has no {', '.join(missing)}; give monobeast.py or a fork of it")
    if "num_actors" not in {field.name for field in fields(agent.Flags)}:
        raise InputError(f"--agent {name}: its environments are in servers; give monobeast.py, or a fork of it")
    return agent


def flags_of(agent: ModuleType) -> Any:
    """The class of a population's flags: those of the agent, and PopulationFlags."""

    @dataclass
    class Flags(PopulationFlags, agent.Flags):  # type: ignore[name-defined]
        """Several policies of one agent file."""

    return Flags


def validate(agent: ModuleType, flags):
    """The flags with automatic values filled in. Raises InputError with the value, the limit and the remedy."""
    if not 1 <= flags.num_policies <= 64:
        raise InputError(f"--num_policies {flags.num_policies}: give 1 to 64")
    if flags.pbt and flags.num_policies < 2:
        raise InputError("--pbt: one policy has nobody to learn from; give --num_policies 2 or more")
    if flags.pbt and flags.cuda_graphs:
        raise InputError("--pbt: with --cuda_graphs no number of an update may change; leave one of them out")
    limits: dict[str, tuple] = {
        "past_every": (0, 10**12),
        "past_share": (0, 1),
        "past_size": (1, 1000),
        "past_at_once": (1, 64),
    }
    limits |= {"pbt_start": (0, 10**12), "pbt_period": (1, 10**12), "pbt_fraction": (0.01, 0.5)}
    limits |= {name: (0, math.inf) for name in ("pbt_gap_absolute", "pbt_gap_relative")}
    limits |= {"pbt_mutation_rate": (0, 1), "pbt_window": (1, 10**6), "pbt_min_games": (1, flags.pbt_window)}
    if not 1 <= flags.pbt_factor[0] <= flags.pbt_factor[1]:
        raise InputError(f"--pbt_factor {flags.pbt_factor}: give two numbers from 1 up, the smaller one first")
    check_limits(flags, limits)
    if flags.auto:
        raise InputError("--auto: it measures one policy; run --agent's own --mode tune, and give what it finds")
    return agent.validate(replace(flags, name=run_name("multi", flags)))


def test(flags, given=()) -> dict:
    """Play whole games with one policy of a checkpoint, and print and write their returns."""
    agent = agent_module(flags.agent)
    flags = validate(agent, flags)

    def make_net(observations: dict, action, trained):
        if Path(trained.agent).name != Path(flags.agent).name:
            raise InputError(f"--agent {flags.agent}: the run was trained with --agent {trained.agent}; give that")
        if isinstance(action, ActionsByKind):
            return Team(partial(agent.Net, flags=trained), EnvSpaces(observations, action))
        return agent.Net(observations, action, trained)

    return evaluation.play_checkpoint(
        flags, agent.create_env, make_net, variants=("multi",), given=given, own=("policy",), several_kinds=True
    )


def match(flags) -> dict:
    """Let two policies play `--episodes` whole games; print who has won, and write match.json beside the first one's
    checkpoint."""
    if len(flags.rivals) != 2:
        raise InputError(f"--rivals {' '.join(flags.rivals)}: give two, such as runs/a:0 runs/b:3")
    check_limits(flags, {name: RUN_LIMITS[name] for name in ("seed", "episodes", "max_game_steps")})
    agent = flags.agent if flags.agent != PopulationFlags.agent else ""  # else that of each checkpoint
    paths, rivals = zip(*(load_rival(text, agent) for text in flags.rivals))
    limit, how = flags.max_game_steps, "greedy" if flags.greedy else "sampled"
    played = play_match(rivals, flags.episodes, flags.seed, limit, flags.greedy, flags.video)
    decided_by, scores = scores_of(played)
    differences = [score[0] - score[1] for score in scores if score]
    wins, losses = sum(x > 0 for x in differences), sum(x < 0 for x in differences)
    found = outcome(wins, losses, len(differences) - wins - losses)
    num_cut, num_without = (sum(x) for x in ((game.is_cut for game in played), (not score for score in scores)))
    print(
        f"{flags.rivals[0]} against {flags.rivals[1]}: {len(played)} games of {rivals[0].flags.env}, {how}, decided by "
        + ("returns" if decided_by == "return" else f'info["{decided_by}"]')
    )
    for name in ("wins", "losses", "ties", "score"):
        value, low, high = getattr(found, name)
        print(f"  {name:<7}{value:.3f}  ({low:.3f} to {high:.3f} with 95 % confidence)")
    print(f"  rating {found.rating_difference:+.0f}; p = {found.probability:.2g} that they are equally strong")
    if num_without:
        print(f"without a result, and counted in nothing: {num_without} of {len(played)} games")
    if num_cut:
        print(f"cut off after {limit:,} steps (--max_game_steps): {num_cut} of {len(played)} games")
    result = {
        "rivals": list(flags.rivals), "env": rivals[0].flags.env, "greedy": flags.greedy, "seed": flags.seed,
        "decided_by": decided_by, **found._asdict(), "games_cut": num_cut, "games_without_result": num_without,
        "max_game_steps": limit,
        "played": [{"scores": score, **game._asdict()} for score, game in zip(scores, played)],
    }  # fmt: skip
    if not math.isfinite(found.rating_difference):
        result["rating_difference"] = None
    output = paths[0].with_name("match.json")
    write_json(output, result)
    print(f"written to {output}" + (f" and {flags.video}" if flags.video else ""))
    return result


def load_rival(text: str, agent: str = "") -> tuple[Path, Policy]:
    """A rival's checkpoint and its policy, of the agent's file that the checkpoint names unless one is given. Raises
    MissingFile or InputError."""
    name, colon, number = text.rpartition(":")
    if not (colon and number.isdigit()):
        name, number = text, "0"
    path = Path(name) / "checkpoint.pt" if Path(name).is_dir() else Path(name)
    return path, load(str(path), agent, int(number))


def main() -> None:
    words = iter(sys.argv[1:])
    name = PopulationFlags.agent
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--agent":
            name = value if equals else next(words, name)
    with exit_with_message():
        agent = agent_module(name)
        presets = getattr(agent, "PRESETS", {}), getattr(agent, "ABOUT", {})
        flags = command_line.parse(flags_of(agent), __doc__, *presets)
        modes: dict[str, Callable] = {"train": train, "test": lambda x: test(x, command_line.given()), "match": match}
        modes[flags.mode](flags)


if __name__ == "__main__":
    main()
