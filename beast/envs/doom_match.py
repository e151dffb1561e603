"""VizDoom's scenarios for several players: each is a game of its own, and they play together over UDP on this machine.

Their interface is PettingZoo's parallel one; `beast.envs.agents` makes columns of the players.
"""

import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from beast.envs.doom import RULES, TICS_PER_SECOND, Player, make_game, scenario_of
from beast.envs.doom_game import GameCrashed
from beast.errors import InputError

MOST_TICS_TO_COME_BACK = 5 * TICS_PER_SECOND


class DoomMatch:
    """A match. A time limit truncates it for all players with their last frames; so does a game that crashes or hangs,
    after which all are started again. `info["true_objective"]` of the last step is 1 for a player with more frags than
    every other one, bots included, and 0 for the others.
    """

    def __init__(self, env_id: str, frame_skip: int | None = None, scenarios: str = "", render_mode=None):
        """`scenarios` is a folder of WADs that VizDoom's package does not have. Raises MissingPackage, MissingFile."""
        scenario = self._scenario = scenario_of(env_id)
        self._id, self._frames, self._folder = env_id, frame_skip or scenario.frames, scenarios
        self.render_mode = render_mode
        self.metadata = {
            "name": env_id, "render_modes": ["rgb_array"], "render_fps": TICS_PER_SECOND / self._frames,
            "frames_per_step": self._frames,
        }  # fmt: skip
        self.possible_agents = [f"player_{seat}" for seat in range(scenario.seats)]
        self.agents: list[str] = []
        self._players = [Player(scenario) for _ in self.possible_agents]
        self.reward_terms = self._players[0].terms.coefficients
        self._threads = ThreadPoolExecutor(scenario.seats, "doom-seat")
        self._reserved = socket.socket()
        self._start()

    @property
    def unwrapped(self) -> "DoomMatch":
        return self

    def observation_space(self, agent: str):
        return self._players[0].observation_space

    def action_space(self, agent: str):
        return self._players[0].action_space

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None or not hasattr(self, "_random"):
            self._random = np.random.default_rng(seed)
        try:
            self._begin()
        except GameCrashed:
            self._restart()
            try:
                self._begin()
            except GameCrashed as error:
                raise InputError(f"{self._id}: the match does not start: {error}") from error
        self._tics, self.agents = 0, list(self.possible_agents)
        observations = {agent: player.observation() for agent, player in zip(self.agents, self._players)}
        return observations, {agent: {} for agent in self.agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        agents = self.agents
        held = [player.buttons(actions[agent]) for agent, player in zip(agents, self._players)]
        tics = min(self._frames, self._scenario.limit - self._tics)
        try:
            # Tic by tic: games that are given several at once, or are not waited for after each, hang.
            for tic in range(tics):
                self._each(lambda seat: self._games[seat].act(held[seat], 1, tic == tics - 1))
            seen = [game.seen() for game in self._games]
            is_over = any([game.is_over() for game in self._games])
        except GameCrashed as error:
            print(f"{self._id}: a match has crashed and is started again: {error}", file=sys.stderr, flush=True)
            self._restart()
            self.agents = []
            observations = {agent: player.observation() for agent, player in zip(agents, self._players)}
            infos = {agent: player.final_info(crashed=1) for agent, player in zip(agents, self._players)}
            return observations, dict.fromkeys(agents, 0.0), *_ends(agents, True), infos
        self._tics += tics
        is_cut = is_over or self._tics >= self._scenario.limit
        each = [player.step(now, 0.0, is_over) for player, now in zip(self._players, seen)]
        observations, rewards, infos = (dict(zip(agents, x)) for x in zip(*each))
        if is_cut:
            self.agents = []
            frags = [player.gained("FRAGCOUNT") for player in self._players]
            for seat, (agent, player) in enumerate(zip(agents, self._players)):
                most = max(frags[:seat] + frags[seat + 1 :] + self._players[0].of_bots())
                infos[agent] |= player.final_info(crashed=0) | {"true_objective": float(frags[seat] > most)}
        return observations, rewards, *_ends(agents, is_cut), infos

    def render(self) -> np.ndarray:
        """What the players see, side by side."""
        return np.concatenate([player.seen.screen for player in self._players], axis=1)

    def close(self) -> None:
        self._each(lambda seat: self._games[seat].close())
        self._reserved.close()
        self._threads.shutdown()

    def _start(self) -> None:
        """Start all games, which wait for each other."""
        self._reserved.close()
        self._reserved = reserve_port()
        port = self._reserved.getsockname()[1]
        host = f"-host {self._scenario.seats} -port {port} {RULES} {self._scenario.rules}"
        others = [f"-join 127.0.0.1:{port}"] * (self._scenario.seats - 1)
        self._games = [make_game(self._scenario, self._folder, arguments) for arguments in (host, *others)]
        for game in self._games:
            game.start()

    def _restart(self) -> None:
        self._each(lambda seat: self._games[seat].close())
        self._start()

    def _begin(self) -> None:
        seed = int(self._random.integers(2**31))
        bots = ["removebots", *["addbot"] * self._scenario.bots] if self._scenario.bots else []
        self._each(lambda seat: self._games[seat].begin(seed, () if seat else bots))
        # Of two players who begin in one place DOOM kills one, who comes back two seconds later.
        nothing = self._players[0].buttons(np.zeros(len(self._scenario.heads)))
        for _ in range(MOST_TICS_TO_COME_BACK):
            if not any(game.seen().variables["DEAD"] for game in self._games):
                break
            self._each(lambda seat: self._games[seat].act(nothing, 1))
        for player, game in zip(self._players, self._games):
            player.begin(game.seen())

    def _each(self, call: Callable[[int], Any]) -> list[Any]:
        """What `call(seat)` returns of all seats, at the same time: a game waits for the others."""
        answers = [self._threads.submit(call, seat) for seat in range(self._scenario.seats)]
        errors = [answer.exception() for answer in answers]  # waits for all of them
        if error := next(filter(None, errors), None):
            raise error
        return [answer.result() for answer in answers]


def reserve_port() -> socket.socket:
    """A UDP port that is free, reserved by a TCP socket with its number: until that closes, no other match gets it."""
    while True:
        port, reserved = free_port(), socket.socket()
        try:
            reserved.bind(("127.0.0.1", port))
            return reserved
        except OSError:
            reserved.close()


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("", 0))  # on all interfaces, as DOOM does
        return free.getsockname()[1]


def _ends(agents: list[str], is_cut: bool) -> tuple[dict, dict]:
    """Whether each agent's match is terminated, and truncated."""
    return dict.fromkeys(agents, False), dict.fromkeys(agents, is_cut)
