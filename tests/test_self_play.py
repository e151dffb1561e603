"""What populations learn: small games with a known answer, each with a control that does not get there."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import toy_games
from toy_games import exploitability

import beast
import multibeast
from beast.population.pool import Population

AGENT = multibeast.agent_module("monobeast.py")
Flags = multibeast.flags_of(AGENT)


@pytest.fixture
def flags(tmp_path, monkeypatch):
    pytest.importorskip("pettingzoo", reason="pip install pettingzoo")
    monkeypatch.setenv("PYTHONPATH", str(multibeast.Path(toy_games.__file__).parent))  # of actors
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    small = {
        "root": str(tmp_path), "name": "run", "num_actors": 1, "unroll_length": 16, "hidden_size": 64,
        "learning_rate": 1e-3, "lr_decay": "none", "reward_clip": 0.0, "normalize_returns": "off",
        "tensorboard": False, "device": "cpu", "log_steps": 20_000,
    }  # fmt: skip
    return lambda **changes: Flags(**{**small, **changes})


def strategy(net) -> np.ndarray:
    """The probabilities of a net's actions in a game's first row, whose observation is always 1."""
    begin = {
        "reward": torch.zeros(1, 1),
        "done": torch.ones(1, 1, dtype=torch.bool),
        "action": torch.zeros(1, 1).long(),
    }
    with torch.no_grad():
        return net({"obs": {"obs": torch.ones(1, 1, 1)}, **begin}, ())[0].softmax(-1)[0, 0].numpy()


@pytest.mark.on_demand  # a minute and a half
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rock_paper_scissors_is_learned_against_past_selves_and_goes_in_circles_without(flags, monkeypatch, seed):
    def play(share: float) -> tuple[float, float]:
        """Exploitability of the newest policy, a mean over the second half of a run, and of its past ones' mixture."""
        newest, grow = [], Population.grow

        def watching(population, policy, steps, playing):
            if steps // 4000 > len(newest):
                newest.append(exploitability(strategy(population._nets[0])))
            grow(population, policy, steps, playing)

        monkeypatch.setattr(Population, "grow", watching)
        result = multibeast.train(
            flags(
                env="pettingzoo:toy_games", name=f"share-{share}", seed=seed, past_every=3200, past_share=share,
                past_at_once=4, entropy_cost=0.15, ppo_clip=0.0, group_width=32, batch_width=8, total_steps=150_000,
            )
        )  # fmt: skip
        monkeypatch.setattr(Population, "grow", grow)
        path = str(result.directory / "checkpoint.pt")
        past = torch.load(path, weights_only=True)["population"]["kept"]
        net, mixture = beast.load(path).net, []
        for each in past:
            net.load_state_dict(each["net"])
            mixture.append(strategy(net))
        return float(np.mean(newest[len(newest) // 2 :])), exploitability(np.mean(mixture, axis=0))

    newest, mixture = play(share=0.5)
    alone, _ = play(share=0.0)
    assert mixture <= 0.1, "in equilibrium 0; an untrained policy's is 0.33"
    assert alone >= 0.35 and newest <= 0.25


@pytest.mark.on_demand  # three minutes
def test_a_population_finds_that_a_term_of_its_reward_misleads_it(flags):
    def play(pbt: bool):
        result = multibeast.train(
            flags(
                env="pettingzoo:trap_game", name=f"pbt-{pbt}", num_policies=6, pbt=pbt, pbt_tune=("reward_terms",),
                pbt_mutation_rate=0.5, pbt_factor=(1.5, 2.0), pbt_start=2000, pbt_period=2000, group_width=24,
                batch_width=4, total_steps=52_000,
            )
        )  # fmt: skip
        state = torch.load(result.directory / "checkpoint.pt", weights_only=True)
        policies = [beast.load(str(result.directory / "checkpoint.pt"), policy=n).net for n in range(6)]
        return state.get("pbt"), [strategy(net)[0] for net in policies]

    pbt, success = play(pbt=True)
    coefficients = [values["reward_terms.temptation"] for values in pbt["values"]]
    assert sum(x < 1 and p >= 0.9 for x, p in zip(coefficients, success)) >= 5, (coefficients, success)
    _, success = play(pbt=False)
    assert max(success) <= 0.1, "the environment's own coefficient is 2"


@pytest.mark.on_demand  # two minutes
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_speaker_and_a_listener_agree_on_words_unless_nobody_hears_them(flags, seed):
    def play(env: str) -> float:
        """Mean return of 400 games."""
        training = flags(
            env=f"pettingzoo:{env}", name=env, seed=seed, group_width=32, batch_width=16, total_steps=150_000,
            entropy_cost=0.2, learning_rate=3e-3,
        )  # fmt: skip
        multibeast.train(training)
        return multibeast.test(flags(env=f"pettingzoo:{env}", name=env, policy=1, episodes=400))["mean"]

    assert play("signal_game") >= 0.9, "a listener that guesses is right in a quarter of the games"
    assert play("deaf_game") <= 0.35


@pytest.mark.on_demand  # a minute
@pytest.mark.parametrize("core", ["lstm", "none"])
def test_policies_that_are_drawn_for_each_game_remember_what_it_began_with(flags, core):
    result = multibeast.train(
        flags(
            env="toy_envs:MemoryCue-v0", core=core, num_policies=2, group_width=16, batch_width=8, hidden_size=128,
            core_size=64, ppo_clip=0.0, learning_rate=5e-4, entropy_cost=0.02, normalize_observations=False,
            total_steps=100_000,
        ),
        lambda flags, game, population, random: [int(random.integers(2))],
    )  # fmt: skip
    state = torch.load(result.directory / "checkpoint.pt", weights_only=True)
    means = [np.mean(each["returns"]) for each in state["policies"]]
    # Without memory a guess is worth 0 in the mean, and 100 games of 1 or -1 have a standard error of 0.1.
    assert min(means) >= 0.9 if core == "lstm" else max(means) <= 0.4, means


BOARD_GAMES = {  # steps, and the score against an untrained policy that every seed must pass
    # Perfect play of tic-tac-toe has 0.98. Against itself a policy seldom sees the moves of an untrained one: seeds 1,
    # 2, 3 had 0.84, 0.87 and 0.87, and in connect four 0.94, 0.93 and 0.94. On a busy machine seed 1 had 0.83 and 0.85.
    "tictactoe_v3": (250_000, 0.8),
    "connect_four_v3": (400_000, 0.85),
}


@pytest.mark.on_demand  # three minutes; connect four seven
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("game", BOARD_GAMES)
def test_a_board_game_by_turns_and_masks_is_learned_by_self_play(flags, game, seed):
    steps, aim = BOARD_GAMES[game]
    play = partial(
        flags, env=f"pettingzoo:pettingzoo.classic.{game}", seed=seed, group_width=32, batch_width=16,
        hidden_size=512, learning_rate=2e-3, entropy_cost=0.05, past_every=5000, past_share=0.9, past_at_once=4,
    )  # fmt: skip
    untrained = multibeast.train(play(name="untrained", total_steps=1000, learning_rate=1e-12)).directory
    trained = multibeast.train(play(name="trained", total_steps=steps)).directory
    match = play(name="match", mode="match", rivals=(str(trained), str(untrained)), episodes=1000)
    assert multibeast.match(match)["score"][0] >= aim
    swapped = replace(match, rivals=match.rivals[::-1], episodes=200)
    assert multibeast.match(swapped)["score"][0] <= 1 - aim + 0.1


@pytest.mark.on_demand  # five minutes
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_three_agents_of_two_policies_learn_to_spread(flags, seed):
    play = partial(
        flags, env="pettingzoo:mpe2.simple_spread_v3", seed=seed, num_policies=2, group_width=96, batch_width=32,
        hidden_size=512, entropy_cost=0.01, normalize_returns="on", discount=0.9,
    )  # fmt: skip
    returns = {}
    for name, steps, rate in (("untrained", 1000, 1e-12), ("trained", 450_000, 1e-3)):
        multibeast.train(play(name=name, total_steps=steps, learning_rate=rate))
        returns[name] = multibeast.test(play(name=name, policy=1, episodes=200))["mean"]
    assert returns["trained"] >= -22 and returns["untrained"] <= -25, returns
